"""The text of a random model: a module, how it is pruned, in what state it is, and the calls that it gets."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

HEAD = """import copy
import torch
import torch.nn.functional as F
from torch import nn
from tests.fuzz.pruned import inputs, open_sizes, prune_, shifted, small_layers_pay

torch.manual_seed({seed})


class Model(nn.Module):
    def __init__(self):
        super().__init__()
"""

WIDTHS = [8, 12, 16, 17, 24, 32, 33, 40, 48, 64]
ACTIVATIONS = [
    "torch.relu", "F.gelu", "F.silu", "torch.tanh", "torch.sigmoid", "F.leaky_relu", "F.hardswish", "F.relu6", "F.softplus",
    "F.elu", "torch.abs", "torch.square", "torch.sin", "torch.erf", "F.mish", "F.logsigmoid",
]  # fmt: skip


@dataclass
class ModelProgram:
    """kind        what `h` is: "sequence", "graph" or "images"
    made        lines that make the module's layers
    forward     lines of its forward
    pruning     arguments of `prune_`
    prepared    a line between pruning and compiling, or none
    calls       arguments of `inputs`, one for each call
    change      a line between the first two calls, or none
    training    whether the module is in train mode
    modes       of autograd for each call: "enable_grad", "no_grad" or "inference_mode"
    backward    how each call with gradients is differentiated: "once", "twice" (gradients of gradients) or ""
    written     whether the result of each call is written to
    marked      how a size of the input is marked for Dynamo: "", "dynamic" or "unbacked"
    smaller     whether empty rows, columns and filters pay in small models, too
    """

    seed: int
    kind: str
    dtype: str = "torch.float32"
    made: list[str] = field(default_factory=list)
    forward: list[str] = field(default_factory=list)
    pruning: str = ""
    prepared: str = ""
    calls: list[str] = field(default_factory=list)
    change: str = ""
    training: bool = False
    modes: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)
    written: bool = False
    dynamic: str = "None"
    marked: str = ""
    smaller: bool = False
    options: str = ""

    def definition(self) -> str:
        """The model, made and pruned."""
        names = "h, source, target, weights" if self.kind == "graph" else "h"
        lines = [HEAD.format(seed=self.seed) + "\n".join(f"        {line}" for line in self.made or ["pass"])]
        lines += ["", f"    def forward(self, {names}):", *(f"        {line}" for line in self.forward), "        return h"]
        lines += ["", "", f"model = prune_(shifted(Model()), {self.pruning}).to({self.dtype})", f"model.train({self.training})"]
        return "\n".join([*lines, self.prepared])

    def inputs(self, call: str) -> str:
        """The call that makes what a call is given."""
        return f"inputs({call}, dtype={self.dtype}, kind={self.kind!r})"

    def __str__(self) -> str:
        lines = [self.definition()]
        lines += ["small_layers_pay().start()"] if self.smaller else []
        lines += [f"model = torch.compile(model, backend='sparse', dynamic={self.dynamic}, options={self.options})"]
        for n, (call, mode, backward) in enumerate(zip(self.calls, self.modes, self.backward, strict=True)):
            lines += [f"given = {self.inputs(call)}"]
            lines += [f"open_sizes(given, {self.kind!r}, {self.marked!r})"] if self.marked else []
            lines += [f"given[0].requires_grad_({mode == 'enable_grad'})"]
            lines += [f"with torch.{mode}(): out = model(*given){'.mul_(2)' if self.written else ''}"]
            if backward == "once":
                lines += ["out.square().sum().backward()"]
            elif backward:
                lines += ["(first,) = torch.autograd.grad(out.square().sum(), given[0], create_graph=True)"]
                lines += ["first.square().sum().backward()"]
            lines += [self.change] if n == 0 and self.change else []
        return "\n".join(lines)


class Builder:
    """Writes layers and lines; `features` is what the input has, one of `widths`, and `width` what `h` has by now."""

    def __init__(self, rng: random.Random, program: ModelProgram, widths: Sequence[int]) -> None:
        self.rng, self.program = rng, program
        self.features = self.width = rng.choice(widths)
        self.products = 0

    def layer(self, text: str) -> str:
        """A layer, made; its name."""
        name = f"m{len(self.program.made)}"
        self.program.made.append(f"self.{name} = {text}")
        return f"self.{name}"

    def line(self, text: str) -> None:
        """A line of forward."""
        self.program.forward.append(text)

    def linear(self, inputs: int, outputs: int) -> str:
        """The name of a linear layer of one of many kinds, a function of a tensor."""
        self.products += 1
        bias = self.rng.random() < 0.7
        kind = self.rng.randrange(9)
        if kind < 5:
            return self.layer(f"nn.Linear({inputs}, {outputs}, bias={bias})")
        b = self.layer(f"nn.Parameter(torch.randn({outputs}))")
        if kind in (5, 6):
            w = self.layer(f"nn.Parameter(torch.randn({inputs}, {outputs}) / {inputs}**0.5)")
            return f"(lambda x: x @ {w} + {b})" if kind == 5 else f"(lambda x: torch.einsum('...i,io->...o', x, {w}))"
        w = self.layer(f"nn.Parameter(torch.randn({outputs}, {inputs}) / {inputs}**0.5)")
        if kind == 7:
            return f"(lambda x: F.linear(x, {w} * 2, {b}))"
        return f"(lambda x: torch.addmm({b}, x.reshape(-1, {inputs}), {w}.t()).reshape(*x.shape[:-1], {outputs}))"

    def activation(self) -> str:
        """The name of a function."""
        return self.rng.choice(ACTIVATIONS)

    def norm(self) -> str:
        """A norm over features, or none."""
        made = self.rng.choice([f"nn.LayerNorm({self.width})", f"nn.RMSNorm({self.width})", "nn.Identity()"])
        return self.layer(made)

    def wider_than_one(self) -> None:
        """Leaves h as it is, or makes a result of another shape of it."""
        after = ["h.flatten(0, -2)", "h.mean(0)", "h.transpose(-1, -2)", "torch.log_softmax(h, -1)", "h", "h", "h",
                 "h[..., ::2]", "h.sum(-1)", "(h * 2, h)[0]"]  # fmt: skip
        self.line(f"h = {self.rng.choice(after)}")
