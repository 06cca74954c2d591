from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def report() -> dict[str, Any]:
    """A report of three cases, as the command line writes it."""

    def case(tokens: int, threads: int, **results: Any) -> dict[str, Any]:
        parameters = {"tokens": tokens, "sparsity": 0.9}
        return {
            "workload": "linear",
            "name": f"{tokens} tokens",
            "parameters": parameters,
            "threads": threads,
            "results": results,
        }

    own = {"precision": None, "skipped": None}
    notes = {"sparse": 1, "schedules": ["broadcast"], "packed_bytes": 12, "dense_bytes": 100}
    place = {"useful_gflops": 30.0, "intensity": 20.0, "roof_gflops": 60.0}
    levels = {
        "l2": {"bytes": 1 << 20, "copy_gbytes_s": 80.0},
        "l3": {"bytes": 1 << 25, "copy_gbytes_s": 60.0},
        "dram": {"bytes": None, "copy_gbytes_s": 20.0},
    }
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "machine": {"cpu": "Some CPU", "features": ["avx2"], "cores": 4},
        "versions": {"torch": "2.13.0"},
        "settings": {"repeats": 20},
        "contenders": {
            "inductor-bf16": {"label": "Half", "precision": "bf16", "skipped": None},
            "dense": {"label": "Dense", **own},
            "inductor": {"label": "Compiled", **own},
            "sparse": {"label": "Sparse", **own},
            "peer": {"label": "Peer", "precision": "f32", "skipped": "not installed"},
        },
        "peaks": {"1": {"f32_gflops": 100.0, "bf16_gflops": 200.0, "levels": levels}},
        "cases": [
            case(
                8,
                1,
                dense={"median_ms": 12.0},
                inductor={"median_ms": 6.0},
                sparse={"median_ms": 3.0, "notes": notes, "roofline": place},
                **{"inductor-bf16": {"median_ms": 0.5}},
            ),
            case(32, 1, dense={"median_ms": 40.0}, sparse={"median_ms": 2.5, "notes": {"sparse": 0}})
            | {"cores_elsewhere": 1.0},
            case(32, 2, dense={"median_ms": 20.0}, sparse={"error": "wrong result"}),
        ],
    }
