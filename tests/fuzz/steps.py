"""Random steps of programs: what torch can do with a tensor, in the spellings that people use."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.fuzz.maker import Maker
from tests.fuzz.programs import Program


def make(seed: int, generic: bool = False) -> Program:
    """The program of a seed, of one to three steps."""
    maker = Maker(seed, generic)
    rng = maker.rng
    rank = rng.choices([1, 2, 3, 4], [1, 10, 3, 1])[0]
    shape = tuple(rng.choice([0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 9]) for _ in range(rank))
    dtype = maker.dtype()
    maker.specials = not generic and dtype.is_floating_point and rng.random() < 0.25
    maker.operand("a", shape, dtype)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        value = maker.value()
        if not isinstance(value, Tensor) or value.numel() > 4000:
            break
        templates = [*ANY, *ANY, *TWO] if value.dim() == 2 else ANY
        finite = not (value.is_floating_point() or value.is_complex()) or bool(value.isfinite().all())
        if maker.specials or not finite:
            templates = [each for each in templates if each not in FINITE]
        maker.program.steps.append(rng.choice(templates)(maker, value))
    return maker.program


Template = Callable[[Maker, Tensor], str]

_UNARY = [
    "abs",
    "neg",
    "sign",
    "sgn",
    "sqrt",
    "square",
    "relu",
    "floor",
    "ceil",
    "round",
    "trunc",
    "frac",
    "sin",
    "sinh",
    "tan",
    "tanh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "erf",
    "expm1",
    "log1p",
    "deg2rad",
    "rad2deg",
    "nan_to_num",
    "positive",
    "exp",
    "cos",
    "log",
    "sigmoid",
    "isnan",
    "isinf",
    "isfinite",
    "logical_not",
    "erfc",
    "cosh",
    "exp2",
    "log2",
    "clone",
    "bitwise_not",
    "isreal",
    "real",
    "conj",
]


def unary(m: Maker, v: Tensor) -> str:
    name = m.rng.choice(_UNARY)
    return f"torch.{name}(a)"


def functional(m: Maker, v: Tensor) -> str:
    return m.rng.choice([
        "F.relu(a)", "F.leaky_relu(a, 0.2)", "F.gelu(a)", "F.relu6(a)", "F.hardtanh(a)", "F.silu(a)", "F.elu(a)",
        "F.softplus(a)",
        "F.threshold(a, 1, 5)", "F.threshold(a, -1, 5)", "F.hardswish(a)", "F.dropout(a, 0.0)", "F.normalize(a, dim=-1)",
    ])  # fmt: skip


def clamp(m: Maker, v: Tensor) -> str:
    return m.rng.choice([
        "a.clamp(-1, 1)", "a.clamp(min=1)", "torch.clamp(a, max=-1)", "a.clamp(min=0)", "a.clamp_min(-1)",
        "torch.clamp_max(a, 2)",
        "torch.clip(a, -2, 2)", "a.nan_to_num(1.0, 2.0, 3.0)",
    ])  # fmt: skip


def with_number(m: Maker, v: Tensor) -> str:
    n = m.number()
    op = m.rng.choice([
        "a * {}", "{} * a", "a / {}", "a + {}", "{} - a", "a - {}", "a ** {}", "{} ** a", "a // {}", "a % {}", "a > {}",
        "a == {}",
        "a != {}", "a <= {}", "torch.mul(a, {})", "torch.div(a, {}, rounding_mode='floor')", "torch.remainder(a, {})",
        "torch.add(a, {}, alpha=2)", "torch.sub(a, {}, alpha=2)", "torch.fmod(a, {})", "torch.true_divide(a, {})",
        "torch.pow(a, {})", "{} / a", "a.add({})", "torch.rsub(a, {})", "torch.mul(a, torch.tensor({}))",
        "torch.full_like(a, {})", "a.new_full((2,), {})", "torch.floor_divide(a, {})", "torch.heaviside(a, torch.tensor({}))",
        "torch.mul(a, torch.tensor({}, dtype=torch.float64))", "a + torch.tensor({}, dtype=torch.float64)",
        "torch.where(a > 0, a, {})", "a.masked_fill(a > 1, {})", "torch.lerp(a, a * 2, {})",
    ])  # fmt: skip
    # Zeros that are not stored stay zeros, whatever they are divided by.
    divides = any(sign in op for sign in ("a / {", "a // {", "a % {", "div", "remainder", "fmod"))
    return op.format("2" if divides and n == "0" else n)


def with_dense(m: Maker, v: Tensor) -> str:
    dtype = m.dtype() if m.rng.random() < 0.2 else v.dtype
    x = m.dense(m.broadcast(v.shape), dtype)
    return m.rng.choice([
        "a * {}", "{} * a", "a + {}", "{} + a", "a - {}", "{} - a", "torch.mul(a, {})", "torch.add({}, a, alpha=2)",
        "torch.maximum(a, {})", "torch.minimum(a, {})", "torch.where({} > 0, a, {})", "torch.add(a, {}, alpha=-1)", "a == {}",
        "a < {}", "torch.mul(input=a, other={})", "torch.add(a, other={})", "a.multiply({})", "torch.lerp(a, {}, 0.5)",
        "torch.addcmul(a, {}, {})", "torch.addcmul(a, {}, {}, value=2)", "torch.logical_and(a, {})", "torch.atan2({}, a + 4)",
        "torch.logical_or(a, {})", "torch.logical_xor({}, a)", "torch.fmax(a, {})", "torch.fmin({}, a)",
        "torch.hypot(a, {})", "torch.copysign(a, {})", "torch.copysign({}, a)", "a != {}", "{} >= a",
        "torch.isclose(a, {})", "torch.xlogy(a, {} + 9)",
        "torch.dist(a, {})", "a.subtract({}, alpha=2)", "torch.clamp(a, max={})", "torch.clamp(a, {}, {} + 1)",
    ]).replace("{}", x)  # fmt: skip


def over_dense(m: Maker, v: Tensor) -> str:
    x = m.dense(m.broadcast(v.shape), torch.float32 if v.dtype == torch.bool else v.dtype, "-2 -1 1 2 4")
    return m.rng.choice([
        "a / {}", "torch.div(a, {})", "torch.div(a, {}, rounding_mode='trunc')", "torch.div(a, {}, rounding_mode='floor')",
        "torch.addcdiv(a, {}, {})", "a // {}", "a % {}", "{} ** 2 / (a * a + 1)",
    ]).replace("{}", x)  # fmt: skip


def with_sparse(m: Maker, v: Tensor) -> str:
    if not 1 <= v.dim() <= 4:
        return "a * 2"
    b = m.other(v)
    return m.rng.choice([
        "a + {}", "a - {}", "a * {}", "{} - a", "torch.add(a, {}, alpha=2)", "torch.sub(a, {}, alpha=3)",
        "torch.maximum(a, {})",
        "torch.mul(a, {})", "a == {}", "torch.where(a > 0, a, {})", "torch.lerp(a, {}, 0.5)", "torch.lerp(a, {}, {})",
        "torch.addcmul(a, {}, {})", "torch.addcmul(a, {}, a, value=3)", "torch.cat([a, {}])", "torch.cat([a, {}], -1)",
        "torch.stack([a, {}])", "torch.stack([a, {}], -1)", "torch.add(a, a, alpha=2)", "a * a", "a - a",
        "torch.minimum(a, a * 2)",
        "torch.hstack([a, {}])", "torch.vstack([a, {}])", "a.lerp({}, 2)", "torch.rsub(a, {}, alpha=2)",
        "torch.logical_or(a, {})", "torch.logical_xor(a, {})", "torch.fmax(a, {})", "torch.fmin(a, {})",
        "torch.hypot(a, {})", "torch.copysign(a, {})", "a != {}", "a <= {}", "torch.isclose(a, {})", "torch.equal(a, {})",
        "torch.dist(a, {}, 1)",
        "torch.clamp(a, min={})", "torch.dstack([a, {}])", "torch.column_stack([a, {}])", "a.masked_fill({} > 0, 5)",
        "torch.where({} != 0, a, 0)", "torch.allclose(a, {})", "a.expand_as({}) + {}", "torch.addcmul({}, a, {}, value=-1)",
    ]).replace("{}", b)  # fmt: skip


def over_sparse(m: Maker, v: Tensor) -> str:
    if not 1 <= v.dim() <= 4:
        return "a * 2"
    b = m.other(v)
    return m.rng.choice(["a / ({} + 4)", "torch.addcdiv(a, a, {} + 9)", "torch.addcdiv(a, a, ({}*0) + 2, value=3)"]).replace(
        "{}", b
    )


def reduction(m: Maker, v: Tensor) -> str:
    rng = m.rng
    name = rng.choice(["sum", "sum", "mean", "amax", "amin", "prod", "max", "min", "any", "all", "argmax", "argmin", "std",
        "var",
                       "norm", "count_nonzero", "logsumexp", "cumsum", "nansum", "median", "aminmax"])  # fmt: skip
    kind = rng.randrange(6)
    if kind == 0:
        return f"torch.{name}(a)"
    if kind == 1 and name in ("sum", "mean", "amax", "amin", "any", "all", "std", "var", "logsumexp", "nansum", "norm"):
        dims = tuple(m.dim(v) for _ in range(rng.choice([0, 1, 2, 2])))
        keepdim = rng.choice(["", ", keepdim=True"])
        return f"a.{name}(dim={dims}{keepdim})"
    keepdim = rng.choice(["", ", keepdim=True"]) if name not in ("cumsum", "count_nonzero") else ""
    if kind == 2 and name in ("sum", "prod", "mean"):
        dtype = rng.choice(["torch.float64", "torch.float32", "torch.int64", "torch.complex64"])
        return f"a.{name}({rng.choice(['', f'dim={m.dim(v)}, ' if name != 'x' else ''])}dtype={dtype})"
    out = f"torch.{name}(a, dim={m.dim(v)}{keepdim})" if rng.random() < 0.7 else f"a.{name}(dim={m.dim(v)}{keepdim})"
    return f"{out}[0]" if name in ("max", "min", "median", "aminmax") else out


def index(m: Maker, v: Tensor) -> str:
    rng = m.rng

    def one(extent: int) -> str:
        n = max(extent, 1)
        listed = [rng.randrange(-n, n) for _ in range(rng.choice([0, 1, 2, 2, 4]))]
        wrong = rng.random() < 0.03
        return rng.choice([
            ":", ":", f"{rng.randrange(-n, n)}", f"{rng.randrange(-n, n)}:", f":{rng.randrange(-n, n + 2)}", "::2",
            f"{rng.randrange(-n, n)}:{rng.randrange(-n, n + 3)}:{rng.choice([1, 2, 3])}",
            f"torch.tensor({listed}, dtype=torch.int64)",
            f"{listed}", "None", "...", "True", "False",
            f"torch.tensor({[rng.random() < 0.5 for _ in range(extent + wrong)]}, dtype=torch.bool)",
            f"torch.tensor({rng.randrange(-n, n)})", f"{n if wrong else 0}", f"torch.tensor([{n if wrong else 0}])",
            "torch.tensor([0., 1.])" if wrong else "0:1",
            f"torch.tensor([[{listed[0] if listed else 0}]], dtype=torch.int32)",
            f"{[rng.random() < 0.5 for _ in range(extent)]}",
        ])  # fmt: skip

    parts = [one(extent) for extent in v.shape[: rng.randrange(0, v.dim() + 1) or v.dim()]]
    if rng.random() < 0.1:
        parts.append(one(3))
    if "..." in parts:  # torch reads a second one in its own way, NumPy refuses it
        first = parts.index("...")
        parts[first + 1 :] = [":" if part == "..." else part for part in parts[first + 1 :]]
    if rng.random() < 0.05:
        return "a[a > 0]" if rng.random() < 0.5 else f"a[{m.dense(tuple(v.shape), torch.bool)}]"
    return f"a[{', '.join(parts)}]" if parts else "a[...]"


def shapes(m: Maker, v: Tensor) -> str:
    rng, d = m.rng, m.dim
    order = list(range(v.dim()))
    rng.shuffle(order)
    if rng.random() < 0.1 and order:
        order = rng.choice([order[:-1], [*order[:-1], order[0]], [*order, 0], [n + 1 for n in order]])
    sizes = rng.choice(
        [list(v.shape[::-1]), [-1], [*v.shape, 1], [1, -1], [-1, 2], [0, -1], [-1, *v.shape[1:]], [v.numel()], [3, -1, 2], []]
    )
    n = rng.choice([[0], [1, 0], [-1], [0, 0, 1], [], [5]])
    return rng.choice([
        "a.t()", "a.T", "a.mT", f"a.transpose({d(v)}, {d(v)})", f"torch.permute(a, {tuple(order)})", f"a.permute({order})",
        f"a.reshape({sizes})", f"a.view({sizes})", f"torch.reshape(a, {tuple(sizes)})", "a.flatten()",
        f"a.flatten({d(v)}, {d(v)})",
        f"a.unsqueeze({d(v)})", f"a.squeeze({d(v)})", "a.squeeze()",
        f"a.index_select({d(v)}, torch.tensor({n}, dtype=torch.int64))",
        f"a.narrow({d(v)}, {rng.randrange(-1, 3)}, {rng.randrange(0, 3)})", f"a.select({d(v)}, {rng.randrange(-2, 3)})",
        "a.to_dense()",
        f"a.unbind({d(v)})[0]", f"a.unflatten({d(v)}, (-1, 1))", "a.double()", "a.float()", "a.to(torch.float64)",
        "a.int()", "a.bool()",
        "a.half()", "torch.zeros_like(a)", "torch.ones_like(a)", "torch.full_like(a, 2)", "a.clone()", "a.detach()",
        "a.contiguous()",
        "a.new_zeros((2, 3))", "a.diagonal()", "torch.tril(a)", "a.flip(0)", "a.roll(1)", f"a.sort(dim={d(v)})[0]",
        "a.expand(2, *a.shape)",
        f"a.split(2, dim={d(v)})[0]", f"a.chunk(2, dim={d(v)})[-1]", "a.repeat(2, *[1] * a.dim())",
        f"torch.swapaxes(a, {d(v)}, {d(v)})",
        f"torch.movedim(a, {d(v)}, {d(v)})", "a.type(torch.float64)", "torch.nonzero(a)", "a.masked_select(a > 0)",
        "torch.ravel(a)",
        f"torch.take_along_dim(a, torch.zeros([1] * a.dim(), dtype=torch.int64), {d(v)})", "a.abs().sqrt()", "a.adjoint()",
        "a.H",
        f"a.masked_select({m.dense(m.broadcast(v.shape), torch.bool)})",
    ])  # fmt: skip


def in_place(m: Maker, v: Tensor) -> str:
    # In place, what would make zeros nonzero changes stored values only, as optimizers want it; a test of its own says so.
    steps = """mul_(2) neg_() zero_() abs_() add_(a) sub_(a,alpha=2) copy_(a*2) div_(2) fill_(0) mul_(a) sqrt_() addcmul_(a,a)
        lerp_(a*2,0.5) mul_(0.5) sub_(a) div_(-4) mul_(True) add_(a,alpha=-1)"""
    return f"a.clone().{m.rng.choice(steps.split())}"


def product(m: Maker, v: Tensor) -> str:
    rng = m.rng
    rows, k = v.shape
    wrong = 1 if rng.random() < 0.05 else 0
    n = rng.choice([0, 1, 1, 2, 5, 8])
    dtype = m.dtype() if rng.random() < 0.05 else v.dtype
    kind = rng.randrange(14)
    if kind < 4:
        x = m.dense((k + wrong, n), dtype)
        return rng.choice(["a @ {}", "torch.mm(a, {})", "torch.matmul(a, {})", "torch.sparse.mm(a, {})", "{}.t() @ a.t()",
            "einsum('ij,jk->ik', a, {})",
                           "torch.mm(input=a, mat2={})", "torch.bmm(a, {})", "torch.mv(a, {})",
                           "a.mm({})"]).format(x)  # fmt: skip
    if kind == 4:
        x = m.dense((k + wrong,), dtype)
        return rng.choice(
            ["a @ {}", "torch.mv(a, {})", "{} @ a.t()", "torch.mm(a, {})", "a.matmul({})", "torch.dot(a, {})"]
        ).format(x)
    if kind == 5:
        x = m.dense((n, k + wrong), dtype)
        bias = m.dense((rows,), dtype)
        return rng.choice([f"F.linear({x}, a)", f"F.linear({x}, a, {bias})", f"F.linear(a, {x})", f"{x} @ a.t()"])
    if kind == 6:
        x, y = m.dense((k + wrong, n), dtype), m.dense(rng.choice([(rows, n), (n,), (1, n), (rows, 1)]), dtype)
        return rng.choice(
            [
                f"torch.addmm({y}, a, {x})",
                f"torch.addmm({y}, a, {x}, beta=2, alpha=3)",
                f"torch.sparse.addmm({y}, a, {x}, beta=0)",
            ]
        )
    if kind == 7:
        x, y = m.dense((k + wrong,), dtype), m.dense((rows,), dtype)
        return rng.choice([f"torch.addmv({y}, a, {x})", f"torch.addmv({y}, a, {x}, beta=0.5, alpha=2)"])
    if kind < 11:
        name = f"b{len(m.program.sparse)}"
        b = m.operand(name, (k + wrong, n), dtype)
        return rng.choice(
            [f"a @ {b}", f"torch.mm(a, {b})", f"{b}.t() @ a.t()", f"einsum('ij,jk->ik', a, {b})", f"torch.sparse.mm(a, {b})"]
        )
    if kind == 11:
        x = m.dense((2, k + wrong, n), dtype)
        return rng.choice([f"a @ {x}", f"torch.matmul(a, {x})", f"torch.bmm(a, {x})", f"{x}.mT @ a.t()"])
    if kind == 12:
        return rng.choice(["a @ a.t()", "a.t() @ a", "torch.mm(a.t(), a)", "(a @ a.t()).sum()", "a.t() @ a.to_dense()"])
    x, y = m.dense((rows, n), dtype), m.dense((n, k), dtype)
    return f"({x} @ {y}) * a"


def nothing_else(m: Maker, v: Tensor) -> str:
    return m.rng.choice(
        [
            "torch.kron(a, a)",
            "torch.trace(a)",
            "torch.linalg.norm(a)",
            "a.cumsum(1)",
            "torch.diag(a)",
            "torch.outer(a[0], a[0])",
        ]
    )


ANY: list[Template] = [
    *(unary, functional, clamp, with_number, with_number, with_dense, over_dense, with_sparse, with_sparse, over_sparse),
    *(reduction, reduction, reduction, index, index, index, shapes, shapes, shapes, in_place),
]
TWO: list[Template] = [product, product, product, product, nothing_else]
FINITE = (with_dense, over_dense, with_sparse, over_sparse, product, nothing_else)
"""Where zeros that are not stored meet what another tensor has, NaN and infinities of either are not those of dense tensors."""
