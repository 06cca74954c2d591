"""What this installation is and where it runs, as a report of a problem should say it: `python -m gossamer`."""

from contextlib import suppress
from importlib.metadata import version

import torch

import gossamer
from gossamer.backend.devices.calibrated import cpu_name, this_machine
from gossamer.dialects.command_line import ends_with_its_reader
from gossamer.dialects.settings import SETTINGS
from gossamer.runtime import cache_files
from gossamer.runtime.data_cache import first_level_bytes
from gossamer.runtime.target import host


@ends_with_its_reader
def main() -> None:
    """Prints a line for each."""
    here, calibrated = host(), ", ".join(sorted(this_machine().measured))
    lines = {
        "gossamer": gossamer.__version__,
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "compilers": f"torch-mlir {version('torch-mlir')}, llvmlite {version('llvmlite')}",
        "CPU": f"{cpu_name()} ({here.cpu}), first-level data cache {first_level_bytes() >> 10} KB",
        "vectors": ", ".join([f"{here.vector_bits} bits", *sorted(here.instructions)]),
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "calibrated": calibrated or "no, times are predicted as for a usual server",
        "cache": _cache(),
        **{each.name: f"{'not set' if each.text is None else repr(each.text)} ({each.means})" for each in SETTINGS},
    }
    width = max(map(len, lines)) + 2
    for name, text in lines.items():
        print(f"{name:{width}}{text}")


def _cache() -> str:
    base = cache_files.directory()
    if base is None:
        return "off"
    sizes = []
    for path in base.iterdir():
        with suppress(FileNotFoundError):  # another process has removed it
            sizes.append(path.lstat().st_size)
    return f"{base}, {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB"


if __name__ == "__main__":
    main()
