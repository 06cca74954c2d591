"""`gossamer.SparseConfig` loads and saves sparse models by `from_pretrained` and `save_pretrained` of transformers.

For transformers a quantizer is an object that changes a model while it is loaded. It finds ours by the name in config.json:

    "quantization_config": {"quant_method": "gossamer", "weights": "stored", …}
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

from transformers.utils.quantization_config import QuantizationConfigMixin

from gossamer.dialects.errors import OptionError
from gossamer.dialects.option_check import check_name, check_share

METHOD = "gossamer"
Weights = Literal["plain", "masked", "stored", "int8", "int4"]


class SparseConfig(QuantizationConfigMixin):
    """The `quantization_config` of `from_pretrained` that makes linear layers sparse. It needs transformers.

        config = gossamer.SparseConfig(sparsity=0.9, weights="masked")
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)

    sparsity  the share of elements to set to zero, by magnitude; None keeps the zeros that the checkpoint has. For less loss
              load the model plain, and call `gossamer.prune` with data
    pattern   where zeros may lie, as for `gossamer.prune`: "unstructured", "rows", "2:4", "1x16", …
    weights   how the layers hold their weights:
              "plain"   dense, with zeros
              "masked"  under masks, to train on (`gossamer.sparsify`)
              "stored"  only nonzeros (`gossamer.store_sparse`)
              "int8", "int4"  integers (`gossamer.quantize`); int4 has groups of 16
    only, skip  which layers: names or patterns of names

    `save_pretrained` then writes plain weights with zeros, which any program loads without Gossamer. With Gossamer the folder
    loads as the same sparse model. Integers are written as floats, from which Gossamer computes the same integers again.

    It also reads files of compressed-tensors. Replace the name of the method, and keep the other entries:

        config = AutoConfig.from_pretrained(folder)
        config.quantization_config["quant_method"] = "gossamer"
        model = AutoModelForCausalLM.from_pretrained(folder, config=config)

    OptionError for a bad value.
    """

    def __init__(
        self,
        sparsity: float | None = None,
        *,
        pattern: str = "unstructured",
        weights: Weights = "plain",
        only: str | Sequence[str] | None = None,
        skip: str | Sequence[str] = (),
        quant_method: str = METHOD,
        **of_checkpoint: Any,
    ) -> None:
        from gossamer.sparsity.pruning.patterns import pattern_of

        check_name("weights", weights, dict.fromkeys(get_args(Weights)))
        density = pattern_of(pattern).density
        if sparsity is not None:
            check_share("sparsity", sparsity)
        of_compressed_tensors = "format" in of_checkpoint or "sparsity_config" in of_checkpoint
        if of_checkpoint and not of_compressed_tensors:
            raise OptionError(f"SparseConfig takes sparsity, pattern, weights, only and skip, not {', '.join(of_checkpoint)}")
        self.quant_method: Any = quant_method
        self.sparsity = sparsity if density is None else 1 - density
        self.pattern, self.weights = pattern, weights
        self.only, self.skip = (
            choice if choice is None or isinstance(choice, str) else list(choice) for choice in (only, skip)
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the entry of config.json. It has no sparsity, so that a pruned model is not pruned again."""
        return {"quant_method": METHOD, "weights": self.weights, "only": self.only, "skip": self.skip}
