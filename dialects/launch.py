"""How the kernels of a region are launched on a GPU: what the compiler decides and the runtime goes by."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from gossamer.dialects.errors import DeviceError

_MOST_BLOCKS = 2**31 - 1


@dataclass(frozen=True)
class Launch:
    """ceil(T / tokens) x blocks thread blocks of `threads` threads with `shared` bytes of shared memory, for T tokens."""

    tokens: int
    blocks: int
    threads: int
    shared: int

    def grid(self, tokens: int) -> int:
        """The number of thread blocks. DeviceError if that is more than a GPU takes."""
        count = -(-tokens // self.tokens) * self.blocks
        if count > _MOST_BLOCKS:
            raise DeviceError(f"{tokens} rows make {count} thread blocks, a GPU takes {_MOST_BLOCKS}: split the input")
        return count

    def as_json(self) -> dict[str, int]:
        """What `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """The inverse of `as_json`."""
        return cls(**fields)


def choose(launches: Mapping[str, Launch], tokens: int, multiprocessors: int) -> str:
    """The kernel for a number of tokens: the one with the widest tiles that still gives every multiprocessor a block; if none
    does, the one with the most blocks. Of those whose tiles hold all the tokens, only the narrowest comes into question."""
    enough_tokens = min((one.tokens for one in launches.values() if one.tokens >= tokens), default=tokens)
    by_width = sorted(launches, key=lambda name: -launches[name].tokens)
    suitable = [name for name in by_width if launches[name].tokens <= enough_tokens]
    busy = (name for name in suitable if launches[name].grid(tokens) >= multiprocessors)
    return next(busy, max(suitable, key=lambda name: launches[name].grid(tokens)))
