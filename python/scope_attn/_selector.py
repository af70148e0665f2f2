"""A selector of the caller's, a function that says which keys each query keeps: its checks, and how much it keeps."""
from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple, Optional

from ._plan import Selection, arrays_of


class Place(NamedTuple):
    """Where a call stands in a video."""

    layer: int  # with a state of its own
    step: int
    branch: str = ""  # of guidance: each has states of its own, unless the method shares them
    expert: str = "transformer"  # one of several transformers; the states of another are dropped
    depth: Optional[int] = None  # the layer that dense_layers counts; None: `layer`
    steps: int = 0  # of the video; 0: the host does not say


Grid = Optional[tuple[int, int, int]]  # frames, rows and columns of a video, in tokens; None: the host does not know them
Selector = Callable[[Any, Any, Grid, Place], Selection]


class SelectorError(RuntimeError):
    """A selector failed, or returned what does not fit; the message says in which layer and step."""


def name_of(selector: Selector) -> str:
    return getattr(selector, "__name__", type(selector).__name__)


def choose(selector: Selector, q: Any, k: Any, grid: Grid, place: Place) -> Selection:
    """What it selects of q and k [batch, heads, tokens, dim], checked."""
    if grid is not None and math.prod(grid) != q.shape[2]:
        grid = None  # there are tokens beside the grid's, such as those of frames before
    try:
        selection = selector(q, k, grid, place)
        check(selection, q, k)
    except Exception as error:  # whatever its author's code raises
        raise SelectorError(f"selector {name_of(selector)}, layer {place.layer}, step {place.step}: "
                            f"{type(error).__name__}: {error}") from error
    return selection


def check(selection: Any, q: Any, k: Any):
    """Raises for what does not fit q and k. Values on a GPU are not looked at, since that would wait for it."""
    if not isinstance(selection, Selection):
        raise TypeError(f"got {type(selection).__name__}, expected a scope_attn.Selection")
    arrays, spare = arrays_of(q), k.shape[2] % 32
    batch, heads, tokens, _ = q.shape
    index, words = arrays.index_of(q), -(-k.shape[2] // 32)
    groups = selection.mask.shape[2] if len(getattr(selection.mask, "shape", ())) == 4 else 1
    for name, shape in dict(labels=(batch, heads, tokens), mask=(batch, heads, max(groups, 1), words),
                            keep=(batch, words)).items():
        given = getattr(selection, name)
        if name == "keep" and given is None:
            continue
        arrays.check_words(name, given, shape, index)
        if index < 0 and name != "labels" and spare and (given.view(arrays.int32)[..., -1] >> spare).any():
            raise ValueError(f"{name}: it has bits of keys from {k.shape[2]} on, which there are not")
    if index < 0:
        labels = selection.labels.view(arrays.int32)
        if ((labels < -1) | (labels >= groups)).any():
            raise ValueError(f"labels: got {labels.min()} to {labels.max()}, expected -1 to {groups - 1}, the groups of mask")


def densities(selection: Selection, k_tokens: int) -> Any:
    """Kept pairs / all pairs, of each head [batch, heads]. Queries that are labelled -1 and keys of keep do not count."""
    arrays = arrays_of(selection.labels)
    labels, mask, keys = selection.labels.view(arrays.int32), selection.mask.view(arrays.int32), k_tokens
    if selection.keep is not None:
        keep = selection.keep.view(arrays.int32)
        mask, keys = mask & ~keep[:, None, None], k_tokens - count_bits(keep)[:, None]
    counts = count_bits(mask)
    spare = k_tokens % 32
    if spare:  # bits of keys that are not there: attend drops them on a GPU, where they could not be refused
        counts = counts - count_bits(mask[..., -1:] >> spare & (1 << 32 - spare) - 1)
    attends = (labels >= 0) & (labels < counts.shape[2])
    pairs = (arrays.take_along(counts, labels * attends) * attends).sum(-1)
    return pairs / (attends.sum(-1) * keys).clip(min=1)


def count_bits(words: Any) -> Any:
    """Of each row of 32-bit integers: bits are added in pairs, pairs in fours, fours in bytes, bytes by a product."""
    words = words - (words >> 1 & 0x55555555)
    words = (words & 0x33333333) + (words >> 2 & 0x33333333)
    return ((words + (words >> 4) & 0x0F0F0F0F) * 0x01010101 >> 24).sum(-1)
