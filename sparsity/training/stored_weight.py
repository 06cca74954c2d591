"""`StoredWeight` is a layer under a recipe whose weight stores only its nonzeros (store_sparse.py). Their pattern is its mask.

layer.mask = mask    →    weight, gradient and the optimizer's state have that pattern; new nonzeros are 0

Steps before nonzeros move need the gradient of elements that are not stored:
- A linear layer computes as usual. Beside it, a weight of zeros without memory gets the gradient of all elements.
- A module with its own forward computes with the sum of the dense weight and such a weight of zeros.
Optimizers and state dicts always see the stored weight.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle, unserializable_hook

from gossamer.runtime.packers.nonzeros import count_nonzeros, divided, nonzero_places
from gossamer.sparsity.arrays.stored_entries import coordinates
from gossamer.sparsity.compiler.taking import take
from gossamer.sparsity.pruning.layers import Layer
from gossamer.sparsity.pruning.patterns import Unstructured
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor, from_entries
from gossamer.sparsity.torch_functions.in_place import overwrite
from gossamer.sparsity.training.data_parallel import averaging_of
from gossamer.sparsity.training.first_values import first_value
from gossamer.sparsity.training.masked import Masked


class _Beside(torch.autograd.Function):
    """Returns y unchanged. Its backward computes the gradient of all elements of the weight that x was multiplied with."""

    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, x, ctx.weight_dtype = inputs[0], inputs[1], inputs[2].dtype
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        (x,) = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        return gradient, None, (rows.t() @ x.reshape(-1, x.shape[-1]).to(rows.dtype)).to(ctx.weight_dtype)


class TakesBeside:
    """A forward that other code sets on a linear layer, and that hands its result on in another layout (tensor_parallel.py)."""

    def __call__(self, x: Tensor, beside: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
        """Computes the layer. `beside` gets this process's result and input, and returns the result; for all gradients."""
        raise NotImplementedError


class _Forward:
    """A forward function of a module that also computes the gradient of all elements of its weight, as that of `zeros`.

    patched  the forward that other code has set on the module, such as Accelerate; None if the module has its class's
    """

    patched: Callable[..., Any] | None = None

    def __init__(self, module: nn.Module, zeros: nn.Parameter) -> None:
        self.module, self.zeros = module, zeros

    def install(self) -> None:
        before = self.module.__dict__.get("forward")
        if before is not self:
            self.patched = before
        self.module.forward = self  # type: ignore[assignment]

    def remove(self) -> None:
        if self.module.__dict__.get("forward") is not self:
            return
        if self.patched is None:
            del self.module.__dict__["forward"]
        else:
            self.module.forward = self.patched

    def __reduce__(self) -> tuple[Any, ...]:
        return _forward_without, (self.module, self.patched)


class _Watched(_Forward):
    """That of a linear layer, which computes with the stored weight."""

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self.patched, TakesBeside):
            return self.patched(x, self._beside)
        y = nn.Linear.forward(self.module, x) if self.patched is None else self.patched(x)  # type: ignore[arg-type]
        return self._beside(y, x)

    def _beside(self, y: Tensor, x: Tensor) -> Tensor:
        beside: Tensor = _Beside.apply(y, x.detach(), self.zeros)
        return beside


class _Lent(_Forward):
    """That of another module, which computes with a dense weight. Its other attributes are always those of the module."""

    def __init__(self, module: nn.Module, zeros: nn.Parameter) -> None:
        super().__init__(module, zeros)
        kind = type(module)
        other: Any = object.__new__(type(kind.__name__, (kind,), {"weight": property(_dense_weight)}))
        other.__dict__ = module.__dict__
        self._other = other

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self._other, *args, **kwargs)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _dense_weight(module: Any) -> Tensor:
    dense: Tensor = module._parameters["weight"].to_dense() + module.forward.zeros
    return dense


def _forward_without(module: nn.Module, patched: Callable[..., Any] | None) -> Callable[..., Any]:
    """Returns what copies and pickles get in place of such a forward, because they have no recipe: the one before it."""
    return module.forward if patched is None else patched


