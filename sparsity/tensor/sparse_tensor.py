"""`gossamer.SparseTensor` is a torch.Tensor that stores its entries as its `Format` describes.

It is a wrapper subclass around plain tensors (positions, coordinates, values), so Dynamo and AOTAutograd trace through it. A
compiled graph has its arrays as inputs and our opaque ops as nodes, for any number of nonzeros.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from gossamer.dialects.errors import FormatError
from gossamer.dialects.format import Format
from gossamer.runtime.operations import one_node, untraced
from gossamer.runtime.torch_internals import (
    is_fake,
    make_wrapper_subclass,
    refusal,
    set_throw_on_mutable_data_ptr,
    temporarily_clear_interpreter_stack,
)
from gossamer.runtime.torch_names import SPARSE_TENSORS
from gossamer.sparsity.arrays.stored_entries import block_sizes
from gossamer.sparsity.arrays.structure import check, check_levels
from gossamer.sparsity.compiler.contract_ir import Operand
from gossamer.sparsity.compiler.operands import Bound, dense
from gossamer.sparsity.operations.dispatch import in_transform
from gossamer.sparsity.operations.exporting import exported, in_export
from gossamer.sparsity.operations.open_sizes import agree
from gossamer.sparsity.operations.sparse_results import compress
from gossamer.sparsity.tensor import constructor_arguments, interchange
from gossamer.sparsity.tensor.constructor_arguments import format_of, tensor_of
from gossamer.sparsity.tensor.edge_list import edges
from gossamer.sparsity.tensor.entries import checked, letters_of, nonzeros, stored
from gossamer.sparsity.tensor.gradients import ValuesOf, with_gradient

_make = refusal(SPARSE_TENSORS) or make_wrapper_subclass


class SparseTensor(torch.Tensor):
    """A sparse tensor in any format.

        a = SparseTensor.from_dense(x, Format.CSR)
        y = a @ x                                  # dense; gradients flow to x and to the values of a

    Make one by `from_dense`, `from_torch`, `from_scipy`, `from_edge_index` or `from_parts`, which check the structure. Do not
    write to its positions and coordinates afterwards. In-place arithmetic works on the stored values.

    If products with vectors use a matrix again, they keep a copy of its values. They notice writes that torch counts. If
    another tensor, NumPy or SciPy shares the memory, every product compares all values; `clone()` avoids this cost. A product
    may miss a write through a storage, `values().data`, DLPack, or `.data` in compiled code, if that object no longer exists at
    the product. Autograd misses the same writes.
    """

    functions: ClassVar[dict[Callable[..., Any], Callable[..., Any]]] = {}  # torch's functions and ours, see extension.py
    call: ClassVar[Callable[..., Any]]  # calls our function for one of torch, see calling.py
    operators: ClassVar[dict[Any, Callable[..., Any]]] = {}  # aten's operators and ours, see pointwise.py
    matmul_again: ClassVar[Callable[..., Tensor | None]]  # a faster product, None if not possible, see repeated_matmul.py

    _format: Format
    _arrays: tuple[str, ...]
    _stored: Tensor
    _repeated: Any = None  # prepared by an earlier product, see repeated_matmul.py
    _origin: "SparseTensor | None" = None  # the first tensor in its chain of detach(), see in_place.py
    _detached: "weakref.ref[SparseTensor] | None" = None  # the last tensor in that chain before it
    _dealt: Any = None  # how the whole matrix is dealt to processes, if this is a part of one, see dealt.py

    @staticmethod
    def __new__(
        cls, format: Format, shape: Sequence[int] = (), components: Sequence[Tensor] = (), requires_grad: bool = False
    ) -> "SparseTensor":
        values = constructor_arguments.arrays_of(format, components)[-1]
        self: SparseTensor = _make(cls, tuple(shape), dtype=values.dtype, device=values.device, requires_grad=requires_grad)
        set_throw_on_mutable_data_ptr(self)  # it has no memory itself, so its address would be a null pointer
        return self

    def __init__(
        self, format: Format, shape: Sequence[int] = (), components: Sequence[Tensor] = (), requires_grad: bool = False
    ) -> None:
        """Makes the tensor of these arrays, in the order of `format.components()`, without checks; `from_parts` checks."""
        self._format, self._arrays = format, _names(format)  # kept, because every call of a compiled function reads them
        for name, component in zip(self._arrays, components, strict=True):
            setattr(self, name, component)

    # Constructors

    @classmethod
    @untraced
    def from_dense(cls, dense: Tensor, format: Format = Format.CSR) -> "SparseTensor":
        """Stores the nonzeros of `dense` in `format`. NaN counts as a nonzero. FormatError if the format cannot hold them."""
        dense, format = tensor_of(dense, "what from_dense stores"), format_of(format)
        if dense.layout != torch.strided:
            return cls.from_torch(dense).to_format(format)
        format.level_sizes(dense.shape)
        return _nonzeros(dense, str(format))

    @classmethod
    @untraced
    def from_torch(cls, tensor: Tensor, *, check: bool = True) -> "SparseTensor":
        """Converts a torch.sparse tensor of any layout. It shares memory if the format is the same.

        COO, CSR, CSC, BSR and BSC become the format of that name; COO is coalesced first. Dense dimensions of a hybrid tensor
        become dense levels. Batches of compressed layouts become a dense level in front. A strided tensor becomes CSR.
        check=False promises that indices are in bounds, in order, and without duplicates.
        """
        tensor = tensor_of(tensor, "what from_torch stores")
        if tensor.layout == torch.strided:
            return cls.from_dense(tensor, Format.CSR if tensor.dim() == 2 else Format.csf(tensor.dim()))
        return _checked(*interchange.from_torch(tensor), check)

    @classmethod
    @untraced
    def from_scipy(cls, matrix: Any, *, check: bool = True) -> "SparseTensor":
        """Converts a SciPy sparse array or matrix: csr, csc, bsr and coo keep their format (coo is sorted), others become CSR.

        Positions and coordinates share memory. Values are copied, so that torch counts all writes to them.
        check=False promises that indices are in bounds, in order, and without duplicates.
        """
        return _checked(*interchange.from_scipy(matrix), check)

    @classmethod
    @untraced
    def from_edge_index(
        cls,
        edge_index: Tensor,
        weight: Tensor | None = None,
        size: int | tuple[int, int] | None = None,
        format: Format = Format.CSR,
    ) -> "SparseTensor":
        """Makes the adjacency of a graph: targets are rows, sources are columns, so `a @ x` sums the features of neighbours.

        edge_index  [2, edges] of integers, sources first, as in PyTorch Geometric
        weight      [edges], by default 1.0; the weights of parallel edges are summed
        size        (targets, sources), or one number for both; by default the largest index + 1
        """
        weight = None if weight is None else tensor_of(weight, "weight")
        return _adjacency(tensor_of(edge_index, "edge_index"), weight, size, str(format_of(format)))

    @classmethod
    @untraced
    def from_parts(
        cls,
        format: Format,
        shape: Sequence[int],
        positions: Tensor | Sequence[Tensor],
        coordinates: Tensor | Sequence[Tensor],
        values: Tensor,
        *,
        check: bool = True,
    ) -> "SparseTensor":
        """Makes the tensor that these arrays store, without copying them.

        positions, coordinates  level by level, for the levels that have them (see `Format.components`): for CSR one each
        values                  of any shape with as many elements as the format stores; gradients flow to it

        Integers may be int32 or int64, if `format` does not give widths; 8 and 16 bits are unsigned. Entries are in order and
        occur once, so a format with `nonordered` levels, or with a `nonunique` one that is not above a singleton, is a
        FormatError. check=False promises that the structure is well-formed: kernels read and write at its indices without
        checks.
        """
        return _checked(*constructor_arguments.parts_of(format, shape, positions, coordinates, values), check)

    # Properties

    @property
    def format(self) -> Format:
        """The format in which it is stored."""
        return self._format

    @property
    def components(self) -> tuple[Tensor, ...]:
        """Its arrays, in the order of `format.components()`. The values are last, flat, and without gradient."""
        return tuple([getattr(self, name) for name in self._arrays])

    @property
    def nnz(self) -> int:
        """The number of stored values, including stored zeros."""
        return self._stored.numel()

    @untraced
    def values(self) -> Tensor:
        """Returns the stored values: [entries], or `[entries, *block]` for dense blocks. Gradients flow through it."""
        with torch.DisableTorchFunctionSubclass():
            shape = self.shape
        block = block_sizes(self._format, shape)
        values = values_of(self)
        return values.view(values.shape[0] // max(prod(block), 1), *block) if block else values

    @untraced
    def with_values(self, values: Tensor) -> "SparseTensor":
        """Returns the same pattern with other values: shaped like `values()` or flat, in any dtype. Gradients flow to them."""
        values = tensor_of(values, "values")
        if not agree(values.numel(), self.nnz):
            raise FormatError(f"{self.nnz} values are stored, got {values.numel()}: give one for each")
        return like(self, values.flatten())

    def positions(self, level: int) -> Tensor:
        """Returns the positions of a compressed level: for each coordinate of the level above, where its entries start."""
        return self._array(level, "positions")

    def coordinates(self, level: int) -> Tensor:
        """Returns the coordinates that a level stores, one for each entry."""
        return self._array(level, "coordinates")

    def _array(self, level: int, kind: str) -> Tensor:
        if (level, kind) not in self._format.components():
            having = [str(number) for number, name in self._format.components() if name == kind]
            raise FormatError(f"level {level} of {self._format.name} has no {kind}, only {', '.join(having) or 'none'} has")
        array: Tensor = getattr(self, f"_{kind}{level}")
        return array

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        details = f", dtype={self.dtype}" if self.dtype != torch.get_default_dtype() else ""
        details += f", device='{self.device}'" if self.device.type != "cpu" else ""
        grad_fn = self.grad_fn
        if grad_fn is not None:
            details += f", grad_fn=<{type(grad_fn).__name__}>"
        elif self.requires_grad:
            details += ", requires_grad=True"
        return f"SparseTensor({self._format.name}, shape={tuple(self.shape)}, nnz={self.nnz}{details})"

    # Conversions

    @untraced
    def to_format(self, format: Format) -> "SparseTensor":
        """Converts to another format; returns itself if it has that format. FormatError if the format cannot hold it.

        Zeros that pad blocks are dropped; other stored zeros stay.
        """
        format = format_of(format)
        if format == self._format:
            return self
        if format.rank != self.dim():
            raise FormatError(f"{format.name} has {format.rank} dimensions, the tensor has {self.dim()}")
        return made_of(compress(bound_to(letters_of(self), self), format))

    @untraced
    def to_torch(self) -> Tensor:
        """Converts to the torch.sparse layout of its format, which shares memory. Other formats become COO.

        Gradients do not flow through it.
        """
        return interchange.to_torch(self._format, tuple(self.shape), self.components)

    @untraced
    def to_scipy(self) -> Any:
        """Converts to a SciPy array: csr, csc or bsr, which share memory, or coo for all other formats."""
        return interchange.to_scipy(self._format, tuple(self.shape), self.components)

    # Protocols of torch

    @untraced
    def __matmul__(self, other: Any) -> Tensor:
        product = None if torch.compiler.is_compiling() else self.matmul_again(self, other)
        return super().__matmul__(other) if product is None else product  # through torch's __torch_function__

    def __tensor_flatten__(self) -> tuple[list[str], Format]:
        return [*self._arrays], self._format

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], format: Format, size: Any, stride: Any) -> "SparseTensor":
        return cls(format, size, [inner[name] for name in _names(format)])

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return cls.call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        ours = cls.operators.get(func) or cls.operators[None]
        return ours(func, args, dict(kwargs or {}))

    def _stable_hash_for_caching(self) -> str:
        """Returns the key of AOTAutograd's cache for a tensor. It depends on format, shapes and dtypes, not on contents."""
        arrays = [(tuple(array.shape), array.dtype, array.device) for array in self.components]
        return f"SparseTensor {self._format} {tuple(self.shape)} {arrays} {self.requires_grad}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        components = tuple(component.detach() for component in self.components)
        parameter = getattr(self, "_is_param", False)  # nn.Parameter marks subclasses so
        return _rebuild, (str(self._format), tuple(self.shape), components, self.requires_grad, parameter)


