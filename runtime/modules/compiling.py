"""Makes torch.compiler.is_compiling() true in all code that runs while Dynamo compiles a frame.

That includes code that Dynamo does not trace, such as __torch_function__ of fake tensors. Torch 2.13 and newer do this
themselves.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


def hold(handler: Any, flags: Any) -> None:
    """Sets the flag within the context that `handler`, Dynamo's handler of callbacks, puts around each compilation."""
    handler.install_callbacks = partial(_within, flags, handler.install_callbacks)


@contextmanager
def _within(flags: Any, install: Callable[..., Any], *given: Any) -> Iterator[None]:
    before, flags._is_compiling_flag = flags._is_compiling_flag, True
    try:
        with install(*given):
            yield
    finally:
        flags._is_compiling_flag = before
