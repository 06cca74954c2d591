"""The body of a region on matrices as one on images, for plain torch."""

import torch
from torch import fx

from gossamer.dialects.window import Window

aten = torch.ops.aten


def on_images(body: fx.GraphModule, window: Window, dims: int) -> fx.GraphModule:
    """A body on matrices (see `matrix_functions`) as one on batches of images of so many dimensions: its product becomes the
    convolution."""
    graph = fx.Graph()
    result = graph.graph_copy(body.graph, copies := dict[fx.Node, fx.Node]())
    graph.output(result)
    product = copies[next(n for n in body.graph.nodes if n.target is aten.mm.default)]
    x, w, *others = (copies[node] for node in body.graph.nodes if node.op == "placeholder")
    kernel, stride, dilation = (list(sizes[5 - dims :]) for sizes in (window.kernel, window.stride, window.dilation))
    around = [n for sides in zip(window.before[::-1], window.after[::-1], strict=True) for n in sides][: 2 * dims - 4]
    with graph.inserting_before(product):
        rows = graph.call_function(aten.sym_size.int, (w, 0))
        filters = graph.call_function(aten.reshape.default, (w, [rows, -1, *kernel]))
        padded = graph.call_function(aten.constant_pad_nd.default, (x, around)) if any(around) else x
        given = (padded, filters, None, stride, [0] * (dims - 2), dilation, False, [0] * (dims - 2), window.groups)
        dense = graph.call_function(aten.convolution.default, given)
        for each in others:
            if len(each.meta["shape"]) == 1:
                readers = list(each.users)
                spread = graph.call_function(aten.reshape.default, (each, [-1, *[1] * (dims - 2)]))
                for reader in readers:
                    reader.replace_input_with(each, spread)
    product.replace_all_uses_with(dense)
    graph.eliminate_dead_code()
    return fx.GraphModule({}, graph, "Convolution")
