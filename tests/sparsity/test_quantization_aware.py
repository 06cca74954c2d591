"""gossamer.quantize(aware=True): results are those of the int8 layers made of it, gradients straight through, zeros stay."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gossamer
from gossamer.sparsity.quantization.aware_linear import QuantizationAwareLinear
from gossamer.sparsity.quantization.quantized_linear import QuantizedLinear, quantized, tokens_on_grid
from gossamer.sparsity.training.distill import DistillationLoss
from gossamer.sparsity.training.gradual_masks import GradualMasks
from tests.backend.harness import compile_and_run, prune_


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """Dynamo may have given up the code of torch's own modules, which other tests compile, too."""
    torch._dynamo.reset()


def model_of(width: int = 48) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 16))
    for i in (0, 2):
        prune_(model[i], 0.2)
    return model


def test_results_are_those_of_int8() -> None:
    model = gossamer.quantize(model_of(), aware=True)
    assert [type(layer) for layer in model] == [QuantizationAwareLinear, nn.ReLU, QuantizationAwareLinear]
    assert "trains for int8" in repr(model)
    assert set(model.state_dict()) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    exact = gossamer.quantize(copy.deepcopy(model))
    assert type(exact[0]) is QuantizedLinear
    x = torch.randn(2, 5, 32)
    x[0, 0] = 0
    torch.testing.assert_close(model(x), exact(x), rtol=1e-5, atol=1e-5)
    assert model(x[:0]).shape == (0, 5, 16)
    x[1, 2, 3] = torch.nan
    assert model(x)[1, 2].isnan().all()
    assert not model(x)[1, 3].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_pass_rounding(dtype: torch.dtype) -> None:
    layer = gossamer.quantize(model_of(), aware=True)[0].to(dtype)
    x = torch.randn(7, 32, dtype=dtype, requires_grad=True)
    q, step = tokens_on_grid(x.detach().float())
    codes, scale = quantized(layer.weight.detach())
    rounded, weight = (t.to(dtype).requires_grad_() for t in (q * step, codes * scale[:, None]))
    wanted = F.linear(rounded, weight, layer.bias)
    assert torch.equal(layer(x), wanted)
    grad = torch.randn_like(wanted)
    given = torch.autograd.grad(layer(x), (x, layer.weight), grad)
    for have, want in zip(given, torch.autograd.grad(wanted, (rounded, weight), grad), strict=True):
        assert torch.equal(have, want)


def test_training_for_int8_learns_and_keeps_zeros() -> None:
    teacher = model_of()
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        for layer in (student[0], student[2]):
            layer.weight.mul_(1 + torch.randn_like(layer.weight))
    gossamer.quantize(student, aware=True)
    zeros, losses = [student[i].weight == 0 for i in (0, 2)], list[float]()
    batches = list(torch.randn(4, 64, 32))
    gossamer.distill(
        student, teacher, batches, DistillationLoss(embeddings=1.0), steps=80, on_step=lambda _, loss: losses.append(loss)
    )
    assert losses[-1] < 0.5 * losses[0]
    assert all(torch.equal(student[i].weight == 0, before) for i, before in zip((0, 2), zeros, strict=True))
    gossamer.quantize(student)
    assert type(student[2]) is QuantizedLinear
    assert not student[0].weight_int8[zeros[0]].any()


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_steps_are_those_of_eager(dynamic: bool | None) -> None:
    model = gossamer.quantize(model_of(), aware=True)
    other = copy.deepcopy(model)
    steps = [torch.compile(model, backend="sparse", fullgraph=True, dynamic=dynamic), other]
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, other)]
    masks = [GradualMasks(each) for each in (model, other)]
    for rows in (12, 12, 9):
        x = torch.randn(rows, 32)
        losses = list[Tensor]()
        for call, optimizer, mask in zip(steps, optimizers, masks, strict=True):
            optimizer.zero_grad()
            losses.append(call(x).square().mean())
            losses[-1].backward()
            optimizer.step()
            mask.step()
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)


def test_inference_is_sparse_and_sees_what_training_changed() -> None:
    model = gossamer.quantize(model_of(256), aware=True)
    for rows in (7, 1, 0):
        x = torch.randn(rows, 32)
        run = compile_and_run(model, x, regions=2)
        torch.testing.assert_close(run.output, model(x), rtol=1e-5, atol=1e-5)
    x = torch.randn(7, 32)
    x[3, 0] = torch.nan
    with torch.no_grad():
        model[0].weight.mul_(3)
        torch.testing.assert_close(run.function(x), model(x), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_groups_are_refused_and_layers_chosen() -> None:
    with pytest.raises(gossamer.OptionError, match="aware=True trains for weights of int8, not for groups"):
        gossamer.quantize(model_of(), weights="int4", aware=True)
    model = gossamer.quantize(model_of(), aware=True, skip="2")
    assert type(model[2]) is nn.Linear


def test_a_trainer_of_hugging_face(tmp_path: Any) -> None:
    transformers, _ = pytest.importorskip("transformers"), pytest.importorskip("accelerate")
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 64}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))
    data = [{"input_ids": torch.arange(8) + i, "labels": torch.tensor(i % 2)} for i in range(32)]
    layers = [layer for layer in model.bert.encoder.modules() if isinstance(layer, nn.Linear)]
    for layer in layers:
        prune_(layer, 0.2)
    gossamer.quantize(model, aware=True)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=8, per_device_train_batch_size=4, report_to=[], use_cpu=True, save_strategy="no"
    )
    before = [layer.weight.detach().clone() for layer in layers]
    callback = GradualMasks(model, only=[name for name, m in model.named_modules() if m in layers]).callback()
    transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback]).train()
    for layer, weight in zip(layers, before, strict=True):
        assert not torch.equal(layer.weight, weight)
        assert not layer.weight[weight == 0].any()
    gossamer.quantize(model)
    assert all(type(layer) is QuantizedLinear for layer in layers)


def test_torchs_transforms_of_functions_see_the_gradients_of_autograd() -> None:
    model, x = gossamer.quantize(model_of(), aware=True), torch.randn(3, 32)
    given = {name: each.detach() for name, each in model.named_parameters()}

    def loss(given: dict[str, Tensor], one: Tensor) -> Tensor:
        return torch.func.functional_call(model, given, (one[None],)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(given, x)
    model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(each[name].sum(0), parameter.grad, rtol=1e-3, atol=1e-3)
    exact, own = gossamer.quantize(copy.deepcopy(model)), x.clone().requires_grad_()
    exact(own).square().sum().backward()
    torch.testing.assert_close(torch.func.grad(lambda x: exact(x).square().sum())(x), own.grad)
