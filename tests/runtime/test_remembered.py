"""What is kept for tensors whose values are compared: as long as their bits are the same, whatever writes to them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gossamer.runtime.remembered import Made, Remembered
from gossamer.runtime.sample import sample_of

TENSORS: dict[str, Callable[[], Tensor]] = {
    "vector": lambda: torch.randn(5),
    "parameter": lambda: nn.Parameter(torch.randn(3)),
    "number": lambda: torch.tensor(3),
    "turned": lambda: torch.randn(3, 4).t(),
    "narrow": lambda: torch.randn(3, dtype=torch.bfloat16),
    "with NaN": lambda: torch.tensor([torch.nan, 1.0]),
    "negated": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "slice": lambda: torch.zeros(2, 1024, dtype=torch.int64)[:, :300],
}


@pytest.mark.parametrize("name", TENSORS)
def test_values_are_compared(name: str) -> None:
    kept, tensor = Remembered[object](compared="all"), TENSORS[name]()
    first = kept.get([tensor], (), object)
    assert name == "negated" or kept.get([tensor], (), object) is first
    tensor.data.add_(1)  # which torch does not count
    assert kept.get([tensor], (), object) is not first


@pytest.mark.parametrize("name", TENSORS)
def test_a_sample_shows_writes_that_torch_does_not_count(name: str) -> None:
    kept, tensor = Remembered[object](compared="none"), TENSORS[name]()
    first = kept.get([tensor], (), object)
    assert kept.get([tensor], (), object) is first
    tensor.data.add_(1)
    assert kept.get([tensor], (), object) is not first


@pytest.mark.parametrize("tensor", [torch.randn(3), torch.randn(100), torch.randn(96, 80) * (torch.rand(96, 80) < 0.1)])
def test_samples_are_small_and_compared_without_unpacking(tensor: Tensor) -> None:
    memory, seen = sample_of(tensor)
    assert memory is not None and seen is not None and memory == seen
    assert memory.format == seen.format and len(memory.format) == 1, "of the machine's own numbers"
    assert memory.nbytes <= 512 and any(seen.tobytes())


@pytest.mark.parametrize("written", [0, 17, 39])
def test_of_many_tensors_a_write_to_one_is_seen(written: int) -> None:
    kept, tensors = Remembered[object](compared="none"), [torch.randn(96, 80) for _ in range(40)]
    first = kept.get(tensors, (), object)
    assert kept.get(tensors, (), object) is first
    tensors[written].data.mul_(2)  # which torch does not count
    assert kept.get(tensors, (), object) is not first


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.empty(3, 0)])
def test_nothing_stays_the_same(tensor: Tensor) -> None:
    kept = Remembered[object](compared="all")
    assert kept.get([tensor], (), object) is kept.get([tensor], (), object)


@pytest.mark.parametrize("move", ["within its storage", "with its storage"])
def test_the_old_memory_of_a_tensor_that_moved_is_not_read(move: str) -> None:
    """Torch may have freed it."""

    class Freed:
        def __eq__(self, other: object) -> bool:
            raise AssertionError("freed memory was read")

    both = torch.randn(2, 96)
    tensor = torch.empty(0)
    tensor.data = both[0]
    made = Made[None]([tensor], "none", lambda _: None)
    assert made.is_current([tensor])
    made.looked_at = Freed()  # type: ignore[assignment]
    if move == "within its storage":
        tensor.data = both[1]
    else:
        tensor.untyped_storage().resize_(2 * both.nbytes)
    assert not made.is_current([tensor])
