"""The values with which optimizers of torch start the state of an element: 0, except for those of Rprop and Adagrad."""

from torch import Tensor
from torch.optim import Adagrad, Optimizer, Rprop


def first_value(optimizer: Optimizer, parameter: Tensor, name: str) -> float:
    """Returns the value that the elements of a tensor in the state of a parameter have before the first step."""
    option = {(Rprop, "step_size"): "lr", (Adagrad, "sum"): "initial_accumulator_value"}
    for (kind, tensor), value in option.items():
        if isinstance(optimizer, kind) and name == tensor:
            groups = (group for group in optimizer.param_groups if any(each is parameter for each in group["params"]))
            return float(next(groups)[value])
    return 0.0
