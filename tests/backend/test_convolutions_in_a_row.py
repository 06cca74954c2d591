"""Convolutions in a row as one operation: what is joined, what is prepared, and that none of it goes stale."""

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.backend.run import convolved_row
from gossamer.backend.run.convolved_row import ConvolvedRow
from gossamer.backend.run.row_of_kernels import Ready
from tests.backend.harness import assert_same, compile_and_run
from tests.fuzz.convolution_rows import difference

Seen = list[tuple[int, bool]]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """For every call of a row: how many convolutions it has, and whether they ran as prepared."""
    seen, ready = Seen(), list[bool]()
    row, prepared = ConvolvedRow.__call__, Ready.__call__

    def call(self: ConvolvedRow, operands: list[Tensor]) -> list[Tensor]:
        ready.clear()
        found = row(self, operands)
        seen.append((len(self.steps), bool(ready)))
        return found

    def run(self: Ready, images: list[Tensor]) -> list[Tensor]:
        ready.append(True)
        return prepared(self, images)

    monkeypatch.setattr(ConvolvedRow, "__call__", call)
    monkeypatch.setattr(Ready, "__call__", run)
    return seen


class Norm(nn.BatchNorm2d):
    """A batch norm in inference, written out: an eager remainder has it as one operation."""

    def forward(self, x: Tensor) -> Tensor:
        mean, var, scale, shift = (
            each[:, None, None] for each in (self.running_mean, self.running_var, self.weight, self.bias)
        )  # type: ignore[index]
        return (x - mean) * (var + self.eps).rsqrt() * scale + shift


class Inverted(nn.Module):
    """A block of MobileNetV2, and what another part of a network would read of it."""

    def __init__(self, channels: int = 6, wide: int = 20, stride: int = 1) -> None:
        super().__init__()
        self.expand, self.project = nn.Conv2d(channels, wide, 1, bias=False), nn.Conv2d(wide, channels, 1)
        self.depthwise = nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False)
        self.norms = nn.ModuleList(Norm(n, eps=1e-3) for n in (wide, wide, channels))
        for norm in self.norms:
            nn.init.uniform_(norm.running_var, 0.5, 2)
            nn.init.normal_(norm.running_mean)
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
        with torch.no_grad():
            for layer in (self.expand, self.project):
                layer.weight *= torch.rand_like(layer.weight) < 0.3
        self.skips = stride == 1
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.norms
        y = F.relu6(first(self.expand(x)))
        y = F.silu(second(self.depthwise(y)))
        y = third(self.project(y))
        return x + y if self.skips else y