class StoredWeight(Masked):
    """A layer, its stored weight, and the optimizer with state of it.

    plain  the layer with its plain weight, if `store_weight` made this one of it
    """

    parameter: SparseTensor  # type: ignore[assignment]

    def __init__(
        self, name: str, module: nn.Module, optimizer: Optimizer, plain: Masked | None = None, sharers: Sequence[Layer] = ()
    ) -> None:
        self.parameter: SparseTensor = module._parameters["weight"]  # type: ignore[assignment]
        super().__init__(name, module, self.parameter, self.mask, sharers=sharers)  # type: ignore[arg-type]
        self.first = 1 - self.density if plain is None else plain.first
        self.optimizer, self.plain = optimizer, plain
        self._looking: list[_Forward] = []  # always the same objects, because compiled code guards on them
        self._hook: RemovableHandle | None = None

    @property
    def mask(self) -> Tensor:
        """Where elements are stored."""
        weight = self.parameter
        kept = torch.zeros(weight.numel(), dtype=torch.bool, device=weight.device)
        kept[self._places()[1]] = True
        return kept.view(weight.shape)

    @mask.setter
    @torch.no_grad()
    def mask(self, mask: Tensor) -> None:
        weight = self.parameter
        entries, places = self._places()
        new = nonzero_places(mask, torch.int64)
        if torch.equal(new, places):
            return
        entry = torch.full((weight.numel(),), -1, dtype=torch.int32, device=weight.device)
        entry[places] = entries.int()
        source = entry[new]  # the number of each value, -1 for a new one
        numbers = torch.arange(1, len(new) + 1, dtype=torch.float64, device=weight.device)
        pattern = from_entries(weight.format, tuple(weight.shape), divided(new, weight.shape[1]), numbers)
        *structure, order = pattern.components
        source = torch.cat([source.new_full((1,), -1), source]).index_select(0, order.long())  # 0 marks padding of blocks
        for tensor, first in self._of_its_pattern():
            values = tensor.components[-1].new_empty(len(source))
            take(tensor.components[-1].detach(), source, values)
            if first:
                values[(source < 0) & (order > 0)] = first
            overwrite("mask", tensor, SparseTensor(weight.format, weight.shape, (*structure, values)))

    def kept(self, mask: Tensor) -> SparseTensor:
        """Returns a weight with the elements of this one that `mask` keeps."""
        at = mask.nonzero().unbind(1)
        return from_entries(self.parameter.format, tuple(self.parameter.shape), at, self.weight()[at])

    def exchange(self, kept: float, grown: Tensor) -> None:
        """Keeps the largest nonzeros, a share `kept` of all elements, and moves the others to the largest of `grown`.

        grown  scores [rows, columns]; they are overwritten
        """
        values, (entries, places) = self.parameter.components[-1].detach(), self._places()
        stay = Unstructured().mask(values[entries].abs()[None], kept * grown.numel() / max(1, len(entries)))[0]
        scores = grown.flatten().index_fill_(0, places[stay], -1.0)
        mask = Unstructured().mask(scores[None], count_nonzeros(~stay) / len(scores))[0]  # dropped ones may grow at once
        mask[places[stay]] = True
        self.mask = mask.view(grown.shape)

    def _places(self) -> tuple[Tensor, Tensor]:
        """Returns which values are elements of the weight, and their flat places. Other values pad blocks at its edge."""
        weight = self.parameter
        (rows, columns), (height, width) = coordinates(weight.format, weight.shape, weight.components), weight.shape
        places = rows * width + columns
        if weight.format.padded_shape(weight.shape) == tuple(weight.shape):
            return torch.arange(len(places), device=places.device), places
        entries = ((rows < height) & (columns < width)).nonzero().flatten()
        return entries, places[entries]

    @property
    def density(self) -> float:
        return self.parameter.nnz / self.parameter.numel()

    def _of_its_pattern(self) -> Iterator[tuple[SparseTensor, float]]:
        """Yields parameter, gradient and state, with the value of new elements."""
        state = self.optimizer.state.get(self.parameter, {}).items()
        found = ((name, tensor) for name, tensor in state if isinstance(tensor, SparseTensor))
        firsts = [(tensor, first_value(self.optimizer, self.parameter, name)) for name, tensor in found]
        for tensor, first in ((self.parameter, 0.0), (self.parameter.grad, 0.0), *firsts):
            if isinstance(tensor, SparseTensor):
                yield tensor, first

    def sum_up(self, tensor: Tensor) -> None:
        """Sums a tensor over the processes that average the gradients of the weight."""
        averaging = averaging_of(self.parameter)
        if averaging is not None:
            averaging.sum_up(tensor)

    def weight(self) -> Tensor:
        return self.parameter.detach().to_dense()

    def set_to_zero(self) -> None:
        """Does nothing, because pruned elements are not stored."""

    def look_at_all(self) -> None:
        """Makes the modules compute the gradient of all elements until `look_no_more`."""
        if not self._looking:
            weight = self.parameter
            zeros = nn.Parameter(torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape))
            zeros.register_post_accumulate_grad_hook(self._hand_over)
            self._looking = [(_Watched if _is_linear(module) else _Lent)(module, zeros) for module, _ in self.holders]
        for forward in self._looking:
            forward.install()
        if self._hook is None:
            forget = unserializable_hook(lambda _: self.forget_discarded())
            # whichever gradient comes first: compiled code computes both at once, and torch then adds them in any order
            self._hook = register_multi_grad_hook((self.parameter, self._looking[0].zeros), forget, mode="any")

    def look_no_more(self) -> None:
        """Makes the modules compute as usual again."""
        for forward in self._looking:
            forward.remove()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    @torch.no_grad()
    def _hand_over(self, zeros: Tensor) -> None:
        assert zeros.grad is not None
        gradient, zeros.grad = zeros.grad, None
        self.add(gradient)

    def _has_nonzeros(self, gradient: Tensor) -> bool:
        return bool(gradient.components[-1].any()) if isinstance(gradient, SparseTensor) else super()._has_nonzeros(gradient)
