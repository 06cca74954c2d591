"""The rewritings of a graph, in the order in which they run. A new one is a file and a line here, with why it stands there.

Importing this file imports none of them, and nothing of the compiler.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from gossamer.backend.report.options import SMALLER_LAYERS, STRUCTURED_WEIGHTS
from gossamer.dialects.errors import OptionError
from gossamer.dialects.option_check import did_you_mean

if TYPE_CHECKING:
    from gossamer.backend.graph.graph_pass import GraphPass

GRAPH_PASSES = {
    # first: all others compare sizes
    "tangent-sizes": "operations.tangent_sizes:TangentSizes",
    # before all patterns: they look through clones, not through copies
    "drop-copies": "operations.drop_copies:DropCopies",
    # makes the operations on SparseTensors that the next passes read
    "message-passing": "messages.message_passing:MessagePassing",
    # after it: normalised weights are constants; before what multiplies by them is fused
    "fold-values": "operations.fold_values:FoldValues",
    # before products of attention are ordered or get an epilogue of their own
    "fuse-attention": "operations.fuse_attention:FuseAttention",
    # before `fuse-rows` and `stored-weights` hold the products in an operation
    "order-products": "operations.order_products:OrderProducts",
    # before `sparse-weights`, which finds the parts of such sums
    "distribute-factors": "operations.distribute_factors:DistributeFactors",
    # after it: the gradients of the factors become chains of small products
    "associate-products": "operations.associate_products:AssociateProducts",
    # makes products that `sparse-weights` takes
    "block-products": "operations.block_products:BlockProducts",
    # before `fuse-rows`, which would take the same products; for `sparse-weights`
    "stored-weights": "weights.stored_weights:StoredWeights",
    # after all that rewrites operations on SparseTensors
    "fuse-rows": "operations.fuse_rows:FuseRows",
    # makes products of int8 that `sparse-weights` takes
    "unsigned-products": "weights.unsigned_products:UnsignedProducts",
    # the same, of products of floats
    "dequantized-products": "weights.dequantized_products:DequantizedProducts",
    # before `sparse-weights`, whose chains hold attention as one operation
    "written-attention": "attention.written_attention:WrittenAttention",
    # before `sparse-weights` takes the products of single experts, and `silu-gradients` changes gradients
    "routed-experts": "experts.routed_experts:RoutedExperts",
    # after it: mixtures gather their weights alike
    "many-adapters": "experts.many_adapters:ManyAdapters",
    # before `sparse-weights`, whose regions grow over the derivative
    "silu-gradients": "weights.silu_gradients:SiluGradients",
    # the first that takes dense products, with chains and what follows them
    "sparse-weights": "weights.sparse_weights:SparseWeights",
    # reads FlexAttention alone, which no other pass takes
    "flex-attention": "attention.flex_attention:FlexAttention",
    # reads look-ups alone, which no other pass takes; before `tall-products` reads what is left
    "embedding-bags": "embeddings.embedding_bags:EmbeddingBags",
    # reads convolutions alone; regions of products are there already
    "convolutions": "convolution.convolutions:Convolutions",
    # after `sparse-weights` and `convolutions`: the gradient of a weight is the product of its layer that is no region
    "masked-gradients": "weights.masked_gradients:MaskedGradients",
    # joins what `convolutions` made
    "convolutions-in-a-row": "convolution.convolutions_in_a_row:ConvolutionsInARow",
    # attention that no chain took; before `masked-attention`, which would take it with its mask
    "cached-attention": "attention.cached_attention:CachedAttention",
    # the last that takes attention: what is left and has a mask
    "masked-attention": "attention.masked_attention:MaskedAttention",
    # after all that make, change or drop operations on SparseTensors
    "report-operations": "operations.report_operations:ReportOperations",
    # dense products that nothing else took
    "few-row-products": "operations.few_row_products:FewRowProducts",
    # last: the same
    "tall-products": "operations.tall_products:TallProducts",
}

STEPS = (STRUCTURED_WEIGHTS, SMALLER_LAYERS, *GRAPH_PASSES)
"""All that the option `disable` can leave out, in the order in which it runs."""


def graph_pass(name: str) -> "GraphPass":
    """The pass of this name."""
    module, _, cls = GRAPH_PASSES[name].partition(":")
    found: GraphPass = getattr(import_module(f"gossamer.backend.{module}"), cls)()
    return found


def check_disabled(names: Sequence[str]) -> None:
    """OptionError for a name in the option `disable` that is none of a pass."""
    for name in names:
        if name not in STEPS:
            raise OptionError(
                f"option disable names {name!r}{did_you_mean(name, STEPS)}; the graph passes are {', '.join(STEPS)}"
            )
