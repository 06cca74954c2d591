"""`StoredExperts` are experts of transformers whose weights store only their nonzeros. They are called and trained as before.

gate_up_proj [experts, rows, columns], dense, with zeros    →    gate_up_proj [experts, rows, columns], a SparseTensor

The forward pass sorts rows by expert with the same operations as `experts_implementation="grouped_mm"` of transformers, so that
the passes of backend/experts recognise it in graphs.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.sparsity.experts.stored_products import LINES
from gossamer.sparsity.pruning.grouped_products import grouped_product
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor, from_entries
from gossamer.sparsity.torch_functions.open_experts import expert_weights

_FORMAT = LINES.with_widths(32, 32)


class StoredExperts(nn.Module):
    """Experts whose weights are SparseTensors, in parameters of the same names and shapes as before.

    Biases, buffers, modules and the activation are those of the plain experts.
    """

    _was: Any
    is_transposed: bool
    has_gate: bool
    has_bias: bool

    @classmethod
    @torch.inference_mode(False)  # parameters that were made within it could never train
    def become(cls, experts: nn.Module, kept: Mapping[str, Tensor], made: dict[int, nn.Parameter]) -> None:
        """Turns plain experts into stored ones in place, so that hooks on them and references to them stay valid.

        kept  by the name of each weight, which elements to store
        made  stored weights by the ids of the plain ones, so that experts that share weights still share them
        """
        for name, where in kept.items():
            weight: Any = experts._parameters[name]
            if id(weight) not in made:
                at = where.nonzero().unbind(1)
                sparse = from_entries(_FORMAT, tuple(weight.shape), at, weight.detach()[at])
                made[id(weight)] = nn.Parameter(sparse, weight.requires_grad)
            experts._parameters[name] = made[id(weight)]
        own: Any = experts
        own._was, own.__class__ = type(experts), cls

    def become_plain(self, dense: Callable[[nn.Parameter], nn.Parameter]) -> None:
        """Turns the experts back into their former class in place. `dense` makes a dense parameter of each stored one."""
        for name in expert_weights(self):
            self._parameters[name] = dense(self._parameters[name])  # type: ignore[arg-type]
        self.__class__ = self.__dict__.pop("_was")

    def _apply_gate(self, sums: Tensor) -> Tensor:
        """Computes what the experts do between their two products."""
        gated: Tensor = self._was._apply_gate(self, sums)
        return gated

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Computes what experts of transformers compute. A token gets 0 from an expert that this process does not have."""
        tokens, top = top_k_index.shape
        first, second = tuple(expert_weights(self))
        count = getattr(self, second).shape[0]
        experts, order = torch.sort(top_k_index.reshape(-1))
        scores = top_k_weights.reshape(-1)[order]
        rows = hidden_states[order // top]
        ends = torch.histc(experts.float(), bins=count, min=0, max=count - 1).cumsum(0, dtype=torch.int32)
        exists = None
        if getattr(self, "_is_expert_parallel", False):
            exists, experts = (experts < count).unsqueeze(1), experts.clamp_max(count - 1)
        sums = self._product(first, rows, experts, ends)
        hidden = self._apply_gate(sums) if self.has_gate else self.act_fn(sums)  # type: ignore[operator]
        each = self._product(second, hidden, experts, ends)
        if exists is not None:
            each = each.where(exists, 0)
        each = each * scores.unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=order.device)
        return each[back].view(tokens, top, each.shape[1]).sum(1).to(hidden_states.dtype)

    def _product(self, name: str, rows: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        """Returns rows that are sorted by expert, times the weight of this name, plus its bias."""
        weight: Any = getattr(self, name)
        product: Tensor = grouped_product(rows.to(weight.dtype), weight if self.is_transposed else weight.mT, ends)
        return product + getattr(self, f"{name}_bias")[experts] if self.has_bias else product

    def extra_repr(self) -> str:
        weights: list[Any] = [getattr(self, name) for name in expert_weights(self)]
        share = sum(each.nnz for each in weights) / max(1, sum(each.numel() for each in weights))
        return f"{weights[0].shape[0]} experts, {share:.1%} of their weights stored"


def stored_names(experts: nn.Module) -> list[str]:
    """Returns the names of the weights of experts that store only their nonzeros."""
    names = expert_weights(experts) if isinstance(experts, StoredExperts) else ()
    return [name for name in names if isinstance(experts._parameters.get(name), SparseTensor)]
