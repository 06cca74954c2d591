"""Programs of products with structured matrices, blocks in a row, adapters of sequences, and einsums in several orders."""

import random

_MODEL = """class Model(nn.Module):
    def __init__(self, shapes, forward):
        super().__init__()
        self.p = nn.ParameterList([torch.randn(shape) / shape[-1] ** 0.5 for shape in shapes])
        self.written = forward

    def forward(self, *given):
        return self.written(self.p, *given)
"""


def structures(chance: random.Random, options: str) -> str:
    """One of these, called with one or two sizes, maybe with gradients, maybe with other parameters on the way."""
    return chance.choice((_matrix, _matrix, _monarch, _adapters, _einsum))(chance, options)


def _program(
    chance: random.Random, options: str, shapes: list[tuple[int, ...]], lines: list[str], inputs: list[str], train: bool
) -> str:
    dtype = "float32" if train else chance.choice(("float32", "float32", "float64", "bfloat16"))
    text = [
        _MODEL,
        "def forward(p, *given):",
        *("    " + line for line in lines),
        f"model = Model({shapes}, forward).to(torch.{dtype})",
        f"compiled = torch.compile(model, dynamic={chance.choice((None, None, True))}, {options})",
    ]
    for call, given in enumerate(inputs):
        text += [f"given = {given}", "twin = copy.deepcopy(model).double()"]
        for name, function, cast in (("found", "compiled", dtype), ("expected", "twin", "float64")):
            owner = "model" if name == "found" else "twin"
            text += [f"here = [g.to(torch.{dtype}).to(torch.{cast}) if g.is_floating_point() else g for g in given]"]
            if train:
                text += [
                    f"y = {function}(*here)",
                    "(y * (torch.arange(y.numel()) % 3 - 1).view_as(y)).sum().backward()",
                    f"{name} += [y.detach(), *(q.grad for q in {owner}.parameters() if q.grad is not None)]",
                    f"{owner}.zero_grad()",
                ]
            else:
                text += [f"with torch.no_grad(): {name}.append({function}(*here))"]
        if call == 0 and chance.random() < 0.5:
            text += ["with torch.no_grad(): model.p[0].mul_(-2)"]
    return "\n".join(text)


def _matrix(chance: random.Random, options: str) -> str:
    """A product with a matrix that is made of others."""
    shapes = list[tuple[int, ...]]()

    def given(rows: int, columns: int) -> str:
        shapes.append((rows, columns))
        return f"p[{len(shapes) - 1}]"

    def made(depth: int) -> tuple[str, int, int]:
        kind = chance.choice(("kron", "kron", "blocks", "product", "sum", "scaled", "turned", "diag")) if depth else "given"
        if kind == "given":
            rows, columns = chance.choice((1, 2, 3, 5, 8, 16)), chance.choice((1, 2, 4, 7, 8, 16))
            return given(rows, columns), rows, columns
        a, rows, columns = made(depth - 1)
        if kind == "kron":
            b, m, n = made(0)
            return f"torch.kron({a}.contiguous(), {b})", rows * m, columns * n  # torch fails to trace other layouts
        if kind == "blocks":
            count = chance.choice((1, 2, 3, 9))
            return f"torch.block_diag({', '.join([a] * count)})", rows * count, columns * count
        if kind == "product":
            width = chance.choice((1, 3, 8))
            return f"({a} @ {given(columns, width)})", rows, width
        if kind == "sum":
            return f"({a} {chance.choice('+-')} {given(rows, columns)})", rows, columns
        if kind == "scaled":
            return chance.choice((f"({a} * 0.5)", f"({a} / 3)", f"(-2 * {a})")), rows, columns
        if kind == "turned":
            return (
                f"{a}{chance.choice(('.T', '.t()', '.mT', '.transpose(0, 1)', '.transpose(-1, -2).contiguous()'))}",
                columns,
                rows,
            )
        shapes.append((columns,))
        return f"({a} @ torch.diag(p[{len(shapes) - 1}]))", rows, columns

    text, rows, columns = made(chance.choice((1, 2, 2, 3)))
    way = chance.choice(("linear", "biased", "right", "left"))
    if way == "biased":
        shapes.append((rows,))
    lines = {
        "linear": f"return F.linear(given[0], {text})",
        "biased": f"return F.relu(F.linear(given[0], {text}, p[{len(shapes) - 1}]))",
        "right": f"return given[0] @ {text}",
        "left": f"return {text} @ given[0]",
    }[way]
    size = rows if way == "right" else columns
    tokens = [chance.choice((1, 2, 17, 64)) for _ in range(2)]
    if way == "left":
        inputs = [f"[torch.randn({size}, {n})]" for n in tokens]
    else:
        lead = chance.choice(("", "2, "))
        inputs = [f"[torch.randn({lead}{n}, {size})]" for n in tokens]
    return _program(chance, options, shapes, [lines], inputs, chance.random() < 0.5)