def truth(network: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = copy.deepcopy(network).double()(x.double()).to(x.dtype)
    return found


@pytest.mark.parametrize("dense", ["eager", "inductor"])
def test_two_blocks_are_one_operation_prepared_at_the_second_call(rows: Seen, dense: str) -> None:
    network, x = nn.Sequential(Inverted(), Inverted()), torch.randn(2, 6, 9, 7)
    run = compile_and_run(network, x, dense=dense)
    assert len(run.decisions) == 6
    outputs = [run.output] + [run.function(x) for _ in range(3)]
    for output in outputs:
        assert_same(output, truth(network, x))
    assert rows == [(6, False), (6, True), (6, True), (6, True)]
    assert len({output.data_ptr() for output in outputs}) == 4  # each call has a result of its own


@pytest.mark.parametrize("change", ["values", "pattern", "norm", "data", "parameter"])
def test_what_is_prepared_notices_all_changes(rows: Seen, change: str) -> None:
    network, x = Inverted(), torch.randn(1, 6, 8, 8)
    run = compile_and_run(network, x)
    run.function(x)
    with torch.no_grad():
        if change == "values":
            network.expand.weight.mul_(-2)
        elif change == "pattern":
            network.project.weight.copy_(torch.randn_like(network.project.weight) * (torch.rand(6, 20, 1, 1) < 0.4))
        elif change == "norm":
            network.norms[1].running_var.add_(1)
        elif change == "data":
            network.depthwise.weight.data = torch.randn(20, 1, 3, 3)
        else:
            network.norms[0].bias = nn.Parameter(torch.randn(20))
    expected = truth(network, x)
    for _ in range(3):
        assert_same(run.function(x), expected)
    assert rows[1][1] and rows[-1][1] and not rows[2][1]


def test_weights_that_change_at_every_call_run_region_by_region(rows: Seen) -> None:
    network, x = Inverted(), torch.randn(1, 6, 8, 8)
    run = compile_and_run(network, x)
    for _ in range(4):
        with torch.no_grad():
            network.expand.weight.mul_(1.5)
        assert_same(run.function(x), truth(network, x))
    assert not any(prepared for _, prepared in rows)


class Skipping(nn.Module):
    """Results that others read: inside of the row, before its end and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Inverted() for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first = self.blocks[0](x)
        second = self.blocks[1](first)
        pooled = first.mean((2, 3))
        third = self.blocks[2](second)
        return pooled, first, torch.cat([second, third], 1).softmax(1)


@pytest.mark.parametrize("dense", ["eager", "inductor"])
def test_results_that_others_read_come_out(rows: Seen, dense: str) -> None:
    network, x = Skipping(), torch.randn(2, 6, 7, 5)
    run = compile_and_run(network, x, dense=dense)
    for _ in range(3):
        for found, expected in zip(run.function(x), copy.deepcopy(network).double()(x.double()), strict=True):
            assert_same(found, expected.float())
    assert {count for count, _ in rows} == {9}


def test_layers_of_equal_sizes_share_a_row_and_keep_their_weights(rows: Seen) -> None:
    blocks = [Inverted() for _ in range(3)]
    network = nn.Sequential(blocks[0], nn.Softmax(1), blocks[1], nn.Softmax(1), blocks[2])
    x = torch.randn(1, 6, 6, 6)
    run = compile_and_run(network, x)
    for _ in range(3):
        assert_same(run.function(x), truth(network, x))
    assert rows[-3:] == [(3, True)] * 3


@pytest.mark.parametrize("dims", [(0,), (2, 3), (0, 2, 3)])
def test_sizes_may_be_open(rows: Seen, dims: tuple[int, ...]) -> None:
    network, x = Inverted(), torch.randn(2, 6, 9, 7)
    for dim in dims:
        torch._dynamo.mark_dynamic(x, dim)
    run = compile_and_run(network, x)
    for n, side in enumerate((3, 1, 4, 5, 6, 8, 0)):
        shape = [side + 2 if dim in dims and dim else size for dim, size in enumerate(x.shape)]
        shape[0] = side if 0 in dims else 2
        given = torch.randn(shape)
        for _ in range(2):
            assert_same(run.function(given), truth(network, given))
        assert n == 6 or rows[-1][1]


def test_sizes_may_be_unknown_until_it_runs(rows: Seen) -> None:
    block = Inverted()

    def chosen(x: Tensor, count: Tensor) -> Tensor:
        number = count.item()
        torch._check(number >= 2)
        torch._check(number <= x.shape[0])
        return block(x[:number].contiguous())

    x = torch.randn(9, 6, 8, 8)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        run = compile_and_run(chosen, x, torch.tensor(4))
        for number in (4, 4, 7):
            assert_same(run.function(x, torch.tensor(number)), truth(block, x[:number]))
    assert rows[-1] == (3, True)


def test_images_need_not_lie_in_order_and_nan_goes_through(rows: Seen) -> None:
    network, x = Inverted(), torch.randn(2, 6, 9, 7)
    run = compile_and_run(network, x)
    given = torch.randn(2, 6, 9, 7).contiguous(memory_format=torch.channels_last)
    run.function(given)
    assert_same(run.function(given), truth(network, given))
    given[0, :, 4, 4] = float("nan")
    given[1, 0] = float("inf")
    found, expected = run.function(given), truth(network, given)
    assert found[0].isnan().any() and not (found.isnan() & ~expected.isnan()).any()
    assert_same(found[0, :, :2], expected[0, :, :2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(rows: Seen, dtype: torch.dtype) -> None:
    network, x = Inverted().to(dtype), torch.randn(2, 6, 9, 7, dtype=dtype)
    run = compile_and_run(network, x)
    expected = truth(network, x)
    for _ in range(3):
        torch.testing.assert_close(run.function(x), expected, rtol=5e-2, atol=8e-2)
    assert rows[-1][1]


@pytest.fixture
def in_bands(rows: Seen, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bands of four channels of images of 8 x 8 on one thread; how many calls each row comes to."""
    from gossamer.backend.convolution import bands

    monkeypatch.setattr(bands, "_LARGE", 1 << 10)
    monkeypatch.setattr(bands, "_BAND", 4 * 4 * 8 * 8)
    monkeypatch.setattr(convolved_row, "prepare", counted(convolved_row.prepare, calls := []))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield calls
    torch.set_num_threads(threads)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("width", [6, 8])  # the latter are whole tiles, which are read as they lie
def test_large_images_go_through_by_bands_of_channels(in_bands: list[int], stride: int, images: int, width: int) -> None:
    network, x = Inverted(stride=stride), torch.randn(images, 6, 8, width)
    run = compile_and_run(network, x, disable=["smaller-layers"])
    for _ in range(3):
        assert_same(run.function(x), truth(network, x))
    assert in_bands == [images * 2 * {6: 4, 8: 5}[width] + 1]  # bands of five or four channels, and what projects


@pytest.mark.parametrize("layers", [2, 3])
def test_what_a_band_reads_lives_until_the_last_band_has_read_it(in_bands: list[int], layers: int) -> None:
    wide, pairs = 20, list[nn.Module]()
    for _ in range(layers):
        pointwise, depthwise = nn.Conv2d(wide, wide, 1), nn.Conv2d(wide, wide, 3, padding=1, groups=wide)
        with torch.no_grad():
            pointwise.weight *= torch.rand_like(pointwise.weight) < 0.3
        pairs += [pointwise, nn.ReLU(), depthwise, nn.ReLU()]
    network, x = nn.Sequential(*pairs).eval(), torch.randn(1, wide, 8, 8)
    run = compile_and_run(network, x)
    for _ in range(3):
        assert_same(run.function(x), truth(network, x))
    assert in_bands == [layers * 2 * 5]


@pytest.mark.parametrize("what", ["map", "vector", "types"])
def test_bands_are_left_where_an_operand_cannot_be_cut(in_bands: list[int], what: str) -> None:
    """A learned map of all channels, a vector that comes with the images, and images of another type than results."""
    expand, mix = nn.Conv2d(6, 20, 1), nn.Conv2d(20, 20, 3, padding=1, groups=20)
    with torch.no_grad():
        expand.weight *= torch.rand_like(expand.weight) < 0.3
    place, narrow = nn.Parameter(torch.randn(1, 20, 8, 8)), what == "types"
    if narrow:
        expand.bfloat16()

    def network(x: Tensor, scale: Tensor) -> Tensor:
        y = expand(x.bfloat16()).float() + scale if narrow else expand(x) * (scale if what == "vector" else place)
        return mix(y.relu())

    number = 1 if what == "vector" else 2
    x, scale = torch.randn(number, 6, 8, 8), torch.randn(number, 20, 8, 8) if narrow else torch.randn(1, 20, 1, 1)
    with torch.no_grad():
        run = compile_and_run(network, x, scale)
        for _ in range(2):
            torch.testing.assert_close(run.function(x, scale), network(x, scale), rtol=2e-2 if narrow else 1e-4, atol=2e-2)


def counted(prepare: Callable[..., Ready | None], calls: list[int]) -> Callable[..., Ready | None]:
    def call(*given: object) -> Ready | None:
        found = prepare(*given)
        assert found is not None
        calls.append(len(found.kernels._calls))
        return found

    return call


def test_threads_prepare_for_themselves(rows: Seen) -> None:
    network, x = Inverted(), [torch.randn(2, 6, 9, 7) for _ in range(4)]
    run, wrong = compile_and_run(network, x[0]), list[str]()
    expected = [truth(network, each) for each in x]

    def work(n: int) -> None:
        with torch.no_grad():
            for _ in range(20):
                if not torch.allclose(run.function(x[n]), expected[n], atol=1e-4):
                    wrong.append(f"thread {n}")

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_parameters_made_in_inference_mode_are_read_anew(rows: Seen) -> None:
    with torch.inference_mode():
        network, x = Inverted(), torch.randn(1, 6, 8, 8)
        run = compile_and_run(network, x)
        network.norms[0].bias += 1
        assert_same(run.function(x), network(x))
        network.norms[0].bias += 1
        assert_same(run.function(x), network(x))


def test_gradients_are_of_regions_by_themselves(rows: Seen) -> None:
    network, x = Inverted().train(), torch.randn(2, 6, 9, 7)
    with torch.enable_grad():
        run = compile_and_run(network, x, grad=True)
        run.output.sum().backward()
    assert not rows and network.expand.weight.grad is not None


def test_writes_that_nobody_counts_are_seen_where_all_is_verified(rows: Seen) -> None:
    network, x = Inverted(), torch.randn(1, 6, 8, 8)
    run = compile_and_run(network, x, verify="full")
    run.function(x)
    network.expand.weight.data.numpy()[:] *= 2
    assert_same(run.function(x), truth(network, x))
    assert not rows


def test_a_row_can_be_stored(rows: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = Inverted(), torch.randn(1, 6, 8, 8)
    found, call = list[tuple[ConvolvedRow, list[Tensor]]](), ConvolvedRow.__call__

    def noted(self: ConvolvedRow, operands: list[Tensor]) -> list[Tensor]:
        found.append((self, operands))
        return call(self, operands)

    monkeypatch.setattr(ConvolvedRow, "__call__", noted)
    run = compile_and_run(network, x)
    row, operands = found[0]
    again = pickle.loads(pickle.dumps(row))
    for _ in range(2):
        assert_same(call(again, operands)[0], run.output)
    assert again.kernels == row.kernels


def test_nothing_prepared_outlives_its_weights(rows: Seen) -> None:
    network, x = Inverted(), torch.randn(1, 6, 8, 8)
    run = compile_and_run(network, x)
    run.function(x)
    old = network.expand.weight
    mine, storage = weakref.ref(old), weakref.ref(old.untyped_storage())
    network.expand.weight = nn.Parameter(old.detach().clone())
    del old
    gc.collect()
    assert mine() is None and storage() is None
    assert_same(run.function(x), truth(network, x))


def test_random_networks(rows: Seen) -> None:
    for seed in range(3):
        error, told = difference(seed)
        assert error <= 1, told
    assert any(prepared for _, prepared in rows)


@pytest.fixture(autouse=True)
def reset() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch._dynamo.reset()
