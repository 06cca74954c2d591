"""Random small models: what they are made of, their zeros, the state they are in, and what happens between calls."""

import random

from tests.fuzz.blocks import BLOCKS, GRAPH_BLOCKS, SEQUENCE_BLOCKS, linear
from tests.fuzz.builder import WIDTHS, Builder, ModelProgram
from tests.fuzz.image_blocks import CHANNELS, IMAGE_BLOCKS, convolution, head

_KINDS = {"sequence": 45, "graph": 25, "images": 30}
_SIZES = [0, 1, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 40, 64, 65, 100]
_SIDES = [1, 5, 6, 8, 8, 9, 12, 16, 17, 24]
_CHANGES = [
    "with torch.no_grad(): [p.mul_(-0.5) for p in model.parameters()]",
    "with torch.no_grad(): [p.copy_(p.flip(0)) for p in model.parameters()]",
    "with torch.no_grad(): [p.zero_() for p in model.parameters()]",
    "with torch.no_grad(): [p.add_(0.01) for p in model.parameters() if p.dim() == 1]",
    "with torch.no_grad(): [p.add_(0.01) for p in model.parameters()]",
    "for p in model.parameters(): p.data = p.data.flip(0)",
    "model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})",
    "model.train(not model.training)",
]
"""What happens to weights between two calls; masks of parametrizations and hooks are parameters of nothing."""
_COPY = "model = copy.deepcopy(model)"


def make_model(seed: int) -> ModelProgram:
    """The program of a seed."""
    rng = random.Random(seed)
    kind = rng.choices([*_KINDS], [*_KINDS.values()])[0]
    program = ModelProgram(seed, kind)
    program.dtype = rng.choices(["torch.float32", "torch.float64", "torch.bfloat16"], [6, 2, 2])[0]
    builder = Builder(rng, program, CHANNELS if kind == "images" else WIDTHS)
    for _ in range(rng.choice([1, 1, 2, 2, 3])):
        blocks = {"sequence": BLOCKS + SEQUENCE_BLOCKS, "images": IMAGE_BLOCKS}.get(kind, BLOCKS)
        blocks = GRAPH_BLOCKS if kind == "graph" and rng.random() < 0.7 else blocks
        rng.choice(blocks)(builder)
    if not builder.products:
        (convolution if kind == "images" else linear)(builder)
    head(builder) if kind == "images" else builder.wider_than_one()
    _prune(rng, program)
    _set_state(rng, program)
    _call(rng, program, builder.features)
    return program


def _prune(rng: random.Random, program: ModelProgram) -> None:
    how = rng.choice(["'in place'", "'in place'", "'prune'", "'parametrize'"])
    blocks = ["(4, 4)", "(16, 1)", "(1, 8)", "(8, 8)", "'2:4'"]
    program.smaller = rng.random() < 0.4
    lines = ["'rows'", "'rows and biases'", "'columns'", "'both'"]
    shape = rng.choice(lines if program.smaller else ["(1, 1)"] * 5 + blocks + lines)
    program.pruning = f"{how}, density={rng.choice([0, 0.02, 0.1, 0.1, 0.2, 0.3, 0.5])}, shape={shape}"


def _set_state(rng: random.Random, program: ModelProgram) -> None:
    program.training = rng.random() < 0.4
    program.written = rng.random() < 0.15
    hooks = "'prune'" in program.pruning  # of which torch copies no results
    program.prepared = _COPY if not hooks and rng.random() < 0.2 else ""
    changes = _CHANGES if hooks else [*_CHANGES, _COPY]
    program.change = rng.choice(["", *changes])
    gain = 1.1 if program.smaller and rng.random() < 0.6 else 0  # above 1, what is left of a layer stays dense
    dense = "" if rng.random() < 0.03 else ", dense='eager'"
    program.options = f"dict(min_gain={gain}, strict=True{dense})"


def _call(rng: random.Random, program: ModelProgram, features: int) -> None:
    """Three calls with inputs of one or two sizes; now and then so many that weights without zeros are noticed."""
    sizes = _SIDES if program.kind == "images" else _SIZES
    first = rng.choice(sizes)
    other = rng.choice([first, rng.choice(sizes), rng.choice(sizes)])
    ways = [("None", ""), ("None", ""), ("True", ""), ("None", "dynamic"), ("None", "unbacked")]
    program.dynamic, program.marked = rng.choice(ways)
    if program.marked == "dynamic" and min(first, other) < 2:
        program.marked = ""
    batch = rng.choice([1, 1, 2, 3])
    edges = rng.choice([0, 1, 10, 50, 300])
    again = edges if program.marked else rng.choice([edges, 1, 2, 77])
    between = [(first, edges)] * (12 if rng.random() < 0.15 else 1)
    last = ", last=True" if program.kind == "images" and rng.random() < 0.4 else ""
    program.calls = [f"{n}, tokens={t}, features={features}, batch={batch}, edges={e}{last}"
                     for n, (t, e) in enumerate([(first, edges), *between, (other, again)])]  # fmt: skip
    trained = program.training or "train" in program.change  # which torch.compile differentiates once
    ways_back = ["once", "once", ""] if trained else ["once", "", "", "twice"]
    regularly = rng.choice(ways_back) if rng.random() < 0.5 else None
    mode = "enable_grad" if rng.random() < (0.9 if program.training else 0.5) else "no_grad"
    for _ in program.calls:
        now = mode if rng.random() < 0.8 else rng.choice(["enable_grad", "no_grad", "inference_mode"])
        way = regularly if regularly is not None else rng.choice(ways_back)
        program.modes.append(now)
        program.backward.append(way if now == "enable_grad" else "")
