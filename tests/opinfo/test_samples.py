"""Some of PyTorch's own samples of its operators; all of them, in minutes, by `python -m tests.opinfo`."""

import pytest

pytest.importorskip("expecttest")  # which torch.testing._internal needs

from tests.opinfo.samples import FORMATS, samples

NAMES = (
    "mul", "div", "addmm", "matmul", "einsum", "amax", "prod", "count_nonzero", "linalg.vector_norm", "cat", "stack", "permute",
    "reshape", "expand", "clamp", "nn.functional.linear", "__rsub__", "index_select", "unflatten",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_samples() -> None:
    outcomes = [
        (each.name, name, *each.outcome(FORMATS[name])) for each in samples(NAMES.__contains__) for name in ("CSR", "BSR")
    ]
    not_right = [outcome for outcome in outcomes if outcome[2] not in ("right", "torch refuses")]
    assert not not_right
    assert len(outcomes) > 200
