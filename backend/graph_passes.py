"""Lists the graph passes in the order in which they run. To add a pass, write a file and a line here, with the reason for its
place.

Importing this file imports no pass, and nothing of the compiler.
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
    # first, because all others compare sizes
    "tangent-sizes": "operations.tangent_sizes:TangentSizes",
    # before all patterns, which look through clones but not through copies
    "drop-copies": "operations.drop_copies:DropCopies",
    # makes the operations on SparseTensors that the next passes read
    "message-passing": "messages.message_passing:MessagePassing",
    # after `message-passing`, so that normalised weights are constants; before passes that fuse the products with them
    "fold-values": "operations.fold_values:FoldValues",
    # before passes that order the products of attention, or give them an epilogue
    "fuse-attention": "operations.fuse_attention:FuseAttention",
    # before `fuse-rows` and `stored-weights`, which put the products into one operation
    "order-products": "operations.order_products:OrderProducts",
    # before `sparse-weights`, which finds the parts of such sums
    "distribute-factors": "operations.distribute_factors:DistributeFactors",
    # after `distribute-factors`, whose gradients of factors become chains of small products
    "associate-products": "operations.associate_products:AssociateProducts",
    # makes products that `sparse-weights` takes
    "block-products": "operations.block_products:BlockProducts",
    # before `fuse-rows`, which would take the same products; `sparse-weights` reads the result
    "stored-weights": "weights.stored_weights:StoredWeights",
    # after all passes that rewrite operations on SparseTensors
    "fuse-rows": "operations.fuse_rows:FuseRows",
    # makes products of int8 that `sparse-weights` takes
    "unsigned-products": "weights.unsigned_products:UnsignedProducts",
    # makes products with dequantized weights that `sparse-weights` takes
    "dequantized-products": "weights.dequantized_products:DequantizedProducts",
    # after passes that make products of int8
    "bytes-as-floats": "weights.bytes_as_floats:BytesAsFloats",
    # before `sparse-weights`, whose chains have attention as one operation
    "written-attention": "attention.written_attention:WrittenAttention",
    # before `sparse-weights` takes the products of single experts, and `silu-gradients` changes gradients
    "routed-experts": "experts.routed_experts:RoutedExperts",
    # after `routed-experts`, because mixtures of experts gather their weights in the same way
    "many-adapters": "experts.many_adapters:ManyAdapters",
    # before `sparse-weights`, whose regions also take the derivative
    "silu-gradients": "weights.silu_gradients:SiluGradients",
    # the first that takes dense products, with their chains and epilogues
    "sparse-weights": "weights.sparse_weights:SparseWeights",
    # reads only FlexAttention, which no other pass takes
    "flex-attention": "attention.flex_attention:FlexAttention",
    # reads only look-ups, which no other pass takes; before `tall-products`, which takes all remaining products
    "embedding-bags": "embeddings.embedding_bags:EmbeddingBags",
    # reads only convolutions; after `sparse-weights`, which has made the regions of products
    "convolutions": "convolution.convolutions:Convolutions",
    # after `sparse-weights` and `convolutions`: the gradient of a weight is the only product of its layer that is not yet in a
    # region
    "masked-gradients": "weights.masked_gradients:MaskedGradients",
    # joins the operations that `convolutions` made
    "convolutions-in-a-row": "convolution.convolutions_in_a_row:ConvolutionsInARow",
    # after `convolutions`, which makes images planar
    "max-pools": "convolution.max_pools:MaxPools",
    # takes attention that is in no chain; before `masked-attention`, which would take it with its mask
    "cached-attention": "attention.cached_attention:CachedAttention",
    # the last that takes attention: all that remains and has a mask
    "masked-attention": "attention.masked_attention:MaskedAttention",
    # after all passes that make, change or drop operations on SparseTensors
    "report-operations": "operations.report_operations:ReportOperations",
    # takes dense products that no other pass took
    "few-row-products": "operations.few_row_products:FewRowProducts",
    # the same; last
    "tall-products": "operations.tall_products:TallProducts",
}

STEPS = (STRUCTURED_WEIGHTS, SMALLER_LAYERS, *GRAPH_PASSES)
"""The names that the option `disable` takes, in the order in which these steps run."""


def graph_pass(name: str) -> "GraphPass":
    """Returns the pass of this name."""
    module, _, cls = GRAPH_PASSES[name].partition(":")
    found: GraphPass = getattr(import_module(f"gossamer.backend.{module}"), cls)()
    return found


def check_disabled(names: Sequence[str]) -> None:
    """Raises OptionError if a name in the option `disable` is not the name of a step."""
    for name in names:
        if name not in STEPS:
            raise OptionError(
                f"option disable names {name!r}{did_you_mean(name, STEPS)}; the graph passes are {', '.join(STEPS)}"
            )
