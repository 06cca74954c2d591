"""Makes AOTInductor link the regions of an exported program into its package.

    torch._inductor.aoti_compile_and_package(gossamer.export(model, inputs))

Calls of `gossamer::exported` become calls of a C function, in a static library that is linked into the package. The package's
metadata get a note on its inputs, which gossamer.load_package reads.
"""

import functools
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import fx

from gossamer.backend.deploy.archive import Calls, More, archive
from gossamer.backend.deploy.c_code import Operand
from gossamer.backend.deploy.exported_region import ExportedRegion, exported, known
from gossamer.dialects.settings import LIBRARY_PATH
from gossamer.runtime.packages.package_inputs import KEY, described
from gossamer.runtime.torch_internals import ahead_of_time, inductor_config

_MARK = "_gossamer_links_kernels"
_LOADED = "AOTInductor*"
"""The functions that torch's loader looks for. The linker hides all other symbols: visible C++ templates are unique in a
process, and a library with such symbols is never unloaded."""
_DECLARED = "int aoti_torch_cpu_exported(const AtenTensorHandle* operands, int64_t count, const char* key, ...)"


def watch_exports() -> None:
    """Makes `aot_compile` of torch._inductor link the regions that a program calls."""
    original = ahead_of_time.aot_compile
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def aot_compile(gm: fx.GraphModule, *arguments: Any, **named: Any) -> Any:
        if not (called := called_in(gm.graph)):
            return original(gm, *arguments, **named)
        told = {"aot_inductor.metadata": {**inductor_config.aot_inductor.metadata, KEY: described(gm.graph)}}
        links = linked(called, "aoti.c", "refuse.cpp", public=_LOADED, flags=("--wrap=aoti_torch_device_type_cpu",))
        with links, inductor_config.patch(told):
            return original(gm, *arguments, **named)

    setattr(aot_compile, _MARK, True)
    ahead_of_time.aot_compile = aot_compile


def compile_ahead(gm: fx.GraphModule, *arguments: Any, **named: Any) -> Any:
    """Calls the original `aot_compile` of torch._inductor. It links only what the caller asks for (see `linked`)."""
    given = ahead_of_time.aot_compile
    return (given.__wrapped__ if hasattr(given, _MARK) else given)(gm, *arguments, **named)


def called_in(graph: fx.Graph) -> dict[str, tuple[ExportedRegion, list[Operand]]]:
    """Returns the regions that a graph calls, by their keys, each with its operands."""
    found = dict[str, tuple[ExportedRegion, list[Operand]]]()
    for node in graph.find_nodes(op="call_function", target=exported):
        operands, key = node.args
        given = [Operand(tuple(each if isinstance(each, int) else None for each in x.meta["val"].shape)) for x in operands]
        if key in found:  # called again: sizes that differ are open
            given = [_either(*both) for both in zip(found[key][1], given, strict=True)]
        found[key] = known(key), given
    return found


@contextmanager
def linked(
    called: Calls, *parts: str, more: More = lambda _: "", public: str | None = None, flags: Sequence[str] = ()
) -> Iterator[None]:
    """In this context, Inductor links these regions, and more C (see `archive`), into everything that it compiles ahead of
    time.

    public  a pattern of the only functions that stay visible, if given
    flags   more flags for the linker
    """
    with tempfile.TemporaryDirectory() as folder:
        library = archive(called, parts, more, Path(folder))
        if public is not None:
            (Path(folder) / "shown").write_text(f"{{ global: {public}; local: *; }};")
            flags = (*flags, f"--version-script={folder}/shown")
        flags = (*flags, "--wrap=__cxa_thread_atexit")
        library += "".join(f" -Wl,{flag}" for flag in flags)  # Inductor writes -l before it, and splits it at spaces
        paths = os.pathsep.join(filter(None, [folder, LIBRARY_PATH.get()]))
        patches = {
            "aot_inductor.custom_ops_to_c_shims": {exported: [_DECLARED]},
            "aot_inductor.custom_op_libs": [library],
            "cpp.dynamic_threads": True,
        }
        with inductor_config.patch(patches), LIBRARY_PATH.set_to(paths):
            yield


def _either(first: Operand, second: Operand) -> Operand:
    return Operand(tuple(a if a == b else None for a, b in zip(first.sizes, second.sizes, strict=True)))
