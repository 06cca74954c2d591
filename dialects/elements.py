"""The types of elements that kernels compute with, by their names in MLIR: a new one is a line here.

The types themselves are torch's in runtime/elements.py.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Element:
    """A type by its name in MLIR.

    torch  its name in torch
    bytes  of an element
    sums   what its products are summed in
    """

    name: str
    torch: str
    bytes: int
    sums: str


FLOATS = {
    each.name: each
    for each in (
        Element("f32", "float32", 4, "f32"),
        Element("f64", "float64", 8, "f64"),
        Element("bf16", "bfloat16", 2, "f32"),
        Element("f16", "float16", 2, "f32"),
    )
}
WEIGHTS = {**FLOATS, "i8": Element("i8", "int8", 1, "i32")}
"""Those of weights: products of quantized ones are exact."""
INTEGERS = {name: Element(name, f"int{name[1:]}", int(name[1:]) // 8, name) for name in ("i8", "i16", "i32", "i64")}
WIDE = tuple(each.name for each in FLOATS.values() if each.sums == each.name)
"""Floats that are summed as they are."""
