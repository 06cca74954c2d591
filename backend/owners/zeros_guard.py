"""Guards a graph on the zeros that it was compiled for, so that a model with other zeros gets a graph of its own.

    dense = torch.compile(model, backend="sparse");  dense(x)        Dynamo shares this graph with all models of the class
    pruned = torch.compile(copy, backend="sparse");  pruned(x)       without a guard, it would run the dense model's code
    model.load_state_dict(pruned_weights);           dense(x)        so would this

Dynamo's guards check shapes and types. This one checks zeros. It counts the zeros of a new model once. For a known model it
checks a few values at every call, and counts again if these have changed. Models with similar zeros share a graph, such as the
blocks of a transformer.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, cycle, islice
from types import CodeType
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.graph.writes import written
from gossamer.backend.owners.owners import Owners
from gossamer.backend.owners.recompiling import may_recompile
from gossamer.backend.owners.zeros import Zeros, has_zeros_to_see
from gossamer.backend.report.graph_breaks import compiled_frame
from gossamer.runtime.foreseen import is_in_training
from gossamer.runtime.remembered import Made
from gossamer.runtime.torch_internals import DeletedGuardManagerWrapper, GuardManager, LocalSource, install_guard, off
from gossamer.runtime.torch_names import ANEW

_MOST_TOGETHER = 5
"""The most guarded graphs of a function whose models are not in local variables. Dynamo counts these graphs together for all
models, and stops compiling at eight."""

_MOST_RENEWALS = 4
"""If the zeros of a model have changed so often, its next graph gets no guard."""

_MOST_PATIENCE = 128
"""The most calls between two counts, for a model whose values change at every call, as in training."""

_MOST_PROBES = 8
"""The most matrices that calls check, each of another shape."""

_PROBES_A_CALL = 2
"""How many of these matrices one call checks, in turn. A check takes 0.7 us. A changed matrix is noticed within four calls, and
until then results are right, but a graph for other zeros computes them."""

_MOST_UNUSED = 8
"""The most graphs that are kept although their models are gone. The next model may have similar zeros."""

_SEES_MARKS = hasattr(GuardManager, "add_dimension_marking_guard")
"""Whether Dynamo recompiles for a marked parameter, as it does from torch 2.13 on."""

_checks: Any = WeakIdKeyDictionary()
"""For each function's code, the checks of its graphs."""

_renewals: Any = WeakIdKeyDictionary()
"""For each model, how often its zeros have changed."""

_NO_VARIABLE = "no variable"
"""Stands for the variable of a graph that serves no model."""

_NOBODY = nn.Module()
"""Stands for the model of a graph whose models are gone."""


def guard_zeros(owners: Owners, inputs: Inputs) -> None:
    """Installs the guards. Call this while Dynamo compiles the frame of the graph."""
    frame = compiled_frame()
    if frame is None or off(ANEW):
        return
    checks = _checks[frame.f_code] = _still_of_use(_checks.get(frame.f_code, ()))
    variable = written(inputs.module.graph)  # KV caches, which begin as zeros
    places = (n for n, node in enumerate(inputs.module.graph.find_nodes(op="placeholder")) if node not in variable)
    statics = {id(inputs.values[n]) for n in places if n in inputs.statics}
    for source, module in owners.outermost:
        counted_apart = isinstance(source, LocalSource)
        full = not counted_apart and sum(not check.is_outdated() for check in checks) >= _MOST_TOGETHER
        names = [name for name, tensor in _tensors(module) if id(tensor) in statics and has_zeros_to_see(tensor)]
        told = _SEES_MARKS and any(is_in_training(tensor) for _, tensor in _tensors(module))  # Dynamo recompiles for marks
        if names and not told and not full and _renewals.get(module, 0) < _MOST_RENEWALS:
            checks.append(check := _Check(module, names, source.local_name if counted_apart else None, frame.f_code))
            install_guard(source.make_guard(partial(_zeros_match, check)))


