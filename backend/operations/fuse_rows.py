"""Fuses the elementwise operations after products of SparseTensors with dense matrices into the products' kernels.

    %y = gossamer::einsum([%pos, %crd, %a, %x])                   %r = gossamer::region([%pos, %crd, %a, %x, %b], "3f2a…")
    %z = relu(add(%y, %b))                                   →

The pass grows a region as for static weights (`regions.epilogue`), in the inference or the joint graph. In a joint graph,
values that the backward pass needs stay outside. So relu is fused, but gelu is not, because its gradient needs its input.
"""

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from gossamer.backend.devices.device import device_of
from gossamer.backend.devices.device_kernel import Kernel
from gossamer.backend.graph.einsum_calls import Call, call_at
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.fusable import is_identity
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.operations.report_operations import name_of
from gossamer.backend.regions.build_region import content_hash
from gossamer.backend.regions.grow_region import epilogue
from gossamer.backend.regions.matrix_functions import GatherBody, signature
from gossamer.backend.regions.replace_region import read_as
from gossamer.backend.report.dump import Dump
from gossamer.backend.report.report import Decision
from gossamer.backend.run import region_op
from gossamer.backend.run.spmm_region import GatheredRegion
from gossamer.dialects.errors import CompileError, DeviceError
from gossamer.dialects.format import Format
from gossamer.runtime.torch_internals import statically_known_true
from gossamer.runtime.versions import source_hash
from gossamer.sparsity.arrays.row_form import LARGE
from gossamer.sparsity.operations.matrix_calls import RowProduct

ours = torch.ops.gossamer
_SCHEDULE = "rows"


class FuseRows:
    """Fuses elementwise operations after products into the products' kernels."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Fuses products. Returns a decision for each. If a kernel fails to compile, warns and leaves the product as it is, or
        raises CompileError under `strict`."""
        if context.options.schedule == "reference":
            return []
        decisions = []
        for node in [n for n in graph.nodes if n.target is ours.einsum.default]:
            found = _Product.at(node)
            if found is None or not found.count:
                continue
            name = name_of(found.call.sparse[0].arrays[0], context.inputs)
            try:
                key, region = found.compiled(name, context.dump)
            except (CompileError, DeviceError) as problem:
                if context.options.strict:
                    raise
                warnings.warn(f"{problem}\nThe product of {name} and the operations after it run separately.", stacklevel=2)
                continue
            region_op.add(key, region)
            decisions.append(found.decision(name, region.kernel.key))
            found.replace(key)
        return decisions


@dataclass(eq=False)
class _Product:
    """A product with its epilogue.

    members  the nodes of the region, in order; the first is the product, and only the last has users outside
    """

    call: Call
    product: RowProduct
    members: list[fx.Node]

    @classmethod
    def at(cls, node: fx.Node) -> "_Product | None":
        """Returns the product of a node with its epilogue; None if there are no kernels for it."""
        call = call_at(node, ours.einsum.default)
        product = None if call is None else RowProduct.of(call.spec)
        if call is None or product is None or product.vector or product.y_across:
            return None
        value = node.meta["val"]
        if not isinstance(value.shape[1], int) or value.shape[1] < 2:
            return None
        members = epilogue(node, (), (value.dtype,))
        shape = members[-1].meta["val"].shape
        if len(shape) != 2 or not all(statically_known_true(a == b) for a, b in zip(shape, value.shape, strict=True)):
            return None
        found = cls(call, replace(product, matrix=0), members)
        return found if product.direct or found._movable() else None

    def _movable(self) -> bool:
        """Whether the matrix can be converted to rows with 32-bit indices."""
        matrix = self.call.sparse[0]
        sizes = (*matrix.sizes, matrix.values.meta["val"].shape[0])
        return all(isinstance(size, int) for size in sizes) and sizes[2] <= LARGE and max(sizes) < 1 << 31

    @property
    def count(self) -> int:
        """The number of elementwise operations."""
        return sum(not is_identity(node) for node in self.members[1:])

    def compiled(self, name: str, dump: Dump | None) -> tuple[str, GatheredRegion]:
        """Returns the region and its key. Raises CompileError, or DeviceError if the device has no kernels."""
        node, matrix = self.members[0], self.call.sparse[0]
        widths = [array.meta["val"].dtype.itemsize * 8 for array in matrix.arrays[:2]] if self.product.direct else [32, 32]
        self._body = GatherBody(node)
        for member in self.members[1:]:
            self._body.append(member)
        body = self._body.finish(self.members[-1])
        kernel = self._kernel(body, Format.CSR.with_widths(*widths), name, dump)
        sizes: Any = None if self.product.direct else tuple(matrix.sizes)
        value = node.meta["val"]
        region = GatheredRegion(self.product, sizes, len(matrix.arrays), kernel, value.shape[1], value.dtype)
        return content_hash(kernel.key, value.device, self.product, sizes), region

    def _kernel(self, body: fx.GraphModule, format: Format, name: str, dump: Dump | None) -> Kernel:
        device = device_of(self.members[0].meta["val"].device)
        stages = dump.stages(name) if dump is not None else None
        if stages is not None:
            stages("fx", "py", body.code.strip() + "\n")
        request = "\n".join((signature(body), str(format), _SCHEDULE, source_hash("gossamer.backend")))
        known = device.recall(request) if dump is None else None
        if known is not None:
            return known
        from gossamer.backend.regions.importer import import_body  # imported here because torch-mlir takes half a second
        from gossamer.passes.framework.origins import printed

        contract = printed(import_body(body, 0, format))
        if stages is not None:
            stages("contract", "mlir", contract)
        return device.compile(contract, _SCHEDULE, stages, request)

    def replace(self, key: str) -> None:
        """Replaces the members by the region."""
        output = self.members[-1]
        emit = Emitter(output, {})
        extras = [read_as(extra, extra.node, emit) for extra in self._body.extras]
        operands = [*self.call.sparse[0].arrays, self.call.dense[0].values, *extras]
        output.replace_all_uses_with(emit(region_op.region, operands, key))
        for member in reversed(self.members):
            output.graph.erase_node(member)

    def decision(self, name: str, kernel: str) -> Decision:
        """Returns the decision for the report. `kernel` is the key of the region's kernel."""
        matrix = self.call.sparse[0]
        assert matrix.format is not None
        kept = "" if self.product.direct else ", on a sorted copy that is kept"
        reason = f"{self.count} op{'s' * (self.count > 1)} fused, in parallel by rows{kept}"
        how = matrix.format.name, _SCHEDULE, True, reason, None
        return Decision(name, f"einsum {self.call.text}", matrix.shape, matrix.density, *how, kernels=(kernel,))
