"""What the attention calls of one video did."""
from __future__ import annotations

import base64
import collections
import dataclasses
import io
import json
import os
import statistics
from pathlib import Path
from typing import Any, Optional, Union

from ._c_api import ScopeError
from ._origin import origin

SHEET_SIDE = 4096  # pixels; browsers hold images of 16,384 at most


@dataclasses.dataclass(frozen=True)
class Call:
    """One self-attention call. Reading a density or seconds waits for a call on a GPU."""

    expert: str  # the pipeline's name of the transformer
    layer: int
    step: int
    branch: str
    why: str  # it ran dense; "": it ran sparse
    stats: Any  # of a sparse call; None: it ran dense, by the pipeline's own attention
    times: Any  # when it began, when a dense call had clustered, and when it ended: in seconds, or as CUDA events

    @property
    def sparse(self) -> bool:
        return not self.why

    @property
    def density(self) -> float:
        """Kept pairs / all pairs; 1 for a dense call."""
        return self.stats.density if self.sparse else 1.0

    @property
    def seconds(self) -> float:
        return between(self.times[0], self.times[2])

    @property
    def selection_seconds(self) -> Optional[float]:
        """For choosing keys; None: a GPU does not tell it apart."""
        stages = self.stats.seconds if self.sparse else {}
        taken = sum(stages.get(stage, 0.0) for stage in ("group", "encode", "score", "select"))
        return None if taken != taken else taken  # NaN

    @property
    def attention_seconds(self) -> float:
        """Without the clustering of a dense call, which is for sparse calls to come."""
        return between(*self.times[1:])

    def to_dict(self) -> dict[str, Any]:
        return dict(expert=self.expert, layer=self.layer, step=self.step, branch=self.branch, sparse=self.sparse, why=self.why,
                    warm=bool(self.sparse and self.stats.warm), density=self.density, seconds=self.seconds,
                    selection_seconds=self.selection_seconds)


def between(start: Any, end: Any) -> float:
    """Seconds."""
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


