"""Reads an open size of an exported program as a multiple of a symbol. torch.export allows `2 * batch + 1`, not more."""

from dataclasses import dataclass

import sympy  # type: ignore[import-untyped]
import torch


@dataclass(frozen=True)
class OpenSize:
    """The size factor * symbol + offset."""

    symbol: sympy.Expr
    factor: int = 1
    offset: int = 0

    @classmethod
    def of(cls, size: torch.SymInt) -> "OpenSize":
        """Returns an open size. An expression of another form counts as a symbol of its own."""
        expression = size.node.expr
        if len(expression.free_symbols) == 1:
            (symbol,) = expression.free_symbols
            factor = expression.coeff(symbol, 1)
            offset = sympy.expand(expression - factor * symbol)
            if factor.is_Integer and factor > 0 and offset.is_Integer:
                return cls(symbol, int(factor), int(offset))
        return cls(expression)
