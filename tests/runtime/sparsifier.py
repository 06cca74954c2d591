"""Runs MLIR's own sparsifier on a packed tensor, in a process of its own because it may abort.

A pickled `Operands` comes on the standard input; the elementwise product and the product with a vector go,
pickled, to the standard output.
"""

import ctypes
import pickle
import sys
from typing import NamedTuple

import numpy as np
from torch_mlir import ir, passmanager
from torch_mlir.execution_engine import ExecutionEngine
from torch_mlir.runtime import get_ranked_memref_descriptor


class Operands(NamedTuple):
    """A sparse tensor A, a dense tensor B of its shape, a vector x as long as its last dimension."""

    encoding: str
    integers: list[str]  # element types of the positions and coordinates
    components: list[np.ndarray]
    dense: np.ndarray
    vector: np.ndarray

    @property
    def element(self) -> str:
        return f"f{self.dense.itemsize * 8}"


def kernel(name: str, a: Operands, dense: np.ndarray, out: np.ndarray, maps: list[list[str]], body: str) -> str:
    """A function that assembles A and computes `out` from it and one dense operand."""
    elements = [*a.integers, a.element]
    stored = {
        f"%s{number}": f"<{'x'.join(['?', *map(str, array.shape[1:]), element])}>"
        for number, (array, element) in enumerate(zip(a.components, elements, strict=True))
    }
    static = [f"{'x'.join([*map(str, array.shape), a.element])}" for array in (a.dense, dense, out)]
    types = {**stored, "%b": f"<{static[1]}>", "%c": f"<{static[2]}>"}
    sparse, b, c = f"tensor<{static[0]}, #S>", f"tensor<{static[1]}>", f"tensor<{static[2]}>"
    arguments = ", ".join(f"{operand}_m: memref{text}" for operand, text in types.items())
    loads = "\n".join(
        f"{operand} = bufferization.to_tensor {operand}_m restrict {'writable ' * (operand == '%c')}"
        f": memref{text} to tensor{text}"
        for operand, text in types.items()
    )
    *levels, values = stored
    level_types = ", ".join(f"tensor{stored[level]}" for level in levels)
    affine = ", ".join(f"affine_map<({', '.join(maps[0])}) -> ({', '.join(results)})>" for results in maps)
    iterators = ", ".join('"parallel"' if dim in maps[2] else '"reduction"' for dim in maps[0])
    return f"""
func.func @{name}({arguments}) attributes {{llvm.emit_c_interface}} {{
{loads}
%a = sparse_tensor.assemble ({", ".join(levels)}), {values}
  : ({level_types}), tensor{stored[values]} to {sparse}
%r = linalg.generic {{indexing_maps = [{affine}], iterator_types = [{iterators}]}}
  ins(%a, %b : {sparse}, {b}) outs(%c : {c}) {{
^bb0(%x: {a.element}, %y: {a.element}, %z: {a.element}):
  %p = arith.mulf %x, %y : {a.element}
  {body}
}} -> {c}
bufferization.materialize_in_destination %r in restrict writable %c_m : ({c}, memref<{static[2]}>) -> ()
return
}}"""


def run(a: Operands) -> list[np.ndarray]:
    """A * B, and the sums over the last dimension of A * x."""
    shape, dtype = a.dense.shape, a.dense.dtype
    dims = [f"d{dim}" for dim in range(len(shape))]
    product, contract = np.zeros(shape, dtype), np.zeros(shape[:-1], dtype)
    store = f"linalg.yield %p : {a.element}"
    add = f"%q = arith.addf %z, %p : {a.element}\n  linalg.yield %q : {a.element}"
    text = f"#S = {a.encoding}"
    text += kernel("product", a, a.dense, product, [dims, dims, dims], store)
    text += kernel("contract", a, a.vector, contract, [dims, dims[-1:], dims[:-1]], add)
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        pipeline = "builtin.module(sparsifier{enable-runtime-library=false})"
        passmanager.PassManager.parse(pipeline).run(module.operation)
        engine = ExecutionEngine(module, opt_level=1)
        for name, dense, out in (("product", a.dense, product), ("contract", a.vector, contract)):
            descriptors = map(get_ranked_memref_descriptor, [*a.components, dense, out])
            engine.invoke(name, *(ctypes.pointer(ctypes.pointer(descriptor)) for descriptor in descriptors))
    return [product, contract]


if __name__ == "__main__":
    sys.stdout.buffer.write(pickle.dumps(run(Operands(*pickle.load(sys.stdin.buffer)))))
