"""Builds a chain: imports it as contract IR, compiles it, and packs its weights. Equal chains are compiled once."""

import math
import threading
from functools import partial

import torch
from torch import fx

from gossamer.backend.chains.chain_cost import is_sequence, schedules_of
from gossamer.backend.chains.dense_chain import DenseChain
from gossamer.backend.chains.find_chains import Chain, Stage
from gossamer.backend.graph.inputs import noticed
from gossamer.backend.regions.build_region import Arrays, Built, arrays_of, content_hash, rounded_tokens
from gossamer.backend.regions.compiled_kernel import compiled_kernel
from gossamer.backend.regions.cost import densest_that_pays, matrix_of, renewing_pays
from gossamer.backend.regions.matrix_functions import signature
from gossamer.backend.report.dump import Dump
from gossamer.backend.report.options import Options
from gossamer.backend.run import region_op
from gossamer.backend.run.compiled_region import CompiledRegion, Variant, Weight
from gossamer.backend.run.labels import about
from gossamer.backend.run.layouts import Matrices, Sequences
from gossamer.backend.run.packed_weights import Packings
from gossamer.dialects.errors import CompileError, FormatError
from gossamer.passes.pipelines import CHAIN, SEQUENCE

_lock = threading.RLock()


def build_chain(chain: Chain, names: list[str], leaves: list[list[torch.Tensor]], options: Options, dump: Dump | None) -> Built:
    """Compiles the chain, packs its weights, and registers it under the key by which `gossamer::region` finds it.

    `names` are the names of its weights. `leaves` are for each weight the tensors that it is computed from. Raises CompileError
    if the chain cannot be compiled or a weight cannot be packed.
    """
    contractions = chain.contractions
    with _lock:
        request = signature_of(chain)
        schedule, place = SEQUENCE if is_sequence(chain) else CHAIN, contractions[0].weight.device
        name, contract = f"{names[0]} to {names[-1]}", partial(_contract, chain)
        kernel = compiled_kernel("chain", name, request, schedule, place, contract, dump, partial(_text, chain, names))
        formats = [format for format in kernel.formats if format is not None]
        verify = noticed([leaf for c in contractions for leaf in c.weight.leaves], options.verify)
        weights, at = list[Weight](), 1
        for contraction, format, values in zip(contractions, formats, leaves, strict=True):
            packings = Packings.of(contraction.weight.key, contraction.weight.evaluate, format)
            densest, renew = densest_that_pays(contraction, options.min_gain), renewing_pays(contraction, options.min_gain)
            weights.append(Weight(packings, slice(at, at + len(values)), densest, renew, verify == "full"))
            at += len(values)
        facts = [(c.weight.key, w.densest, w.renew) for c, w in zip(contractions, weights, strict=True)]
        key = content_hash(request, *facts, verify)
        built = region_op.find(key)
        if built is None:
            variant = Variant(math.inf, kernel, tuple(weights))
            said = about(f"chain of {len(contractions)}", chain.members, [each.node for each in contractions])
            built = CompiledRegion((variant,), _layout(chain), DenseChain.of(chain), about=said)
        built = region_op.add(key, built)
    sizes, arrays = list[int](), list[Arrays]()
    for weight, values, own in zip(weights, leaves, names, strict=True):
        try:
            packed = weight.packings.first(values, weight.densest)
            sizes.append(packed.nbytes if packed is not None else 0)
            arrays.append(arrays_of(packed))
        except FormatError as error:
            raise CompileError(f"region {own}: its weight cannot be packed: {error}") from error
    return Built(key, built, (kernel,), tuple(sizes), tuple(arrays), "" if dump is None else dump.written.get(request, ""))


def _layout(chain: Chain) -> Matrices:
    results = tuple((int(stage.columns), stage.output.meta["val"].dtype) for stage in chain.results)  # guarded sizes
    if chain.attention is None:
        return Matrices(results)
    return Sequences(results, by_position=chain.inputs[0].node in chain.by_position)


def _contract(chain: Chain) -> str:
    from gossamer.backend.chains.chain_importer import import_chain  # torch-mlir's front end takes half a second to load

    weights = [(matrix_of(c), own) for c, own in zip(chain.contractions, schedules_of(chain), strict=True)]
    return import_chain(chain, weights, rounded_tokens(chain.contractions[0].tokens))


def _text(chain: Chain, names: list[str]) -> str:
    from gossamer.backend.chains.chain_importer import chain_text

    return chain_text(chain, names)


def signature_of(chain: Chain) -> str:
    """Returns all that the kernel depends on, as text: chains of equal text share a kernel."""
    numbers = {i.node: f"input {n}" for n, i in enumerate(chain.inputs)}
    numbers |= {s.output: f"stage {n}" for n, s in enumerate(chain.stages)}
    kinds = [(i.kind, i.node.meta["val"].dtype, _width(i.node, i.kind)) for i in chain.inputs]
    turned = sorted(numbers[node] for node in chain.by_position)
    outputs = [numbers[node] for node in chain.outputs]
    own = dict(zip([c.node for c in chain.contractions], schedules_of(chain), strict=True))
    what = SEQUENCE if is_sequence(chain) else CHAIN
    lines = [f"{what} {kinds} {rounded_tokens(chain.contractions[0].tokens)} {turned} {outputs}"]
    for stage in chain.stages:
        operands = [(numbers[o.node], o.kind) for o in stage.operands]
        product = stage.contraction
        weight = None if product is None else (str(matrix_of(product)), own[product.node])
        lines.append(f"{operands} {_content(stage)} {weight}")
    return "\n".join(lines)


def _content(stage: Stage) -> str:
    if stage.step is not None:
        return f"{stage.step.operation} {stage.step.numbers}"
    assert stage.body is not None
    return signature(stage.body)


def _width(node: fx.Node, kind: str) -> object:
    return None if kind == "mask" else node.meta["val"].shape[-1 - (kind == "factor") :]
