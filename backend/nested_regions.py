"""Inlines regions of torch.compiler.nested_compile_region that have pruned weights.

    @torch.compiler.nested_compile_region
    def forward(self, x): ...                   Dynamo makes one graph for all blocks of this class

    %y = invoke_subgraph(%graph, "graph", %x, %w)      →     %y = the operations of %graph, for %x and %w

Inductor compiles such a graph once, and all blocks call it with their own weights. But kernels for zeros depend on the weights.
Regions without pruned weights stay, because they compile faster.
"""

from typing import Any

from torch import fx

from gossamer.backend.graph.inputs import Inputs, zero_heavy


def inline_pruned_regions(module: fx.GraphModule, inputs: Inputs) -> None:
    """Inlines regions in place, in one of Dynamo's graphs."""
    regions = [node for node in module.graph.nodes if _is_region(node)]
    if not regions:
        return
    placeholders = module.graph.find_nodes(op="placeholder")
    pruned = {placeholders[number] for number, static in inputs.statics.items() if zero_heavy(static.tensor)}
    chosen = [node for node in regions if pruned & set(node.all_input_nodes)]
    for node in chosen:
        _inline(module, node)
    if chosen:
        module.graph.eliminate_dead_code()
        module.recompile()


def _is_region(node: fx.Node) -> bool:
    return node.op == "call_function" and str(node.target) == "invoke_subgraph"


def _inline(module: fx.GraphModule, call: fx.Node) -> None:
    """Replaces a call of a region by the operations of the region, and of the regions in it."""
    source, _, *operands = call.args
    assert isinstance(source, fx.Node)
    region = module.get_submodule(str(source.target))
    assert isinstance(region, fx.GraphModule)
    copies = dict(zip(region.graph.find_nodes(op="placeholder"), operands, strict=True))
    before = set(module.graph.nodes)
    with module.graph.inserting_before(call):
        results: Any = module.graph.graph_copy(region.graph, copies)
    added = [node for node in module.graph.nodes if node not in before]
    for node in added:
        if node.op == "get_attr":
            node.target = _moved(module, region, str(node.target))
    for user in list(call.users):  # all are getitem: a region returns a tuple
        user.replace_all_uses_with(results[user.args[1]])
        module.graph.erase_node(user)
    module.graph.erase_node(call)
    for node in added:
        if _is_region(node):
            _inline(module, node)


def _moved(module: fx.GraphModule, region: fx.GraphModule, name: str) -> str:
    """Gives the module an attribute of the region, under a name that is free. Returns the name."""
    value, free = getattr(region, name), name
    while getattr(module, free, value) is not value:
        free += "_"
    setattr(module, free, value)
    return free
