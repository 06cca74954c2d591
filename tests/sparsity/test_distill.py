"""A pruned model learns from its dense teacher: the losses are those of the papers, zeros stay, sparsity rises as scheduled."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer.sparsity.pruning.batches import Call
from gossamer.sparsity.training.distill import DistillationLoss
from gossamer.sparsity.training.gradual_masks import GradualMasks


@pytest.fixture
def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 16))


def batches() -> list[Tensor]:
    return list(torch.randn(8, 32, 16, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("loss", [DistillationLoss(logits=1.0), DistillationLoss(embeddings=1.0)])
def test_what_pruning_lost_is_learned_again(dense: nn.Module, loss: DistillationLoss) -> None:
    student = copy.deepcopy(dense).train()
    gossamer.prune(student, batches(), 0.8, method="magnitude")
    zeros, losses = [student[i].weight == 0 for i in (0, 3)], list[float]()
    gossamer.distill(
        student, dense, batches(), loss, steps=120, learning_rate=3e-3, on_step=lambda _, value: losses.append(value)
    )
    assert sum(losses[-8:]) < 0.6 * sum(losses[:8])
    assert all(((student[i].weight == 0) == before).all() for i, before in zip((0, 3), zeros, strict=True))
    assert student[2].training


def test_sparsity_rises_by_the_cubic_schedule(dense: nn.Module) -> None:
    masks, found = GradualMasks(dense, 0.8, steps=100, every=7), list[float]()
    for _ in range(100):
        masks.step()
        found.append(float((dense[0].weight == 0).float().mean()))
    assert found[0] == 0 and found == sorted(found)
    assert found[34] == pytest.approx(0.8 * (1 - 0.5**3), abs=0.01)
    assert found[69] == found[-1] == pytest.approx(0.8, abs=0.01)


def test_losses_are_those_of_the_papers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 16}
    student, teacher = (transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).eval() for _ in range(2))
    ids, mask = torch.arange(12).view(2, 6), torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    call = Call((), {"input_ids": ids, "attention_mask": mask}, mask.bool())
    s, t = (m(input_ids=ids, attention_mask=mask, output_hidden_states=True) for m in (student, teacher))
    kept = mask.bool()
    hidden = [
        (((a - b)[kept]) ** 2).sum() / (b[kept] ** 2).sum() for a, b in zip(s.hidden_states, t.hidden_states, strict=True)
    ]
    torch.testing.assert_close(DistillationLoss(hidden=1.0)(student, teacher, call), sum(hidden[1:]) / 2)
    p, q = (each.logits[kept].div(2).softmax(-1) for each in (t, s))
    divergence = (p * (p / q).log()).sum(-1).mean()
    torch.testing.assert_close(DistillationLoss(logits=1.0)(student, teacher, call), 4 * divergence)


def test_a_trainer_keeps_it_sparse(dense: nn.Module) -> None:
    transformers = pytest.importorskip("transformers")
    gossamer.prune(dense, batches(), 0.5)
    callback = GradualMasks(dense).callback()
    assert isinstance(callback, transformers.TrainerCallback)
    with torch.no_grad():
        dense[0].weight += 1
    callback.on_step_end(None, None, None)
    assert (dense[0].weight == 0).float().mean() == pytest.approx(0.5, abs=0.01)


def test_what_makes_no_sense_is_refused(dense: nn.Module) -> None:
    with pytest.raises(gossamer.OptionError, match="weights"):
        DistillationLoss()
    with pytest.raises(gossamer.OptionError, match="steps"):
        gossamer.distill(dense, dense, batches(), DistillationLoss(logits=1), steps=0)
    with pytest.raises(gossamer.OptionError, match="sparsity is 2"):
        GradualMasks(dense, 2.0)


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, output_hidden_states: bool = False) -> Any:
        states = self.encoder(x)
        logits = self.decoder(states)
        hidden = {"encoder_hidden_states": (x, states), "decoder_hidden_states": (states, logits)}
        return SimpleNamespace(logits=logits, **(hidden if output_hidden_states else {}))


def test_hidden_states_of_encoder_and_decoder() -> None:
    torch.manual_seed(0)
    student, teacher, x = EncoderDecoder(), EncoderDecoder(), batches()[0]
    given, wanted = (model(x, output_hidden_states=True) for model in (student, teacher))
    pairs = [(s[1], t[1]) for s, t in zip(list(vars(given).values())[1:], list(vars(wanted).values())[1:], strict=True)]
    expected = sum((s - t).square().sum() / t.square().sum() for s, t in pairs) / 2
    torch.testing.assert_close(DistillationLoss(hidden=1)(student, teacher, x), expected)


@pytest.mark.parametrize(
    ("student", "teacher", "loss", "said"),
    [
        (nn.Linear(16, 4), nn.Linear(16, 5), DistillationLoss(logits=1), r"\(32, 4\), of its teacher \(32, 5\)"),
        (nn.Linear(16, 4), nn.Linear(16, 5), DistillationLoss(embeddings=1), "embeddings of the model"),
        (nn.Linear(16, 4), nn.Linear(16, 4), DistillationLoss(hidden=1), "Linear takes no output_hidden_states"),
        (nn.Linear(16, 4).requires_grad_(False), nn.Linear(16, 4), DistillationLoss(logits=1), "nothing to train"),
        (nn.LSTM(16, 4), nn.LSTM(16, 4), DistillationLoss(logits=1), "no layer to prune: .* 1 LSTM"),
    ],
)
def test_models_that_do_not_go_together_are_refused(
    student: nn.Module, teacher: nn.Module, loss: DistillationLoss, said: str
) -> None:
    before = copy.deepcopy(student.state_dict())
    with pytest.raises(gossamer.OptionError, match=said):
        gossamer.distill(student, teacher, batches(), loss, steps=3)
    assert all(torch.equal(before[name], value) for name, value in student.state_dict().items())


def test_a_loss_that_is_no_number_ends_training_before_it_is_learned(dense: nn.Module) -> None:
    data = batches()
    data[2][0] = torch.nan
    student = copy.deepcopy(dense)
    gossamer.prune(student, data[:2], 0.5)
    with pytest.raises(gossamer.OptionError, match="loss of step 2, of batch 2, is nan"):
        gossamer.distill(student, dense, data, DistillationLoss(logits=1), steps=8)
    assert all(bool(each.isfinite().all()) and each.grad is None for each in student.parameters())


def test_gradients_are_turned_on(dense: nn.Module) -> None:
    first, second = copy.deepcopy(dense), copy.deepcopy(dense)
    with torch.no_grad():
        gossamer.distill(first, dense, batches(), DistillationLoss(logits=1), steps=2)
    gossamer.distill(second, dense, batches(), DistillationLoss(logits=1), steps=2)
    assert torch.equal(first[0].weight, second[0].weight)
