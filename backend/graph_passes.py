"""The rewritings of a graph, in the order in which they run. A new one is a file and a line here.

Importing this file imports none of them, and nothing of the compiler.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from gossamer.backend.report.options import SMALLER_LAYERS
from gossamer.dialects.errors import OptionError
from gossamer.dialects.option_check import did_you_mean

if TYPE_CHECKING:
    from gossamer.backend.graph.graph_pass import GraphPass

GRAPH_PASSES = {
    "tangent-sizes": "operations.tangent_sizes:TangentSizes",
    "drop-copies": "operations.drop_copies:DropCopies",
    "message-passing": "messages.message_passing:MessagePassing",
    "fold-values": "operations.fold_values:FoldValues",
    "fuse-attention": "operations.fuse_attention:FuseAttention",
    "order-products": "operations.order_products:OrderProducts",
    "stored-weights": "weights.stored_weights:StoredWeights",
    "fuse-rows": "operations.fuse_rows:FuseRows",
    "unsigned-products": "weights.unsigned_products:UnsignedProducts",
    "dequantized-products": "weights.dequantized_products:DequantizedProducts",
    "written-attention": "attention.written_attention:WrittenAttention",
    "silu-gradients": "weights.silu_gradients:SiluGradients",
    "sparse-weights": "weights.sparse_weights:SparseWeights",
    "masked-gradients": "weights.masked_gradients:MaskedGradients",
    "routed-experts": "weights.routed_experts:RoutedExperts",
    "flex-attention": "attention.flex_attention:FlexAttention",
    "convolutions": "convolution.convolutions:Convolutions",
    "convolutions-in-a-row": "convolution.convolutions_in_a_row:ConvolutionsInARow",
    "cached-attention": "attention.cached_attention:CachedAttention",
    "masked-attention": "attention.masked_attention:MaskedAttention",
    "report-operations": "operations.report_operations:ReportOperations",
    "tall-products": "operations.tall_products:TallProducts",
}


def graph_pass(name: str) -> "GraphPass":
    """The pass of this name."""
    module, _, cls = GRAPH_PASSES[name].partition(":")
    found: GraphPass = getattr(import_module(f"gossamer.backend.{module}"), cls)()
    return found


def check_disabled(names: Sequence[str]) -> None:
    """OptionError for a name in the option `disable` that is none of a pass."""
    known = [*GRAPH_PASSES, SMALLER_LAYERS]
    for name in names:
        if name not in known:
            raise OptionError(
                f"option disable names {name!r}{did_you_mean(name, known)}; the graph passes are {', '.join(known)}"
            )
