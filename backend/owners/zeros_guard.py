"""A graph serves models that have the zeros which it was compiled for; a model with others gets a graph of its own.

    dense = torch.compile(model, backend="sparse");  dense(x)        Dynamo shares this graph with all models of the class
    pruned = torch.compile(copy, backend="sparse");  pruned(x)       without a guard, it would run the dense model's code
    model.load_state_dict(pruned_weights);           dense(x)        so would this

Dynamo's guards see shapes and types. This one sees zeros. It looks at a model that is new to it once. Of one that it knows it
looks at a few values at every call, and again at all when these have changed. Models with similar zeros share a graph, as the
blocks of a transformer do.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.owners.owners import Owners
from gossamer.backend.owners.zeros import Zeros, has_zeros_to_see
from gossamer.backend.report.graph_breaks import compiled_frame
from gossamer.runtime.foreseen import is_in_training
from gossamer.runtime.remembered import Made
from gossamer.runtime.torch_internals import DeletedGuardManagerWrapper, GuardManager, LocalSource, install_guard, off
from gossamer.runtime.torch_names import ANEW

_MOST_TOGETHER = 5
"""Guarded graphs of a function, where Dynamo counts those of all models together and stops at eight."""

_MOST_RENEWALS = 4
"""Graphs for zeros of one model that came and went."""

_MOST_PATIENCE = 128
"""Calls of a model that is being trained after which its zeros are counted again at the latest."""

_MOST_PROBES = 8
"""Shapes of which a matrix is looked at in every call. A look takes a quarter of a microsecond."""

_MOST_UNUSED = 8
"""Graphs that are kept although their models are gone: the next model may have zeros like theirs."""

_SEES_MARKS = hasattr(GuardManager, "add_dimension_marking_guard")
"""Whether Dynamo compiles anew for a marked parameter. Before torch 2.13 it does not."""

_checks: Any = WeakIdKeyDictionary()
"""Of each function's code, those of its graphs."""

_renewals: Any = WeakIdKeyDictionary()
"""How often the zeros of a model were found changed."""

_NOBODY = nn.Module()
"""Stands for the models of a graph that are gone."""


def guard_zeros(owners: Owners, inputs: Inputs) -> None:
    """Installs the guards. To be called while Dynamo compiles the frame of the graph."""
    frame = compiled_frame()
    if frame is None or off(ANEW):
        return
    checks = _checks[frame.f_code] = _still_of_use(_checks.get(frame.f_code, ()))
    statics = {id(inputs.values[n]) for n in inputs.statics}
    for source, module in owners.outermost:
        counted_apart = isinstance(source, LocalSource)
        full = not counted_apart and len(checks) >= _MOST_TOGETHER
        names = [name for name, tensor in _tensors(module) if id(tensor) in statics and has_zeros_to_see(tensor)]
        told = _SEES_MARKS and any(is_in_training(tensor) for _, tensor in _tensors(module))  # when to compile anew
        if names and not told and not full and _renewals.get(module, 0) < _MOST_RENEWALS:
            checks.append(check := _Check(module, names, source.local_name if counted_apart else None))
            install_guard(source.make_guard(partial(_zeros_match, check)))


def _still_of_use(checks: Iterable["_Check"]) -> "list[_Check]":
    """The checks of graphs that Dynamo still has. Of those whose models are gone it forgets all but the latest."""
    found = [check for check in checks if check.has_graph()]
    for check in [check for check in found if check.counted() is _NOBODY][:-_MOST_UNUSED]:
        check.drop_graph()
    return [check for check in found if check.has_graph()]


def _zeros_match(check: "_Check", builder: Any, guard: Any) -> None:
    """Adds the check to the guards of a graph, as the methods of Dynamo's GuardBuilder do."""
    text = f"the zeros of {guard.name} are those it was compiled for"
    root = builder.guard_manager.root  # its guards see all local variables, at every call
    if check.variable is not None:
        root.add_lambda_guard(lambda scope: check(scope.get(check.variable)), [text], None)
    else:
        root.add_lambda_guard(lambda _: check(check.latest()), [text], None)
        builder.get_guard_manager(guard).add_lambda_guard(check, [text], None)  # left out while it is the same module
    check.graph, check.counts = weakref.ref(builder.guard_manager), builder.id_matched_objs
    check.count()


