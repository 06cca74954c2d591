"""PyTorch's own samples of its operators (OpInfo), those of two-dimensional floats, with a SparseTensor for the first tensor.

What an operator gives for the dense tensor of the same elements is the oracle.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db

from gossamer import Format, GossamerError, SparseTensor

FORMATS = {"CSR": Format.CSR, "COO": Format.COO, "CSC": Format.CSC, "BSR": Format.bsr(2, 2)}

RANDOM = ("rand", "dropout", "normal", "bernoulli", "multinomial", "uniform", "exponential", "cauchy", "geometric", "rrelu",
          "gumbel", "fractional_max_pool", "lowrank", "empty", "fused", "svd", "eig", "_segment", "lobpcg", "resize", "qr",
          "as_strided", "pooling", "lstsq")  # fmt: skip
"""In a name: what is different at every call, is not unique, or asks for memory."""
OTHERWISE = ("softmax", "softmin", "log_softmax", "masked.", "to_sparse", "sparse.")
"""Documented to go over stored entries only, or to give sparse tensors of torch."""


@dataclass(frozen=True)
class Sample:
    """An operator, and what it is called with."""

    name: str
    function: Callable[..., Any]
    dense: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    both: bool  # whether other tensors of two dimensions become sparse, too

    def outcome(self, format: Format) -> tuple[str, str]:
        """How it goes, in a word ("right", "wrong", "refused", "raises"), and what is not as it should be."""
        try:
            expected = self.function(self.dense.clone(), *self.args, **self.kwargs)
        except Exception:
            return "torch refuses", ""
        convert = self.both
        args = [SparseTensor.from_dense(a, format) if convert and _suits(a) else a for a in self.args]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = self.function(SparseTensor.from_dense(self.dense, format), *args, **self.kwargs)
                return (
                    ("right", "") if _equal(found, expected) else ("wrong", f"gives {_short(found)}, torch {_short(expected)}")
                )
        except GossamerError as refusal:
            return "refused", str(refusal)[:150]
        except Exception as failure:
            return "raises", f"{type(failure).__name__}: {str(failure)[:150]}"


def samples(wanted: Callable[[str], bool]) -> Iterator[Sample]:
    """The samples of the operators of wanted names with a matrix of floats first, half of it zeros; methods in place, too."""
    for info in op_db:
        if (
            not wanted(info.name)
            or torch.float32 not in info.dtypes
            or any(word in info.name for word in (*RANDOM, *OTHERWISE))
        ):
            continue
        torch.manual_seed(0)
        try:
            found = list(info.sample_inputs("cpu", torch.float32, requires_grad=False))
        except Exception:
            continue
        for sample in found:
            if not _suits(sample.input):
                continue
            dense = torch.where(torch.rand(sample.input.shape) < 0.5, 0, sample.input)
            others = any(_suits(each) for each in sample.args)
            for both in (False, True) if others else (False,):
                yield Sample(info.name, info.op, dense, tuple(sample.args), dict(sample.kwargs), both)
            inplace = info.inplace_variant
            if inplace is not None and info.supports_out is not None and not sample.broadcasts_input:
                yield Sample(f"{info.name}_", inplace, dense, tuple(sample.args), dict(sample.kwargs), False)


def _suits(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.dim() == 2 and tensor.dtype == torch.float32


def _equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        if not isinstance(found, Tensor):
            return False
        found, expected = (
            each.to_dense() if isinstance(each, SparseTensor) or each.is_sparse else each for each in (found, expected)
        )
        if found.shape != expected.shape or found.dtype != expected.dtype:
            return False
        return torch.allclose(found, expected, 1e-3, 1e-4, equal_nan=True)
    if isinstance(expected, tuple | list):
        return len(found) == len(expected) and all(map(_equal, found, expected))
    return bool(found == expected)


def _short(found: Any) -> str:
    return repr(found.to_dense() if isinstance(found, SparseTensor) else found).replace("\n", "")[:150]