def from_entries(format: Format, shape: Sequence[int], at: Sequence[Tensor], values: Tensor) -> SparseTensor:
    """Returns the tensor with these values at these coordinates (int64, in bounds, any order; duplicates are summed)."""
    return made_of(stored(format, shape, at, values))


@one_node
def _nonzeros(dense: Tensor, format: str) -> SparseTensor:
    return from_entries(Format.parse(format), tuple(dense.shape), *nonzeros(dense))


@one_node
def _adjacency(edge_index: Tensor, weight: Tensor | None, size: int | tuple[int, int] | None, format: str) -> SparseTensor:
    at, values, shape = edges(edge_index, weight, size)
    return from_entries(Format.parse(format), shape, at, values)


def values_of(tensor: SparseTensor) -> Tensor:
    """Returns the stored values, flat and differentiable."""
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor._stored
    if in_export():
        values: Tensor = exported(ValuesOf.apply, tensor)
        return values
    outside = temporarily_clear_interpreter_stack if in_transform() else nullcontext  # torch.func has not seen this tensor
    with outside():
        values = ValuesOf.apply(tensor)
    return values


def wrap(format: Format, shape: Sequence[int], structure: Sequence[Tensor], values: Tensor) -> SparseTensor:
    """Returns the tensor of these arrays; gradients flow to the values (flat)."""
    if in_export():
        return exported(_made, str(format), tuple(shape), tuple(structure), values)
    return _made(format, shape, structure, values)


