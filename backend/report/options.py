"""Parses and checks the options of `torch.compile(model, backend="sparse", options={...})`.

Input: the user's mapping. Output: a frozen `Options`, or an `OptionError` that names the wrong option and the valid ones.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from gossamer.dialects.errors import OptionError
from gossamer.dialects.option_check import did_you_mean, is_number
from gossamer.dialects.settings import DUMP_IR
from gossamer.passes.framework import by_name

Dense = Literal["auto", "inductor", "eager"]
Verify = Literal["version", "full"]
Gpu = Literal["dense", "untested"]
SCHEDULES = ("auto", "reference", *by_name.schedules(*by_name.CPU_SCHEDULES), *by_name.schedules(*by_name.GPU_SCHEDULES))
SMALLER_LAYERS = "smaller-layers"
"""Name, for the option `disable`, of the step before all graph passes, which removes empty rows and columns."""

STRUCTURED_WEIGHTS = "structured-weights"
"""Name of the step before that one, which multiplies by the factors of structured matrices."""

MEASURING = ("max-autotune", "max-autotune-no-cudagraphs")
"""The modes of torch.compile in which schedules are measured."""


@dataclass(frozen=True)
class Options:
    """The options of `torch.compile(model, backend="sparse", options={...})`, with their defaults.

    dense     who runs all dense operations: "inductor", "eager", or "auto" (Inductor if there is a C++ compiler)
    schedule  the schedule of the sparse kernels. "auto" takes the one with the fastest prediction; "reference" is MLIR's own
              sparsifier, slow and simple, for comparisons; docs/guide.md lists the others. A layer stays dense if its device
              has no such schedule
    min_gain  predicted speed-up that a layer needs to become sparse; with 0 every layer becomes sparse, even if that is slower
    max_autotune  measure the schedules of every sparse layer, and the dense product, instead of predicting. The same as
              mode="max-autotune", which torch.compile does not accept together with options
    dump_ir   folder for the text of every compilation stage; default: the environment variable GOSSAMER_DUMP_IR
    strict    raise an error if a region does not compile, instead of one warning and a dense layer
    check     run every graph also without Gossamer, and warn if results or gradients differ. Slow; dense parts run op by op
              unless {"dense": "inductor"} is given
    disable   names of graph passes to leave out, such as ["fuse-attention"]; the guide lists them. Two steps before them have
              names, too: without "smaller-layers", rows, columns, filters and heads of zeros stay; without
              "structured-weights", structured matrices are multiplied as whole matrices
    gpu       "dense" leaves graphs that use a GPU to Inductor; "untested" takes Gossamer's kernels for GPUs, none of which has
              run on a GPU yet
    verify    how Gossamer notices a changed weight: "version" compares data pointer, version counter and a few values; "full"
              compares every value at every call, so it also sees writes that torch does not count (`.data`, NumPy)
    """

    dense: Dense = "auto"
    schedule: str = "auto"
    min_gain: float = 1.1
    max_autotune: bool = False
    dump_ir: str | None = field(default_factory=DUMP_IR.get)
    strict: bool = False
    check: bool = False
    verify: Verify = "version"
    disable: Sequence[str] = ()
    gpu: Gpu = "dense"

    def __post_init__(self) -> None:
        _one_of("dense", self.dense, get_args(Dense))
        _one_of("schedule", self.schedule, SCHEDULES)
        _one_of("verify", self.verify, get_args(Verify))
        _one_of("gpu", self.gpu, get_args(Gpu))
        for name in ("strict", "check", "max_autotune"):
            if not isinstance(value := getattr(self, name), bool):
                raise OptionError(f"option {name} is {value!r}; it must be True or False")
        given: Any = self.disable
        names = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (None,)
        if not all(isinstance(name, str) for name in names):
            raise OptionError(f"option disable is {given!r}; it must be a list of names of graph passes")
        object.__setattr__(self, "disable", names)
        gain: Any = self.min_gain
        if not is_number(gain) or not gain >= 0:
            raise OptionError(f"option min_gain is {gain!r}; it must be a number of at least 0 (1.1 by default)")
        object.__setattr__(self, "min_gain", gain if type(gain) in (int, float) else float(gain))
        if self.dump_ir is not None:
            object.__setattr__(self, "dump_ir", _writable_directory(self.dump_ir))

    @classmethod
    def parse(cls, options: "Options | Mapping[str, Any] | None") -> "Options":
        """Returns the options that a user gave to torch.compile or `explain`.

        Raises OptionError for an unknown name, a bad value, or a dump directory that is not writable.
        """
        if isinstance(options, Options):
            return options
        if options is not None and not isinstance(options, Mapping):
            raise OptionError(f"options is a {type(options).__name__}; it must be a dictionary such as {{'min_gain': 1.5}}")
        given = dict(options or {})
        valid = [f.name for f in fields(cls)]
        for name in given:
            if name not in valid:
                raise OptionError(f"unknown option {name!r}{did_you_mean(name, valid)}; the options are {', '.join(valid)}")
        return cls(**given)


def _one_of(name: str, value: object, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise OptionError(f"option {name} is {value!r}{did_you_mean(value, valid)}; it must be one of {', '.join(valid)}")


def _writable_directory(path: object) -> str:
    name = f"the environment variable {DUMP_IR.name}" if path == DUMP_IR.text else "option dump_ir"
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise OptionError(f"{name} is {path!r}; it must be a path to a directory")
    directory = os.path.abspath(os.fspath(path))
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"{name} is {str(path)!r}, which cannot be created: {error.strerror}; choose another directory"
        ) from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise OptionError(f"{name} is {str(path)!r}, which is not writable; choose another directory")
    return directory
