"""`gossamer.export` returns a program of torch.export whose sparse layers are Gossamer's kernels, for packages of AOTInductor.

    program = gossamer.export(model, inputs, dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch._inductor.aoti_compile_and_package(program, package_path="model.pt2")

The package contains the kernels and packed weights. `torch._inductor.aoti_load_package` loads it on machines that have torch.
"""

import operator
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, OutputSpec, TensorArgument

from gossamer.backend.compile_graph import compile_graph
from gossamer.backend.dense import inductor_table
from gossamer.backend.deploy.exported_experts import export_experts
from gossamer.backend.deploy.exported_region import ExportedRegion, call
from gossamer.backend.deploy.packages import watch_exports
from gossamer.backend.deploy.smaller_module import smaller_module
from gossamer.backend.devices.unproven import stays_dense
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Inputs, Static, constants
from gossamer.backend.graph.strides import orders, orders_of_results, restore, restore_results
from gossamer.backend.graph_passes import GRAPH_PASSES
from gossamer.backend.report.dump import Dump
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import record
from gossamer.backend.run import region_op
from gossamer.dialects.errors import CompileError
from gossamer.runtime.foreseen import foreseen
from gossamer.runtime.torch_internals import (
    PlainAOTInput,
    detect_fake_mode,
    disable_current_modes,
    enable_python_dispatcher,
    proxies_of_exports,
    tree_flatten,
)

PASSES = (
    "drop-copies", "distribute-factors", "unsigned-products", "dequantized-products", "routed-experts", "sparse-weights",
    "convolutions",
)  # fmt: skip
"""The graph passes whose kernels run without Python. `export` disables all others."""


def export(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | Options | None = None,
) -> torch.export.ExportedProgram:
    """Returns a program of the model in which sparse layers are kernels with packed weights.

    args, kwargs, dynamic_shapes  as torch.export.export takes them
    options                       as torch.compile takes them (see `Options`)

    The program has the current weights. It is for inference, and for this machine's processor. Inductor compiles everything
    but products with pruned weights. Keep the program as long as you call it in this process.

    Raises the errors of torch.export, and CompileError if no layer is sparse.
    """
    parsed = Options.parse(options)
    given, named = tuple(args), dict(kwargs or {})
    with torch.no_grad():
        smaller, before = smaller_module(model, given, named, dynamic_shapes, parsed)
        program = torch.export.export(smaller, given, named, dynamic_shapes=dynamic_shapes)
        program = program.run_decompositions(inductor_table())
        _drop_assertions(program.graph_module.graph)
        proxies_of_exports.clear()  # it would keep the program and its packed weights alive until the next export
    graph, inputs = program.graph_module.graph, _inputs(program)
    if reason := stays_dense(inputs.values, parsed):
        raise CompileError(f"the model cannot be exported: {reason}")
    parsed = replace(parsed, disable=tuple(name for name in GRAPH_PASSES if name not in PASSES or name in parsed.disable))
    context = GraphContext(inputs, parsed, Dump(parsed.dump_ir) if parsed.dump_ir else None, None, exported=True)
    traced, results, nodes = orders(graph), orders_of_results(graph), set(graph.nodes)
    with disable_current_modes(), torch.no_grad(), enable_python_dispatcher(), _without_guards(graph):
        rewritten = compile_graph(graph, context)
        restore_results(graph, results, nodes, images=False)
        restore(graph, traced)
        called = _with_weights(graph, inputs)
    sparse = {decision.name for decision in rewritten.decisions if decision.sparse}
    decisions = [*(decision for decision in before if decision.name not in sparse), *rewritten.decisions]
    record(decisions, rewritten.kernels, rewritten.seconds, False)
    if not called and smaller is model:
        reasons = "; ".join(sorted({f"{each.name}: {each.reason}" for each in decisions})[:5])
        raise CompileError(
            f"no layer of the model is sparse ({reasons or 'it has no weights with zeros'}): use torch.export.export for it"
        )
    watch_exports()
    return _without_dead_inputs(program)


def _without_guards(graph: fx.Graph) -> AbstractContextManager[None]:
    """In this context, new fake values add no guards on symbolic sizes. A program has no guards, so they would get lost."""
    mode = detect_fake_mode([node.meta.get("val") for node in graph.find_nodes(op="placeholder")])
    return mode.shape_env.suppress_guards() if mode and mode.shape_env else nullcontext()


