"""Pruned models of transformers in eval mode, with gradients: forward as in inference, and gradients are those of float64."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backend.harness import assert_same, compile_and_run, prune_

transformers = pytest.importorskip("transformers")

_SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


class Hidden(nn.Module):
    """The last hidden state of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.model(x).last_hidden_state
        return found


def encoder() -> tuple[nn.Module, Tensor]:
    return transformers.BertModel(transformers.BertConfig(vocab_size=96, **_SMALL)), torch.randint(96, (3, 24))


def decoder() -> tuple[nn.Module, Tensor]:
    config = transformers.LlamaConfig(vocab_size=96, num_key_value_heads=2, use_cache=False, **_SMALL)
    return transformers.LlamaModel(config), torch.randint(96, (3, 24))


def images() -> tuple[nn.Module, Tensor]:
    config = transformers.ViTConfig(image_size=32, patch_size=8, **_SMALL)
    return transformers.ViTModel(config), torch.randn(3, 3, 32, 32)


def gradients(model: nn.Module, result: Tensor) -> dict[str, Tensor]:
    result.square().mean().backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize(("make", "layers"), [(encoder, 12), (decoder, 14), (images, 12)])
def test_gradients_are_those_of_float64(make: Any, layers: int) -> None:
    torch.manual_seed(0)
    whole, x = make()
    model = Hidden(whole).eval()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            prune_(layer)
    wide = copy.deepcopy(model).double()
    exact = gradients(wide, wide(x.double() if x.is_floating_point() else x))
    run = compile_and_run(model, x, grad=True)
    assert len({each.name for each in run.regions if "layer" in each.name}) == layers
    assert "_Recomputation" in type(run.output.grad_fn).__name__, "the forward pass is that of inference"
    assert_same(run.output, model(x))
    found = gradients(model, run.function(x))
    assert found.keys() == exact.keys()
    for name, gradient in found.items():
        scale = max(float(exact[name].abs().max()), 1e-4)
        assert float((gradient.double() - exact[name]).abs().max()) < 1e-3 * scale, name
