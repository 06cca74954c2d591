"""Chain → something that runs: import to contract IR, compile, pack every weight. Equal chains are compiled once."""

import math
import threading
from weakref import WeakValueDictionary

import torch
from torch import fx

from gossamer.backend.calls import region_op
from gossamer.backend.calls.compiled_region import CompiledRegion, Variant, Weight
from gossamer.backend.calls.layouts import Matrices, Sequences
from gossamer.backend.calls.packed_weights import Packings
from gossamer.backend.chains.chain_cost import is_sequence, schedules_of
from gossamer.backend.chains.dense_chain import DenseChain
from gossamer.backend.chains.find_chains import Chain, Stage
from gossamer.backend.chains.head_norm import HeadNorm
from gossamer.backend.chains.rotary import Rotation
from gossamer.backend.graph.inputs import noticed
from gossamer.backend.regions.build_region import Built, content_hash, rounded_tokens
from gossamer.backend.regions.cost import densest_that_pays, matrix_of, renewing_pays
from gossamer.backend.regions.matrix_functions import signature
from gossamer.backend.report.dump import Dump
from gossamer.backend.report.options import Options
from gossamer.dialects.errors import CompileError, FormatError
from gossamer.passes.pipelines import CHAIN, SEQUENCE
from gossamer.runtime.region_kernel import RegionKernel, recall_region
from gossamer.runtime.versions import source_hash
from gossamer.sparsity.kernels.compile_kernel import compile_region

_lock = threading.RLock()
_kernels: WeakValueDictionary[str, RegionKernel] = WeakValueDictionary()


def build_chain(chain: Chain, names: list[str], leaves: list[list[torch.Tensor]], options: Options, dump: Dump | None) -> Built:
    """Compiles the chain, packs its weights from the values of their leaves, and makes it known to `gossamer::region`.

    `names` are the weights'. Raises CompileError.
    """
    contractions = chain.contractions
    name = f"{names[0]} to {names[-1]}"
    with _lock:
        request = signature_of(chain)
        kernel = _kernels.get(request)
        if kernel is None or (dump is not None and request not in dump.written):
            kernel = _kernels[request] = _compile(chain, name, request, dump)
        if dump is not None:
            dump.written.add(request)
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
            built = CompiledRegion((variant,), _layout(chain), DenseChain.of(chain))
        built = region_op.add(key, built)
    sizes = []
    for weight, values, own in zip(weights, leaves, names, strict=True):
        try:
            packed = weight.packings.first(values, weight.densest)
            sizes.append(packed.nbytes if packed is not None else 0)
        except FormatError as error:
            raise CompileError(f"region {own}: its weight cannot be packed: {error}") from error
    return Built(key, built, (kernel,), tuple(sizes))


def _layout(chain: Chain) -> Matrices:
    results = tuple((int(stage.columns), stage.output.meta["val"].dtype) for stage in chain.results)  # guards fixed them
    if chain.attention is None:
        return Matrices(results)
    return Sequences(results, by_position=chain.inputs[0].node in chain.by_position)


def _compile(chain: Chain, name: str, signature_: str, dump: Dump | None) -> RegionKernel:
    stages = dump.stages(name) if dump is not None else None
    request = f"{signature_}\n{source_hash('gossamer.backend')}"
    known = recall_region(request) if dump is None else None
    if known is not None:
        return known
    from gossamer.backend.chains.chain_importer import import_chain  # torch-mlir's front end takes half a second to load

    try:
        first = chain.contractions[0]
        weights = [(matrix_of(c), own) for c, own in zip(chain.contractions, schedules_of(chain), strict=True)]
        contract = import_chain(chain, weights, rounded_tokens(first.tokens))
        if stages is not None:
            stages("contract", "mlir", contract)
        return compile_region(contract, schedule=SEQUENCE if is_sequence(chain) else CHAIN, observer=stages, request=request)
    except CompileError as error:
        where = f"; the stages before are in {dump.directory}" if dump is not None else ""
        raise CompileError(f"chain {name}: {error}{where}") from error


def signature_of(chain: Chain) -> str:
    """All that the chain's kernel depends on."""
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
    if stage.body is not None:
        return signature(stage.body)
    if stage.per_head is not None:
        step = stage.per_head
        done = f"rotated {step.rotated}" if isinstance(step, Rotation) else ""
        done = f"normalized {step.eps}" if isinstance(step, HeadNorm) else done
        return f"{done} {step.heads.count} {step.heads.offset} {step.size}"
    found = stage.attention
    assert found is not None
    scores = f"{found.scale} {found.cap} {found.causal} {found.key_mask}"
    return f"{found.heads} {found.kv_heads} {found.head_size} {scores} {found.offsets}"


def _width(node: fx.Node, kind: str) -> object:
    return None if kind == "mask" else node.meta["val"].shape[-1:]