def _inputs(program: torch.export.ExportedProgram) -> Inputs:
    """Returns the inputs of a program's graph. Parameters, buffers and constants are static, unless the program writes to
    them."""
    signature, flat = program.graph_signature, list[Any]()
    given = iter(tree_flatten(program.example_inputs)[0])
    written = _written(signature)
    statics, names = dict[int, Static](), dict[int, str]()
    for index, (node, spec) in enumerate(zip(_placeholders(program), signature.input_specs, strict=True)):
        node.meta["desc"] = PlainAOTInput(index)
        name = names[index] = spec.target or node.name
        if spec.kind is InputKind.USER_INPUT:
            flat.append(next(given))
            continue
        held = program.constants if name in program.constants else program.state_dict
        flat.append(held.get(name))
        if isinstance(flat[index], torch.Tensor) and name not in written:
            statics[index] = Static(name, foreseen(flat[index]))
    return Inputs(program.graph_module, flat, statics, (), names)


def _written(signature: ExportGraphSignature) -> set[str]:
    """Returns the names of the parameters and buffers that a program writes to."""
    return {*signature.buffers_to_mutate.values(), *signature.parameters_to_mutate.values()}


def _with_weights(graph: fx.Graph, inputs: Inputs) -> int:
    """Replaces each call of a region by a call with packed weights, in place. Returns the number of calls."""
    found = [node for node in graph.nodes if node.target in (region_op.region, region_op.chain)]
    for node in found:
        operands, key = node.args
        region, others = ExportedRegion.of(region_op.known(key), [_value(each, inputs) for each in operands])
        emit = Emitter(node)
        called = call(emit, region, [operands[0], *operands[others]])
        node.replace_all_uses_with(called if node.target is region_op.chain else emit(operator.getitem, called, 0))
        graph.erase_node(node)
    experts = export_experts(graph, inputs)
    graph.eliminate_dead_code(_has_effect)
    return len(found) + experts


def _drop_assertions(graph: fx.Graph) -> None:
    """Erases assertions of types, which always hold. They are users of values, and so prevent their fusion into regions."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.erase_node(node)


def _has_effect(node: fx.Node) -> bool:
    """Whether a node without users must stay. torch's own predicate would keep attention, because it takes it for random."""
    schema = getattr(node.target, "_schema", None)
    asserts = getattr(node.target, "__name__", "").startswith(("_assert_scalar", "_assert_async"))
    return node.op in ("placeholder", "output") or asserts or (schema is not None and schema.is_mutable)


def _value(node: fx.Node, inputs: Inputs) -> torch.Tensor | None:
    """Returns the tensor that a placeholder or constant stands for at every call, or None."""
    return inputs.value(node) if node.op == "placeholder" else constants(node.graph).get(node)


def _without_dead_inputs(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program of a rewritten graph. Its constants become inputs; weights that it no longer reads are left out."""
    module, signature = program.graph_module, program.graph_signature
    graph, held, inputs = module.graph, dict(program.constants), list(signature.input_specs)
    first = next(iter(graph.nodes))
    for node, value in constants(graph).items():
        with graph.inserting_before(first):
            lifted = graph.placeholder(f"constant_{node.name}")
        lifted.meta = dict(node.meta)
        held[lifted.name] = value
        inputs.insert(0, InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(lifted.name), lifted.name))
        node.replace_all_uses_with(lifted)
        graph.erase_node(node)
    by_name, written = {spec.arg.name: spec for spec in inputs}, _written(signature)
    kept = list[InputSpec]()
    for node in graph.find_nodes(op="placeholder"):
        spec = by_name[node.name]
        if node.users or spec.kind is InputKind.USER_INPUT or spec.target in written:
            kept.append(spec)
        else:
            graph.erase_node(node)
    outputs = list[OutputSpec]()
    for spec, node in zip(signature.output_specs, graph.output_node().args[0], strict=True):
        argument = TensorArgument(node.name) if isinstance(spec.arg, TensorArgument) else spec.arg
        outputs.append(OutputSpec(spec.kind, argument, spec.target))
    module.recompile()
    targets = {spec.target for spec in kept}
    return torch.export.ExportedProgram(
        root=module,
        graph=graph,
        graph_signature=ExportGraphSignature(kept, outputs),
        state_dict={name: value for name, value in program.state_dict.items() if name in targets},
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants={name: value for name, value in held.items() if name in targets},
        verifiers=[program.verifier],
    )


def _placeholders(program: torch.export.ExportedProgram) -> list[fx.Node]:
    return list(program.graph_module.graph.find_nodes(op="placeholder"))
