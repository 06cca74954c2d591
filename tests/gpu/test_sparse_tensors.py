"""Operations on SparseTensors with a GPU: their kernels run in the emulator."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gossamer import SparseTensor
from gossamer.dialects.format import Format
from gossamer.sparsity import cuda_products
from gossamer.sparsity.contract_ir import Operand
from gossamer.sparsity.operands import dense, flat
from gossamer.sparsity.tensor import bound_to
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
    return cuda_products.einsum(*flat([bound_to(letters, matrix), dense(of_x, x)], Operand(result)))


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
    values = cuda_products.sample(*flat(operands, Operand("p")))
    assert_same(values, (x @ y.t())[a != 0])
    assert gpu.schedules == ["dots"]


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_gradients_are_products_and_samples_too(gpu: EmulatedDevice) -> None:
    library = torch.library.Library("gossamer", "IMPL")
    for name in ("einsum", "sample"):
        library.impl(name, getattr(cuda_products, name), "CPU", allow_override=True)
    try:
        pattern, x = pruned(37, 50), torch.randn(50, 24, requires_grad=True)
        matrix = SparseTensor.from_dense(pattern).requires_grad_()
        (matrix @ x).square().sum().backward()
    finally:
        library._destroy()
    exact = pattern.clone().requires_grad_()
    given = x.detach().clone().requires_grad_()
    (exact @ given).square().sum().backward()
    assert gpu.schedules.count("rows") == 2 and gpu.schedules.count("dots") == 1
    assert_same(x.grad, given.grad)
    assert_same(matrix.grad.values().flatten(), exact.grad[pattern != 0])


def test_what_has_no_kernel_goes_through_the_cpu_with_one_warning(gpu: EmulatedDevice) -> None:
    a, b = pruned(8, 5), pruned(5, 6)
    operands = [bound_to("ij", SparseTensor.from_dense(a)), bound_to("jk", SparseTensor.from_dense(b))]
    cuda_products._warn.cache_clear()
    with pytest.warns(UserWarning, match=r"gossamer::einsum has no kernel for GPUs here") as warned:
        results = [cuda_products.einsum(*flat(operands, Operand("ik"))) for _ in range(2)]
    assert len(warned) == 1 and gpu.schedules == []
    assert_same(results[0], a @ b)


def test_integers_have_no_kernel_and_are_not_compiled_twice(gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    a, x = pruned(8, 5).int(), torch.randint(9, (5, 3), dtype=torch.int32)
    compiled: list[str] = []
    compile_ = cuda_products.compile_gpu_region
    monkeypatch.setattr(cuda_products, "compile_gpu_region", lambda *a, **k: (compiled.append(""), compile_(*a, **k))[1])
    cuda_products._kernel.cache_clear()
    for _ in range(2):
        assert product(SparseTensor.from_dense(a), "ij", x, "jk", "ik").equal(a @ x)
    assert len(compiled) == 1


@pytest.mark.parametrize(
    "name", ["einsum", "sample", "einsum_sparse", "add_sparse", "convert", "compress", "pick", "softmax", "segment_reduce"]
)
def test_every_operation_has_an_implementation_for_cuda(name: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"gossamer::{name}", "CUDA")


def test_a_sparse_tensor_moves_to_a_gpu_with_all_its_arrays() -> None:
    real = SparseTensor.from_dense(pruned(3, 5))
    with FakeTensorMode() as mode:
        fake = SparseTensor(Format.CSR, (3, 5), [mode.from_tensor(array) for array in real.components])
        moved = torch.ops.aten._to_copy.default(fake, device=torch.device("cuda", 0))  # what fake.to("cuda") does
        assert isinstance(moved, SparseTensor) and moved.device == torch.device("cuda", 0)
        assert {array.device for array in moved.components} == {torch.device("cuda", 0)}
        product = moved @ torch.empty(5, 4, device="cuda")
    assert product.shape == (3, 4) and product.device == torch.device("cuda", 0)