def _made(format: Format | str, shape: Sequence[int], structure: Sequence[Tensor], values: Tensor) -> SparseTensor:
    format = Format.parse(format) if isinstance(format, str) else format
    tensor: SparseTensor = with_gradient(SparseTensor, format, shape, structure, values)
    return tensor


def bound_to(letters: str, tensor: Tensor) -> Bound:
    """Returns a tensor, sparse or dense, as an operand with these letters; gradients flow through it."""
    if not isinstance(tensor, SparseTensor):
        return dense(letters, tensor)
    arrays = (*tensor.components[:-1], values_of(tensor))
    return Bound(Operand(letters, tensor._format), arrays, tuple(tensor.shape))


def made_of(result: Bound) -> SparseTensor:
    """Returns a sparse operand as a tensor, the inverse of `bound_to`."""
    assert result.format is not None
    *structure, values = result.arrays
    return wrap(result.format, result.shape, structure, values)


def like(tensor: SparseTensor, values: Tensor) -> SparseTensor:
    """Returns a tensor of the same pattern with other values (flat); gradients flow to them."""
    return wrap(tensor._format, tensor.shape, tensor.components[:-1], values.contiguous())  # real parts have a stride of 2


def _names(format: Format) -> tuple[str, ...]:
    return tuple(["_stored" if kind == "values" else f"_{kind}{level}" for level, kind in format.components()])


def _checked(format: Format, shape: Sequence[int], components: Sequence[Tensor], checking: bool) -> SparseTensor:
    *structure, values = components
    if checking:
        structure = checked(format, shape, structure, values)  # type: ignore[assignment]
    else:
        check_levels(format)
    return wrap(format, shape, structure, values)


def _rebuild(
    format: str, shape: tuple[int, ...], components: tuple[Tensor, ...], requires_grad: bool, parameter: bool
) -> SparseTensor:
    """Makes the tensor of saved parts, for torch.load. It checks them, because they may come from a file."""
    parsed = Format.parse(format)
    if not any(each.is_meta or is_fake(each) for each in components):  # torch.load(map_location="meta")
        check(parsed, shape, components)
    tensor = SparseTensor(parsed, shape, components, requires_grad)
    if parameter:
        tensor._is_param = True
    return tensor


torch.serialization.add_safe_globals([_rebuild])
