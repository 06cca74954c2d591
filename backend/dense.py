"""Compiles the part of a graph that is in no sparse region: with TorchInductor, or to run op by op."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.fast_paths import IN_PARTS
from gossamer.backend.graph.strides import orders, restore
from gossamer.backend.rewrite import SparseRewrite
from gossamer.backend.torch_libraries import kept
from gossamer.dialects.errors import OptionError
from gossamer.dialects.option_check import did_you_mean
from gossamer.runtime.torch_internals import functorch_config

aten = torch.ops.aten


def check_mode(mode: str | None) -> None:
    """Raises OptionError for a mode that torch.compile does not have."""
    from gossamer.runtime.torch_internals import list_mode_options

    valid = list(list_mode_options())
    if mode is not None and mode not in valid:
        raise OptionError(f"unknown mode {mode!r}{did_you_mean(mode, valid)}; the modes are {', '.join(valid)}")


@functools.cache
def has_cpp_compiler() -> bool:
    """Whether Inductor can build its CPU kernels here."""
    from gossamer.runtime.torch_internals import get_cpp_compiler

    try:
        return bool(get_cpp_compiler())
    except (OSError, RuntimeError):
        return False


def has_triton_for(inputs: Sequence[Any]) -> bool:
    """Whether Triton is installed, or none of these inputs is on a GPU."""
    from gossamer.runtime.torch_internals import has_triton

    return has_triton() or not any(isinstance(each, torch.Tensor) and each.is_cuda for each in inputs)


def with_inductor(
    module: fx.GraphModule, inputs: Sequence[Any], rewrite: SparseRewrite, mode: str | None
) -> Callable[..., Any]:
    """Compiles the module with Inductor, which calls `rewrite` on each inference or joint graph, unless torch has it cached."""
    from gossamer.runtime.torch_internals import compile_fx, compile_fx_inner, inductor_config, list_mode_options

    patches = {**(list_mode_options(mode) if mode else {}), "joint_custom_pre_pass": rewrite}

    def inner(*graph: Any, **how: Any) -> Any:
        """Compiles a forward, backward or inference graph. Keeps pixels innermost in images if `rewrite` says so.

        Inductor would put channels innermost, and copy the images and weights of sparse convolutions at each call. The setting
        has to be made here: Inductor applies `config_patches` again around each of these compilations.
        """
        with inductor_config.patch(layout_optimization=inductor_config.layout_optimization and not rewrite.planar):
            return compile_fx_inner(*graph, **how)

    def compile_(cached: bool) -> Callable[..., Any]:
        with functorch_config.patch(enable_autograd_cache=cached):
            compiled: Any = compile_fx(
                module, inputs, inner_compile=inner, config_patches=patches, decompositions=inductor_table()
            )
        return compiled

    cached = functorch_config.enable_autograd_cache and rewrite.keep()
    with kept(rewrite.fingerprint if cached else None):
        compiled = compile_(cached)
    return compiled if rewrite.done() or not cached else compile_(False)


def eagerly(module: fx.GraphModule, inputs: Sequence[Any], rewrite: SparseRewrite) -> Callable[..., Any]:
    """Compiles the module to run op by op between its sparse regions. Needs no C++ compiler."""
    from functorch.compile import default_partition, make_boxed_func  # type: ignore[import-untyped]

    from gossamer.runtime.torch_internals import aot_autograd

    def run(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        return make_boxed_func(graph.forward)

    def forward(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        return make_boxed_func(lambda *args: [_no_view(each) for each in graph.forward(*args)])

    rewrite.by_operation = True

    def rewritten(module: fx.GraphModule) -> fx.GraphModule:
        traced = orders(module.graph)
        rewrite(module.graph)
        restore(module.graph, traced)
        module.recompile()
        return module

    def infer(graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        return run(rewritten(graph), examples)

    def partition(joint: fx.GraphModule, examples: Sequence[Any], **kwargs: Any) -> Any:
        return default_partition(rewritten(joint), examples, **kwargs)

    backend = aot_autograd(
        fw_compiler=forward, bw_compiler=run, inference_compiler=infer, partition_fn=partition, decompositions=_DECOMPOSITIONS
    )
    return backend(module, inputs)


def _no_view(result: Any) -> Any:
    """Returns a result of a forward graph, detached if it is a view. Autograd refuses writes to a view, such as a region's
    reshaped result, if the operation that torch traced makes no view."""
    return result.detach() if isinstance(result, torch.Tensor) and result._is_view() else result


def _mv(matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    return torch.mm(vector.view(1, -1), matrix.t()).view(-1)


def _addmv(
    addend: torch.Tensor, matrix: torch.Tensor, vector: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return torch.addmm(addend, vector.view(1, -1), matrix.t(), beta=beta, alpha=alpha).view(-1)


# Inductor would decompose a product with a vector into multiplications and a sum, in which no pass finds a contraction.
_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {aten.mv.default: _mv, aten.addmv.default: _addmv, **IN_PARTS}


class _Table(dict[Any, Callable[..., Any]]):
    """A decomposition table that is pickled by name, so that Inductor can hash it for its cache key."""

    def __reduce__(self) -> tuple[Callable[[], "_Table"], tuple[()]]:
        return inductor_table, ()


def inductor_table() -> _Table:
    # The second has all that the first has. The import of the first loads Inductor's lowerings, which pools need.
    from gossamer.runtime.torch_internals import inductor_decompositions, select_decomp_table

    return _Table({**inductor_decompositions, **select_decomp_table(), **_DECOMPOSITIONS})
