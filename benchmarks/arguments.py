"""What the workloads' command-line options have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def shape(value: str) -> tuple[int, int]:
    inputs, cross, outputs = value.partition("x")
    if not (cross and inputs.isdecimal() and outputs.isdecimal() and int(inputs) and int(outputs)):
        raise argparse.ArgumentTypeError(f"'{value}' is not a shape such as 768x3072 (in_features x out_features)")
    return int(inputs), int(outputs)


def shapes(value: str) -> list[tuple[int, int]]:
    return [shape(part) for part in value.split(",")]


def shares(value: str) -> list[float]:
    found = [float(part) for part in value.split(",")]
    if not all(0 <= share < 1 for share in found):
        raise argparse.ArgumentTypeError(f"'{value}' is not a list of shares from 0 to below 1, such as .8,.9")
    return found


def sizes(value: str) -> list[int]:
    found = [int(part) for part in value.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"'{value}' is not a list of positive numbers such as 1,8")
    return found


def texts(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


def some_of(*valid: str) -> Callable[[str], list[str]]:
    """For argparse: a list of which every part is one of `valid`."""

    def parse(value: str) -> list[str]:
        if unknown := sorted(set(texts(value)) - set(valid)):
            raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; there are {', '.join(valid)}")
        return texts(value)

    return parse


def add_list(parser: argparse._ActionsContainer, name: str, kind: Callable[[str], Any], default: str, meaning: str) -> None:
    """An option that takes a list, with its default in the help."""
    parser.add_argument(name, type=kind, default=kind(default), help=f"{meaning} (default {default})")


def add_dtype(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--dtype", choices=DTYPES, default="f32", help="the type of the model itself (default f32)")


def counted(number: int, noun: str) -> str:
    """ "1 token", "8 tokens"."""
    return f"{number} {noun}{'s' * (number != 1)}"
