"""Adds our backend to lists of other libraries, which know the backends of torch.compile by name.

    TrainingArguments(torch_compile_backend="sparse")      Accelerator(dynamo_backend="sparse")
    model.generate(…, cache_implementation="static", compile_config=CompileConfig(backend="sparse"))

Nothing changes for other backends. docs/upstream has the same changes as patches of these libraries.
"""

from importlib import import_module
from typing import Any

BACKEND = "sparse"


def list_in_accelerate() -> None:
    """Adds SPARSE to the enumeration `DynamoBackend`, and to the choices of `accelerate config` and `launch`."""
    backends: Any = import_module("accelerate.utils.dataclasses").DynamoBackend
    name = BACKEND.upper()
    if name in backends.__members__:
        return
    member = str.__new__(backends, name)
    member._name_, member._value_, member._sort_order_ = name, name, len(backends)
    backends._member_names_.append(name)
    backends._member_map_[name] = backends._value2member_map_[name] = member
    type.__setattr__(backends, name, member)
    from gossamer.runtime.modules.when_loaded import when_loaded

    when_loaded("accelerate.commands.config.config_utils", _list_in_commands)


def _list_in_commands() -> None:
    choices = import_module("accelerate.commands.config.config_utils").DYNAMO_BACKENDS
    if BACKEND.upper() not in choices:
        choices.append(BACKEND.upper())


def compile_on_cpus() -> None:
    """Makes `generate` compile for our backend on CPUs, too. transformers ignores a `CompileConfig` on CPUs."""
    config: Any = import_module("transformers.generation.configuration_utils").CompileConfig
    if not isinstance(vars(config).get(_SWITCH), _OnCpus):
        setattr(config, _SWITCH, _OnCpus(getattr(config, _SWITCH)))


_SWITCH = "_compile_all_devices"


class _OnCpus:
    """The value of the switch where nobody has set it: True for our backend, transformers' own value for others."""

    def __init__(self, otherwise: Any) -> None:
        self._otherwise = otherwise

    def __get__(self, config: Any, kind: type | None = None) -> Any:
        return True if getattr(config, "backend", None) == BACKEND else self._otherwise