class Receipt:
    """Every self-attention call of a video: `calls`, a summary when printed, to_json(), report().

    Nothing here waits for the GPU until it is looked at.
    """

    def __init__(self, **settings: Any):
        self.settings = settings
        self.calls: list[Call] = []

    @property
    def density(self) -> Optional[float]:
        """Mean over sparse calls; None: there was none."""
        sparse = [call.density for call in self.calls if call.sparse]
        return sum(sparse) / len(sparse) if sparse else None

    @property
    def milliseconds(self) -> dict[str, Optional[float]]:
        """The median dense call and the median sparse one; None: there was none."""
        taken = {name: [1e3 * call.attention_seconds for call in self.calls if call.sparse == sparse]
                 for name, sparse in (("dense", False), ("sparse", True))}
        return {name: statistics.median(each) if each else None for name, each in taken.items()}

    def pace(self) -> str:
        """The milliseconds in words; "": no call was sparse."""
        dense, sparse = self.milliseconds.values()
        if sparse is None:
            return ""
        if dense is None:
            return f"median call: sparse {sparse:.2f} ms, and none was dense; python -m scope_attn.doctor --measure TOKENS compares them"
        text = f"median call: dense {dense:.2f} ms, sparse {sparse:.2f} ms, {dense / sparse:.2f} times as fast"
        return text if sparse < dense else f"{text}: SLOWER than dense here; lower the density, or call scope_attn.disable(pipe)"

    def to_dict(self) -> dict[str, Any]:
        return dict(**origin(), **self.settings, density=self.density, milliseconds=self.milliseconds,
                    calls=[call.to_dict() for call in self.calls])

    def to_json(self, path: Union[str, os.PathLike]):
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=1)
            file.write("\n")

    def report(self, path: Union[str, os.PathLike], frames: Any = None, fps: float = 16):
        """Writes the page of `scope report`: times, density and k_head by layer and step, settings, and the clip if it is given.

        frames: what the pipeline gave for one video: images, or an array [frames, height, width, 3] of numbers from 0 to 1.
        """
        from . import _c_api
        if not self.calls:
            raise ValueError("receipt: there were no calls yet")
        sheets, (count, height, width), columns, per_sheet = draw_sheets(frames)
        data = dict(version=_c_api.library().version().decode(), title="What every attention call did", frames=count, width=width,
                    height=height, fps=fps, skip=0, columns=columns, per_sheet=per_sheet, clusters=[],
                    runs=[dict(name=self.settings["method"], density=self.density, quality=None, run=self._run(), sheets=sheets)])
        page = (Path(__file__).parent / "report.html").read_text(encoding="utf-8")
        # "<" would let a name end the script that holds the JSON.
        Path(path).write_text(page.replace("/*DATA*/", json.dumps(data).replace("<", "\\u003c"), 1), encoding="utf-8")

    def _run(self) -> dict[str, Any]:
        """As `scope generate` writes run.json: for each step a cell for every branch and layer."""
        told = dict(self.settings)
        rows = list(dict.fromkeys((call.branch, call.layer) for call in sorted(self.calls, key=lambda call: call.layer)))
        rows.sort(key=lambda row: row[0])  # branch after branch
        cells = {(call.step, call.branch, call.layer): call for call in self.calls}

        def cell(step, branch, layer):
            call, name = cells.get((step, branch, layer)), f"{branch}, layer {layer}"
            if call is None or call.why:
                return dict(name=name, dense=True, density=1, k_head=[], why=f"dense: {call.why}" if call else "skipped by a cache")
            heads = call.stats.heads
            return dict(name=name, dense=False, density=call.density, k_head=[head.k_head for head in heads],
                        head_density=[head.density for head in heads])

        parts = dict(dense_prefix=0.0, sparse_attention=0.0, selection=0.0)
        for call in self.calls:
            selection = call.selection_seconds or 0.0
            parts["selection"] += selection
            parts["sparse_attention" if call.sparse else "dense_prefix"] += call.seconds - selection
        total = between(self.calls[0].times[0], self.calls[-1].times[2])
        seconds = dict(total=total, **parts, rest=max(0.0, total - sum(parts.values())))
        return dict(method=told["method"], model=told["model"], steps=told["steps"], rope=list(told["rope"] or ()),
                    min_tokens=told["min_tokens"], settings=told["settings"], seconds=seconds,
                    layers=[[cell(step, *row) for row in rows] for step in sorted({call.step for call in self.calls})])

    def line(self) -> str:
        """All of it in one line, for a host's log."""
        dense = collections.Counter(call.why for call in self.calls if not call.sparse)
        sparse = len(self.calls) - sum(dense.values())
        text = f"{self.settings['method']} for {self.settings['model']}, {sparse:,} calls sparse"
        if sparse:
            try:
                text += f" (mean density {self.density:.3f}; {self.pace()})"
            except ScopeError as error:  # what only the device could find
                text += f" ({error})"
        return text + ("; dense: " + ", ".join(f"{count:,} ({why})" for why, count in dense.most_common()) if dense else "")

    def __str__(self) -> str:
        told = self.settings["settings"]
        choices = ", ".join(f"{name}={value}" for name, value in told.items())
        lines = [f"{self.settings['method']} ({choices}), for {self.settings['model']}"]
        if self.settings["careful"]:
            lines.append(f"target_density={told['target_density']} is the default: neither a density nor rho or rule was given")
        if self.settings["idle_products"]:
            lines.append(f"products={told['products']}: for heads of up to 64 channels an H200 is no faster with it than with bf16")
        if self.settings["ranks"] > 1:
            lines.append(f"rank {self.settings['rank']} of {self.settings['ranks']}, which attends with its own heads" +
                         (": each rank meets the density over its own (target_scope=head: every head does, as on one rank)"
                          if self.settings["rho_of_each_rank"] else ""))
        if not self.calls:
            return "\n".join([*lines, "no calls yet"])
        rows: dict[tuple[str, str], list[Call]] = collections.defaultdict(list)
        for call in self.calls:
            rows[call.expert, call.why].append(call)
        total = self.settings["steps"]  # 0: the host does not say
        steps = f"{len({call.step for call in self.calls})}" + (f" of {total}" if total else "")
        lines.append(f"{steps} steps, {len(self.calls):,} self-attention calls")
        for (expert, why), calls in rows.items():
            what = f"dense: {why}" if why else f"sparse, mean density {sum(call.density for call in calls) / len(calls):.3f}"
            lines.append(f"  {expert:14}{len(calls):7,} calls {sum(call.seconds for call in calls):9.2f} s  {what}")
        return "\n".join(lines + [self.pace()] * bool(self.pace()))

    def __repr__(self) -> str:
        return f"<Receipt of {len(self.calls)} calls; print it>"


def pictures_of(frames: Any) -> Any:
    """Bytes [frames, height, width, 3] in numpy, of images, or of an array of bytes or of numbers from 0 to 1."""
    import numpy
    pictures = numpy.stack([numpy.asarray(frame) for frame in frames])
    if pictures.ndim != 4 or pictures.shape[3] != 3:
        raise ValueError(f"frames: got shape {list(pictures.shape)}, expected [frames, height, width, 3]; pass one video, such as "
                         "frames[0]")
    if pictures.dtype != numpy.uint8:
        pictures = (pictures.clip(0, 1) * 255).round().astype(numpy.uint8)
    return pictures


def draw_sheets(frames: Any):
    """A clip as PNG sheets in data URIs; its frames, height and width; frames in a row, and on a sheet."""
    if frames is None:
        return [], (0, 1, 1), 1, 1
    from PIL import Image
    pictures = pictures_of(frames)
    count, height, width, _ = pictures.shape
    columns = min(count, max(1, SHEET_SIDE // width))
    per_sheet = columns * max(1, SHEET_SIDE // height)
    uris = []
    for first in range(0, count, per_sheet):
        some = pictures[first:first + per_sheet]
        sheet = Image.new("RGB", (columns * width, -(-len(some) // columns) * height))
        for i, picture in enumerate(some):
            sheet.paste(Image.fromarray(picture), (i % columns * width, i // columns * height))
        png = io.BytesIO()
        sheet.save(png, "PNG")
        uris.append("data:image/png;base64," + base64.b64encode(png.getvalue()).decode())
    return uris, (count, height, width), columns, per_sheet
