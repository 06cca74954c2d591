"""Operations on SparseTensors with a GPU: their kernels run in the emulator."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from gossamer import SparseTensor
from gossamer.backend.run import message_ops
from gossamer.dialects.format import Format
from gossamer.sparsity.compiler.contract_ir import Operand
from gossamer.sparsity.compiler.operands import dense, flat
from gossamer.sparsity.operations import dense_results
from gossamer.sparsity.tensor import slices
from gossamer.sparsity.tensor.sparse_tensor import bound_to
from tests.backend.harness import assert_same, pruned
from tests.gpu.emulated_device import EmulatedDevice, emulated_device


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevice]:
    """A GPU in place of the CPU."""
    torch.manual_seed(0)
    emulated = emulated_device()
    with emulated.installed(monkeypatch):
        yield emulated


def product(matrix: SparseTensor, letters: str, x: Tensor, of_x: str, result: str) -> Tensor:
    """What `gossamer::einsum` gives for CUDA tensors."""
    return dense_results.einsum_on_cuda(*flat([bound_to(letters, matrix), dense(of_x, x)], Operand(result)))


@pytest.mark.parametrize("format", [Format.CSR, Format.CSC, Format.COO, Format.CSR.with_widths(32, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_of_any_format_times_a_dense_one(format: Format, dtype: torch.dtype, gpu: EmulatedDevice) -> None:
    a, x = pruned(37, 50, dtype=dtype), torch.randn(50, 24).to(dtype)
    assert_same(product(SparseTensor.from_dense(a, format), "ij", x, "jk", "ik"), a @ x)
    assert gpu.schedules == ["rows"]


def test_the_transpose_and_a_vector(gpu: EmulatedDevice) -> None:
    a, x, v = pruned(37, 50), torch.randn(37, 24), torch.randn(50)
    matrix = SparseTensor.from_dense(a)
    assert_same(product(matrix, "ij", x, "ik", "jk"), a.t() @ x)
    assert_same(product(matrix, "ij", v, "j", "i"), a @ v)
    assert gpu.schedules == ["rows"] * 2


def test_samples_at_the_entries(gpu: EmulatedDevice) -> None:
    a, x, y = pruned(37, 50), torch.randn(37, 24), torch.randn(50, 24)
    matrix = SparseTensor.from_dense(a)
    operands = [bound_to("ij", matrix), dense("ik", x), dense("jk", y)]
    values = dense_results.sample_on_cuda(*flat(operands, Operand("p")))
    assert_same(values, (x @ y.t())[a != 0])
    assert gpu.schedules == ["dots"]


FOR_CPUS = [f"attend_{what}{backward}" for what in ("masked", "tiles", "under") for backward in ("", "_backward")]
FOR_CPUS += ["chain", "attend_flex", "attend_flex_backward", "attend_masked_scores", "masked_gradient"]
FOR_CPUS += ["exported", "masked_filter_gradient", "max_pool"]
FOR_CPUS += ["attend_cached", "attend_appended"]
FOR_CPUS += ["bags_gradient", "max_bags", "max_bags_gradient"]
FOR_CPUS += ["coarse_sites", "convolve_sites", "convolve_sites_weight", "largest_sites", "sum_sites"]
"""Operations that graphs of CPU tensors alone have, and those of point clouds, which refuse others."""


def test_every_operation_has_an_implementation_for_cuda() -> None:
    ours = [name for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU") if name.startswith("gossamer::")]
    assert {"gossamer::einsum", message_ops.aggregate.name()} <= set(ours)
    for name in set(ours) - {f"gossamer::{name}" for name in FOR_CPUS}:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"), name


def on_gpu(matrix: SparseTensor, mode: FakeTensorMode) -> Tensor:
    """Fake, as if it were there."""
    fake = SparseTensor(matrix.format, matrix.shape, [mode.from_tensor(array) for array in matrix.components])
    moved: Tensor = torch.ops.aten._to_copy.default(fake, device=torch.device("cuda", 0))  # what fake.to("cuda") does
    return moved


def test_a_sparse_tensor_moves_to_a_gpu_with_all_its_arrays() -> None:
    real = SparseTensor.from_dense(pruned(3, 5))
    with FakeTensorMode() as mode:
        moved = on_gpu(real, mode)
        assert isinstance(moved, SparseTensor) and moved.device == torch.device("cuda", 0)
        assert {array.device for array in moved.components} == {torch.device("cuda", 0)}
        product = moved @ torch.empty(5, 4, device="cuda")
    assert product.shape == (3, 4) and product.device == torch.device("cuda", 0)


def test_indices_may_be_on_the_cpu() -> None:
    """As torch has it for dense tensors."""
    real = SparseTensor.from_dense(pruned(3, 5))
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        matrix = on_gpu(real, mode)
        for index in (torch.empty(2, dtype=torch.int64), torch.empty(3, dtype=torch.bool)):
            assert index.is_cpu and slices._index(index, 0, matrix).is_cuda
