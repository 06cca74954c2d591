"""The base of our nodes of autograd's graph.

torch.autograd.Function looks at every argument, for torch.func, and that takes longer than a small product. This class has what
it has but for that.
"""

from typing import Any

import torch

from gossamer.runtime.operations import untraced
from gossamer.runtime.torch_internals import SingleLevelFunction


class Node(SingleLevelFunction):
    """A function with a backward pass that Dynamo does not look into."""

    def __init_subclass__(cls) -> None:
        if "backward" in vars(cls):
            cls.backward = staticmethod(untraced(cls.backward))  # autograd may call it after a graph break

    @staticmethod
    @untraced
    def _compiled_autograd_key(ctx: Any) -> tuple[int, ...]:
        """What compiled autograd knows the node by. It asks for this before Dynamo sees the backward pass.

        That pass reads versions and addresses, and is kernels of ours. So Dynamo's graph ends there, and the pass runs as it
        is. `torch.compiler.disable` adds 2 µs to a call: only here, where somebody compiles a backward pass.
        """
        node = ctx._forward_cls
        if "_opaque" not in vars(node):
            node._opaque, node.backward = True, staticmethod(torch.compiler.disable(node.backward))
        return (ctx._autograd_function_id,)
