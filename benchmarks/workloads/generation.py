"""Writing text: `generate` of transformers, greedy, with language models whose layers are mixtures of experts.

The models are small ones of the architectures of Mixtral and Qwen3-MoE, with random weights. Every contender has to write the
tokens of eager code. All share one copy of the weights.
"""

from __future__ import annotations

import copy
import inspect
from argparse import Namespace, _ActionsContainer
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.arguments import add_list, sizes, some_of
from benchmarks.contenders.sparse import chosen, missing
from benchmarks.own_code import compiled
from benchmarks.registry import Case, Contender, Prepared, Work, Workload, WrongResult

_SIZES: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12, "num_key_value_heads": 4,
    "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"intermediate_size": 1024, "num_local_experts": 16, "num_experts_per_tok": 2}),
    "qwen3": ("Qwen3Moe", {"head_dim": 64, "moe_intermediate_size": 384, "num_experts": 32, "num_experts_per_tok": 4}),
}


@dataclass(frozen=True, eq=False)
class Writing:
    """A model, a prompt [1, tokens], and how many tokens are to follow; the result is all of them."""

    model: Any
    prompt: Tensor
    new: int
    tolerance: Mapping[str, float] = field(default_factory=lambda: {"f32": 0.0})
    precision: str = "f32"

    def reference(self) -> tuple[Tensor, Work]:
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        return self.write(self.model), Work(0.0, 0.0, weights, self.prompt.nbytes)

    def error(self, result: Tensor, expected: Tensor) -> float:
        """The share of tokens that are others."""
        if result.shape != expected.shape:
            raise WrongResult(f"{[*result.shape]} tokens instead of {[*expected.shape]}")
        return float((result != expected).float().mean())

    def write(self, model: Any) -> Tensor:
        with torch.no_grad():
            found: Tensor = model.generate(
                self.prompt, attention_mask=torch.ones_like(self.prompt), do_sample=False, max_new_tokens=self.new,
                min_new_tokens=self.new,
            )  # fmt: skip
        return found


def written(backend: str | None, experts: str, problem: Writing) -> Prepared:
    """`generate`, whose forward pass a backend compiles, with an experts_implementation."""
    from gossamer.backend.report.report import collect

    model = copy.deepcopy(problem.model, {id(p): p for p in problem.model.parameters()})
    model.set_experts_implementation(experts)
    if backend is not None:
        original = model.forward
        model.forward = compiled(original, backend=backend)
        model.forward.__signature__ = inspect.signature(original)  # `generate` reads which arguments there are
    with collect() as collected:
        problem.write(model)
    call = partial(problem.write, model)
    return Prepared(call, partial(chosen, collected.decisions)) if backend == "sparse" else Prepared(call)


def build(name: str, prompt: int, new: int) -> Writing:
    import transformers

    transformers.logging.set_verbosity_error()
    family, sizes = _MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**_SIZES, **sizes)).eval()
    random = torch.Generator().manual_seed(1)
    return Writing(model.requires_grad_(False), torch.randint(0, _SIZES["vocab_size"], (1, prompt), generator=random), new)


def add_arguments(parser: _ActionsContainer) -> None:
    add_list(parser, "--models", some_of(*_MODELS), ",".join(_MODELS), "which")
    add_list(parser, "--prompts", sizes, "32", "tokens of the prompt")
    add_list(parser, "--new", sizes, "32", "tokens that are written")


def cases(args: Namespace) -> list[Case]:
    return [
        Case(
            f"{name} {prompt} + {new} tokens",
            {"model": name, "tokens": prompt, "new": new},
            partial(build, name, prompt, new),
            0.06 * (prompt + new),
        )
        for name in args.models
        for prompt in args.prompts
        for new in args.new
    ]


def contenders() -> dict[str, Contender]:
    found = {
        f"{backend or 'eager'}-{experts}": Contender(f"{label}, {experts}", partial(written, backend, experts))
        for backend, label in ((None, "PyTorch"), ("inductor", "Inductor"))
        for experts in ("grouped_mm", "batched_mm")
    }
    return found | {"sparse": Contender("Gossamer", partial(written, "sparse", "grouped_mm"), missing=missing)}


WORKLOAD = Workload(
    "writing text with mixtures of experts",
    add_arguments,
    cases,
    contenders=contenders,
    baselines=("inductor-grouped_mm", "inductor-batched_mm"),
    preparing=60,
    gflops=5.0,
)
