"""torch.compiler.is_compiling() in all that runs while Dynamo compiles a frame, also in what it does not trace, such as
__torch_function__ of fake tensors. From torch 2.13 on, it is true there by itself.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


def hold(handler: Any, flags: Any) -> None:
    """Has the flag be true within what `handler`, Dynamo's of callbacks, puts around a compilation."""
    handler.install_callbacks = partial(_within, flags, handler.install_callbacks)


@contextmanager
def _within(flags: Any, install: Callable[..., Any], *given: Any) -> Iterator[None]:
    before, flags._is_compiling_flag = flags._is_compiling_flag, True
    try:
        with install(*given):
            yield
    finally:
        flags._is_compiling_flag = before
