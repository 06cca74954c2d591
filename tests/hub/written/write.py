"""Writes the checkpoints beside this file with compressed-tensors 0.11, as llm-compressor did. 0.20 writes no bitmasks.

    pip install compressed-tensors==0.11.0
    python -m tests.hub.written.write

The weights follow a formula, so a test knows them without the library. They are multiples of 1/16, which is the scale of the
quantized ones. So integers and 8-bit floats hold them exactly.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
SCALE = 1 / 16
FORMATS = {
    "sparse-bitmask": ("sparse-bitmask", None),
    "sparse-24-bitmask": ("sparse-24-bitmask", None),
    "sparse-24-bitmask-of-fp8": ("sparse-24-bitmask", "float-quantized"),
    "pack-quantized": (None, "pack-quantized"),
}
"""The formats of sparsity and of quantization, by the name of the folder."""


def weight(rows: int, columns: int, two_four: bool) -> Tensor:
    """Returns a matrix of multiples of 1/16 from -7/16 to 7/16. Two of four are nonzeros, or two fifths in no pattern."""
    place = torch.arange(rows * columns)
    value = (place * 7919 % 251 % 7 + 1) * (1 - 2 * (place * 613 % 127 % 2))
    first, step = place // 4 * 31 % 5 % 4, place // 4 * 17 % 7 % 3 + 1
    kept = (place % 4 == first) | (place % 4 == (first + step) % 4) if two_four else place * 7907 % 1009 % 5 < 2
    return (value * kept).view(rows, columns) * SCALE


def model(two_four: bool) -> LlamaForCausalLM:
    """Returns a Llama of one layer with these weights, in bfloat16."""
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        vocab_size=8, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    made = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.copy_(weight(*parameter.shape, two_four))
    return made


def write(name: str) -> None:
    """Writes one checkpoint into the folder of this name."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.config import SparsityCompressionConfig
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization import apply_quantization_config as quantize

    sparsity, quantization = FORMATS[name]
    llama = model(two_four="24" in name)
    layers = {"targets": ["Linear"], "ignore": ["lm_head"]}
    given: dict[str, Any] = {}
    if sparsity:
        structure = "2:4" if "24" in sparsity else "unstructured"
        given["sparsity_config"] = SparsityCompressionConfig.load_from_registry(
            sparsity, sparsity_structure=structure, **layers
        )
    if quantization:
        kind: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel"}
        if quantization == "pack-quantized":
            kind = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(symmetric=True, **kind))
        config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format=quantization)
        quantize(llama, config)
        for parameter, value in llama.named_parameters():
            if parameter.endswith("weight_scale"):
                value.data.fill_(SCALE)
        given["quantization_config"] = config
    compressor = ModelCompressor(**given)
    compressor.compress_model(llama)
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    llama.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    compressor.update_config(str(folder))


if __name__ == "__main__":
    for each in FORMATS:
        write(each)
