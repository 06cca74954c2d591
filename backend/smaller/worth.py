"""Whether leaving channels out pays, for all that hang together, by the cost model.

before   each product as it would be otherwise, dense or sparse
after    each product of what is left, and copies where a value is gathered from, or made whole again
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, fx

from gossamer.backend.devices.calibrated import this_machine
from gossamer.backend.graph.inputs import density
from gossamer.backend.smaller.analysis import Analysis, Product
from gossamer.backend.smaller.channels import Channels
from gossamer.runtime.elements import WEIGHTS

_LEAST = 1.1
"""The gain that is enough, if a user is content with less."""

_FREE = 0.9
"""Share of channels below which no loss is enough where nothing has to be copied: kernels for sparse weights gain, too."""

_SPARSE = 0.7
"""Density of what is left below which a kernel for sparse weights may take it."""

_UNKNOWN_TOKENS = 32
"""Assumed for sizes that are not known at compile time."""

_COPIED, _COPY_CALL_US = 9e3, 6.0
"""Bytes of a whole value a microsecond, where lines of it are picked or put back, and microseconds for a call of that."""

_CALL_US = 4.0
"""What a look at the inputs takes at every call."""


@dataclass(frozen=True)
class Judged:
    """A product whose weight may become smaller.

    kept  (rows, columns) of the smaller weight, which is `small`
    gain  over the whole one, together with all that hangs together with it
    pays  whether that is enough
    """

    product: Product
    kept: tuple[int, int]
    small: Tensor
    gain: float
    pays: bool


def judge(analysis: Analysis, min_gain: float) -> list[Judged]:
    """All products some of whose channels are not needed; has all channels stay where leaving them out does not pay."""
    kept, products = analysis.atoms.kept(), analysis.products()
    members = [each.ids for each in analysis.all_channels()]
    label = analysis.atoms.families(members)
    # Rows and columns of a product belong to several families: each is judged with all that it changes.
    family = {id(each): int(label[each.ids.flatten()[0]]) for each in analysis.all_channels()}
    before, after = defaultdict[int, float](float), defaultdict[int, float](float)
    changed = list[tuple[Product, tuple[int, int], Tensor, set[int]]]()
    for product in products:
        rows, columns = (int(each.lines(kept).sum()) for each in (product.rows, product.columns))
        m, k = product.weight.shape[:2]
        if (rows, columns) == (m, k):
            continue
        small = _small(product, kept)
        sparse = product.op == "linear" and density(small) < _SPARSE
        whole, less = (_cost(product, weight, sparse) for weight in (product.weight, small))
        families = {family[id(each)] for each, n, of in ((product.rows, rows, m), (product.columns, columns, k)) if n < of}
        changed.append((product, (rows, columns), small, families))
        for each in families:
            before[each] += whole / len(families)
            after[each] += less / len(families)
    copies = defaultdict[int, float](float)
    for channels, us in _copies(analysis, kept):
        copies[family[id(channels)]] += us
    gains = {each: before[each] / max(after[each] + copies[each] + _CALL_US, 1e-9) for each in before}
    free = {each for each in gains if not copies[each] and float(kept[torch.from_numpy(label == each)].float().mean()) < _FREE}
    enough = {each: gain >= (1.0 if each in free else max(min_gain, _LEAST)) for each, gain in gains.items()}
    for channels in analysis.all_channels():
        if not enough.get(family[id(channels)], False):
            analysis.atoms.need(channels.ids, torch.ones_like(channels.const))
    judged = []
    for product, sizes, small, families in changed:
        gain = min(gains[each] for each in families)
        judged.append(Judged(product, sizes, small, gain, all(enough[each] for each in families)))
    return judged


def _small(product: Product, kept: Tensor) -> Tensor:
    weight = product.weight[product.rows.lines(kept)]
    return weight[:, product.columns.lines(kept)]


def _cost(product: Product, weight: Tensor, sparse: bool) -> float:
    """Microseconds of a product with a weight, dense; of a sparse one, its nonzeros' share of them."""
    m, k = weight.shape[0], prod(weight.shape[1:])
    speed = this_machine().speeds[WEIGHTS[weight.dtype]]
    us = speed.dense_us(m * k, weight.dtype.itemsize, product.tokens or _UNKNOWN_TOKENS) / torch.get_num_threads()
    return us * density(weight) if sparse else us


def _copies(analysis: Analysis, kept: Tensor) -> Iterator[tuple[Channels, float]]:
    """Values that are copied because channels are left out, with the microseconds that takes."""
    for (node, _), channels in analysis.entries.items():
        if not bool((lines := channels.lines(kept)).all()):
            yield channels, _us(node, int(lines.sum()) / len(lines))
    for node, step in analysis.steps.items():
        if isinstance(step.result, list) or bool(step.result.lines(kept).all()):
            continue
        takers = [user for user in node.users if user not in analysis.steps or node not in analysis.steps[user].operands]
        if takers:
            yield step.result, _us(node, 1.0)


def _us(node: fx.Node, share: float) -> float:
    sizes = [n if isinstance(n, int) else _UNKNOWN_TOKENS for n in node.meta["example_value"].shape]
    size = prod(sizes) * node.meta["example_value"].dtype.itemsize
    return _COPY_CALL_US + size * share / _COPIED / torch.get_num_threads()