def _still_of_use(checks: Iterable["_Check"]) -> "list[_Check]":
    """Returns the checks of graphs that Dynamo still has. Drops graphs that serve no model, except for the latest."""
    found = [check for check in checks if check.has_graph()]
    for check in [check for check in found if check.counted() is _NOBODY][:-_MOST_UNUSED]:
        check.drop_graph()
    return [check for check in found if check.has_graph()]


def _zeros_match(check: "_Check", builder: Any, guard: Any) -> None:
    """Adds the check to the guards of a graph, as the methods of Dynamo's GuardBuilder do."""
    text = f"the zeros of {guard.name} are those it was compiled for"
    root = builder.guard_manager.root  # its guards get all local variables at every call
    if check.variable is not None:
        root.add_lambda_guard(lambda scope: check(scope.get(check.variable)), [text], None)
    else:
        root.add_lambda_guard(lambda _: check(check.latest()), [text], None)
        builder.get_guard_manager(guard).add_lambda_guard(check, [text], None)  # Dynamo skips it for the same module
    check.graph, check.counts = weakref.ref(builder.guard_manager), builder.id_matched_objs
    check.count()


class _Check:
    """A guard: checks whether a graph suits the zeros of a module.

    variable  the local variable that has the module; None for other sources, for which Dynamo counts all graphs together
    counted   weak reference to the module for which Dynamo counts the graph; to _NOBODY if the graph serves no module
    graph     weak reference to Dynamo's record of the graph
    counts    Dynamo's own record for counting: weak references to modules by the names of local variables
    function  weak reference to the code of the function that has the graph
    """

    def __init__(self, module: nn.Module, names: Sequence[str], variable: str | None, function: CodeType) -> None:
        self.graph: Callable[[], Any] = _nothing
        self.counts = dict[str, Any]()
        self.variable, self._names, self._function = variable, names, weakref.ref(function)
        tensors = dict(_tensors(module))
        self._zeros = [Zeros.of(tensors[name]) for name in names]
        self._probed = _one_of_each_shape({name: tensors[name] for name in names})
        self._looks: Any = WeakIdKeyDictionary()
        self._looks[module] = self._last = _Look(module, self._probed, serves=True)
        self.counted = weakref.ref(module)

    def __call__(self, module: object) -> bool:
        try:
            return not isinstance(module, nn.Module) or self._serves(module) or self._has_to_serve(module)
        except Exception:  # a guard must not raise; Dynamo's own guards tell whether the graph can run
            return True

    def latest(self) -> nn.Module | None:
        """Returns the module that was checked last; None if it is gone."""
        return self._last.module()

    def count(self) -> None:
        """Makes Dynamo count the graph for a module that it serves. Dynamo allows eight graphs for each module in a local
        variable. Without this, it would allow eight for all modules together."""
        served = next((module for module, look in list(self._looks.items()) if look.serves), _NOBODY)
        self.counted = weakref.ref(served)
        if served is not _NOBODY:
            weakref.finalize(served, self.count).atexit = False
        if self.variable is not None:
            self.counts[self.variable] = weakref.ref(served)
        elif self.is_outdated():
            self.counts[_NO_VARIABLE] = weakref.ref(served)  # Dynamo counts the graph no longer

    def is_outdated(self) -> bool:
        """Whether a model of the graph lives, but none has the zeros of the graph any more."""
        return self.counted() is _NOBODY and any(look.served for look in self._looks.values())

    def has_graph(self) -> bool:
        """Whether Dynamo still has the graph. After torch.compiler.reset(), only its record exists."""
        graph = self.graph()
        return graph is not None and graph.cache_entry is not None

    def drop_graph(self) -> None:
        """Makes Dynamo forget the graph."""
        graph, self.graph = self.graph(), _nothing
        forgotten = DeletedGuardManagerWrapper("the models with these zeros are gone")
        forgotten.id_matched_objs.update(graph.id_matched_objs)
        graph.extra_state.invalidate(graph.cache_entry, forgotten)

    def _serves(self, module: nn.Module) -> bool:
        look = self._last
        if look.module() is not module:
            look = self._looks.get(module)
            if look is None:
                look = self._looks[module] = _Look(module, self._probed, self._resembles(module))
            self._last = look
        if look.serves and look.is_due(module):
            look.serves = self._resembles(module)
            if not look.serves:
                _renewals[module] = _renewals.get(module, 0) + 1
                self.count()
        return look.serves

    def _has_to_serve(self, module: nn.Module) -> bool:
        """Whether the graph has to run for other zeros than its own: Dynamo must not compile, and no other graph suits them."""
        if may_recompile():
            return False
        others = [check for check in _checks.get(self._function(), ()) if check is not self]
        return self._looks[module].served or not any(check._serves(module) for check in others)

    def _resembles(self, module: nn.Module) -> bool:
        tensors = dict(_tensors(module))
        pairs = [(tensors[name], zeros) for name, zeros in zip(self._names, self._zeros, strict=True) if name in tensors]
        return all(Zeros.of(tensor).resemble(zeros) for tensor, zeros in pairs if has_zeros_to_see(tensor))


