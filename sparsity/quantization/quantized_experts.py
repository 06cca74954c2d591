"""`QuantizedExperts` are experts of transformers with integer weights of 8 or 4 bits, which run as one operation.

gate_up_proj [experts, 2 hidden, columns]    →    gate_up_proj_codes, with a scale for each row, or for each group of a row

Tokens stay floats. Reading the weights takes most of the time, and integers have a quarter or an eighth of the bytes of f32.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gossamer.sparsity.experts.expert_weights import floats_of
from gossamer.sparsity.experts.named_activation import named, numbers
from gossamer.sparsity.experts.routed_mlp import routed_mlp
from gossamer.sparsity.quantization.kept_types import KeepsTypes
from gossamer.sparsity.torch_functions.open_experts import expert_weights

GROUPS = {8: 16, 4: 32}
"""By bits, the number of columns in a group that shares a scale. Kernels read a group as a whole vector."""

PARTS = ("codes", "scale")
"""The buffers of each weight: `<name>_codes` and `<name>_scale`."""

_LEAST = torch.finfo(torch.float32).tiny


def why_no_experts(module: nn.Module, bits: int, grouped: bool) -> str:
    """Returns why a module has no experts that can be quantized, "" if it has."""
    names = expert_weights(module)
    if not names:
        return "no experts of transformers"
    weights = [module._parameters.get(name) for name in names]
    if parametrize.is_parametrized(module) or not all(type(weight) is nn.Parameter and weight.is_cpu for weight in weights):
        return "the weights of its experts are masked, stored as nonzeros, sharded or not on a CPU"
    if _activation_of(module) is None:
        return "its activation is none that experts have"
    columns = [weight.shape[1 if module.is_transposed else 2] for weight in weights if weight is not None]
    if grouped and any(count % GROUPS[bits] for count in columns):
        return f"its columns are no groups of {GROUPS[bits]}"
    return ""


class QuantizedExperts(KeepsTypes, nn.Module):
    """Experts with integer weights, called like those of transformers.

    gate_up_proj_codes, down_proj_codes  int8 [experts, rows, columns], or uint8 [experts, rows, columns / 2] with two integers
                                         of 4 bits each (up_proj_codes if there are no gates)
    gate_up_proj_scale, down_proj_scale  float32 [experts, rows, groups]
    gate_up_proj, down_proj              the weights as floats, in their former layout; computed at each access, never written
    """

    _first: str
    _how: tuple[str, str]
    is_transposed: bool
    has_bias: bool

    @classmethod
    def of(cls, experts: nn.Module, bits: int, grouped: bool) -> Self:
        """Turns float experts into quantized ones in place, so that hooks on them and references to them stay valid."""
        found = {}
        for name in expert_weights(experts):
            weight = experts.get_parameter(name).detach()
            group = GROUPS[bits] if grouped else None
            found[name] = _quantized(weight.mT if experts.is_transposed else weight, bits, group)
        return cls.become(experts, found)

    @classmethod
    def become(cls, experts: nn.Module, weights: dict[str, tuple[Tensor, Tensor]]) -> Self:
        """Turns experts into quantized ones in place. `weights` has the integers and scales by the names of the weights."""
        made: Any = experts
        made._first = next(iter(weights))
        made._how, made._dtype = _activation_of(experts), made._parameters[made._first].dtype
        for name in weights:
            del made._parameters[name]
        made.__class__ = cls
        for name, (values, scale) in weights.items():
            made.register_buffer(f"{name}_codes", values)
            made.register_buffer(f"{name}_scale", scale)
        return made

    @property
    def names(self) -> tuple[str, str]:
        """The names of both weights."""
        return self._first, "down_proj"

    def __getattr__(self, name: str) -> Any:
        """Returns attributes, and computes weights as floats."""
        values = self._buffers.get(f"{name}_codes")
        if values is None:
            return super().__getattr__(name)
        weight = floats_of(values, self._buffers[f"{name}_scale"], self._dtype)
        return weight.mT if self.is_transposed else weight

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Computes what experts of transformers compute. A token gets 0 from an expert that does not exist."""
        first, activation, layout = self._first, *self._how
        last = self._buffers["down_proj_codes"].shape[0] - 1  # type: ignore[union-attr]
        return routed_mlp(
            hidden_states,
            top_k_index.clamp_max(last),
            top_k_weights.masked_fill(top_k_index > last, 0),
            self._buffers[f"{first}_codes"],  # type: ignore[arg-type]
            self._buffers["down_proj_codes"],  # type: ignore[arg-type]
            gate_up_bias=getattr(self, f"{first}_bias") if self.has_bias else None,
            down_bias=self.down_proj_bias if self.has_bias else None,
            gate_up_scales=self._buffers[f"{first}_scale"],
            down_scales=self._buffers["down_proj_scale"],
            activation=activation,
            layout=layout,
        )

    def extra_repr(self) -> str:
        values = self._buffers["down_proj_codes"]
        assert values is not None
        return f"{values.shape[0]} experts, {'int4' if values.dtype == torch.uint8 else 'int8'}"


@torch.no_grad()
def _activation_of(experts: Any) -> tuple[str, str] | None:
    """Returns the activation and the layout of experts, by the names of `routed_mlp`; None if they are unknown."""
    sums = numbers([16, 24])
    try:
        found = experts._apply_gate(sums) if experts.has_gate else experts.act_fn(sums)
    except Exception:  # a gate that takes other inputs
        return None
    layouts = ["halves", "interleaved"] if experts.has_gate else ["up"]
    return named(found, sums, layouts) if isinstance(found, Tensor) else None


def _quantized(weight: Tensor, bits: int, group: int | None) -> tuple[Tensor, Tensor]:
    """Returns weights [experts, rows, columns] rounded to integers, and the scale of each row or of each group of columns."""
    most = 2 ** (bits - 1) - 1
    grouped = weight.float().unflatten(2, (-1, group or weight.shape[2]))
    scale = (grouped.abs().amax(3) / most).clamp_min(_LEAST)
    values = (grouped / scale.unsqueeze(3)).round().clamp(-most, most).to(torch.int8).flatten(2)
    if bits == 4:
        even, odd = (values[..., at::2].view(torch.uint8) & 15 for at in (0, 1))
        values = even | odd << 4
    return values.contiguous(), scale
