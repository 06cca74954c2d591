"""Blocks of random models: each reads `h` and leaves `h`, of any shape that ends in features.

Those of graphs read `source` and `target`, too.
"""

from collections.abc import Callable

from tests.fuzz.builder import WIDTHS, Builder


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