class _Look:
    """A module whose zeros a check has counted, and a few values that tell whether to count again.

    serves  whether the graph suits the module
    served  whether it did before the zeros changed
    """

    def __init__(self, module: nn.Module, probed: Iterable[str], serves: bool) -> None:
        self.module, self.serves, self.served = weakref.ref(module), serves, serves
        self._waits, self._patience = 0, 1  # calls
        self._probes = [_Probe(module, name) for name in probed]
        self._in_turn = cycle(self._probes)

    def is_due(self, module: nn.Module) -> bool:
        """Whether to count zeros again, because values changed. If they change at every call, it checks ever more rarely."""
        if self._waits > 0:
            self._waits -= 1
            return False
        if not any(probe.has_changed(module) for probe in islice(self._in_turn, min(_PROBES_A_CALL, len(self._probes)))):
            return False
        for probe in self._probes:
            probe.renew(module)
        self._patience = min(2 * self._patience, _MOST_PATIENCE)
        self._waits = self._patience - 1
        return True


class _Probe:
    """A tensor of a module, by its name, and its state at the last count."""

    def __init__(self, module: nn.Module, name: str) -> None:
        *self._path, self._name = name.split(".")
        self.renew(module)

    def renew(self, module: nn.Module) -> None:
        tensor = self._tensor(module)
        self._made: Made[None] | None = Made([tensor], "none", _nothing) if tensor is not None else None

    def has_changed(self, module: nn.Module) -> bool:
        tensor, made = self._tensor(module), self._made
        if tensor is None or made is None or made.storage is None:
            return False
        return not (
            made.storage() is tensor.untyped_storage()
            and made.places[0] == tensor.data_ptr()  # before the sample, whose memory torch may have freed
            and made.version == tensor._version
            and made.looked_at == made.seen
        )

    def _tensor(self, module: nn.Module) -> Tensor | None:
        holder: nn.Module | None = module
        for name in self._path:  # at every call, because a submodule may be replaced
            holder = None if holder is None else holder._modules.get(name)
        if holder is None:
            return None
        parameter = holder._parameters.get(self._name)
        return parameter if parameter is not None else holder._buffers.get(self._name)


def _one_of_each_shape(tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of tensors, one of each shape. Pruning may spare the largest matrix, but seldom a whole shape."""
    found, elements = dict[tuple[int, ...], str](), Counter[tuple[int, ...]]()
    for name, tensor in tensors.items():
        found.setdefault(tuple(tensor.shape), name)
        elements[tuple(tensor.shape)] += tensor.numel()
    return [found[shape] for shape, _ in elements.most_common(_MOST_PROBES)]


def _nothing(*_: object) -> None:
    pass


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
