"""Keeps the libraries that a C++ compiler built for Inductor, in Gossamer's cache on disk.

Torch's portable cache (`torch.compiler.save_cache_artifacts`) has graphs, but not the libraries that they call. In another
directory the C++ compiler would build them again, which takes longer than all other steps. So Gossamer's cache has them, and
puts them where Inductor looks for them.

    library-<hash>      a library: its place in Inductor's directory, and its bytes
    libraries-<hash>    the names of the libraries that a graph needs, by its fingerprint, or of those by which torch tests
                        the instructions of a CPU

They are code for this CPU, so both hashes depend on it.
"""

import hashlib
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from gossamer.runtime import cache_files, disk_cache
from gossamer.runtime.target import host
from gossamer.runtime.torch_internals import off
from gossamer.runtime.torch_names import LIBRARIES

log = logging.getLogger("gossamer")

_PLACE = re.compile(r"[a-z0-9]{2}/c[a-z0-9]{40,60}(\.main)?\.so", re.ASCII)
"""Path of a library within Inductor's directory."""

_LARGEST = 64 << 20  # bytes of a library
_CHECK, _CHECK_LENGTH = b"_chk_kernel", 4096
"""A name in the short programs by which torch tests whether compiler and CPU know some instructions, and their largest size."""


@contextmanager
def kept(fingerprint: str | None) -> Iterator[None]:
    """While Inductor compiles a graph, restores the libraries that were built for it before, and keeps new ones.

    Does nothing for None, which stands for a graph that is not kept.
    """
    if fingerprint is None or off(LIBRARIES):
        yield
        return
    of_graph, of_cpu = f"libraries-{fingerprint}", f"libraries-{_hash(torch.__version__)}"
    graph_is_known, cpu_is_known = _restore(of_graph), _restore(of_cpu)
    before = set() if graph_is_known else _in_use()
    yield
    if not graph_is_known:
        _keep(of_graph, _in_use() - before)
        if not cpu_is_known and (checks := _checks()):
            _keep(of_cpu, checks)


def _restore(name: str) -> bool:
    """Writes the missing libraries of a list into Inductor's directory. Returns whether the cache has all of them."""
    known = disk_cache.read(name)
    if known is None:
        return False
    for library in known.call["libraries"]:
        found = disk_cache.read(library)
        if found is None or not _PLACE.fullmatch(found.call["place"]):
            return False
        path = _directory() / found.call["place"]
        if not path.exists():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                cache_files.create(path, found.code)
            except OSError as problem:
                log.info("%s cannot be written (%s), it is compiled again", path, problem)
    return True


def _keep(name: str, places: Iterable[str]) -> None:
    libraries = []
    for place in sorted(places):
        with suppress(OSError):  # it is gone, or somebody else's
            code = cache_files.read(_directory() / place, _LARGEST)
            library = f"library-{_hash(place)}"
            disk_cache.write(library, disk_cache.Entry(code, {"place": place}))
            libraries.append(library)
    disk_cache.write(name, disk_cache.Entry(b"", {"libraries": libraries}))


def _in_use() -> set[str]:
    """Returns the paths of Inductor's libraries that this process has loaded."""
    start = f"{_directory()}/"
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line[at:].rstrip("\n") for line in maps if (at := line.find(start)) >= 0}
        return {place for path in paths if _PLACE.fullmatch(place := path.removeprefix(start))}
    return set()


def _checks() -> set[str]:
    """Returns the paths of the libraries by which torch tests the instructions of the CPU."""
    found = set()
    for path in _directory().glob("??/c*.cpp"):
        place = path.with_suffix(".so").relative_to(_directory()).as_posix()
        with suppress(OSError):
            if path.stat().st_size <= _CHECK_LENGTH and _PLACE.fullmatch(place) and _CHECK in path.read_bytes():
                found.add(place)
    return found


def _directory() -> Path:
    from gossamer.runtime.torch_internals import inductor_directory

    return Path(inductor_directory())


def _hash(text: str) -> str:
    return hashlib.sha256(f"{host()}\n{text}".encode()).hexdigest()[:32]
