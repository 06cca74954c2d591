"""All environment variables that Gossamer reads. No other file reads any. `python -m gossamer` prints them."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from gossamer.dialects.errors import OptionError

T = TypeVar("T")


@dataclass(frozen=True)
class Setting(Generic[T]):
    """An environment variable.

    name    its name
    means   its purpose, and its default, for users
    typed   turns its text into its value; gets None if it is not set
    """

    name: str
    means: str
    typed: Callable[[str | None], T]

    @property
    def text(self) -> str | None:
        """The text that the environment has now, or None."""
        return os.environ.get(self.name)

    def get(self) -> T:
        """Returns its value now."""
        return self.typed(self.text)

    @contextmanager
    def set_to(self, text: str) -> Iterator[None]:
        """Sets it to a text within the `with` block."""
        before = self.text
        os.environ[self.name] = text
        try:
            yield
        finally:
            if before is None:
                del os.environ[self.name]
            else:
                os.environ[self.name] = before


def _cache_directory(text: str | None) -> Path | None:
    if text is None:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gossamer"
    return Path(text) if text else None


def _level(text: str | None) -> int:
    if text not in (None, "", "0", "1", "2", "3"):
        raise OptionError(f"the environment variable GOSSAMER_LLVM_LEVEL is {text!r}; it must be 0, 1, 2 or 3")
    return int(text or 3)


def _switch(text: str | None) -> bool:
    low = (text or "1").lower()
    if low not in ("0", "false", "off", "no", "1", "true", "on", "yes"):
        raise OptionError(f"the environment variable GOSSAMER_CALIBRATE is {text!r}; it must be 0 or 1")
    return low in ("1", "true", "on", "yes")


CACHE_DIR = Setting("GOSSAMER_CACHE_DIR", "directory of the cache, usually ~/.cache/gossamer; empty: none", _cache_directory)
DUMP_IR = Setting("GOSSAMER_DUMP_IR", "directory for the text of every compilation stage", lambda text: text or None)

CALIBRATE = Setting("GOSSAMER_CALIBRATE", "0: compilations measure nothing, predictions decide", _switch)

LLVM_LEVEL = Setting("GOSSAMER_LLVM_LEVEL", "how much LLVM optimises kernels for CPUs, 0 to 3, usually 3", _level)

LIBRARY_PATH = Setting("LIBRARY_PATH", "the compiler's: directories of libraries to link with", lambda text: text or None)

SETTINGS = (CACHE_DIR, DUMP_IR, CALIBRATE, LLVM_LEVEL)
"""The variables of Gossamer itself."""
