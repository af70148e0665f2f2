"""Calls whose keys a selector of the caller's chooses: the text beside the video's tokens, attend, and what the receipt tells.

The selector sees the video's tokens alone. Text joins its selection afterwards: every query sees the valid text, and text queries
see every valid key, as with our methods.
"""
from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Optional

import torch

from .. import _functions, _torch
from .._plan import HeadStats, Selection
from .._receipt import between
from .._selector import Grid, Place, Selector, choose, densities
from .session import SCHEDULE, Tokens, now

CHUNK = 1 << 25  # bits that are unpacked at once


def refuse_idle(method: Optional[str], target_density: Optional[float], settings: Mapping[str, Any]):
    """Raises for what would do nothing beside a selector, by name."""
    idle = {"method": method, "target_density": target_density}
    idle = {name: value for name, value in idle.items() if value is not None}
    idle.update({name: value for name, value in settings.items() if name not in SCHEDULE})
    if idle:
        raise ValueError(f"{', '.join(idle)}: it would do nothing beside a selector, which chooses the keys by itself; leave it out "
                         f"(window, model, {', '.join(SCHEDULE)} still say which calls are dense)")


class Layout:
    """Where the video's tokens and the text's lie in a call [batch, tokens]."""

    def __init__(self, others: torch.Tensor, lengths: Optional[Sequence[int]], device: torch.device):
        self.count = others.shape[1]
        valid = torch.ones_like(others)
        if lengths is not None:
            valid = torch.arange(self.count) < torch.tensor(lengths)[:, None]
        if (others != others[:1]).any():
            raise ValueError("selector: text lies elsewhere in each sample of the batch, which a selector cannot be given; make one video "
                             "at a time")
        if not (valid | others).all():
            raise ValueError("selector: some of the video's tokens are padding, which a selector cannot be given; make videos of equal "
                             "size, or take a method")
        video = (~others[0]).nonzero()[:, 0]
        first, last = int(video[0]), int(video[-1]) + 1
        self.tokens, self.text = len(video), self.count - len(video)
        self.range = slice(first, last) if last - first == self.tokens else None
        self.where = video.to(device)
        self.keep, self.rest = (_torch.pack_bits(bits).to(device) for bits in (others & valid, ~others & valid))

    def of_video(self, x: torch.Tensor) -> torch.Tensor:
        """The video's tokens of [batch, heads, tokens, dim]."""
        return x[:, :, self.range] if self.range else x.index_select(2, self.where)

    def spread(self, words: torch.Tensor) -> torch.Tensor:
        """Bits of the video's tokens as bits of all."""
        words = words.view(torch.int32)
        wide = -(-self.count // 32)
        if self.range and self.range.start == 0:
            return torch.nn.functional.pad(words, (0, wide - words.shape[-1]))
        rows, found = words.flatten(0, -2), words.new_empty(words.shape[:-1].numel(), wide)
        step = max(1, CHUNK // self.count)
        for first in range(0, len(rows), step):
            part = _torch.unpack_bits(rows[first:first + step], self.tokens)
            bits = part.new_zeros(len(part), self.count)
            bits[:, self.where] = part
            found[first:first + step] = _torch.pack_bits(bits)
        return found.unflatten(0, words.shape[:-1])

    def with_text(self, chosen: Selection) -> Selection:
        """Of all tokens: text queries are a group of their own, which sees everything that is valid."""
        batch, heads, groups, _ = chosen.mask.shape
        labels = chosen.labels.new_full((batch, heads, self.count), groups, dtype=torch.int32)
        labels[:, :, self.where] = chosen.labels.view(torch.int32)
        mask = self.spread(chosen.mask) & self.rest[:, None, None]
        mask = torch.cat([mask, self.rest[:, None, None].expand(-1, heads, -1, -1)], 2)
        keep = self.keep if chosen.keep is None else self.keep | self.spread(chosen.keep) & self.rest
        return Selection(labels, mask, keep)


@dataclasses.dataclass(frozen=True)
class SelectedStats:
    """What a receipt tells of a call, as Stats tell it. Reading anything waits for a GPU."""

    found: torch.Tensor  # [batch, heads]: densities
    keys: int  # of the video
    times: tuple[Any, Any, Any]  # when the selector began, when attend did, and when it ended

    warm: ClassVar[bool] = False  # nothing is handed from call to call

    @property
    def density(self) -> float:
        return float(self.found.mean())

    @property
    def heads(self) -> list[HeadStats]:
        """With the mean count of kept keys in the place of a budget; what a selector does not have is 0 or NaN."""
        return [HeadStats(each, math.nan, math.nan, math.nan, round(each * self.keys), 0, self.keys, *[0] * 6)
                for each in self.found.flatten().tolist()]

    @property
    def seconds(self) -> dict[str, float]:
        return dict(select=between(*self.times[:2]), attend=between(*self.times[1:]))


class Selected:
    """The calls of one video."""

    def __init__(self, selector: Selector):
        self.selector = selector
        self.layouts: collections.deque = collections.deque(maxlen=8)  # (bits, what else it was made of, layout)

    def layout_of(self, q: torch.Tensor, tokens: Tokens) -> Layout:
        """The calls of a branch share one, since making it waits for a GPU."""
        made_of = tokens.lengths, q.shape[0], q.shape[2], q.device
        for bits, other, layout in self.layouts:
            if bits is tokens.bits and other == made_of:
                return layout
        layout = Layout(_torch.unpack_bits(tokens.bits, q.shape[2]), tokens.lengths, q.device)
        self.layouts.append((tokens.bits, made_of, layout))
        return layout

    def attend(self, q: Any, k: Any, v: Any, place: Place, grid: Grid, tokens: Tokens, scale: Optional[float]):
        """out and statistics of [batch, heads, tokens, dim]."""
        if tokens.valid_keys is not None or (tokens.lengths is not None and not tokens.others):
            raise ValueError("selector: some of the video's tokens are padding, which a selector cannot be given; take a method")
        layout = self.layout_of(q, tokens) if tokens.others else None
        began = now(q)
        chosen = choose(self.selector, *((layout.of_video(q), layout.of_video(k)) if layout else (q, k)), grid, place)
        selected = layout.with_text(chosen) if layout else chosen
        ready = now(q)
        out = _functions.attend_selected(q, k, v, selected, scale=scale or 0.0, q_lengths=tokens.lengths, k_lengths=tokens.lengths)
        ended = now(q)
        keys = layout.tokens if layout else k.shape[2]
        return out, SelectedStats(densities(chosen, keys), keys, (began, ready, ended))
