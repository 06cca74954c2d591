"""`gossamer.Cuttlefish` trains layers dense first. Once the rank of a layer has settled, it trains two factors of that rank.

    factors = gossamer.Cuttlefish(model, optimizer)
    for epoch in range(epochs):
        train(model, data, optimizer)
        factors.epoch()                 # layers that have settled become two, in the model and in the optimizer

The stable rank of a weight tells how much rank it needs: the sum of the squares of all singular values over that of the
largest. It changes in the first epochs, and hardly afterwards (Wang et al., Cuttlefish, MLSys 2023, sections 3.2 to 3.4):

    rank of W at epoch t = stable rank of W_t * smaller size of W / stable rank of W_0
    settled              = it has changed by less than a share of that size in each of the last epochs
    switched             = W -> (U sqrt(S)) (sqrt(S) V) of that rank, if the factors are smaller than W
"""

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn

from gossamer.dialects.errors import OptionError
from gossamer.dialects.option_check import check_least, check_positive
from gossamer.sparsity.pruning.choose_layers import Layers, chosen_layers, none_chosen
from gossamer.sparsity.torch_functions.check_model import check_model
from gossamer.sparsity.torch_functions.plain_model import plain_model


@dataclass
class _Watched:
    """A layer that is still dense, its stable rank at the start (`first`), and its rank after each epoch."""

    name: str
    layer: nn.Linear
    first: float
    ranks: list[float] = field(default_factory=list)


class Cuttlefish:
    """Replaces linear layers of a model by two of a low rank each, once their ranks have settled.

    optimizer   gets the factors in place of the weights, in the same group, without state. None: make a new optimizer from
                `model.parameters()` after each epoch that has switched a layer
    change      a rank has settled if it changes by less than this in an epoch, as a share of the weight's smaller size
    patience    number of consecutive epochs in which the rank must change by less than that
    only, skip  which linear layers, as for `gossamer.sparsify`
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, change: float = 0.02, patience: int = 2,
        only: Layers | None = None, skip: Layers = (),
    ) -> None:  # fmt: skip
        check_model(model)
        check_positive("change", change)
        check_least("patience", patience, 1, integer=True)
        self.model, self.optimizer, self.change, self.patience = plain_model(model), optimizer, change, patience
        chosen = [layer for layer in chosen_layers(model, only, skip) if type(layer) is nn.Linear and layer.weight.numel()]
        if not chosen:
            raise OptionError(f"there is no layer to watch: {none_chosen(model, only, skip)}")
        if self.model in chosen:
            raise OptionError("the model is a linear layer itself, so nothing has a place for two: give nn.Sequential(layer)")
        names = {module: name for name, module in self.model.named_modules()}
        self._watched = [_Watched(names[layer], layer, stable_rank(layer.weight.detach())) for layer in chosen]

    @property
    def dense(self) -> list[str]:
        """The names of the layers that have not been switched."""
        return [each.name for each in self._watched]

    def epoch(self) -> dict[str, int]:
        """Switches layers that have settled; call it after each epoch. Returns the ranks of the switched layers by name."""
        switched = {}
        for each in list(self._watched):
            size = min(each.layer.weight.shape)
            each.ranks.append(size * stable_rank(each.layer.weight.detach()) / each.first if each.first else 0.0)
            recent = each.ranks[-1 - self.patience :]
            moved = [abs(b - a) for a, b in pairwise(recent)]
            if len(moved) < self.patience or max(moved) > self.change * size:
                continue
            self._watched.remove(each)
            rank = max(1, min(size, round(each.ranks[-1])))
            if rank * sum(each.layer.weight.shape) < each.layer.weight.numel():
                self._switch(each, rank)
                switched[each.name] = rank
        return switched

    def _switch(self, watched: _Watched, rank: int) -> None:
        layer, factors = watched.layer, factored(watched.layer, rank)
        for parent in self.model.modules():
            for own in [own for own, module in parent._modules.items() if module is layer]:
                setattr(parent, own, factors)
        for group in self.optimizer.param_groups if self.optimizer is not None else []:
            places = [n for n, parameter in enumerate(group["params"]) if parameter is layer.weight]
            for place in places:
                group["params"][place : place + 1] = [factors[0].weight, factors[1].weight]
                self.optimizer.state.pop(layer.weight, None)  # type: ignore[union-attr]


def stable_rank(weight: Tensor) -> float:
    """Returns the sum of the squares of all singular values over the square of the largest; 0 for a weight of zeros."""
    values = torch.linalg.svdvals(_wide(weight))
    largest = float(values[0])
    return float(values.square().sum()) / largest**2 if largest else 0.0


class FactoredLinear(nn.Sequential):
    """Two linear layers in place of one. It has the attributes of that one, for code that reads them."""

    @property
    def in_features(self) -> int:
        return self[0].in_features  # type: ignore[return-value]

    @property
    def out_features(self) -> int:
        return self[1].out_features  # type: ignore[return-value]

    @property
    def weight(self) -> Tensor:
        """The product of both weights, computed at each access. torch's encoder layers in inference and T5 read it."""
        product: Tensor = self[1].weight @ self[0].weight  # type: ignore[operator]
        return product

    @property
    def bias(self) -> Tensor | None:
        return self[1].bias  # type: ignore[return-value]


def factored(layer: nn.Linear, rank: int) -> FactoredLinear:
    """Returns two linear layers for one: factors of the nearest weight of this rank. The second has the same bias object."""
    u, s, vh = torch.linalg.svd(_wide(layer.weight.detach()), full_matrices=False)
    roots = s[:rank].sqrt()
    made = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    first = nn.Linear(layer.in_features, rank, bias=False, **made)
    second = nn.Linear(rank, layer.out_features, bias=False, **made)
    with torch.no_grad():
        first.weight.copy_(roots[:, None] * vh[:rank])
        second.weight.copy_(u[:, :rank] * roots)
    second.bias = layer.bias
    for part in (first, second):
        part.weight.requires_grad_(layer.weight.requires_grad)
        part.train(layer.training)
    return FactoredLinear(first, second)


def _wide(weight: Tensor) -> Tensor:
    """Returns a weight in float32 or float64, because torch has no singular values of smaller floats."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32))
