"""Which channels of a head video models rotate along time, height and width: a fact of the model, whatever the host."""
from __future__ import annotations

from typing import Optional

MIXED_IN_LTX = "the heads of LTX mix these axes"  # so that no channel belongs to one of them


def wan(dim: int) -> tuple[int, int, int]:
    """How many, one axis after the other."""
    third = 2 * (dim // 6)
    return dim - 2 * third, third, third


def minimax_h3(dim: int, frequencies: Optional[int] = None) -> tuple[tuple[int, ...], ...]:
    """Which: of f frequencies an axis, channel i turns with channel i + 3 f, and those from 6 f on do not turn."""
    f = dim // 8 if frequencies is None else frequencies
    axes = tuple((*range(axis * f, axis * f + f), *range((axis + 3) * f, (axis + 4) * f)) for axis in range(3))
    return (*axes, tuple(range(6 * f, dim))) if dim > 6 * f else axes
