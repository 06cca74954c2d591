"""Runs a mixture of experts with pruned weights. A slot is a pair of a token and one of its experts.

    gossamer::region([x [T, K], experts [T, top], scores [T, top], *leaves of the weights], key) -> [T, M]

many slots an expert   for each expert: its rows of x are gathered, and go through one chain of gate, up, activation and down
few slots an expert    all rows are gathered, and go through a region of gate and up for each expert, the activation, and a
                       region of down for each expert

Experts run at once, each on one thread, unless one has so many slots that the other threads would wait for it. At the end, the
rows of each token are added up, times its scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.backend.devices.device_kernel import Kernel
from gossamer.backend.devices.kernels_at_once import Call, Copied
from gossamer.backend.run.compiled_region import CompiledRegion
from gossamer.backend.run.expert_regions import Hit, at_once, part, run_each, run_into
from gossamer.runtime.compiled_kernel import Given, Memory
from gossamer.runtime.experts.activations import activated
from gossamer.runtime.experts.routes import Routes
from gossamer.runtime.memory.warm_memory import empty
from gossamer.runtime.region_kernel import RegionKernel

MANY = 16
"""Chains run from so many slots on, for the average expert with slots. A tile of a chain has at least a vector of tokens."""


@dataclass(frozen=True, eq=False)
class PrunedMixture:
    """A mixture of experts with pruned weights.

    up, down    a region for each expert; `up` also computes the gate
    chains      a region for each expert that computes all its products; or empty
    places      the indices of the leaves of `up`, of `down` and of `chains` among those of the operation
    activation  the activation between the products (see runtime/experts/activations.py)
    layout      the layout of its operands
    sorting     the kernel that sorts slots by their experts
    """

    up: tuple[CompiledRegion, ...]
    down: tuple[CompiledRegion, ...]
    chains: tuple[CompiledRegion, ...]
    places: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    activation: str
    layout: str
    sorting: RegionKernel

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels of all experts, each once."""
        regions = (*self.up, *self.down, *self.chains)
        return tuple(dict.fromkeys(kernel for region in regions for kernel in region.kernels))

    def _sorted(self, keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
        positions, order = keys.new_empty(count + 1, dtype=torch.int64), keys.new_empty(keys.numel(), dtype=torch.int64)
        self.sorting([keys.long()], [positions, order])
        return positions, order

    def outputs(self, operands: Sequence[Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Returns the sizes and type of the result."""
        return self.down[0].outputs(operands)

    def __call__(self, operands: Sequence[Tensor]) -> Tensor:
        x, experts, scores, *leaves = operands
        (((tokens, m), dtype),) = self.outputs(operands)
        routes = Routes.of(experts, len(self.up), self._sorted)
        tokens_of, slots, hit = routes.tokens, routes.order.numel(), list(routes.hit())
        if not (slots and m):
            return x.new_zeros(tokens, m, dtype=dtype)
        y = empty((slots, m), dtype)
        up, down, chain = ([leaves[place] for place in places] for places in self.places)
        if self.chains and slots >= MANY * len(hit):
            _each_gathered(self.chains, x.contiguous(), tokens_of, hit, chain, y)
        else:
            rows = x.index_select(0, tokens_of)
            (((_, width), _),) = self.up[0].outputs([rows])
            sums = empty((slots, width), dtype)
            run_each(self.up, rows, hit, up, sums)
            run_each(self.down, activated(sums, self.activation, self.layout).contiguous(), hit, down, y)
        return _summed(y, routes, scores)


def _each_gathered(
    chains: Sequence[CompiledRegion], x: Tensor, tokens: Tensor, hit: Hit, leaves: Sequence[Tensor], out: Tensor
) -> None:
    """Copies the rows of each expert from x, and runs them through its chain."""
    columns, row_bytes = x.shape[1], x.shape[1] * x.itemsize

    def call(expert: int, begin: int, end: int) -> Call | None:
        rows = Copied(x.data_ptr(), tokens.data_ptr() + begin * tokens.itemsize, end - begin, row_bytes)
        given = [Memory(Given(0), (end - begin, columns)), *leaves]
        return chains[expert].prepared(given, part(out, begin, end), end - begin, rows)

    if at_once(call, hit):
        return
    gathered = empty((max(end - begin for _, begin, end in hit), columns), x.dtype)
    for expert, begin, end in hit:
        rows = gathered[: end - begin]
        torch.index_select(x, 0, tokens[begin:end], out=rows)
        run_into(out[begin:end], chains[expert], [rows, *leaves])


def _summed(y: Tensor, routes: Routes, scores: Tensor) -> Tensor:
    """Returns [tokens, M]: the sum of each token's rows of y times its scores. y is in the order of the routes."""
    places = torch.empty_like(routes.order).scatter_(0, routes.order, torch.arange(len(y), device=y.device))
    wide = torch.promote_types(y.dtype, torch.float32)
    given = F.embedding_bag(places.view(scores.shape), y.to(wide), mode="sum", per_sample_weights=scores.to(wide))
    return given.to(y.dtype)
