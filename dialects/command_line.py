"""What all command lines have in common: they end quietly when nobody reads on.

gossamer-opt --list-passes | head -1
"""

import os
import signal
import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Status = TypeVar("_Status")


def ends_with_its_reader(main: Callable[_Arguments, _Status]) -> Callable[_Arguments, _Status]:
    """Has a command end without a traceback if the reader of its output has ended, as a command that SIGPIPE ends."""

    @wraps(main)
    def run(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Status:
        try:
            try:
                return main(*arguments, **named)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
            raise SystemExit(128 + signal.SIGPIPE) from None

    return run
