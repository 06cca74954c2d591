"""A pruned model learns from its dense teacher: the losses are those of the papers, zeros stay, sparsity rises as scheduled."""

import copy

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
