"""Networks of transformers, one of each architecture, with any share of zeros: is one of them slower than without Gossamer?

inference  a call of the network in eval mode, under torch.no_grad() or as the README calls it
training   a step under the hooks of torch.nn.utils.prune, for all contenders: forward, backward, AdamW with its defaults
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch

from benchmarks import zoo
from benchmarks.arguments import add_list, shares, some_of
from benchmarks.contenders.sparse import missing
from benchmarks.models import PrunedModel
from benchmarks.registry import Case, Contender, Prepared, Unsupported, Workload, contender
from benchmarks.workloads import training
from benchmarks.workloads.convnet import with_statistics

MODES = ("inference", "training")
NAMES = (*zoo.TEXTS, *zoo.IMAGES, *zoo.SOUNDS)
TOLERANCE = {"f32": 5e-4}

Problem = PrunedModel | training.Training


def add_arguments(parser: argparse._ActionsContainer) -> None:
    add_list(parser, "--architectures", some_of(*NAMES), ",".join(NAMES), "the networks")
    add_list(parser, "--modes", some_of(*MODES), ",".join(MODES), "what is timed")
    add_list(parser, "--sparsity", shares, ".2,.4,.6,.8,.95", "shares of zeros")


def build(name: str, mode: str, sparsity: float) -> Problem:
    model, given = zoo.network(name)
    layers = zoo.pruned(model, sparsity)
    if mode == "training":
        result = model(given)
        result.sum().backward()
        learning = [name for name in layers if model.get_submodule(name).weight.grad is not None]  # not poolers, behind it
        model.zero_grad()
        return training.Training(model, tuple(learning), given, torch.randn_like(result), {"f32": 0.1}, fused=None)
    if name in zoo.IMAGES:
        with_statistics(model, given)
    return PrunedModel(model.eval(), (given,), TOLERANCE)


def cases(args: argparse.Namespace) -> list[Case]:
    return [
        Case(
            f"{name} {sparsity:.0%}" + " training" * (mode == "training"),
            {"architecture": name, "mode": mode, "sparsity": sparsity},
            partial(build, name, mode, sparsity),
            6.0 if mode == "training" else 2.0,
        )
        for mode in args.modes
        for name in args.architectures
        for sparsity in args.sparsity
    ]


def either(inference: str, step: Callable[[training.Training], Prepared] | None) -> Callable[[Problem], Prepared]:
    """Prepares the contender of inference or, in training, a step."""

    def prepare(problem: Problem) -> Prepared:
        if isinstance(problem, PrunedModel):
            return contender(inference).prepare(problem)
        if step is None:
            raise Unsupported("inference only")
        return step(problem)

    return prepare


def contenders() -> dict[str, Contender]:
    return {
        "dense": Contender("PyTorch eager", either("dense", partial(training.hooked, False))),
        "inductor": Contender("Inductor", either("inductor", partial(training.hooked, True))),
        "sparse": Contender("Gossamer", either("sparse", partial(training.ours, "hooks")), missing=missing),
        "sparse-gradients": Contender("Gossamer, gradients on", either("sparse-gradients", None), missing=missing),
    }


WORKLOAD = Workload(
    "networks of transformers, one of each architecture, with 20 to 95 % zeros",
    add_arguments,
    cases,
    contenders=contenders,
    preparing=8.0,
    gflops=60.0,
)
