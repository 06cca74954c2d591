"""Panels: how many columns of a weight are multiplied before the next ones, so that their x stays in the first-level cache."""

from gossamer.passes.framework.family import Matrix

_WIDER = ((0.28, 1.0), (0.08, 1.5), (0.0, 3.0))  # for weights denser than this, times as wide as fits


def widest_panel(matrix: Matrix, vectors: int) -> int:
    """Columns of a panel at most, where tiles have so many vectors of tokens.

    A dense weight wants all of the panel's x in the first-level cache. But the sums of a row are loaded and stored, and its
    loop mispredicted, once a panel, which pays for sparse rows in wider panels.
    """
    fitting = matrix.l1d // (vectors * matrix.bits // 8)
    share = next(share for denser, share in _WIDER if matrix.density >= denser)
    return int(fitting * share)
