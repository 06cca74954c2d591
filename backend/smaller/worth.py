"""Predicts whether it pays to leave channels out. Channels that are tied together form a family, which is judged as a whole.

before   the time of each product with its whole weight, dense or sparse
after    the time of each product with its smaller weight, and of copies that gather channels of a value or fill in constants

Blocks and n:m have fast kernels of their own. If the smaller weight would lose the pattern, there are three ways: leave out
single channels, whole blocks or groups, or nothing. The fastest is taken.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from math import inf, prod

import torch
from torch import Tensor, fx

from gossamer.backend.devices.calibrated import this_machine
from gossamer.backend.graph.inputs import density
from gossamer.backend.graph.zero_pattern import Pattern
from gossamer.backend.smaller.analysis import Analysis, Product
from gossamer.backend.smaller.channels import Channels
from gossamer.runtime.elements import WEIGHTS

_LEAST = 1.1
"""The least gain, even if the option `min_gain` is less."""

_FREE = 0.9
"""If fewer than this share of channels stay and nothing is copied, a gain of 1 is enough: sparse kernels gain as well."""

_SPARSE = 0.7
"""A sparse kernel may take a smaller weight of less than this density."""

_UNKNOWN_TOKENS = 32
"""The number of tokens that is assumed if it is unknown at compile time."""

_COPIED, _COPY_CALL_US = 9e3, 6.0
"""Copies that gather lines or put them back: bytes of the whole value in a microsecond, and microseconds of the call."""

_CALL_US = 4.0
"""Microseconds that a call of the smaller graph takes to check that weights are unchanged."""


@dataclass(frozen=True)
class Judged:
    """A product whose weight may become smaller.

    kept   (rows, columns) of the smaller weight
    small  the smaller weight
    gain   how many times faster its family is than with whole weights
    pays   whether the gain is enough
    lost   the pattern that the smaller weight would lose, such as "2:4"; empty for none
    """

    product: Product
    kept: tuple[int, int]
    small: Tensor
    gain: float
    pays: bool
    lost: str = ""


@dataclass(frozen=True, eq=False)
class _Trial:
    """A prediction for the case that only these channels stay.

    kept   whether each channel stays
    gains  gain of each family that loses channels
    free   the families for which nothing is copied
    """

    kept: Tensor
    gains: Mapping[int, float]
    free: Set[int]

    def pays(self, family: int, min_gain: float) -> bool:
        """Whether the gain of a family is enough."""
        return self.gains.get(family, 0.0) >= (1.0 if family in self.free else max(min_gain, _LEAST))


class _Judgement:
    """Judges families. The rows and the columns of a product may belong to different families."""

    def __init__(self, analysis: Analysis) -> None:
        self._analysis = analysis
        self._label = analysis.atoms.families([each.ids for each in analysis.all_channels()])
        self._patterns = dict[Product, Pattern]()

    def family(self, channels: Channels) -> int:
        """Returns the family of channels."""
        return int(self._label[channels.ids.flatten()[0]])

    def changed(self, kept: Tensor) -> Iterator[tuple[Product, tuple[int, int], set[int]]]:
        """Yields the products whose weights become smaller, their remaining rows and columns, and their families."""
        for product in self._analysis.products():
            sizes = [(each, int(each.lines(kept).sum()), each.lines(kept).numel()) for each in (product.rows, product.columns)]
            if families := {self.family(each) for each, stay, all_ in sizes if stay < all_}:
                yield product, (sizes[0][1], sizes[1][1]), families

    def trial(self, kept: Tensor) -> _Trial:
        """Predicts the gains if only these channels stay."""
        before, after, copies = (defaultdict[int, float](float) for _ in range(3))
        for product, _, families in self.changed(kept):
            whole, less = self._costs_of(product, small(product, kept))
            for each in families:
                before[each] += whole / len(families)
                after[each] += less / len(families)
        for channels, us in _copies(self._analysis, kept):
            copies[self.family(channels)] += us
        gains = {each: before[each] / max(after[each] + copies[each] + _CALL_US, 1e-9) for each in before}
        shares = {each: float(kept[torch.from_numpy(self._label == each)].float().mean()) for each in before}
        return _Trial(kept, gains, {each for each in before if not copies[each] and shares[each] < _FREE})

    def in_multiples(self, kept: Tensor) -> list[Tensor]:
        """Returns the further channels that must stay so that weights keep their blocks or groups."""
        return [
            channels.ids.movedim(channels.along, 0)[_multiples(channels.lines(kept), size)].flatten()
            for product, _, _ in self.changed(kept)
            if _is_sparse(product, small(product, kept))
            for channels, size in zip((product.rows, product.columns), _granules(self._pattern(product)), strict=True)
            if size > 1
        ]

    def lost(self, product: Product, kept: Tensor) -> str:
        """Returns the pattern that a weight would lose, if a kernel needs it; empty if none."""
        less = small(product, kept)
        label = self._pattern(product).label if _is_sparse(product, less) else ""
        return label if label and Pattern.of(less).label != label else ""

    def _pattern(self, product: Product) -> Pattern:
        if product not in self._patterns:
            self._patterns[product] = Pattern.of(product.weight)
        return self._patterns[product]

    def _costs_of(self, product: Product, less: Tensor) -> tuple[float, float]:
        """Returns the microseconds of a product with its weight, and with the smaller one."""
        weights = product.weight, less
        dense = [_dense_us(product, weight) for weight in weights]
        if not _is_sparse(product, less):
            return dense[0], dense[1]
        patterns = self._pattern(product), Pattern.of(less)
        if any(pattern.label for pattern in patterns) and not self._analysis.training:
            sparse = [_sparse_us(product, weight, each) for weight, each in zip(weights, patterns, strict=True)]
        else:
            sparse = [us * pattern.density for us, pattern in zip(dense, patterns, strict=True)]
        return min(dense[0], sparse[0]), min(dense[1], sparse[1])


def judge(analysis: Analysis, min_gain: float) -> list[Judged]:
    """Judges all products with channels that are not needed. If a family does not pay, all of its channels stay."""
    judgement = _Judgement(analysis)
    most = judgement.trial(analysis.atoms.kept())
    trials = [most]
    if also := judgement.in_multiples(most.kept):
        trials.append(judgement.trial(analysis.atoms.kept(also)))
    best: dict[int, _Trial | None] = {}
    for family in most.gains:
        paying = [trial for trial in trials if trial.pays(family, min_gain)]
        best[family] = max(paying, key=lambda trial: trial.gains[family], default=None)
    for channels in analysis.all_channels():
        trial = best.get(judgement.family(channels))
        stay = torch.ones_like(channels.const) if trial is None else trial.kept[channels.ids]
        analysis.atoms.need(channels.ids, stay)
    final = analysis.atoms.kept()
    judged = []
    for product, sizes, families in judgement.changed(most.kept):
        chosen = [best[each] for each in families]
        pays = all(trial is not None for trial in chosen)
        gain = min((most if trial is None else trial).gains[each] for each, trial in zip(families, chosen, strict=True))
        kept = final if pays else most.kept
        if pays:
            sizes = (int(product.rows.lines(kept).sum()), int(product.columns.lines(kept).sum()))
            if sizes == product.weight.shape[:2]:  # no whole group of this weight is left out
                continue
        lost = "" if pays else judgement.lost(product, kept)
        judged.append(Judged(product, sizes, small(product, kept), gain, pays, lost))
    return judged


def _multiples(stay: Tensor, size: int) -> Tensor:
    """Returns which lines stay if aligned groups of this size stay or go as a whole."""
    groups = torch.nn.functional.pad(stay, (0, -len(stay) % size)).view(-1, size)
    return groups.any(1).repeat_interleave(size)[: len(stay)]


def _granules(pattern: Pattern) -> tuple[int, int]:
    """Returns how many rows, and how many columns, must go together so that a weight keeps its pattern."""
    rows, columns = pattern.block or (1, 1)
    return max(rows, pattern.rows.v or 1), max(columns, (pattern.rows.nm or (1, 1))[1])


def small(product: Product, kept: Tensor) -> Tensor:
    """Returns the smaller weight of a product."""
    weight = product.weight[product.rows.lines(kept)]
    return weight[:, product.columns.lines(kept)]


def _is_sparse(product: Product, less: Tensor) -> bool:
    """Whether sparse kernels may take the smaller weight."""
    return product.op == "linear" and density(less) < _SPARSE


def _dense_us(product: Product, weight: Tensor) -> float:
    """Returns the microseconds of a dense product with a weight."""
    m, k = weight.shape[0], prod(weight.shape[1:])
    speed = this_machine().speeds[WEIGHTS[weight.dtype]]
    return speed.dense_us(m * k, weight.dtype.itemsize, product.tokens or _UNKNOWN_TOKENS) / torch.get_num_threads()


def _sparse_us(product: Product, weight: Tensor, pattern: Pattern) -> float:
    """Returns the microseconds of the fastest kernel for a weight with a pattern; infinite if there is none."""
    from gossamer.backend.devices.device import device_of  # these load MLIR
    from gossamer.backend.regions.cost import matrix_with

    matrix = matrix_with(pattern, weight.shape[0], weight.shape[1], weight.dtype, weight.device)
    found = device_of(weight.device).predict(replace(matrix, density=pattern.density), product.tokens or _UNKNOWN_TOKENS)
    return found.sparse_us if found.by_schedule else inf


def _copies(analysis: Analysis, kept: Tensor) -> Iterator[tuple[Channels, float]]:
    """Yields the values that are copied because channels are left out, and the microseconds of each copy."""
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
