"""Random routed products and mixtures of experts, eager or in a graph, with gradients, as programs; see layers.py."""

import random

_ROUTINGS = (
    "torch.randint(0, {count}, ({tokens}, {top}))",
    "torch.full(({tokens}, {top}), {one})",
    "torch.randint(0, 2, ({tokens}, {count})).float().topk({top}).indices",  # ties
    "torch.randn({tokens}, {count}).topk({top}).indices",
    "torch.randint(0, {count}, ({tokens}, {top})) // 2 * 2 % {count}",  # every second one has no token
)
_ACTIVATIONS = ("silu", "silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh", "identity", "clamped_swiglu")
_SIZES = (1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 48, 64, 65, 96, 100, 128, 130)


def routed(chance: random.Random) -> str:
    """A layer, or a product alone, called with several numbers of tokens."""
    count = chance.choice((1, 2, 3, 8, 16))
    top, columns, hidden = chance.randint(1, min(count, 4)), chance.choice(_SIZES), chance.choice(_SIZES)
    dtype = chance.choice(("float32", "float32", "float32", "float64", "bfloat16", "float16"))
    kind = chance.choice(("mixture", "mixture", "mixture", "product"))
    integers = dtype in ("float32", "bfloat16") and chance.random() < 0.25
    turned = not integers and chance.random() < 0.2
    differentiated = not integers and chance.random() < 0.5
    lines = [
        f"names, dtype, count = [], torch.{dtype}, {count}",
        "def made(*shape, scale=1.0):",
        "    return (torch.randn(*shape) * scale).to(dtype)",
    ]
    build = _mixture if kind == "mixture" else _product
    lines += build(chance, count, columns, hidden, integers, turned)
    mode = chance.random()
    unbacked = mode < 0.05
    if mode < 0.1:
        lines += ["call = torch.compile(ours, backend='aot_eager', fullgraph=True, dynamic=True)"]
    else:
        lines += ["call = ours"]
    for _ in range(3):
        tokens = chance.choice((0, 1, 1, 2, 3, 5, 8, 13, 40, 100, 130))
        one = chance.randrange(count)
        routing = chance.choice(_ROUTINGS).format(count=count, tokens=tokens, top=top, one=one)
        own = kind == "product" and chance.random() < 0.4
        integer = chance.choice(("int64", "int64", "int32", "int16"))
        lines += [
            f"experts = ({routing}).to(torch.{integer})",
            f"x = made({f'{tokens}, {top}' if own else tokens}, {columns})",
            f"scores = torch.rand({tokens}, {top}).to(torch.{chance.choice((dtype, 'float32'))})",
        ]
        if tokens and chance.random() < 0.2:
            lines += [f"x[{chance.randrange(tokens)}, ..., {chance.randrange(columns)}] = nan"]
        if unbacked:
            lines += [
                "some = (torch.rand(len(x)) < 0.7).nonzero()[:, 0]",
                "x, scores, experts = x[some], scores[some], experts[some]",
            ]
        lines += [
            "leaves = {'x': x, 'scores': scores, **weights}",
            "wide = {name: each.double() for name, each in leaves.items()}",
        ]
        wanted = []
        if differentiated:
            lines += ["leaves = {name: each.detach() for name, each in leaves.items()}"]
            possible = ["x", "scores", "gate_up", "down"] if kind == "mixture" else ["x", "weight"]
            wanted = [name for name in possible if chance.random() < 0.6] or ["x"]
            lines += [f"for name in {wanted}:", "    leaves[name].requires_grad_(), wide[name].requires_grad_()"]
        lines += [
            "y, z = call(leaves, experts), theirs(wide, experts)",
            "z = z + sum(each.flatten()[:0].sum() for each in wide.values())",
            "found.append(y)",
            "expected.append(z)",
        ]
        if wanted:
            lines += [
                "g = torch.linspace(-1, 1, z.numel(), dtype=torch.float64).view_as(z).to(dtype)",
                f"gradients = torch.autograd.grad(y, [leaves[name] for name in {wanted}], g)",
                "found += [each if each.itemsize < dtype.itemsize else each.to(dtype) for each in gradients]",
                f"expected += torch.autograd.grad(z, [wide[name] for name in {wanted}], g.double())",
            ]
    return "\n".join(lines)


def _weight(
    chance: random.Random, name: str, count: int, rows: int, columns: int, integers: bool, turned: bool
) -> tuple[list[str], str, str]:
    """Lines that make a weight, and what ours and theirs are given."""
    scale = f"scale={columns**-0.5:.3f}"
    if not integers:
        order = f"{columns}, {rows}" if turned else f"{rows}, {columns}"
        return (
            [f"weights[{name!r}] = made({count}, {order}, {scale}){'.mT' if turned else ''}"],
            f"leaves[{name!r}]",
            f"wide[{name!r}]",
        )
    bits = chance.choice((4, 8)) if columns % 2 == 0 else 8
    groups = chance.choice([n for n in (1, 1, 2, 4) if columns % n == 0 and (bits == 8 or columns // n % 2 == 0)])
    made = f"torch.randn({count}, {rows}, {columns}) * {columns**-0.5:.3f}"
    lines = [f"{name}, {name}_scales, {name}_floats = quantized({made}, {bits}, {groups})"]
    return lines, name, f"{name}_floats.double()"


def _mixture(chance: random.Random, count: int, columns: int, hidden: int, integers: bool, turned: bool) -> list[str]:
    activation, layout = chance.choice(_ACTIVATIONS), chance.choice(("halves", "halves", "interleaved", "up"))
    activation = "silu" if layout == "up" and activation == "clamped_swiglu" else activation
    rows, outputs = hidden if layout == "up" else 2 * hidden, chance.choice((columns, 1, 40))
    first, own, their = _weight(chance, "gate_up", count, rows, columns, integers, turned)
    second, own_down, their_down = _weight(chance, "down", count, outputs, hidden, integers, turned)
    lines = ["weights = {}", *first, *second]
    given = f"activation={activation!r}, layout={layout!r}"
    scales = ", gate_up_scales=gate_up_scales, down_scales=down_scales" if integers else ""
    biases, wide = "", ""
    if chance.random() < 0.5:
        lines += [f"gate_up_bias, down_bias = made({count}, {rows}), made({count}, {outputs})"]
        biases = ", gate_up_bias=gate_up_bias, down_bias=down_bias"
        wide = ", gate_up_bias=gate_up_bias.double(), down_bias=down_bias.double()"
    return [
        *lines,
        "def ours(leaves, experts):",
        f"    return gossamer.routed_mlp(leaves['x'], experts, leaves['scores'], {own}, {own_down}, {given}{scales}{biases})",
        "def theirs(wide, experts):",
        f"    return by_tokens(wide['x'], experts, wide['scores'], {their}, {their_down}, {given}{wide})",
    ]


def _product(chance: random.Random, count: int, columns: int, rows: int, integers: bool, turned: bool) -> list[str]:
    lines, own, their = _weight(chance, "weight", count, rows, columns, integers, turned)
    biased = chance.random() < 0.5
    scales = ", scales=weight_scales" if integers else ""
    return [
        "weights = {}",
        *lines,
        f"bias = made({count}, {rows})" if biased else "bias = None",
        "def ours(leaves, experts):",
        f"    return gossamer.routed_linear(leaves['x'], experts, {own}, bias{scales})",
        "def theirs(wide, experts):",
        f"    return linear_by_tokens(wide['x'], experts, {their}, {'bias.double()' if biased else 'None'})",
    ]
