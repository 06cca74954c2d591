"""Lets all command lines end quietly when the reader of their output has ended, as in

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
    """Makes a command end without a traceback if the reader of its output has ended, with the status of SIGPIPE."""

    @wraps(main)
    def run(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Status:
        try:
            try:
                return main(*arguments, **named)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more when it exits
            raise SystemExit(128 + signal.SIGPIPE) from None

    return run
