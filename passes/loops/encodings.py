"""Reads and writes the encoding of a tensor type as a `Format` or a `Packing`."""

from torch_mlir import ir

from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing, parse


def storage_of_type(tensor: ir.RankedTensorType) -> Format | Packing | None:
    """Returns the storage of tensors of this type; None for dense ones."""
    return None if tensor.encoding is None else parse(str(tensor.encoding))


def stored_as(tensor: ir.RankedTensorType, storage: Format | Packing) -> ir.RankedTensorType:
    """Returns the type of the same tensor in another storage."""
    encoding = ir.StringAttr.get(str(storage)) if isinstance(storage, Packing) else ir.Attribute.parse(str(storage))
    return ir.RankedTensorType.get(tensor.shape, tensor.element_type, encoding)
