"""A language model like Llama, its Linears pruned, with peft's LoRA beside them: a step of training, and writing text.

The base is frozen, its weights are random. A step is forward, backward and AdamW of the adapters; what is checked is the first
step's gradients. Text has to be that of eager code.
"""

from __future__ import annotations

import copy
from argparse import Namespace, _ActionsContainer
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.arguments import add_list, shares, sizes, some_of
from benchmarks.contenders import sparse
from benchmarks.models import largest_error
from benchmarks.own_code import compiled
from benchmarks.pruning import prune_linears
from benchmarks.registry import Case, Contender, Prepared, Work, Workload

_SIZES: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 12, "vocab_size": 2048,
    "num_key_value_heads": 4, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_PROMPT, _NEW = 32, 32
_WEIGHTS = 4 * (2 * 768 * 768 + 2 * 768 * 256 + 3 * 768 * 2048)
TASKS = {"train": (4, 128), "generate": (1, _PROMPT)}
"""Texts and tokens of each."""


@dataclass(frozen=True, eq=False)
class Adapted:
    """A model of peft, token ids, and which of TASKS it is for."""

    model: Any
    tokens: Tensor
    task: str
    tolerance: Mapping[str, float] = field(default_factory=lambda: {"f32": 1e-3})
    precision: str = "f32"

    def reference(self) -> tuple[Tensor, Work]:
        model = copy.deepcopy(self.model)
        found = self.written(model) if self.task == "generate" else self.trained(model.double(), model)[0].double()
        flops = (6.0 if self.task == "train" else 2.0) * _WEIGHTS * (self.tokens.numel() + _NEW * (self.task == "generate"))
        return found, Work(flops, flops, 4 * _WEIGHTS, self.tokens.nbytes)

    def error(self, result: Tensor, expected: Tensor) -> float:
        """For text, the share of tokens that are others."""
        return float((result != expected).float().mean()) if self.task == "generate" else largest_error(result, expected)

    def written(self, model: Any) -> Tensor:
        """The tokens, and as many new ones."""
        with torch.no_grad():
            found: Tensor = model.generate(
                input_ids=self.tokens, attention_mask=torch.ones_like(self.tokens), do_sample=False, pad_token_id=0,
                max_new_tokens=_NEW, min_new_tokens=_NEW,
            )  # fmt: skip
        return found

    def trained(self, model: Any, call: Callable[..., Any]) -> tuple[Tensor, Callable[[], Tensor]]:
        """The first gradients of the adapters, and what takes a step. `call` runs the model."""
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=1e-6, fused=True)

        def backward() -> None:
            with torch.enable_grad():
                call(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss.backward()

        backward()
        first = torch.cat([weight.grad.flatten().clone() for weight in weights if weight.grad is not None])

        def step() -> Tensor:
            optimizer.zero_grad()
            backward()
            optimizer.step()
            return first

        return first, step


def build(task: str, sparsity: float, rank: int) -> Adapted:
    import peft
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES)).eval()
    prune_linears(base.model, "unstructured", sparsity)
    model = peft.get_peft_model(base, peft.LoraConfig(r=rank, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # peft begins with zeros there
                parameter.normal_(std=0.01)
    return Adapted(model.eval(), torch.randint(_SIZES["vocab_size"], TASKS[task]), task)


def prepare(backend: str | None, problem: Adapted) -> Prepared:
    from gossamer.backend.report.report import collect

    model = copy.deepcopy(problem.model)
    base = model.get_base_model()
    with collect() as collected:
        if backend is not None:
            base.forward = compiled(base.forward, backend=backend)
        if problem.task == "generate":
            problem.written(model)
            call: Callable[[], Tensor] = partial(problem.written, model)
        else:
            call = problem.trained(model, base if backend is None else base.forward)[1]
    return Prepared(call, partial(sparse.chosen, collected.decisions)) if backend == "sparse" else Prepared(call)


def add_arguments(parser: _ActionsContainer) -> None:
    add_list(parser, "--tasks", some_of(*TASKS), ",".join(TASKS), "which")
    add_list(parser, "--sparsity", shares, ".9", "shares of zeros")
    add_list(parser, "--ranks", sizes, "16", "of the adapters")


def cases(args: Namespace) -> list[Case]:
    return [
        Case(
            f"{task} {sparsity:.0%} rank {rank}",
            {"task": task, "sparsity": sparsity, "rank": rank},
            partial(build, task, sparsity, rank),
            6e-9 * _WEIGHTS * 512,
        )
        for task in args.tasks
        for sparsity in args.sparsity
        for rank in args.ranks
    ]


def missing(backend: str | None) -> str | None:
    if find_spec("peft") is None:
        return "peft is not installed: pip install peft"
    return sparse.missing() if backend == "sparse" else None


def contenders() -> dict[str, Contender]:
    names = {"dense": (None, "PyTorch"), "inductor": ("inductor", "Inductor"), "sparse": ("sparse", "Gossamer")}
    return {
        name: Contender(label, partial(prepare, backend), missing=partial(missing, backend))
        for name, (backend, label) in names.items()
    }


WORKLOAD = Workload("LoRA beside a pruned Llama", add_arguments, cases, contenders, preparing=60.0, gflops=50.0)
