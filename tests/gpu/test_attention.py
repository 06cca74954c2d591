"""Attention of CUDA tensors is left to torch: its own kernels, cuDNN's and FlexAttention's are made for tensor cores."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.graph_passes import GRAPH_PASSES, graph_pass
from gossamer.backend.report.options import Options
from gossamer.backend.run.lifetime import kept
from tests.backend.test_backward_part import Traced

PASSES = [name for name, where in GRAPH_PASSES.items() if where.startswith("attention.")]
TOKENS = 64


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(TOKENS)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(at[:, None] - at).abs() < 8)


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(TOKENS)
    scores = (q @ k.transpose(2, 3) * 0.125 / 50).tanh() * 50
    return scores.masked_fill((at[:, None] - at).abs() >= 8, -torch.inf).softmax(-1) @ v


def trained(*given: Tensor) -> fx.GraphModule:
    """The joint graph of `written`."""
    return Traced(written, *(x.requires_grad_() for x in given)).module


def traced(attention: Callable[..., object], device: str, dtype: torch.dtype) -> fx.GraphModule:
    """A graph whose values are on a device, as far as passes can tell."""
    given = [torch.randn(2, 4, TOKENS, 64, dtype=dtype) for _ in range(3)]
    module: fx.GraphModule = trained(*given) if attention is trained else make_fx(attention, tracing_mode="fake")(*given)
    mode = FakeTensorMode()
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and device != "cpu":
            with mode:
                node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return module


@pytest.mark.parametrize("attention", [fused, written, trained])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_pass_touches_it(attention: Callable[..., object], dtype: torch.dtype) -> None:
    assert set(PASSES) == {"written-attention", "flex-attention", "cached-attention", "masked-attention"}
    changed = {}
    for device in ("cpu", "cuda"):
        module = traced(attention, device, dtype)
        before = [(node.target, str(node.args)) for node in module.graph.nodes]
        context = GraphContext(Inputs(module, [], {}), Options(min_gain=0, strict=True), None, measuring=None)
        with kept():
            decisions = [each for name in PASSES for each in graph_pass(name).run(module.graph, context)]
        changed[device] = before != [(node.target, str(node.args)) for node in module.graph.nodes]
        assert bool(decisions) == (device == "cpu")
    assert changed == {"cpu": True, "cuda": False}
