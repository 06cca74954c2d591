"""Random small models: the text of a module, how it is pruned, and the calls that it gets.

A block reads `h` and leaves `h`, of any shape that ends in features; blocks of graphs read `source` and `target`, too.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

HEAD = """import torch
import torch.nn.functional as F
from torch import nn
from tests.fuzz.pruned import inputs, prune_

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
    """made        lines that make the module's layers
    forward     lines of its forward
    pruning     arguments of `prune_`
    calls       arguments of `inputs`, one for each call
    change      a line between the first two calls, or none
    """

    seed: int
    graph: bool = False
    dtype: str = "torch.float32"
    made: list[str] = field(default_factory=list)
    forward: list[str] = field(default_factory=list)
    pruning: str = ""
    calls: list[str] = field(default_factory=list)
    change: str = ""
    training: bool = False
    dynamic: str = "None"
    marked: bool = False
    options: str = "dict(min_gain=0, strict=True, dense='eager')"

    def definition(self) -> str:
        """The model, made and pruned."""
        names = "h, source, target, weights" if self.graph else "h"
        lines = [HEAD.format(seed=self.seed) + "\n".join(f"        {line}" for line in self.made or ["pass"])]
        lines += ["", f"    def forward(self, {names}):", *(f"        {line}" for line in self.forward), "        return h"]
        return "\n".join([*lines, "", "", f"model = prune_(Model(), {self.pruning}).to({self.dtype})"])

    def __str__(self) -> str:
        lines = [self.definition(), f"model.train({self.training}); torch.set_grad_enabled({self.training})"]
        lines += [f"model = torch.compile(model, backend='sparse', dynamic={self.dynamic}, options={self.options})"]
        for n, call in enumerate(self.calls):
            marks = f"torch._dynamo.mark_dynamic(given[0], {0 if self.graph else 1}); " if self.marked else ""
            lines += [f"given = inputs({call}, dtype={self.dtype}, graph={self.graph}); {marks}out = model(*given)"]
            lines += ["out.square().sum().backward()"] if self.training else []
            lines += [self.change] if n == 0 and self.change else []
        return "\n".join(lines)


def make_model(seed: int) -> ModelProgram:
    """The program of a seed."""
    rng = random.Random(seed)
    program = ModelProgram(seed, graph=rng.random() < 0.35)
    program.dtype = rng.choices(["torch.float32", "torch.float64", "torch.bfloat16"], [6, 2, 2])[0]
    builder = Builder(rng, program)
    for _ in range(rng.choice([1, 1, 2, 2, 3])):
        blocks = GRAPH_BLOCKS if program.graph and rng.random() < 0.7 else BLOCKS
        rng.choice(blocks if program.graph else BLOCKS + SEQUENCE_BLOCKS)(builder)
    if not builder.products:
        linear(builder)
    builder.wider_than_one()
    how = rng.choice(["'in place'", "'in place'", "'prune'", "'parametrize'"])
    shape = rng.choice(["(1, 1)", "(1, 1)", "(1, 1)", "(4, 4)", "(16, 1)", "(1, 8)", "(8, 8)", "'2:4'", "'rows'"])
    program.pruning = f"{how}, density={rng.choice([0, 0.02, 0.1, 0.1, 0.2, 0.3, 0.5])}, shape={shape}"
    program.training = rng.random() < 0.4
    sizes = [0, 1, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 40, 64, 65, 100]
    first = rng.choice(sizes)
    other = rng.choice([first, rng.choice(sizes), rng.choice(sizes)])
    program.dynamic, program.marked = rng.choice([("None", False), ("None", False), ("True", False), ("None", True)])
    if program.marked and min(first, other) < 2:
        program.marked = False
    batch = rng.choice([1, 1, 2, 3])
    edges = rng.choice([0, 1, 10, 50, 300])
    again = edges if program.marked else rng.choice([edges, 1, 2, 77])
    program.calls = [f"{n}, tokens={t}, features={builder.features}, batch={batch}, edges={e}"
                     for n, (t, e) in enumerate([(first, edges), (first, edges), (other, again)])]  # fmt: skip
    program.change = rng.choice(["", *CHANGES])
    if rng.random() < 0.03:
        program.options = "dict(min_gain=0, strict=True)"
    return program


CHANGES = [
    "with torch.no_grad(): [p.mul_(-0.5) for p in model.parameters()]",
    "with torch.no_grad(): [p.copy_(p.flip(0)) for p in model.parameters()]",
    "with torch.no_grad(): [p.zero_() for p in model.parameters()]",
    "with torch.no_grad(): [p.add_(0.01) for p in model.parameters() if p.dim() == 1]",
    "model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})",
]
"""What happens to weights between two calls; masks of parametrizations and hooks are parameters of nothing."""


class Builder:
    """Writes layers and lines; `features` is what the input has, `width` what `h` has by now."""

    def __init__(self, rng: random.Random, program: ModelProgram) -> None:
        self.rng, self.program = rng, program
        self.features = self.width = rng.choice(WIDTHS)
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


