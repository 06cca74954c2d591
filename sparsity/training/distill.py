"""`gossamer.distill` trains a pruned model toward the outputs of its dense original. It may also raise the sparsity.

    loss = logits * T^2 KL(t | s)  +  hidden * mean over layers of |s - t|^2 / |t|^2  +  embeddings * (1 - cos(s, t))

s and t are the outputs of student and teacher for the same batch. Softened logits: Hinton et al., 2015. Hidden states relative
to the size of the teacher's: SquareHead, Kurtic et al., 2023.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.dialects.errors import OptionError
from gossamer.dialects.option_check import check_least
from gossamer.sparsity.pruning.batches import Call, call_of, calls_of
from gossamer.sparsity.pruning.choose_layers import Layers
from gossamer.sparsity.torch_functions.plain_model import evaluating, plain_model
from gossamer.sparsity.training.gradual_masks import GradualMasks

Model = TypeVar("Model", bound=nn.Module)
_WARM_UP = 20


@dataclass(frozen=True)
class DistillationLoss:
    """A distillation loss. Its fields weight its parts; one of `logits`, `hidden` and `embeddings` must be above 0.

    logits, temperature  compares the field `logits` of the outputs, or the tensor that the model returns
    hidden               compares `hidden_states` of models of Hugging Face, of the encoder and of the decoder
    embeddings           compares the tensors that `embed` makes of an output and its call; by default the first tensor

    Tokens that the attention mask of a batch hides do not count. OptionError if the outputs lack such a part, or if its sizes
    differ between student and teacher.
    """

    logits: float = 0.0
    hidden: float = 0.0
    embeddings: float = 0.0
    temperature: float = 2.0
    embed: Callable[[Any, Call], Tensor] | None = None

    def __post_init__(self) -> None:
        if min(self.logits, self.hidden, self.embeddings) < 0 or not self.logits + self.hidden + self.embeddings:
            raise OptionError("logits, hidden and embeddings are weights: none may be negative, and one must be positive")

    def __call__(self, student: nn.Module, teacher: nn.Module, batch: Any) -> Tensor:
        """Returns the loss of a batch (as for `prune`), with gradients for the student."""
        call = batch if isinstance(batch, Call) else call_of(student, batch)
        if self.hidden and not _takes_hidden_states(student):
            raise OptionError(
                f"hidden={self.hidden:g} needs hidden states, as models of Hugging Face have them: "
                f"{type(plain_model(student)).__name__} takes no output_hidden_states"
            )
        asked = Call(call.args, call.kwargs | ({"output_hidden_states": True} if self.hidden else {}), call.tokens)
        with torch.no_grad():
            wanted = asked.of(teacher)
        given = asked.of(student)
        parts: list[Tensor] = []
        if self.logits:
            s, t = (_counted(_logits(each), call) / self.temperature for each in (given, wanted))
            _check_sizes("logits", s, t)
            divergence = F.kl_div(s.log_softmax(-1), t.log_softmax(-1), log_target=True, reduction="sum") / len(s)
            parts.append(self.logits * self.temperature**2 * divergence)
        if self.hidden:
            students, teachers = _hidden_states(given), _hidden_states(wanted)
            if len(students) != len(teachers):
                raise OptionError(f"the model has {len(students)} hidden states, its teacher {len(teachers)}: leave out hidden")
            pairs = [(_counted(s, call), _counted(t, call)) for s, t in zip(students, teachers, strict=True)]
            for pair in pairs:
                _check_sizes("hidden states", *pair)
            ratios = [(s - t).square().sum() / t.square().sum().clamp(min=1e-12) for s, t in pairs]
            parts.append(self.hidden * torch.stack(ratios).mean())
        if self.embeddings:
            s, t = (self.embed(each, call) if self.embed else _counted(_first(each), call) for each in (given, wanted))
            _check_sizes("embeddings", s, t)
            parts.append(self.embeddings * (1 - F.cosine_similarity(s, t, dim=-1)).mean())
        return torch.stack(parts).sum()


@torch.inference_mode(False)
def distill(
    model: Model,
    teacher: nn.Module,
    data: Iterable[Any],
    loss: DistillationLoss,
    *,
    steps: int,
    sparsity: float | None = None,
    learning_rate: float = 5e-4,
    only: Layers | None = None,
    skip: Layers = (),
    on_step: Callable[[int, float], None] | None = None,
) -> Model:
    """Trains a sparse model toward its dense teacher in place, and returns it. Zeros stay zeros. All modules keep their modes.

    data           batches as for `prune`; they are repeated until `steps` are done
    sparsity       the share of zeros to reach, by a cubic schedule. None keeps the zeros of the model
    learning_rate  the largest rate of AdamW without weight decay. It rises for 20 steps, then falls linearly to 0
    on_step        a function that is called with the number and the loss of each step

    Dropout is off, because the teacher has none. OptionError if a loss is NaN or infinite, before the optimizer's step.

    In a loop of your own, use `DistillationLoss`, and `gossamer.recipes.GradualMasks`: call its `step()` after each step
    of the optimizer, or give its `callback()` to transformers.Trainer.
    """
    check_least("steps", steps, 1, integer=True)
    masks, calls = GradualMasks(model, sparsity, steps=steps, only=only, skip=skip), calls_of(model, data)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise OptionError("no parameter of the model requires a gradient: there is nothing to train")
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / _WARM_UP) * (1 - step / steps))
    try:
        with evaluating(model, teacher), torch.enable_grad():
            for step, call in enumerate(itertools.islice(itertools.cycle(calls), steps)):
                optimizer.zero_grad()
                found = loss(model, teacher, call)
                value = float(found.detach())
                if not math.isfinite(value):
                    raise OptionError(
                        f"the loss of step {step}, of batch {step % len(calls)}, is {value}: look for NaN and infinity in that "
                        "batch, in the teacher's outputs, or lower learning_rate"
                    )
                found.backward()
                optimizer.step()
                schedule.step()
                masks.step()
                if on_step is not None:
                    on_step(step, value)
    finally:
        optimizer.zero_grad()
    return model


def _counted(tensor: Tensor, call: Call) -> Tensor:
    """Returns [samples, features] without padding."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    if call.tokens is None or call.tokens.numel() != len(rows):
        return rows
    return rows[call.tokens.reshape(-1)]


def _logits(output: Any) -> Tensor:
    found = getattr(output, "logits", output)
    if not isinstance(found, Tensor):
        parts = f" ({', '.join(map(str, output))})" if isinstance(output, dict) else ""
        raise OptionError(
            f"the model gives a {type(output).__name__}{parts} without logits: leave them out, for hidden or embeddings, "
            "or give a function of your own as the loss"
        )
    return found


def _hidden_states(output: Any) -> list[Tensor]:
    """Returns the hidden states after each layer."""
    names = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")
    states = [s for name in names for s in (getattr(output, name, None) or ())[1:]]
    if not states:
        raise OptionError(f"the model gives a {type(output).__name__} without hidden states: leave out hidden")
    return states


def _takes_hidden_states(model: nn.Module) -> bool:
    parameters = inspect.signature(plain_model(model).forward).parameters.values()
    return any(p.name == "output_hidden_states" or p.kind is p.VAR_KEYWORD for p in parameters)


def _check_sizes(what: str, student: Tensor, teacher: Tensor) -> None:
    if student.shape != teacher.shape:
        raise OptionError(
            f"{what} of the model are {tuple(student.shape)}, of its teacher {tuple(teacher.shape)}: leave out {what}"
        )


def _first(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    first: Tensor = next(iter(output.values())) if isinstance(output, dict) else output[0]
    return first
