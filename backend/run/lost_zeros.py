"""Makes Dynamo compile a graph again if one of its weights has lost its zeros, so that Inductor compiles the layer as dense.

If the weight of a region has become too dense, the region runs in plain torch, op by op. Its tensors have the layout that
sparse kernels need. That is slower than Inductor's code for dense layers. Dynamo compiles a graph again if one of its tensors
gets a mark as static.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from torch import Tensor

from gossamer.backend.owners.recompiling import may_recompile
from gossamer.runtime.torch_internals import mark_static

_PATIENCE, _MOST_TIMES = 8, 6
"""Dense calls of a weight before its graph is compiled again, and the largest number of compilations. The first number doubles
each time, so that weights that lose their zeros one after the other do not keep Dynamo busy."""

_MOST_WEIGHTS = 4096  # that are counted; beyond, counting starts again

_calls = Counter[int]()
"""The number of calls for which a weight has run in plain torch, by its address."""

_times = 0
"""The number of times that graphs were compiled again."""


def ran_densely(leaves: Sequence[Tensor], too_dense: Callable[[], bool]) -> None:
    """Counts a call for which a region runs in plain torch because of the weight that is computed from these leaves.

    too_dense  tells whether the weight has too few zeros; otherwise its zeros move at every call, and may settle later
    """
    global _times
    address = leaves[0].data_ptr()
    if len(_calls) >= _MOST_WEIGHTS:
        _calls.clear()
    _calls[address] += 1
    if _calls[address] < _PATIENCE << _times:
        return
    _calls.pop(address, None)  # another thread may have been here
    if _times < _MOST_TIMES and may_recompile() and too_dense():
        _times += 1
        for leaf in leaves:
            mark_static(leaf, 0)
