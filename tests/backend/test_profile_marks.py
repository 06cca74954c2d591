"""The code of frames with graphs of ours marks nothing in profiles; that of others does as before."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo import config
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from tests.backend.harness import compile_and_run, prune_


def _marks(function: Callable[..., object]) -> bool:
    (entry,) = _debug_get_cache_entry_list(function.__code__)  # type: ignore[attr-defined]
    return any("record_pregraph" in name for name in entry.code.co_names)


def test_frames_of_ours_have_no_marks_and_the_setting_is_as_before() -> None:
    layer, x = prune_(nn.Linear(64, 48)).eval(), torch.randn(4, 64)

    def ours(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = layer(x)
        return y

    def other(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = layer(x)
        return y + 1

    compile_and_run(ours, x)
    assert config.record_runtime_overhead and not _marks(ours)
    torch.compile(other, backend="eager")(x)
    assert _marks(other)


@pytest.mark.parametrize("wanted", [True, False])
def test_the_setting_of_a_user_stays(wanted: bool) -> None:
    layer, x = prune_(nn.Linear(64, 48)).eval(), torch.randn(4, 64)
    with config.patch(record_runtime_overhead=wanted):
        compile_and_run(lambda x: layer(x), x)
        assert config.record_runtime_overhead is wanted
