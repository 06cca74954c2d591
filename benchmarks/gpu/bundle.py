"""Packs a bundle: `python -m benchmarks.gpu.bundle build/gpu-bundle [--capability 90]`. Needs no GPU."""

import argparse
import ast
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import fx

import benchmarks
import gossamer
from benchmarks.gpu.cases import TYPES, Layer, layers
from benchmarks.gpu.open_products import PRODUCTS, OpenProduct
from gossamer.backend.regions.importer import import_region
from gossamer.dialects.format import Format
from gossamer.passes.framework.family import Matrix
from gossamer.runtime.ptx import Architecture
from gossamer.sparsity.compiler import segment_ir
from gossamer.sparsity.compiler.contract_ir import Operand, einsum, sample
from gossamer.sparsity.compiler.gpu_kernels import GpuRegionKernel, compile_gpu_region

_SHIPPED = ("cases", "kernels", "checks", "timings", "open_products", "run")
_NEEDED = ("gossamer.runtime.gpu_kernel", "gossamer.runtime.packing")
_RUN = '''"""Checks and timings of GPU kernels: `python run.py --help`."""

import os
from pathlib import Path

# torch would load a gossamer that is installed, and find this part of it.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

from benchmarks.gpu.run import main

raise SystemExit(main(Path(__file__).parent))
'''
aten, convert = torch.ops.aten, torch.ops.prims.convert_element_type.default


def write(folder: Path, wanted: Sequence[Layer], products: Sequence[OpenProduct], architecture: Architecture) -> None:
    """Compile the kernels of some layers and products and write the bundle; a folder that is there is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "kernels").mkdir(parents=True)
    entries = {
        "kernels": [_layer(folder, layer, architecture) for layer in wanted],
        "products": [_product(folder, product, architecture) for product in products],
    }
    made = {"version": gossamer.__version__, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    manifest = {"architecture": architecture.name, "made": made, **entries}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    (folder / "run.py").write_text(_RUN)
    _copy_sources(folder)


def contract(layer: Layer) -> str:
    """The contract IR of a layer."""
    graph = fx.Graph()

    def placeholder(name: str, dtype: torch.dtype, *shape: int | None) -> fx.Node:
        node = graph.placeholder(name)
        node.meta = {"shape": shape, "dtype": dtype}
        return node

    x, w = placeholder("x", layer.given, None, layer.columns), placeholder("w", layer.given, layer.rows, layer.columns)
    extras = {step: placeholder(step, layer.dtype, *shape) for step, shape in layer.shapes(None).items()}
    exact = layer.given is torch.int8
    x, w = (graph.call_function(convert, (node, torch.int32)) if exact else node for node in (x, w))
    y = graph.call_function(aten.mm.default, (x, graph.call_function(aten.permute.default, (w, [1, 0]))))
    y = graph.call_function(convert, (y, layer.dtype)) if exact else y
    for step in layer.epilogue:
        if step in extras:
            combine = aten.mul.Tensor if step in ("step", "scale") else aten.add.Tensor
            y = graph.call_function(combine, (y, extras[step]))
        else:
            y = graph.call_function({"relu": aten.relu.default, "gelu": aten.gelu.default}[step], (y,))
    graph.output(y)
    block = (layer.block, layer.block) if layer.block else None
    nm = (2, 4) if layer.two_four else None
    matrix = Matrix(layer.rows, layer.columns, 1, layer.element, 1024, layer.planned or 0.1, block, nm=nm, vnm=layer.vnm)
    return import_region(fx.GraphModule({}, graph, "Layer"), matrix, None)


def open_contract(product: OpenProduct) -> str:
    """The contract IR of a product of open shape."""
    a, dtype = Operand("ij", Format.CSR), TYPES[product.element]
    if product.reduction is not None:
        return segment_ir.reduce(torch.int64, dtype, product.reduction)
    if product.schedule == "segments":
        return segment_ir.softmax(torch.int64, dtype, log=False)
    if product.schedule == "rows":
        return einsum([a, Operand("jk")], Operand("ik"), dtype)
    return sample(a, [Operand("ik"), Operand("jk")], dtype)


def _layer(folder: Path, layer: Layer, architecture: Architecture) -> dict[str, Any]:
    kernel = compile_gpu_region(contract(layer), architecture, schedule=layer.schedule)
    (format,) = (f for f in kernel.formats if f is not None)
    return {"layer": layer.as_json(), "format": str(format), **_code(folder, layer.name, kernel)}


def _product(folder: Path, product: OpenProduct, architecture: Architecture) -> dict[str, Any]:
    kernel = compile_gpu_region(open_contract(product), architecture, schedule=product.schedule)
    return {"product": product.as_json(), **_code(folder, product.name, kernel)}


def _code(folder: Path, name: str, kernel: GpuRegionKernel) -> dict[str, Any]:
    file = Path("kernels") / f"{name}.ptx"
    (folder / file).write_text(kernel.ptx)
    return {
        "name": name,
        "file": str(file),
        "sha256": hashlib.sha256(kernel.ptx.encode()).hexdigest(),
        "launches": {name: launch.as_json() for name, launch in kernel.launches.items()},
        "dynamic": kernel.dynamic,
    }


def _copy_sources(folder: Path) -> None:
    """The shipped part of this package, and what it needs of gossamer."""
    here = Path(benchmarks.__path__[0]) / "gpu"
    shipped = {f"benchmarks/gpu/{name}.py": here / f"{name}.py" for name in _SHIPPED}
    needed = {f"{module.replace('.', '/')}.py": _source(module) for module in _closure(_NEEDED)}
    for name, source in (shipped | needed).items():
        for package in Path(name).parents[:-1]:
            (folder / package).mkdir(parents=True, exist_ok=True)
            (folder / package / "__init__.py").touch()
        shutil.copy(source, folder / name)


def _closure(modules: Sequence[str]) -> set[str]:
    """Some modules of gossamer and all that they import of it."""
    found: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += _imports(module)
    return found


def _imports(module: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(_source(module).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gossamer"):
            parent = str(node.module)
            candidates = (parent, *(f"{parent}.{name.name}" for name in node.names))
            yield from (name for name in candidates if name.count(".") > 1 and _source(name).is_file())


def _source(module: str) -> Path:
    """The file of gossamer.room.name."""
    _, room, *name = module.split(".")
    return Path(__import__(f"gossamer.{room}", fromlist=["_"]).__path__[0]).joinpath(*name).with_suffix(".py")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Pack GPU kernels with their checks and timings.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--capability", type=int, default=90, help="compute capability of the GPUs that it is for (default 90)")
    options = parser.parse_args()
    write(options.folder, layers(), PRODUCTS, Architecture(options.capability))


if __name__ == "__main__":
    main()