def _monarch(chance: random.Random, options: str) -> str:
    """Batches of products in a row, in inference."""
    a, b = chance.choice((2, 3, 4, 8, 16)), chance.choice((2, 3, 5, 8, 16))
    k, m, out = chance.choice((1, 3, 4, 8, 20)), b * chance.choice((1, 2)), chance.choice((1, 4, 7, 16))
    inner = a * m // b
    act = chance.choice(("", "", "h = F.gelu(h)", "h = torch.tanh(h) + 1"))
    mix = chance.choice(("h.transpose(1, 2).reshape", "h.reshape"))
    first = chance.choice((
        f"h = torch.einsum('tkp,kqp->tkq', given[0].view(-1, {a}, {k}), p[0])",
        f"h = torch.bmm(given[0].view(-1, {a}, {k}).transpose(0, 1), p[0].transpose(1, 2)).transpose(0, 1)",
        f"h = torch.bmm(p[0], given[0].view(-1, {a}, {k}).permute(1, 2, 0)).permute(2, 0, 1)",
    ))  # fmt: skip
    second = chance.choice((
        "y = torch.einsum('tlr,lsr->tls', h, p[1])",
        "y = torch.bmm(h.transpose(0, 1), p[1].transpose(1, 2)).transpose(0, 1)",
    ))  # fmt: skip
    lines = [first, f"h = {mix}(-1, {a * m})", *([act] if act else []), f"h = h.view(-1, {b}, {inner})", second]
    lines += [f"return {chance.choice(('y', 'y.transpose(1, 2)'))}.reshape(-1, {b * out})"]
    inputs = [f"[torch.randn({chance.choice((64, 65, 130))}, {a * k})]" for _ in range(2)]
    return _program(chance, options, [(a, m, k), (b, out, inner)], lines, inputs, False)


def _adapters(chance: random.Random, options: str) -> str:
    """Sequences that choose their adapters."""
    count, k, r, m = (
        chance.choice((1, 2, 10)),
        chance.choice((3, 16, 40)),
        chance.choice((2, 8, 17)),
        chance.choice((2, 16, 33)),
    )
    lines = [
        chance.choice(
            ("h = torch.bmm(given[0], p[0][given[1]])", "h = torch.einsum('bsk,bkr->bsr', given[0], p[0][given[1]])")
        ),
        f"return torch.bmm(h, p[1][given[1]]) * {chance.choice((1, 2.0))}",
    ]
    sizes = [(chance.choice((1, 2, 9)), chance.choice((1, 5, 32))) for _ in range(2)]
    inputs = [f"[torch.randn({b}, {s}, {k}), torch.randint(-{count}, {count}, ({b},))]" for b, s in sizes]
    return _program(chance, options, [(count, k, r), (count, r, m)], lines, inputs, chance.random() < 0.3)


def _einsum(chance: random.Random, options: str) -> str:
    """A chain of sparse and dense operands, eager or in a graph, with the gradients of the dense ones."""
    letters = "ijklm"[: chance.choice((4, 5))]
    size = {letter: chance.choice((1, 7, 40, 90)) for letter in letters}
    inputs = [letters[n : n + 2] for n in range(len(letters) - 1)]
    if chance.random() < 0.5:
        inputs.insert(chance.randrange(len(inputs)), chance.choice(letters))
    result = chance.choice((letters[0] + letters[-1], letters[0], letters[:2]))
    sparse = [len(each) == 2 and chance.random() < 0.5 for each in inputs]
    equation = f"{','.join(inputs)}->{result}"
    lines = [
        "def dense(t): return t.to_dense() if isinstance(t, gossamer.SparseTensor) else t",
        f"call = {chance.choice(('gossamer.einsum', f'torch.compile(gossamer.einsum, {options})'))}",
        "given = []",
    ]
    for each, packed in zip(inputs, sparse, strict=True):
        shape = tuple(size[letter] for letter in each)
        lines += [f"t = torch.randn({shape}, dtype=torch.float64)"]
        lines += [f"t = gossamer.SparseTensor.from_dense(t * (torch.rand({shape}) < 0.1))"] if packed else []
        lines += ["given.append(t.requires_grad_())"]
    lines += [
        "wide = [dense(t.detach()).requires_grad_() for t in given]",
        f"y, e = dense(call({equation!r}, *given)), torch.einsum({equation!r}, *wide)",
        "found.append(y.detach()); expected.append(e.detach())",
        f"rest = [n for n, packed in enumerate({sparse}) if not packed]",
        "if rest:",
        "    found += torch.autograd.grad(y.sum(), [given[n] for n in rest])",
        "    expected += torch.autograd.grad(e.sum(), [wide[n] for n in rest])",
    ]
    return "\n".join(lines)
