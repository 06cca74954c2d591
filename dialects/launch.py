"""Describes how a GPU launches the kernels of a region. The compiler decides it, the runtime follows it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from gossamer.dialects.errors import DeviceError

_MOST_BLOCKS = 2**31 - 1


@dataclass(frozen=True)
class Launch:
    """A launch of ceil(T / tokens) x blocks thread blocks for T tokens. A block has `threads` threads and `shared` bytes of
    shared memory."""

    tokens: int
    blocks: int
    threads: int
    shared: int

    def grid(self, tokens: int) -> int:
        """Returns the number of thread blocks. DeviceError if a GPU cannot launch so many."""
        count = -(-tokens // self.tokens) * self.blocks
        if count > _MOST_BLOCKS:
            raise DeviceError(f"{tokens} rows make {count} thread blocks, a GPU takes {_MOST_BLOCKS}: split the input")
        return count

    def as_json(self) -> dict[str, int]:
        """Returns data for JSON, which `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Returns the launch that `as_json` wrote."""
        return cls(**fields)


def choose(launches: Mapping[str, Launch], tokens: int, multiprocessors: int) -> str:
    """Returns the name of the best kernel for a number of tokens.

    It is the one with the widest tiles that still gives every multiprocessor a block. If none does, it is the one with the most
    blocks. Among kernels whose tiles hold all tokens, only the narrowest is considered.
    """
    enough_tokens = min((one.tokens for one in launches.values() if one.tokens >= tokens), default=tokens)
    by_width = sorted(launches, key=lambda name: -launches[name].tokens)
    suitable = [name for name in by_width if launches[name].tokens <= enough_tokens]
    busy = (name for name in suitable if launches[name].grid(tokens) >= multiprocessors)
    return next(busy, max(suitable, key=lambda name: launches[name].grid(tokens)))
