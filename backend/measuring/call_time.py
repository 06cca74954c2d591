"""Measures how long the call of a region takes besides its kernel, by calling a tiny region as a graph does."""

import math

import torch
from torch import fx

from gossamer.backend.measuring.measure import fastest, kernel_of, random
from gossamer.backend.regions.compiled_kernel import format_of
from gossamer.backend.run import region_op
from gossamer.backend.run.compiled_region import CompiledRegion, Variant, Weight
from gossamer.backend.run.layouts import Matrices
from gossamer.backend.run.packed_weights import Packings
from gossamer.passes.framework.family import Matrix
from gossamer.runtime.data_cache import first_level_bytes
from gossamer.runtime.target import host

_SIZE = 16
_KEY = "the time of a call"


def call_us() -> float:
    """Returns the microseconds that torch takes from the operation `gossamer::region` to the kernel, and back."""
    matrix = Matrix(
        _SIZE, _SIZE, 1, "f32", host().vector_bits, 1 / _SIZE, features=host().instructions, l1d=first_level_bytes(),
    )  # fmt: skip
    kernel = kernel_of(matrix, torch.float32, "broadcast")
    weight, x = torch.eye(_SIZE, dtype=torch.float32), random(1, _SIZE)
    packings = Packings.of(_KEY, _itself(), format_of(kernel))
    variant = Variant(math.inf, kernel, (Weight(packings, slice(1, 2), 1.0, renew=True, verify=False),))
    region = region_op.add(_KEY, CompiledRegion((variant,), Matrices(((_SIZE, torch.float32),)), torch.mm))
    us = fastest({"call": lambda: region_op.region([x, weight], _KEY)}, 1)["call"]
    del region
    return us


def _itself() -> fx.GraphModule:
    """Returns the expression of a weight that is its own only leaf."""
    graph = fx.Graph()
    graph.output(graph.placeholder("weight"))
    return fx.GraphModule({}, graph)
