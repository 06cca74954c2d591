"""Weights that have lost their zeros: the graph that uses one is compiled anew, so that its layers are torch's again.

A region whose weight has become too dense for it runs in plain torch, one operation after the other, on tensors that lie as
sparse kernels want them. That is slower than the code that Inductor makes of dense layers, so it does not last: Dynamo compiles
a graph once more if one of its tensors has got a mark.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from torch import Tensor

from gossamer.runtime.torch_internals import mark_static

_PATIENCE, _MOST_TIMES = 8, 6
"""Calls for which a weight is too dense until its graph is compiled anew; each time twice as many are waited for as before, so
that weights which lose their zeros one after the other do not keep Dynamo busy."""

_MOST_WEIGHTS = 4096

_calls = Counter[int]()
"""For how many calls a weight has run in plain torch, by its address."""

_times = 0
"""How often graphs were compiled anew."""


def ran_densely(leaves: Sequence[Tensor], too_dense: Callable[[], bool]) -> None:
    """To be called when a region has run in plain torch because of the weight that is computed from these.

    `too_dense` tells whether it has too few zeros. Others, whose zeros move at every call, may settle.
    """
    global _times
    address = leaves[0].data_ptr()
    if len(_calls) >= _MOST_WEIGHTS:
        _calls.clear()
    _calls[address] += 1
    if _calls[address] < _PATIENCE << _times:
        return
    del _calls[address]
    if _times < _MOST_TIMES and too_dense():
        _times += 1
        for leaf in leaves:
            mark_static(leaf, 0)
