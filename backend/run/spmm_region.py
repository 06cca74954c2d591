"""Runs a product of a SparseTensor with a dense matrix, and its elementwise epilogue, as a `gossamer::region`.

    gossamer::region([positions, coordinates, values, x, *extras], key) -> [rows, columns]

The arrays may be of any format. A matrix that is not stored by rows is converted once (see `row_form`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.backend.devices.device_kernel import Kernel
from gossamer.sparsity.operations.matrix_calls import RowProduct


@dataclass(eq=False)
class GatheredRegion:
    """A region on a SparseTensor: a `region_op.Callee`.

    product  the product, whose first operand is the sparse matrix
    sizes    the sizes of the matrix; None if only the call knows them, which happens only for one that is stored by rows
    arrays   the number of its arrays
    m, dtype columns and type of the result
    """

    product: RowProduct
    sizes: tuple[int, int] | None
    arrays: int
    kernel: Kernel
    m: int
    dtype: torch.dtype

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The only kernel, as a tuple."""
        return (self.kernel,)

    def outputs(self, operands: Sequence[Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Returns the sizes and type of the result."""
        rows = operands[0].shape[0] - 1 if self.sizes is None else self.sizes[self.product.rows]
        return [((rows, self.m), self.dtype)]

    def __call__(self, operands: list[Tensor]) -> Tensor:
        given = self.arrays + 1
        arrays = operands[:given]
        extras = [extra if extra.is_contiguous() else extra.contiguous() for extra in operands[given:]]
        sizes = self.sizes
        if sizes is None:
            x = arrays[-1]
            rows, columns = arrays[0].shape[0] - 1, x.shape[self.product.x_across]
            sizes = (columns, rows) if self.product.rows else (rows, columns)

        def multiply(both: tuple[Any, Tensor], out: Tensor) -> None:
            self.kernel([*both, *extras], out)

        out = self.product.run(lambda _: multiply, arrays, sizes)
        assert out is not None, "regions are made of matrices that can be brought into rows only"
        return out