def linear(b: Builder) -> None:
    """A layer and what is often after it."""
    width = b.rng.choice(WIDTHS)
    b.line(f"h = {b.linear(b.width, width)}(h)")
    b.width = width
    pointwise(b)


def pointwise(b: Builder) -> None:
    """Elementwise work."""
    gain = b.layer(f"nn.Parameter(torch.randn({b.width}))") if b.rng.random() < 0.5 else "0.5"
    b.line(b.rng.choice([
        f"h = {b.activation()}(h)", f"h = {b.activation()}(h) * {gain}", f"h = h * torch.sigmoid(h) + {gain}",
        f"h = h - {gain}", "h = h.clamp(-1, 1)", "h = F.dropout(h, 0.0, self.training)", "h = torch.softmax(h, -1)",
        "h = torch.where(h > 0, h, -h)", f"h = {b.norm()}({b.activation()}(h))", "h = h / (1 + h.abs())",
        "h = torch.maximum(h, h * 0.1)", "h = F.normalize(h, dim=-1)", "h = h - h.mean(-1, keepdim=True)",
        "h = h + torch.arange(h.shape[-1], dtype=h.dtype)", "h = h.flip(-1)",
    ]))  # fmt: skip


def feed_forward(b: Builder) -> None:
    """Two layers around an activation, with a residual."""
    wide = b.rng.choice(WIDTHS)
    up, down, norm = b.linear(b.width, wide), b.linear(wide, b.width), b.norm()
    act = b.activation()
    if b.rng.random() < 0.4:
        gate = b.linear(b.width, wide)
        b.line(f"u = {norm}(h); h = h + {down}({act}({gate}(u)) * {up}(u))")
    elif b.rng.random() < 0.5:
        b.line(f"h = {norm}(h + {down}({act}({up}(h))))")
    else:
        b.line(f"h = h + {down}({act}({up}({norm}(h))))")


def branches(b: Builder) -> None:
    """Layers that read the same, and what they give, joined."""
    width = b.rng.choice(WIDTHS)
    one, two = b.linear(b.width, width), b.linear(b.width, width)
    join = b.rng.choice(["one + two", "one * two", "torch.cat([one, two], -1)", "torch.maximum(one, two)", "one - one * two",
                         "torch.stack([one, two]).sum(0)"])  # fmt: skip
    b.line(
        f"one, two = {one}(h), {two}({b.rng.choice(['h', 'torch.relu(h)', 'one if one.shape == h.shape else h'])}); h = {join}"
    )
    b.width = width * 2 if "cat" in join else width


def shared(b: Builder) -> None:
    """One weight, used more than once."""
    layer = b.linear(b.width, b.width)
    act = b.activation()
    b.line(
        f"h = {act}({layer}(h)); h = {layer}(h) + h"
        if b.rng.random() < 0.6
        else f"for _ in range(3): h = torch.tanh({layer}(h))"
    )


def fused_weights(b: Builder) -> None:
    """One product for several, taken apart."""
    layer = b.linear(b.width, 3 * b.width)
    b.line(f"q, k, v = {layer}(h).chunk(3, -1); h = q * torch.sigmoid(k) + v")


def attention(b: Builder) -> None:
    """Attention over tokens, written in one of some ways."""
    rng = b.rng
    heads, size = rng.choice([(1, 8), (2, 8), (4, 8), (2, 16), (3, 12), (2, 5)])
    few = rng.choice([heads, 1])
    q, k, v = b.linear(b.width, heads * size), b.linear(b.width, few * size), b.linear(b.width, few * size)
    out, norm = b.linear(heads * size, b.width), b.norm()
    b.line(f"u = {norm}(h)")
    for name, layer, count in (("q", q, heads), ("k", k, few), ("v", v, few)):
        b.line(f"{name} = {layer}(u).unflatten(-1, ({count}, {size})).transpose(-2, -3)")
    if few != heads:
        b.line(f"k, v = (x.expand(*x.shape[:-3], {heads}, *x.shape[-2:]) for x in (k, v))")
    how = rng.randrange(5)
    if how == 0:
        b.line("a = F.scaled_dot_product_attention(q, k, v)")
    elif how == 1:
        b.line("a = F.scaled_dot_product_attention(q, k, v, is_causal=True)")
    elif how == 2:
        b.line("n = torch.arange(h.shape[-2]); near = (n[:, None] - n).abs() < 5")
        b.line("a = F.scaled_dot_product_attention(q, k, v, attn_mask=near)")
    elif how == 3:
        b.line(f"a = torch.softmax(q @ k.transpose(-1, -2) / {size}**0.5, -1) @ v")
    else:
        b.line("n = torch.arange(h.shape[-2]); s = (q @ k.mT).masked_fill(n[:, None] < n, -torch.inf)")
        b.line("a = torch.softmax(s, -1) @ v")
    b.line(f"h = h + {out}(a.transpose(-2, -3).flatten(-2))")


