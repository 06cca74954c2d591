"""python -m gossamer.run DUMP.mlir: runs one kernel of a dump, compares it with MLIR's own sparsifier, and times both.

    python -m gossamer.run ir/0003_weight_contract.mlir --schedule broadcast
    python -m gossamer.run ir/0021_weight_schedule.mlir --open 64

The file is contract IR, or the kernel IR of a product or of a chain, which you may have changed. The schedule of contract IR is
the one in the dump beside it, unless you name another. The data are random, with as many zeros in weights as the region says,
unless you give them. Exit status: 0, 1 if the results differ, 2 for bad input.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch_mlir import ir
from torch_mlir.dialects import func

from gossamer.backend.checking.differences import close
from gossamer.backend.measuring.measure import fastest
from gossamer.dialects.command_line import ends_with_its_reader
from gossamer.dialects.errors import CompileError, GossamerError, OptionError
from gossamer.passes import pipelines
from gossamer.passes.contract.hints import hints_of
from gossamer.passes.framework.context import context
from gossamer.runtime.packing import pack
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.sparsity.compiler.compile_kernel import compile_kernel_ir, compile_region

TYPES = {
    "f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "i1": torch.bool,
}  # fmt: skip
_USUAL_DENSITY, _USUAL_SIZE = 0.1, 32


_Running = tuple[Callable[[], object], list[Tensor]]
"""A function that calls a kernel, and the tensors that the kernel writes to."""


@dataclass(frozen=True)
class Argument:
    """An argument or a result of a region: element type, sizes (None: open), whether it is sparse, and the importer's hints."""

    dtype: torch.dtype
    sizes: tuple[int | None, ...]
    sparse: bool
    hints: dict[str, Any]

    def shape(self, size: int) -> list[int]:
        """Returns the sizes, with `size` for the open ones."""
        return [size if known is None else known for known in self.sizes]

    def random(self, size: int, density: float | None) -> Tensor:
        """Returns random values. Integers that are no weights are 0, because they may be indices."""
        shape = self.shape(size)
        if not self.sparse:
            values = torch.randn(shape) if self.dtype.is_floating_point else torch.zeros(shape)
            return (torch.rand(shape) < 0.5) if self.dtype is torch.bool else values.to(self.dtype)
        values = torch.randn(shape) if self.dtype.is_floating_point else torch.randint(1, 127, shape)
        share = self.hints.get("density", _USUAL_DENSITY) if density is None else density
        if "nm" in self.hints and density is None:
            return (values * _n_of_m(shape, *self.hints["nm"])).to(self.dtype)
        blocks = torch.rand([-(-n // edge) for n, edge in zip(shape, self.hints.get("block", (1, 1)), strict=True)]) < share
        for dim, edge in enumerate(self.hints.get("block", (1, 1))):
            blocks = blocks.repeat_interleave(edge, dim).narrow(dim, 0, shape[dim])
        return (values * blocks).to(self.dtype)


@ends_with_its_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns the exit status. `argv` defaults to the command line."""
    parser = argparse.ArgumentParser("python -m gossamer.run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, metavar="DUMP.mlir", help="…_contract.mlir or …_schedule.mlir of a dump")
    parser.add_argument("--schedule", help="for contract IR: compile it with this schedule")
    parser.add_argument(
        "--open",
        type=_count,
        metavar="N",
        help="the value of sizes that are '?' in the file (default: the region's tokens, or 32)",
    )
    parser.add_argument("--density", type=_share, help="share of nonzeros in weights (default: what the region says, or 0.1)")
    parser.add_argument("--data", type=Path, help="a file of torch.save: a list with a dense tensor for each argument")
    parser.add_argument("--save", type=Path, help="a file to write the data to, for a later --data")
    try:
        return _run(parser.parse_args(argv))
    except (GossamerError, OSError) as error:
        print(f"gossamer.run: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    text, contract = _texts(options.file)
    arguments, results, tokens = signature(text)
    if contract:  # it has the importer's hints
        arguments, _, tokens = signature(contract)
    size = options.open or tokens or _USUAL_SIZE
    if options.data:
        operands, size = _saved(options.data, arguments, size)
    else:
        operands = [each.random(size, options.density) for each in arguments]
    if options.save:
        torch.save(operands, options.save)
    if text == contract:
        kernel = compile_region(contract, schedule=options.schedule or _schedule_beside(options.file))
    elif options.schedule:
        raise OptionError(f"{options.file} is kernel IR, which has its schedule already; give the contract for another one")
    else:
        kernel = compile_kernel_ir(text)
    shapes = " ".join("x".join(map(str, each.shape)) or "number" for each in operands)
    print(f"{options.file.name}: schedule {kernel.schedule}, operands {shapes}")
    calls = {kernel.schedule: _call(kernel, operands, results, size)}
    status = _compared(calls, contract, operands, results, size)
    for name, us in fastest({name: call for name, (call, _) in calls.items()}, torch.get_num_threads()).items():
        print(f"{name:12} {us:10.1f} us")
    return status


def _compared(
    calls: dict[str, _Running], contract: str, operands: Sequence[Tensor], results: Sequence[Argument], size: int
) -> int:
    """Compares the kernel with the reference, and adds the reference to `calls`. Returns the exit status."""
    if not contract:
        print("not compared: its contract (…_contract.mlir of the same dump) is not in the folder of the file")
        return 0
    ((call, found),) = calls.values()
    try:
        other, expected = _reference(contract, operands, results, size)
    except CompileError as problem:
        print(f"not compared: MLIR's sparsifier cannot compile it ({problem})")
        return 0
    calls["reference"] = other, expected
    call(), other()
    status = 0
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        largest = float(theirs.double().abs().max()) if theirs.numel() else 0.0
        difference = float((ours.double() - theirs.double()).abs().max()) / (largest or 1.0) if theirs.numel() else 0.0
        right = difference <= close(ours.dtype)
        relation = "equals" if right else "DIFFERS from"
        print(f"result {number} {relation} the reference, largest relative difference {difference:.1e}")
        status |= not right
    return int(status)


def signature(text: str) -> tuple[list[Argument], list[Argument], int | None]:
    """Returns the arguments and results of a region, and the number of tokens it was made for. OptionError for other texts."""
    with context(), ir.Location.unknown():
        try:
            module = ir.Module.parse(text)
        except ir.MLIRError as error:
            raise OptionError(f"the file is not MLIR: {error}") from error
        region = _region(module)
        if "kernel.window" in region.attributes:
            raise OptionError(
                "the region is a convolution, whose kernel takes images: give a product or a chain, which can run alone"
            )
        arguments = [_argument(each, hints_of(region, number)) for number, each in enumerate(region.type.inputs)]
        results = [_argument(each, {}) for each in region.type.results]
        if not results or any(each.sparse for each in results):
            raise OptionError("the region has no dense result: give a stage up to …_schedule.mlir of a product or a chain")
        tokens = ir.IntegerAttr(region.attributes["kernel.tokens"]).value if "kernel.tokens" in region.attributes else None
        return arguments, results, tokens


def _region(module: ir.Module) -> func.FuncOp:
    for op in module.body.operations:
        if isinstance(op, func.FuncOp) and op.name.value == "region":
            return op
    raise OptionError("the file has no function @region: give …_contract.mlir or …_schedule.mlir of a dump")


def _argument(given: ir.Type, hints: dict[str, Any]) -> Argument:
    if not isinstance(given, ir.RankedTensorType) or str(given.element_type) not in TYPES:
        raise OptionError(f"an argument is a {given}: give a stage up to …_schedule.mlir, whose arguments are tensors")
    sizes = tuple(None if given.is_dynamic_dim(dim) else given.get_dim_size(dim) for dim in range(given.rank))
    return Argument(TYPES[str(given.element_type)], sizes, given.encoding is not None, hints)


def _texts(path: Path) -> tuple[str, str]:
    """Returns a file's text and its region's contract IR: the same text, that of a file beside it, or "" if there is none."""
    if path.suffix != ".mlir":
        raise OptionError(f"{path} is not an .mlir file: give …_contract.mlir or …_schedule.mlir of a dump")
    text = path.read_text(encoding="utf-8", errors="replace")
    if '"kernel.spmm"' not in text:
        return text, text
    before = [each for each in _beside(path, "contract") if each.name < path.name]
    return text, before[-1].read_text(encoding="utf-8") if before else ""


def _schedule_beside(path: Path) -> str:
    """Returns the schedule that the dump has for a file of contract IR, "auto" if it has none."""
    after = [each for each in _beside(path, "schedule") if each.name > path.name]
    return pipelines.planned(after[0].read_text(encoding="utf-8"), 512).schedule if after else "auto"


def _beside(path: Path, stage: str) -> list[Path]:
    """Returns the files of a stage of the same region in the same dump, in the order in which they were written."""
    region = path.stem.partition("_")[2].rpartition("_")[0]
    return sorted(each for each in path.parent.glob("*.mlir") if each.stem.partition("_")[2] == f"{region}_{stage}")


def _reference(contract: str, operands: Sequence[Tensor], results: Sequence[Argument], size: int) -> _Running:
    """Compiles a region by MLIR's sparsifier, a chain stage by stage. CompileError where MLIR cannot compile it."""
    with context(), ir.Location.unknown():
        module = ir.Module.parse(contract)
        block = _region(module).entry_block
        body = [op.operation for op in block.operations]
        if all(op.name != "func.call" for op in body):
            return _call(compile_region(contract, schedule="reference"), operands, results, size)
        *stages, returned = body
        values = dict(zip((each.get_name() for each in block.arguments), operands, strict=True))
        calls = []
        for op in stages:
            text = _alone(contract, ir.FlatSymbolRefAttr(op.attributes["callee"]).value)
            made = [_argument(each.type, {}) for each in op.results]
            inputs = [values[each.get_name()] for each in op.operands]
            call, outputs = _call(compile_region(text, schedule="reference"), inputs, made, size)
            calls.append(call)
            values.update(zip((each.get_name() for each in op.results), outputs, strict=True))
        return lambda: [call() for call in calls], [values[each.get_name()] for each in returned.operands]


def _alone(contract: str, stage: str) -> str:
    """Returns the contract of a chain with one of its stages as the only region."""
    module = ir.Module.parse(contract)
    for function in list(module.body.operations):
        if function.name.value != stage:
            function.operation.erase()
        else:
            function.attributes["sym_name"] = ir.StringAttr.get("region")
            del function.attributes["sym_visibility"]
    return str(module)


def _saved(path: Path, arguments: Sequence[Argument], size: int) -> tuple[list[Tensor], int]:
    """Returns the tensors of a file, and the value of open sizes in them (`size` if none is open)."""
    try:
        found = torch.load(path, weights_only=True)
    except (RuntimeError, UnpicklingError, EOFError) as problem:
        raise OptionError(f"{path} is no file of torch.save: {str(problem).partition(chr(10))[0]}") from problem
    if not isinstance(found, list) or len(found) != len(arguments) or not all(isinstance(each, Tensor) for each in found):
        raise OptionError(f"{path} must have a list of {len(arguments)} tensors, one for each argument of the region")
    for number, (tensor, argument) in enumerate(zip(found, arguments, strict=True)):
        size = max((n for n, known in zip(tensor.shape, argument.sizes, strict=False) if known is None), default=size)
        if list(tensor.shape) != argument.shape(size) or tensor.dtype is not argument.dtype:
            wanted = "x".join("?" if known is None else str(known) for known in argument.sizes)
            raise OptionError(
                f"tensor {number} of {path} is {list(tensor.shape)} of {tensor.dtype}, but the region takes [{wanted}] of "
                f"{argument.dtype}"
            )
    return [each.contiguous() for each in found], size


def _call(kernel: RegionKernel, operands: Sequence[Tensor], results: Sequence[Argument], size: int) -> _Running:
    """Returns a function that calls the kernel, and its outputs, which are NaN until the kernel writes them."""
    packed = [each if form is None else pack(each, form) for each, form in zip(operands, kernel.formats, strict=True)]
    outputs = [torch.empty(each.shape(size), dtype=each.dtype) for each in results]
    for each in outputs:
        each.fill_(float("nan") if each.dtype.is_floating_point else 1)
    return lambda: kernel(packed, outputs if len(outputs) > 1 else outputs[0]), outputs


def _n_of_m(shape: Sequence[int], n: int, m: int) -> Tensor:
    """Returns a mask with n random places in every m neighbours of a row."""
    rows, columns = shape
    places = torch.rand(rows, -(-columns // m), m).argsort(-1) < n
    return places.flatten(1)[:, :columns]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _share(text: str) -> float:
    try:
        if 0 <= (share := float(text)) <= 1:
            return share
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")


if __name__ == "__main__":
    raise SystemExit(main())
