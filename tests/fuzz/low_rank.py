"""Programs of pruned layers with low ranks beside them, as adapters or as sums of a sparse matrix and two factors."""

import random
from itertools import pairwise

_MODEL = """class Beside(nn.Module):
    def __init__(self, k, m, rank, density, way, scale, bias, act):
        super().__init__()
        self.w = nn.Parameter(torch.randn(m, k) * (torch.rand(m, k) < density) / k ** 0.5, requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(rank, k) / k ** 0.5), nn.Parameter(torch.randn(m, rank) / rank ** 0.5)
        self.bias = nn.Parameter(torch.randn(m)) if bias else None
        self.low = nn.Parameter(torch.randn(m)) if way == 'biased' else None
        self.way, self.scale, self.act = way, scale, act

    def forward(self, x):
        if self.way == 'sum':
            return self.act(F.linear(x, self.w + self.b @ self.a * self.scale, self.bias))
        h = F.linear(x, self.a)
        if self.way == 'early':
            h = h * self.scale
        low = F.linear(h, self.b, self.low)
        if self.way == 'first':
            return self.act(low + F.linear(x, self.w, self.bias))
        return self.act(F.linear(x, self.w, self.bias) + (low if self.way == 'early' else low * self.scale))
"""


def low_rank(chance: random.Random, options: str) -> str:
    """One layer or two, called with several sizes, or trained for a step or two; maybe a NaN, maybe other values on the way."""
    widths = [chance.choice((8, 16, 33, 64, 96, 130, chance.randint(4, 160))) for _ in range(chance.choice((2, 2, 3)))]
    dtype = chance.choice(("float32", "float32", "float32", "bfloat16"))
    density = chance.choice((0.02, 0.1, 0.1, 0.3))
    acts = ("nn.Identity()", "nn.ReLU()", "nn.GELU()", "nn.SiLU()", "nn.Tanh()")
    layers = []
    for k, m in pairwise(widths):
        rank = chance.choice((1, 2, 3, 4, 7, 8, 16, chance.randint(1, 70)))
        way = chance.choice(("late", "late", "early", "first", "biased", "sum"))
        numbers = f"{k}, {m}, {rank}, {density}, {way!r}, {chance.choice((1, 2.0, 0.5, -3.0))}, {chance.random() < 0.7}"
        layers.append(f"Beside({numbers}, {chance.choice(acts)})")
    train = dtype == "float32" and chance.random() < 0.5
    lines = [
        _MODEL,
        f"model = nn.Sequential({', '.join(layers)}).to(torch.{dtype})",
        f"compiled = torch.compile(model, dynamic={chance.choice((None, True, False))}, {options})",
    ]
    change = chance.choice(("", "factors", "weight"))
    for call in range(2):
        sizes = chance.choice(
            ("3, 11, ", *(f"{n}, " for n in (16, 17, 33, 64, 100, 130))) if call == 0 else ("48, ", "1, ", "2, 5, ")
        )
        lines += [f"x = torch.randn({sizes}{widths[0]}).to(torch.{dtype})", "twin = copy.deepcopy(model).double()"]
        if chance.random() < 0.15:
            lines += [f"x[0, ..., {chance.randrange(widths[0])}] = nan"]
        if train:
            lines += [
                "for each, call, results in ((model, compiled, found), (twin, twin, expected)):",
                "    leaf = x.detach().to(next(each.parameters()).dtype).requires_grad_()",
                "    y = call(leaf)",
                "    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()",
                "    results += [y.detach(), leaf.grad, *(p.grad for p in each.parameters() if p.grad is not None)]",
                "model.zero_grad()",
            ]
        else:
            lines += ["with torch.no_grad():", "    found.append(compiled(x))", "    expected.append(twin(x.double()))"]
        if change and call == 0:
            named = "model[0].w" if change == "weight" else "model[0].b"
            lines += [f"with torch.no_grad(): {named}.copy_({named}.flip(0))"]
    return "\n".join(lines)