def encoder_layer(b: Builder) -> None:
    """torch's own layer."""
    heads = next(n for n in (4, 3, 2, 11, 17, 1) if b.width % n == 0)
    first = b.rng.random() < 0.5
    b.products += 4
    act = b.rng.choice(["F.relu", "F.gelu"])
    made = f"nn.TransformerEncoderLayer({b.width}, {heads}, 24, 0.0, {act}, norm_first={first}, batch_first=True)"
    b.line(f"h = {b.layer(made)}(h)")


def over_tokens(b: Builder) -> None:
    """Work between tokens that is no attention."""
    b.line(b.rng.choice([
        "h = h + h.mean(-2, keepdim=True)", "h = h.cumsum(-2)", "h = h.roll(1, -2)", "h = torch.softmax(h, -2)",
        "h = h * torch.arange(h.shape[-2], dtype=h.dtype)[:, None] / 10",
        "h = h.transpose(-1, -2).contiguous().transpose(-1, -2)",
    ]))  # fmt: skip
    linear(b)


def aggregate(b: Builder) -> None:
    """Messages, summed."""
    rng = b.rng
    width = rng.choice(WIDTHS)
    before = rng.random() < 0.5
    layer = b.linear(b.width, width)
    b.line(f"u = {layer}(h)" if before else "u = h")
    weighed = rng.choice(["u[source]", "u[source] * weights[:, None]", "u.index_select(0, source)", "torch.relu(u[source])",
                          "u[source] - u[target]", "u[source] * 2", "u[source] * u[target]"])  # fmt: skip
    zeros = "torch.zeros(h.shape[0], u.shape[1], dtype=u.dtype)"
    place = "target[:, None].expand(-1, u.shape[1])"
    how = rng.choice([
        f"{zeros}.index_add(0, target, e)", f"{zeros}.scatter_add(0, {place}, e)",
        f"{zeros}.index_put((target,), e, accumulate=True)",
        f"{zeros}.scatter_reduce(0, {place}, e, 'sum')", f"{zeros}.scatter_reduce(0, {place}, e, 'mean', include_self=False)",
        f"{zeros}.scatter_reduce(0, {place}, e, 'amax', include_self=False)", "u.index_add(0, target, e)",
    ])  # fmt: skip
    b.line(f"e = {weighed}; u = {how}")
    b.line("h = u" if before else f"h = {layer}(u)")
    b.width = width
    pointwise(b)


def normalized(b: Builder) -> None:
    """GCN: degrees, and messages weighed by them."""
    width = b.rng.choice(WIDTHS)
    b.line("degree = torch.zeros(h.shape[0], dtype=h.dtype).index_add(0, target, torch.ones_like(weights)) + 1")
    b.line("scale = degree.rsqrt(); w = scale[source] * scale[target]")
    b.line(f"u = {b.linear(b.width, width)}(h)")
    b.line("h = torch.zeros_like(u).index_add(0, target, u[source] * w[:, None]) + u / degree[:, None]")
    b.width = width
    pointwise(b)


def edge_softmax(b: Builder) -> None:
    """GAT: softmax over the edges of a node."""
    rng = b.rng
    heads, size = rng.choice([(1, 8), (2, 8), (4, 4), (3, 5)])
    b.line(f"u = {b.linear(b.width, heads * size)}(h).unflatten(-1, ({heads}, {size}))")
    if rng.random() < 0.5:
        one, two = (b.layer(f"nn.Parameter(torch.randn(1, {heads}, {size}))") for _ in range(2))
        b.line(f"s = F.leaky_relu((u * {one}).sum(-1)[source] + (u * {two}).sum(-1)[target], 0.2)")
    else:
        b.line(f"q = {b.linear(b.width, heads * size)}(h).unflatten(-1, ({heads}, {size}))")
        b.line(f"s = (q[target] * u[source]).sum(-1) / {size}**0.5")
    b.line("place = target[:, None].expand_as(s)")
    b.line("top = torch.full((h.shape[0], s.shape[1]), -torch.inf, dtype=s.dtype).scatter_reduce(0, place, s, 'amax')")
    b.line("s = (s - top[target]).exp(); total = torch.zeros_like(top).scatter_add(0, place, s)")
    b.line(
        "u = torch.zeros_like(u).index_add(0, target, u[source] * (s / (total[target] + 1e-9))[:, :, None]); h = u.flatten(1)"
    )
    b.width = heads * size
    pointwise(b)


def from_both_ends(b: Builder) -> None:
    """EdgeConv: messages that a layer makes of both ends."""
    width = b.rng.choice(WIDTHS)
    layer = b.linear(2 * b.width, width)
    b.line(f"e = torch.relu({layer}(torch.cat([h[target], h[source] - h[target]], -1)))")
    b.line(f"h = torch.zeros(h.shape[0], {width}, dtype=h.dtype).index_add(0, target, e)")
    b.width = width


Block = Callable[[Builder], None]
BLOCKS: list[Block] = [linear, linear, feed_forward, feed_forward, branches, shared, fused_weights, pointwise]
SEQUENCE_BLOCKS: list[Block] = [attention, attention, attention, encoder_layer, over_tokens]
GRAPH_BLOCKS: list[Block] = [aggregate, aggregate, aggregate, normalized, edge_softmax, edge_softmax, from_both_ends]
