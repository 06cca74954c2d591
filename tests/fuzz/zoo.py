"""python -m tests.fuzz.zoo [NAMES]: every model that transformers can make, tiny, pruned, compiled, against float64.

Each runs in a process of its own: inference with padding at two sizes, then a training step. Rules say how small numbers of a
configuration become. If a model does not run with all of them, a number is put back. What does not run with any number put back
is passed over, with torch's or transformers' reason.
"""

import argparse
import os
import random
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

# How large what these words name becomes; the first word that ends a name decides.
SIZES: dict[str, int] = {
    "vocab_size": 300, "hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "num_blocks": 2, "num_hidden_groups": 1, "key_value_heads": 2, "num_kv_heads": 2, "n_head_kv": 2,
    "attention_heads": 4, "num_heads": 4, "n_head": 4, "n_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "head_dim": 16, "intermediate_size": 96, "ffn_dim": 96, "d_ff": 96, "d_inner": 128,
    "n_inner": 96, "hidden_dim": 96, "hidden_size": 64, "d_model": 64, "n_embd": 64, "embed_dim": 64, "embedding_size": 64,
    "dim": 64, "d_embed": 64, "d_kv": 16, "d_head": 16, "projection_dim": 32, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "experts_per_tok": 2, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "image_size": 32, "patch_size": 8, "max_position_embeddings": 256,
    "n_positions": 256, "sliding_window": 8, "state_size": 8, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
Results = list[dict[str, Tensor]]
KEPT = {"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"}
ROUNDING, TIMES_EAGER = 5e-5, 8
LARGEST = 30_000_000
"""Parameters of a model that counts as tiny."""


def tiny(config: Any, but: str = "") -> tuple[Any, set[str]]:
    """The configuration with small numbers in place, `but` for one name, and the names of what became smaller."""
    changed, before = set[str](), dict(vars(config))
    for name, value in before.items():
        if hasattr(value, "to_dict"):
            changed |= tiny(value, but)[1]
        elif isinstance(value, bool) or name.startswith("_") or name == but:
            continue
        elif isinstance(value, int) and name in KEPT:
            setattr(config, name, min(value, 2))
        elif isinstance(value, int):
            size = next((SIZES[word] for word in SIZES if name == word or name.endswith(f"_{word}")), value)
            _set(config, name, min(value, size))
        elif name == "depth_coefficient":
            _set(config, name, min(value, 0.5))
        elif (
            isinstance(value, list)
            and value
            and all(type(v) is int for v in value)
            and name in ("hidden_sizes", "embed_dims", "depths")
        ):
            _set(config, name, [min(v, 2 if name == "depths" else 32 * (1 + n)) for n, v in enumerate(value)])
        elif name in ("layer_types", "mlp_layer_types", "layers_block_type") and isinstance(value, list):
            _set(config, name, (value[:1] + value[-1:])[:2])
    return config, changed | {name for name, value in before.items() if vars(config).get(name) != value}


def _set(config: Any, name: str, value: Any) -> None:
    with suppress(AttributeError, ValueError, NotImplementedError):  # derived from others
        setattr(config, name, value)


def inputs(model: Any, config: Any, batch: int, tokens: int) -> dict[str, Tensor]:
    """What the model's main input asks for, and padding where there is a mask."""
    generator = torch.Generator().manual_seed(tokens)
    main = model.main_input_name
    if main == "pixel_values":
        vision = getattr(config, "vision_config", config)
        side = getattr(vision, "image_size", 64)
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        return {main: torch.randn(batch, getattr(vision, "num_channels", 3), height, width, generator=generator)}
    if main == "input_values":
        return {main: torch.randn(batch, 400 * tokens, generator=generator)}
    if main != "input_ids":
        raise NotImplementedError(f"input {main}")
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    given = {main: torch.randint(3, min(getattr(text, "vocab_size", 300), 300), (batch, tokens), generator=generator)}
    mask = torch.ones(batch, tokens, dtype=torch.long)
    mask[0, tokens - tokens // 3 :] = 0
    given["attention_mask"] = mask
    if getattr(config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = given[main][:, : tokens // 2]
    return given


def prune_(model: nn.Module, density: float) -> nn.Module:
    """Random zeros in place, in all linear layers and convolutions."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.dim() >= 2 and not isinstance(module, nn.Embedding):
            weight.data.mul_(torch.rand(weight.shape, generator=generator) < density)
    return model


def made(name: str) -> tuple[Any, Any]:
    """A configuration and its model, in float32, all random but the same each time. Raises what stops it from running."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config, changed = tiny(CONFIG_MAPPING[name]())
    try:
        return _running(config)
    except Exception:
        for kept in sorted(changed):
            with suppress(Exception):
                return _running(tiny(CONFIG_MAPPING[name](), kept)[0])
        raise


@torch.no_grad()
def _running(config: Any) -> tuple[Any, Any]:
    """The configuration and its model, which has run once."""
    from transformers import AutoModel

    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModel.from_config(config).parameters())
    if size > LARGEST:
        raise NotImplementedError(f"{size} parameters")
    torch.manual_seed(0)
    model = AutoModel.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() >= 2 and float(parameter.detach().std()) < 0.05:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
    model.eval()(**inputs(model, config, 2, 24))
    return config, prune_(model.train(), 0.1)


def run(model: Any, calls: list[dict[str, Tensor]], training: bool, function: Any) -> Results:
    """Outputs of each call, and the parameters' gradients of the last if training."""
    found = []
    for call in calls:
        torch.manual_seed(1)
        dtype = next(model.parameters()).dtype
        given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in call.items()}
        with torch.set_grad_enabled(training):
            out = function(**given)
        values = [x for x in tree_flatten(dict(out))[0] if isinstance(x, Tensor) and x.is_floating_point()]
        here = {f"output {n}": x.detach() for n, x in enumerate(values)}
        if training:
            model.zero_grad()
            # Of directions of its own each: what a norm gives has squares that do not change.
            sum((x * torch.randn(x.shape).to(x)).mean() for x in values if x.requires_grad).backward()  # type: ignore[union-attr]
            here |= {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append(here)
    return found


def exact(
    model: Any, calls: list[dict[str, Tensor]], training: bool, eager: list[dict[str, Tensor]]
) -> list[dict[str, Tensor]]:
    """The same in float64; what eager torch gives in float32 where an operator has no float64."""
    try:
        return run(model.double(), calls, training, model)
    except RuntimeError:
        return eager
    finally:
        model.float()


def one(name: str, dense: str) -> str:
    """How a model goes, in a line."""
    from gossamer.backend import sparse as backend
    from gossamer.backend.report.report import collect

    warnings.simplefilter("ignore")
    try:
        config, model = made(name)
        model.eval()
        with torch.no_grad():
            calls = [inputs(model, config, 2, 24), inputs(model, config, 3, 40)]
            eager = run(model, calls, False, model)
        wide = exact(model, calls, False, eager)
    except Exception as refusal:
        return f"skip {type(refusal).__name__} {str(refusal)[:90]!r}"
    words = []
    for training in (False, True):
        torch._dynamo.reset()
        if training:
            calls = calls[:1]
            try:
                eager = run(model, calls, True, model)
            except Exception as refusal:
                words.append(f"no training: {type(refusal).__name__}")
                break
            wide = exact(model, calls, True, eager)
        compiled = torch.compile(model, backend=backend, options={"dense": dense, "min_gain": 0, "strict": True})
        with collect() as collected:
            try:
                ours = run(model, calls, training, compiled)
            except Exception as failure:
                return f"RAISES {'training' if training else 'inference'} {type(failure).__name__} {str(failure)[:600]}"
        regions = sum(bool(decision.sparse) for decision in collected.decisions)
        problem = compared(ours, eager, wide)
        if problem:
            return f"WRONG {'training' if training else 'inference'} {regions} regions: {problem}"
        words.append(f"{regions} regions")
    return f"ok {', '.join(words)}"


def compared(ours: Results, eager: Results, wide: Results) -> str:
    """The first value that is farther from float64 than rounding and eager torch's own error allow, and how many are."""
    problems = []
    for call, (mine, theirs, exact) in enumerate(zip(ours, eager, wide, strict=True)):
        for name, reference in exact.items():
            if name not in mine:
                problems.append(f"call {call} {name} missing")
                continue
            if mine[name].shape != theirs[name].shape:
                problems.append(f"call {call} {name} {list(mine[name].shape)} for {list(theirs[name].shape)}")
                continue
            if not reference.numel() or not bool(reference.isfinite().all()):
                continue
            scale = float(reference.abs().max())
            error = float((mine[name].double() - reference).abs().nan_to_num(torch.inf).max())
            allowed = float((theirs[name].double() - reference).abs().max())
            if error > TIMES_EAGER * allowed + ROUNDING * max(scale, 1e-4):
                problems.append(f"call {call} {name} {error:.2g} of {scale:.2g}, eager {allowed:.2g}")
    return f"{len(problems)}: {'; '.join(problems[:3])}" if problems else ""


def main() -> int:
    """The number of models that failed, at most 100."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("names", nargs="*")
    options.add_argument("--dense", choices=["eager", "inductor"], default="eager")
    options.add_argument("--seconds", type=float, default=1e9)
    options.add_argument("--limit", type=float, default=300, help="seconds a model may take")
    options.add_argument("--log", type=Path, help="lines are added; models that it names are passed over")
    options.add_argument("--alone", action="store_true", help="in this process")
    given = options.parse_args()
    if given.alone:
        torch.set_num_threads(1)
        print(one(given.names[0], given.dense), flush=True)
        return 0
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    names = given.names or random.Random(0).sample(sorted(MODEL_MAPPING_NAMES), len(MODEL_MAPPING_NAMES))
    before = given.log.read_text().splitlines() if given.log and given.log.exists() else []
    done, wrong, begin = {line.split()[0] for line in before}, 0, time.monotonic()
    for name in names:
        if name in done or time.monotonic() > begin + given.seconds:
            continue
        command = [sys.executable, "-m", "tests.fuzz.zoo", "--alone", "--dense", given.dense, name]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=given.limit, env=os.environ | {"HF_HUB_OFFLINE": "1"}
            )
            lines = result.stdout.strip().splitlines()
            word = lines[-1] if lines and result.returncode == 0 else f"CRASH {result.returncode} {result.stderr[-300:]!r}"
        except subprocess.TimeoutExpired:
            word = "LIMIT"
        wrong += word.split()[0] in ("WRONG", "RAISES", "CRASH")
        line = f"{name} {word}".replace("\n", " ")
        print(line, flush=True)
        if given.log:
            with given.log.open("a") as log:
                log.write(line + "\n")
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(), 100))
