"""Turns the text `name{option=value other=value}` into an instance of a pass's dataclass, and back.

The fields of the dataclass are the options; `min_gain` is written `min-gain` or `min_gain`. Types:

    int      4, 0x10        bool     true, false            str      word, "two words"
    float    0.5, 1e-3      tuple    4x8, [4,8], 4 (of int)
"""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, get_origin, get_type_hints

from gossamer.dialects.errors import OptionError
from gossamer.passes.framework.by_name import name_of

_CLOSING = {"(": ")", "{": "}", "[": "]"}
_BOOLS = {"true": True, "false": False}


def split(text: str, separators: str) -> list[str]:
    """Splits a text at separators outside of brackets and quotes. OptionError for brackets that do not match."""
    pieces, start, quote = [], 0, ""
    expected: list[str] = []
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in _CLOSING:
            expected.append(_CLOSING[character])
        elif expected and character == expected[-1]:
            expected.pop()
        elif character in _CLOSING.values():
            raise OptionError(f"'{character}' at column {position + 1} of '{text}' closes nothing")
        elif character in separators and not expected:
            pieces.append(text[start:position].strip())
            start = position + 1
    if quote or expected:
        raise OptionError(f"'{text}' ends before a closing {quote or expected[-1]}")
    return [*pieces, text[start:].strip()]


def build(cls: type[Any], options: str) -> Any:
    """Returns the pass `cls` with options such as `tile=4x8 fast=true`. OptionError if a name or value is wrong."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    types = get_type_hints(cls)
    values: dict[str, Any] = {}
    for item in filter(None, split(options, " \t\n")):
        key, _, text = item.partition("=")
        field = key.replace("-", "_")
        if field not in fields:
            raise OptionError(f"pass '{name_of(cls)}' has no option '{key}'{choices(key, map(_spelled, fields))}")
        try:
            values[field] = _value(text, types[field])
        except (ValueError, KeyError):
            wanted = "tuple of int" if get_origin(types[field]) is tuple else types[field].__name__
            raise OptionError(f"option '{key}' of pass '{name_of(cls)}' is of type {wanted}, not '{text}'") from None
    for name, field_ in fields.items():
        if name not in values and field_.default is field_.default_factory is dataclasses.MISSING:
            raise OptionError(f"pass '{name_of(cls)}' needs option '{_spelled(name)}'")
    return cls(**values)


def label(instance: Any) -> str:
    """Returns the text of a pass in a pipeline, with the options that differ from their defaults."""
    given = {f.name: getattr(instance, f.name) for f in dataclasses.fields(instance)}
    defaults = {f.name: f.default for f in dataclasses.fields(instance)}
    options = [f"{_spelled(name)}={_text(value)}" for name, value in given.items() if value != defaults[name]]
    return _named(type(instance), options)


def signature(cls: type[Any]) -> str:
    """Returns the text of a pass with all its options and their defaults; `?` for an option without a default."""
    defaults = {f.name: "?" if f.default is dataclasses.MISSING else _text(f.default) for f in dataclasses.fields(cls)}
    options = [f"{_spelled(name)}={default}" for name, default in defaults.items()]
    return _named(cls, options)


def _named(cls: type[Any], options: Sequence[str]) -> str:
    return f"{name_of(cls)}{{{' '.join(options)}}}" if options else name_of(cls)


def choices(wrong: str, valid: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: names like it, and all valid ones."""
    names = sorted(valid)
    close = difflib.get_close_matches(wrong, names, n=2)
    meant = f"; did you mean {' or '.join(close)}?" if close else ";"
    return f"{meant} valid: {', '.join(names) or 'none'}"


def _spelled(field: str) -> str:
    return field.replace("_", "-")


def _value(text: str, kind: Any) -> Any:
    if kind is bool:
        return _BOOLS[text]
    if kind is str:
        return text[1:-1] if text[:1] in ("'", '"') else text
    if kind is int:
        return int(text, 0)
    if kind is float:
        return float(text)
    if get_origin(kind) is tuple:
        return tuple(int(number) for number in re.split("[x,]", text.strip("[]"))) if text != "[]" else ()
    raise TypeError(f"a pass option cannot be of type {kind}")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "x".join(map(str, value)) or "[]"
    text = str(value)
    return text if re.fullmatch(r"[^\s,(){}\[\]'\"=]+", text) else f'"{text}"'
