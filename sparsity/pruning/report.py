"""The report of `prune` and `decompose`: the sparsity, error and predicted gain of each layer."""

import io
from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class PrunedLayer:
    """A layer in the report.

    density   share of nonzeros in its weight
    error     the squared error of its output, as a share of the variance of the dense layer's output (layer_problem.py)
    dense_us  predicted microseconds of a call of the dense layer, for the report's number of tokens
    us        predicted microseconds of a call of the pruned layer
    note      why it was left dense, otherwise ""
    """

    name: str
    shape: tuple[int, ...]
    density: float
    error: float
    dense_us: float
    us: float
    note: str = ""


@dataclass
class PruningReport:
    """The layers in the order in which they were pruned. `print` shows a table.

    left  how many other modules of each kind hold weights
    """

    tokens: int
    layers: list[PrunedLayer] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)

    @property
    def sparsity(self) -> float:
        """The share of zeros in all layers."""
        sizes = [layer.shape[0] * layer.shape[1] for layer in self.layers]
        return 1 - sum(size * layer.density for size, layer in zip(sizes, self.layers, strict=True)) / sum(sizes)

    @property
    def gain(self) -> float:
        """The predicted time of all layers dense, divided by their time now."""
        dense, now = sum(layer.dense_us for layer in self.layers), sum(layer.us for layer in self.layers)
        return dense / now if now else 1.0

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=100, color_system=None, highlight=False, markup=False)
        console.print(
            f"{len(self.layers)} layers pruned, {self.sparsity:.1%} of their weights are 0; "
            f"{self.gain:.1f}x as fast as dense is predicted for {self.tokens} tokens"
        )
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("layer", overflow="fold")
        for title in ("shape", "nonzero", "error", "gain"):
            table.add_column(title, justify="right", no_wrap=True)
        for each in self.layers:
            gain = f"{each.dense_us / each.us:.1f}x" if each.us else "-"
            table.add_row(
                f"{each.name}{': ' if each.note else ''}{each.note}", "x".join(map(str, each.shape)), f"{each.density:.1%}",
                f"{each.error:.4f}", gain,
            )  # fmt: skip
        console.print(table)
        if self.left:
            console.print(f"left as they were: {', '.join(f'{count} {kind}' for kind, count in self.left.items())}")
        text = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in text.strip().splitlines())
