"""Fixtures of tests that compile: a test file asks for one with `pytestmark = pytest.mark.usefixtures("fresh_dynamo")`."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """The test starts with Dynamo forgotten, its counters at zero, and the same random numbers."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
