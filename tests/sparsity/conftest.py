"""Fixtures. A test file asks for one for all of its tests with `pytestmark = pytest.mark.usefixtures("fresh_dynamo")`."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(params=[torch.float64, torch.bfloat16])
def other_default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """The test runs under another default dtype than float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """The test starts with Dynamo forgotten, its counters at zero, and the same random numbers."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
