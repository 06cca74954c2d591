"""Runs MLIR's own sparsifier on a packed tensor, in a process of its own because it may abort.

A pickled `Operands` comes on the standard input; the elementwise product and the product with a vector go, pickled, to the
standard output.
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
    """What the kernels read: a sparse tensor A, a dense tensor B of its shape, a vector x as long as its last dimension."""

    encoding: str
    integers: list[str]  # element types of the positions and coordinates
    components: list[np.ndarray]
    dense: np.ndarray
    vector: np.ndarray


def memref(array: np.ndarray, element: str, dynamic: bool) -> str:
    sizes = ["?", *map(str, array.shape[1:])] if dynamic else [str(size) for size in array.shape]
    return f"memref<{'x'.join([*sizes, element])}>"


def kernel(name: str, operands: Operands, out: np.ndarray, maps: list[list[str]], body: str) -> str:
    """A function that assembles A from its components and computes `out` from it and one dense operand."""
    element = f"f{operands.dense.itemsize * 8}"
    other = operands.vector if name == "contract" else operands.dense
    stored = [f"%s{number}" for number in range(len(operands.components))]
    types = dict(
        zip(stored, map(memref, operands.components, [*operands.integers, element], [True] * 9), strict=False)
    )
    types |= {"%b": memref(other, element, False), "%c": memref(out, element, False)}
    tensors = {name: text.replace("memref", "tensor") for name, text in types.items()}
    sparse = memref(operands.dense, element, False).replace("memref", "tensor").replace(">", ", #S>")
    dims = ", ".join(maps[0])
    affine = ", ".join(f"affine_map<({dims}) -> ({', '.join(results)})>" for results in maps)
    iterators = ", ".join('"parallel"' if dim in maps[2] else '"reduction"' for dim in maps[0])
    loads = "\n".join(
        f"{name} = bufferization.to_tensor {name}_m restrict {'writable ' * (name == '%c')}: {text} to {tensors[name]}"
        for name, text in types.items()
    )
    levels = ", ".join(tensors[name] for name in stored[:-1])
    return f"""
func.func @{name}({", ".join(f"{name}_m: {text}" for name, text in types.items())}) attributes {{llvm.emit_c_interface}} {{
{loads}
%a = sparse_tensor.assemble ({", ".join(stored[:-1])}), {stored[-1]} : ({levels}), {tensors[stored[-1]]} to {sparse}
%r = linalg.generic {{indexing_maps = [{affine}], iterator_types = [{iterators}]}}
  ins(%a, %b : {sparse}, {tensors["%b"]}) outs(%c : {tensors["%c"]}) {{
^bb0(%x: {element}, %y: {element}, %z: {element}):
  %p = arith.mulf %x, %y : {element}
  {body}
}} -> {tensors["%c"]}
bufferization.materialize_in_destination %r in restrict writable %c_m : ({tensors["%c"]}, {types["%c"]}) -> ()
return
}}"""


def run(operands: Operands) -> list[np.ndarray]:
    """A * B, and the sums over the last dimension of A * x."""
    shape, dtype = operands.dense.shape, operands.dense.dtype
    dims = [f"d{dim}" for dim in range(len(shape))]
    element = f"f{operands.dense.itemsize * 8}"
    product, contract = np.zeros(shape, dtype), np.zeros(shape[:-1], dtype)
    add = f"%q = arith.addf %z, %p : {element}\n  linalg.yield %q : {element}"
    text = f"#S = {operands.encoding}"
    text += kernel("product", operands, product, [dims, dims, dims], f"linalg.yield %p : {element}")
    text += kernel("contract", operands, contract, [dims, dims[-1:], dims[:-1]], add)
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        pipeline = "builtin.module(sparsifier{enable-runtime-library=false})"
        passmanager.PassManager.parse(pipeline).run(module.operation)
        engine = ExecutionEngine(module, opt_level=1)
        for name, other, out in (
            ("product", operands.dense, product),
            ("contract", operands.vector, contract),
        ):
            descriptors = map(get_ranked_memref_descriptor, [*operands.components, other, out])
            engine.invoke(name, *(ctypes.pointer(ctypes.pointer(descriptor)) for descriptor in descriptors))
    return [product, contract]


if __name__ == "__main__":
    sys.stdout.buffer.write(pickle.dumps(run(Operands(*pickle.load(sys.stdin.buffer)))))