class _Check:
    """Whether a graph serves the module of a frame.

    variable  the local variable that the module is in; None for others, whose graphs Dynamo does not count apart
    counted   the module as whose Dynamo counts the graph
    graph     Dynamo's record of the graph
    counts    what Dynamo counts graphs by: modules by the names of local variables
    """

    def __init__(self, module: nn.Module, names: Sequence[str], variable: str | None) -> None:
        self.graph: Callable[[], Any] = _nothing
        self.counts = dict[str, Any]()
        self.variable, self._names = variable, names
        tensors = dict(_tensors(module))
        self._zeros = [Zeros.of(tensors[name]) for name in names]
        self._probed = _one_of_each_shape({name: tensors[name] for name in names})
        self._looks: Any = WeakIdKeyDictionary()
        self._looks[module] = self._last = _Look(module, self._probed, serves=True)
        self.counted = weakref.ref(module)

    def __call__(self, module: object) -> bool:
        try:
            return not isinstance(module, nn.Module) or self._serves(module)
        except Exception:  # a guard must not raise; whether the graph can run is for Dynamo's own to tell
            return True

    def latest(self) -> nn.Module | None:
        """The module that was seen last."""
        return self._last.module()

    def count(self) -> None:
        """Has Dynamo count the graph as that of a module which it serves. Dynamo allows eight graphs for each module in a local
        variable, and without this for all together."""
        served = next((module for module, look in list(self._looks.items()) if look.serves), _NOBODY)
        self.counted = weakref.ref(served)
        if served is not _NOBODY:
            weakref.finalize(served, self.count).atexit = False
        if self.variable is not None:
            self.counts[self.variable] = weakref.ref(served)

    def has_graph(self) -> bool:
        """Whether Dynamo has the graph; after torch.compiler.reset() only its record is left."""
        graph = self.graph()
        return graph is not None and graph.cache_entry is not None

    def drop_graph(self) -> None:
        """Has Dynamo forget the graph."""
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
        if look.serves and look.is_due():
            look.serves = self._resembles(module)
            if not look.serves:
                _renewals[module] = _renewals.get(module, 0) + 1
        return look.serves

    def _resembles(self, module: nn.Module) -> bool:
        tensors = dict(_tensors(module))
        pairs = [(tensors[name], zeros) for name, zeros in zip(self._names, self._zeros, strict=True) if name in tensors]
        return all(Zeros.of(tensor).resemble(zeros) for tensor, zeros in pairs if has_zeros_to_see(tensor))


class _Look:
    """A module that a check has looked at, and what tells whether to look again: a few values of some of its tensors.

    serves  what the check has found
    """

    def __init__(self, module: nn.Module, probed: Iterable[str], serves: bool) -> None:
        self.module, self.serves = weakref.ref(module), serves
        self._waits, self._patience = 0, 1  # calls
        self._probes = [_Probe(module, name) for name in probed]

    def is_due(self) -> bool:
        """Whether values have changed; where they do at every call, as in training, it looks ever more rarely."""
        if self._waits > 0:
            self._waits -= 1
            return False
        if not any(probe.has_changed() for probe in self._probes):
            return False
        for probe in self._probes:
            probe.renew()
        self._patience = min(2 * self._patience, _MOST_PATIENCE)
        self._waits = self._patience - 1
        return True


class _Probe:
    """A tensor of a module, by its name, and what it was when it was looked at last."""

    def __init__(self, module: nn.Module, name: str) -> None:
        path, _, self._name = name.rpartition(".")
        self._holder = weakref.ref(module.get_submodule(path))
        self.renew()

    def renew(self) -> None:
        tensor = self._tensor()
        self._made: Made[None] | None = Made([tensor], "none", _nothing) if tensor is not None else None

    def has_changed(self) -> bool:
        tensor, made = self._tensor(), self._made
        if tensor is None or made is None or made.storage is None:
            return False
        return not (
            made.storage() is tensor.untyped_storage() and made.version == tensor._version and made.looked_at == made.seen
        )

    def _tensor(self) -> Tensor | None:
        holder = self._holder()
        if holder is None:
            return None
        parameter = holder._parameters.get(self._name)
        return parameter if parameter is not None else holder._buffers.get(self._name)


def _one_of_each_shape(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of some tensors: who prunes a model may leave out its largest matrix, but seldom all of one shape."""
    found, elements = dict[tuple[int, ...], str](), Counter[tuple[int, ...]]()
    for name, tensor in tensors.items():
        found.setdefault(tuple(tensor.shape), name)
        elements[tuple(tensor.shape)] += tensor.numel()
    return [found[shape] for shape, _ in elements.most_common(_MOST_PROBES)]


def _nothing(*_: object) -> None:
    pass


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
