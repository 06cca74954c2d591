"""Operations on a CSR matrix that comes with each call, as graphs and backward passes have them: checks and timings."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor

from benchmarks.gpu.cases import BERT, TYPES
from benchmarks.gpu.checks import compared
from benchmarks.gpu.kernels import Code
from benchmarks.gpu.timings import contest


@dataclass(frozen=True)
class OpenProduct:
    """What a kernel of open shape computes of a CSR matrix a: "rows" a x (SpMM, SpMV), "dots" x y^T at its entries (SDDMM),
    "segments" the softmax of each row, or one number for each."""

    schedule: str
    element: str
    reduction: str | None = None  # "sum", "prod", "amax" or "amin" of the rows

    @property
    def name(self) -> str:
        """A name for files and tables."""
        return "-".join([self.schedule, *([self.reduction] if self.reduction else []), self.element])

    def dense(self, a: Tensor, width: int) -> list[Tensor]:
        """Random dense operands for a."""
        sizes = {"rows": [a.shape[1]], "dots": a.shape, "segments": []}[self.schedule]
        return [torch.randn(size, width).to(TYPES[self.element]) for size in sizes]

    def size(self, rows: int, width: int, entries: int) -> tuple[int, ...]:
        """Of the result."""
        if self.schedule == "rows":
            return rows, width
        return (entries,) if self.reduction is None else (rows,)

    def reference(self, a: Tensor, entries: tuple[Tensor, Tensor], dense: list[Tensor]) -> Tensor:
        """By torch, of a dense a whose entries are at these rows and columns."""
        if self.schedule == "rows":
            return a @ dense[0]
        if self.schedule == "dots":
            return (dense[0] @ dense[1].t())[entries]
        if self.reduction is None:
            return torch.full_like(a, -torch.inf).index_put(entries, a[entries]).softmax(1)[entries]
        neutral = {"sum": 0.0, "prod": 1.0, "amax": -torch.inf, "amin": torch.inf}[self.reduction]
        filled = torch.full_like(a, neutral).index_put(entries, a[entries])
        return torch.stack([getattr(row, self.reduction)() for row in filled])

    def as_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """The inverse of `as_json`."""
        return cls(**fields)


PRODUCTS = [OpenProduct(schedule, element) for schedule in ("rows", "dots", "segments") for element in TYPES]
PRODUCTS += [OpenProduct("segments", "f32", reduction) for reduction in ("sum", "prod", "amax", "amin")]


@dataclass(frozen=True)
class Shape:
    """A matrix of rows x columns with random entries, of whose rows the first ones are `hubs` with half of all columns."""

    rows: int
    columns: int
    width: int
    density: float
    hubs: int = 0

    def coordinates(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Positions and coordinates, on the device."""
        counts = torch.poisson(torch.full((self.rows,), self.density * self.columns)).long().clamp(max=self.columns)
        counts[: self.hubs] = self.columns // 2
        row = torch.arange(self.rows).repeat_interleave(counts)
        entries = (row * self.columns + torch.randint(self.columns, row.shape)).unique().to(device)
        found = torch.bincount(entries // self.columns, minlength=self.rows)
        return torch.cat([found.new_zeros(1), found.cumsum(0)]), entries % self.columns


CHECKED = [Shape(1, 1, 1, 1.0), Shape(35, 50, 1, 0.3), Shape(35, 50, 7, 0.3), Shape(300, 1500, 33, 0.02, hubs=2),
           Shape(129, 257, 64, 0.1), Shape(129, 257, 200, 0.1, hubs=1), Shape(9, 40, 520, 0.0)]  # fmt: skip
_GRAPHS = [Shape(170_000, 170_000, width, 7e-5, hubs) for hubs in (0, 4) for width in (1, 16, 64, 128, 256)]
_LAYERS = [Shape(m, k, n, d) for m, k in BERT for n in (2048, 4096, 8192) for d in (0.3, 0.2, 0.1, 0.05, 0.02)]
TIMED = {"rows": [*_GRAPHS, *_LAYERS], "dots": [shape for shape in _GRAPHS if shape.width > 1]}
TIMED["segments"] = [shape for shape in _GRAPHS if shape.width == 1]


class Call:
    """A kernel with its operands on a device: a call launches it on the current stream and returns the result."""

    def __init__(self, code: Code, product: OpenProduct, shape: Shape, device: torch.device) -> None:
        self.product, self._code, self._device = product, code, device
        self.arrays = [*shape.coordinates(device)]
        self.arrays.append(torch.randn(self.arrays[1].shape).to(TYPES[product.element]).to(device))
        self.shape = (shape.rows, shape.columns)
        self.dense = [t.to(device) for t in product.dense(torch.empty(self.shape, device="meta"), shape.width)]
        size = product.size(shape.rows, shape.width, self.arrays[1].numel())
        self.out = torch.full(size, float("nan"), dtype=TYPES[product.element], device=device)
        self._read = self.arrays[::2] if product.schedule == "segments" else self.arrays
        self._kernel = code.kernel(device)

    def __call__(self) -> Tensor:
        words = self._code.words([*self._read, *self.dense, self.out])
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._kernel.run(words, self.out.shape[0], self._device.index or 0, stream)
        return self.out

    def by_kernel(self) -> Callable[[], Tensor]:
        """The call itself."""
        return self

    def by_torch(self) -> Callable[[], Tensor]:
        """The same by torch, from a sparse tensor; cuSPARSE computes it but for the softmax."""
        positions, coordinates, values = self.arrays
        stored = torch.sparse_csr_tensor(positions, coordinates, values, size=self.shape)
        if self.product.schedule == "rows":
            return lambda: stored @ self.dense[0]
        if self.product.schedule == "dots":
            return lambda: torch.sparse.sampled_addmm(stored, self.dense[0], self.dense[1].t(), beta=0.0)
        if (kind := self.product.reduction) is not None:
            names = {"amax": "max", "amin": "min"}
            return lambda: torch.segment_reduce(values, names.get(kind, kind), offsets=positions, initial=None)
        by_coordinates = stored.to_sparse_coo()
        return lambda: torch.sparse.softmax(by_coordinates, 1)


def check(codes: dict[OpenProduct, Code], device: torch.device, small: bool = False) -> Iterator[dict[str, Any]]:
    """A record for every product, kernel and shape; `ok` says whether it is right. `small`: of one shape only."""
    for product, code in codes.items():
        for name in code.launches:
            for shape in CHECKED[:1] if small else CHECKED:
                call = Call(code.only(name), product, shape, device)
                a = torch.zeros(call.shape, dtype=torch.float64)
                rows = torch.arange(shape.rows).repeat_interleave(call.arrays[0].cpu().diff())
                a[rows, call.arrays[1].cpu()] = call.arrays[2].cpu().double()
                expected = product.reference(a, (rows, call.arrays[1].cpu()), [t.cpu().double() for t in call.dense])
                yield {"check": product.name, "kernel": name, "shape": asdict(shape), **compared(call().cpu(), expected)}


def time_all(codes: dict[OpenProduct, Code], device: torch.device) -> Iterator[dict[str, Any]]:
    """A record for every product and timed shape, with microseconds by contender, or why it cannot take part."""
    for product, code in codes.items():
        for shape in TIMED[product.schedule]:
            call = Call(code, product, shape, device)
            made = {"gossamer": call.by_kernel, "torch.sparse": call.by_torch}
            entries = call.arrays[1].numel()
            yield {"product": product.name, "shape": asdict(shape), "nonzeros": entries, **contest(made)}
