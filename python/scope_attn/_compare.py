"""compare(): selectors of the caller's and our methods in one table, on the tensors of one call or by whole videos."""
from __future__ import annotations

import collections
import contextlib
import datetime
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable, NamedTuple, Optional, Union

from . import _functions
from ._origin import origin
from ._plan import Reason, Selection, State, Stats, arrays_of, text_of
from ._receipt import between, pictures_of
from ._selector import Grid, Place, Selector, choose, densities, name_of
from .hosts.session import SAYS_HOW_MANY, WHY_DENSE, now

Method = Union[str, Mapping[str, Any], Selector]
Progress = Callable[[str], None]

# Student's 0.975 quantile by degrees of freedom, from 1 on.
STUDENT = 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228


def compare(*inputs: Any, methods: Mapping[str, Method], density: Optional[float] = None, progress: Optional[Progress] = None,
            **given: Any) -> Comparison:
    """Our methods and selectors of yours side by side: compare(q, k, v, methods=...) on one call's tensors, or
    compare(pipe, methods=..., seeds=...) by whole videos of a diffusers pipeline. Print what it returns.

    methods: by the names of their rows. A string is a row of methods(). A function is a selector of yours: it is given q, k, the
        grid and a Place, and returns a Selection. A dict names one of the two as "method" or "selector", and has settings
        beside it: dict(method="scope", rho=0.9). Dense attention has a row of its own.
    density: the share of keys that our methods are to keep, but for those that say by themselves how many (presets, and dicts
        with target_density, density, rho or rule). Selectors of yours keep what they keep.
    progress: is told what is done, a line each; None: standard error, where it is a terminal.

    With tensors, numpy's or PyTorch's [batch, heads, tokens, dim]:

    grid: the frames, rows and columns of the tokens, for selectors.
    rope: the channels along T, H and W, for methods that code keys.
    place: a Place, for selectors, and for methods with a profile; None: the first layer and step, outside any schedule.
    scale: of q k; 0: 1 / sqrt(dim).
    repeats: warm calls of each, in turns, so that what slows the machine slows all of them.
    samples: queries of each head, by which error and recall are measured in float64.

    With a pipeline, which is as it was afterwards:

    seeds: a video of each, with dense attention and with every method. All figures are paired by the seed.
    make: a function that makes a video of `pipe` from a seed, [frames, height, width, 3] from 0 to 1 or images; None: the
        pipeline is called with what else is given, such as prompt="A cat" and num_frames=81.
    settings: of enable(), for every method alike, such as dict(min_tokens=0, window=(0.2, 1)).
    skip: so many first frames do not count, where they are given to the model.

    >>> import numpy, scope_attn
    >>> q, k, v = numpy.random.default_rng(0).standard_normal((3, 1, 2, 512, 64), numpy.float32)
    >>> def nearest(q, k, grid, place):
    ...     "Each half of the queries sees the same half of the keys."
    ...     half = numpy.arange(512) // 256
    ...     mask = numpy.broadcast_to(half == [[0], [1]], (1, 2, 2, 512))
    ...     return scope_attn.Selection(numpy.tile(half.astype(numpy.int32), (1, 2, 1)), scope_attn.pack_bits(mask))
    >>> found = scope_attn.compare(q, k, v, methods={"mine": nearest, "ours": "scope-mean"}, density=0.5, repeats=1)
    >>> [(row["name"], round(row["density"], 2)) for row in found.rows]
    [('dense', 1.0), ('mine', 0.5), ('ours', 0.5)]
    """
    if len(inputs) not in (1, 3):
        raise TypeError(f"compare: got {len(inputs)} inputs, expected q, k and v, or a pipeline")
    rest = entries_of(methods, density), dict(density=density), progress or to_terminal
    if len(inputs) == 1:
        return compare_videos(inputs[0], *rest, **given)
    q, k, v = inputs
    return compare_tensors(q, k, v, *rest, **given)


class Comparison:
    """What compare() found: a table when printed, `rows` as dictionaries, to_json(path)."""

    def __init__(self, about: dict[str, Any], rows: list[dict[str, Any]], columns: Mapping[str, tuple[str, str]], title: str,
                 notes: Sequence[str]):
        self.about, self.rows, self.notes = about, rows, list(notes)
        self._columns, self._title = columns, title

    def to_dict(self) -> dict[str, Any]:
        return dict(**origin(), **self.about, rows=self.rows, notes=self.notes)

    def to_json(self, path: Union[str, os.PathLike]):
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=1)
            file.write("\n")

    def __str__(self) -> str:
        lines = [["", *(heading for heading, _ in self._columns.values())]]
        lines += [[row["name"], *(cell(row, name, form) for name, (_, form) in self._columns.items())] for row in self.rows]
        return "\n".join([self._title, "", markdown(lines), "", *self.notes])

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(row['name'] for row in self.rows)}; print it>"


class Entry(NamedTuple):
    """A method to compare."""

    name: str
    selector: Optional[Selector]  # None: one of ours
    method: str  # "": a selector
    settings: dict[str, Any]

    def about(self) -> dict[str, str]:
        what = dict(selector=name_of(self.selector)) if self.selector else dict(method=self.method)
        return {**what, **{name: shown(value) for name, value in self.settings.items()}}


def shown(value: Any) -> str:
    """An argument in a JSON: of an array its shape alone."""
    return f"{type(value).__name__} {list(value.shape)}" if hasattr(value, "shape") else text_of(value)


def entries_of(methods: Mapping[str, Method], density: Optional[float]) -> list[Entry]:
    if not isinstance(methods, Mapping) or not methods:
        raise TypeError(f"methods: got {type(methods).__name__}, expected a dict with at least one method by its name")
    return [entry_of(name, method, density) for name, method in methods.items()]


def entry_of(name: str, method: Method, density: Optional[float]) -> Entry:
    at = f"methods[{name!r}]"
    settings: dict[str, Any] = dict(method) if isinstance(method, Mapping) else {"selector" if callable(method) else "method": method}
    selector, named = settings.pop("selector", None), settings.pop("method", None)
    if (selector is None) == (named is None) or not (callable(selector) or isinstance(named, str)):
        raise TypeError(f'{at}: got {selector or named!r}, expected the name of a method, a selector, or a dict with one of them as '
                        '"method" or "selector"')
    if name == "dense" or named == "dense":
        raise ValueError(f"{at}: dense is what the others are compared with; it has its own row")
    if named is None:
        return Entry(name, selector, "", settings)
    defaults = {row.name: row.default for row in _functions.settings(named)}
    _functions.refuse_morton(named)
    if density is not None and defaults["target_density"] == "none" and not (SAYS_HOW_MANY | {"target_density"}) & set(settings):
        settings["target_density"] = density
    return Entry(name, None, named, settings)


def to_terminal(line: str):
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


class Steps:
    """Tells of each step of long work, and how long the rest may take."""

    def __init__(self, count: int, progress: Progress, work: str = "compare"):
        self.count, self.progress, self.work, self.done, self.began = count, progress, work, 0, time.monotonic()

    def step(self, what: str):
        self.done += 1
        left = (time.monotonic() - self.began) / self.done * (self.count - self.done)
        self.progress(f"{self.work}: {self.done} of {self.count}: {what}; about {datetime.timedelta(seconds=round(left))} left")


# ---- tensors

TENSOR_COLUMNS = dict(density=("density", "{:.4f}"), recall=("mass recall", "{:.4f}"), error=("error", "{:.5f}"),
                      seconds=("ms", "{:.4g}"), selection_seconds=("choosing ms", "{:.4g}"), speedup=("times as fast", "{:.2f}"))


class Timed(NamedTuple):
    """One call."""

    seconds: float
    selection_seconds: Optional[float]  # None: not told apart
    density: float


class Dense:
    """On a GPU PyTorch's own dense attention, on the CPU ours: whichever is faster there."""

    entry = Entry("dense", None, "dense", {})

    def __init__(self, q, k, v, scale):
        self.qkv, self.scale, self.out = (q, k, v), scale, None

    def call(self) -> Timed:
        q = self.qkv[0]
        began = now(q)
        if getattr(q, "is_cuda", False):
            import torch
            self.out = torch.nn.functional.scaled_dot_product_attention(*self.qkv, scale=self.scale or None)
        else:
            self.out = _functions.attention(*self.qkv, method="dense", scale=self.scale)
        return Timed(between(began, now(q)), None, 1.0)

    def selection(self) -> Optional[Selection]:
        return None  # everything


class Ours:
    """A method, which starts every call but the first from the same state."""

    def __init__(self, entry: Entry, q, k, v, scale, rope, place: Optional[Place]):
        self.entry, self.qkv, self.scale, self.out = entry, (q, k, v), scale, None
        texts = [f"{name}={text_of(value)}" for name, value in entry.settings.items() if name != "model"]
        self.plan = _functions.plan_for(arrays_of(q), q, k, False, False, entry.method, entry.settings.get("model"), rope, texts)
        at = {} if place is None else dict(layer=place.layer, step=place.step, steps=place.steps or place.step + 1)
        reason = self.plan.reason(**at)
        if reason is not Reason.SPARSE:
            raise ValueError(f"{place}: a call of {entry.name} is dense there: {WHY_DENSE[reason]}")
        self.state = State(self.plan)
        self.saved: Optional[bytes] = None  # the state after the first call
        for name, value in at.items():
            setattr(self.state, name, value)

    def call(self) -> Timed:
        q, stats = self.qkv[0], Stats()
        self.rewind()
        began = now(q)
        self.out = self.plan.run(*self.qkv, state=self.state, stats=stats, scale=self.scale)
        seconds, stages = between(began, now(q)), stats.seconds
        if self.saved is None and self.plan.state_bytes:
            self.saved = self.state.save()
        choosing = sum(stages[stage] for stage in ("group", "encode", "score", "select"))
        return Timed(seconds, None if math.isnan(choosing) else choosing, stats.density)

    def rewind(self):
        if self.saved is not None:
            self.state.load(self.saved)

    def selection(self) -> Selection:
        """What a warm call keeps."""
        self.rewind()
        return self.plan.select(*self.qkv, state=self.state, scale=self.scale)


class Theirs:
    """A selector of the caller's."""

    def __init__(self, entry: Entry, q, k, v, scale, grid: Grid, place: Optional[Place]):
        if entry.settings:
            raise TypeError(f"methods[{entry.name!r}]: got {', '.join(entry.settings)} beside a selector, where it would do nothing")
        self.entry, self.qkv, self.scale, self.grid, self.place = entry, (q, k, v), scale, grid, place or Place(0, 0)
        self.chosen: Any = None
        self.out = None

    def call(self) -> Timed:
        q, k, v = self.qkv
        began = now(q)
        self.chosen = choose(self.entry.selector, q, k, self.grid, self.place)
        ready = now(q)
        self.out = _functions.attend_selected(q, k, v, self.chosen, scale=self.scale)
        ended = now(q)
        return Timed(between(began, ended), between(began, ready), float(densities(self.chosen, k.shape[2]).mean()))

    def selection(self) -> Selection:
        return self.chosen


def compare_tensors(q: Any, k: Any, v: Any, entries: list[Entry], about: dict[str, Any], progress: Progress, *, grid: Grid = None,
                    rope: Optional[Sequence[int]] = None, place: Optional[Place] = None, scale: float = 0.0, repeats: int = 7,
                    samples: int = 128) -> Comparison:
    arrays = arrays_of(q)
    for name, value in (("repeats", repeats), ("samples", samples)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: got {value!r}, expected 1 or more")
    _functions.plan_for(arrays, q, k, False, False, "dense", None, None, ())  # refuses what is no q and k
    if grid is not None and math.prod(grid) != q.shape[2]:
        raise ValueError(f"grid: got {'x'.join(map(str, grid))}, which is {math.prod(grid)} tokens, expected the {q.shape[2]} of q")
    with contextlib.ExitStack() as stack:
        if hasattr(q, "requires_grad"):
            import torch
            stack.enter_context(torch.no_grad())
        runs = [Dense(q, k, v, scale), *(Ours(entry, q, k, v, scale, rope, place) if entry.selector is None else
                                         Theirs(entry, q, k, v, scale, grid, place) for entry in entries)]
        heads = q.shape[0] * q.shape[1]
        steps = Steps(len(runs) + repeats + heads, progress)
        for run in runs:
            run.call()
            steps.step(f"first call of {run.entry.name}")
        calls: list[list[Timed]] = [[] for _ in runs]
        for repeat in range(repeats):
            for run, found in zip(runs, calls):
                found.append(run.call())
            steps.step(f"warm call {repeat + 1} of each")
        measured = qualities(q, k, v, scale, samples, [(run.out, run.selection()) for run in runs], steps)
    rows = []
    for run, found, (error, recall) in zip(runs, calls, measured):
        seconds, choosing = [each.seconds for each in found], [each.selection_seconds for each in found]
        row = dict(name=run.entry.name, density=found[-1].density, recall=recall, error=error, **medians("seconds", seconds),
                   selection_seconds=None if None in choosing else statistics.median(choosing), all_seconds=seconds)
        rows.append({**row, **medians("speedup", [dense.seconds / each for dense, each in zip(calls[0], seconds)])})
    dtype, on = str(q.dtype).removeprefix("torch."), machine(q)
    dense = "PyTorch's scaled_dot_product_attention" if getattr(q, "is_cuda", False) else "SCOPE's dense attention"
    about = dict(kind="tensors", shape=list(q.shape), k_tokens=k.shape[2], dtype=dtype, machine=on, dense=dense, grid=grid and list(grid),
                 rope=rope and list(rope), place=place and place._asdict(), **about, repeats=repeats,
                 samples=min(samples, q.shape[2]), methods={entry.name: entry.about() for entry in entries})
    notes = [f"mass recall: exact softmax mass on the kept keys; error: |o - o*| / |o*|; both in float64 on {about['samples']} queries of "
             "each head.", f"ms and times as fast: medians of {repeats} warm calls{brackets(repeats)}; dense is {dense}."]
    title = f"{heads} heads x {q.shape[2]:,} tokens x {q.shape[3]}, {dtype}, {on}"
    return Comparison(about, rows, TENSOR_COLUMNS, title, notes)


def qualities(q, k, v, scale, samples, results, steps) -> list[tuple[float, float]]:
    """Error and mass recall of each (out, selection), against exact attention of the same sampled queries; means over heads."""
    import numpy
    batch, heads, tokens, dim = q.shape
    samples = min(samples, tokens)
    edges = numpy.arange(samples + 1) * tokens // samples  # a random query of each stretch
    at = edges[:-1] + (numpy.random.default_rng(0).random(samples) * numpy.diff(edges)).astype(int)
    sums = numpy.zeros((len(results), 2))
    for b in range(batch):
        for h in range(heads):
            logits = floats(q[b, h])[at] @ floats(k[b, h]).T * (scale or dim**-0.5)
            weights = numpy.exp(logits - logits.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            exact = weights @ floats(v[b, h])
            length = max(numpy.linalg.norm(exact), 1e-300)
            for total, (out, selection) in zip(sums, results):
                total += numpy.linalg.norm(floats(out[b, h])[at] - exact) / length, kept_mass(weights, selection, b, h, at) / samples
            steps.step(f"error and recall of head {b * heads + h + 1}")
    return [(error, recall) for error, recall in (sums / (batch * heads)).tolist()]


def floats(x: Any) -> Any:
    """float64 in numpy."""
    import numpy
    return x.detach().double().cpu().numpy() if hasattr(x, "requires_grad") else numpy.asarray(x, numpy.float64)


def kept_mass(weights, selection: Optional[Selection], b: int, h: int, at) -> float:
    """Of these queries of a head, the sum over what they keep."""
    if selection is None:
        return weights.sum()
    import numpy

    def host(words):
        words = words.view(arrays_of(words).int32)
        return words.cpu().numpy() if hasattr(words, "cpu") else words

    labels = host(selection.labels[b, h])[at]
    mask = host(selection.mask[b, h])[labels.clip(0)]
    if selection.keep is not None:
        mask = mask | host(selection.keep[b])
    kept = _functions.unpack_bits(numpy.ascontiguousarray(mask).view(numpy.uint32), weights.shape[1])
    return (weights * kept * (labels >= 0)[:, None]).sum()


# ---- whole videos

VIDEO_COLUMNS = dict(psnr=("PSNR dB", "{:.2f}"), ssim=("SSIM", "{:.4f}"), density=("density", "{:.4f}"), seconds=("seconds", "{:.4g}"),
                     selection_seconds=("choosing s", "{:.4g}"), speedup=("times as fast", "{:.2f}"))


def compare_videos(pipe: Any, entries: list[Entry], about: dict[str, Any], progress: Progress, *, seeds: Iterable[int],
                   make: Optional[Callable[[int], Any]] = None, settings: Mapping[str, Any] = {}, skip: int = 0,
                   **call: Any) -> Comparison:
    from . import _pipelines
    host = _pipelines.host()
    import torch

    from .reproduce import quality
    seeds = list(seeds)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds: got {seeds}, expected one or more, each once")
    if make is not None and call:
        raise TypeError(f"{', '.join(call)}: nothing takes it where `make` makes the videos")
    if "generator" in call:
        raise TypeError("generator: leave it out; each seed makes one")
    if host.processors_of(pipe):
        raise RuntimeError("pipe: it is enabled already; call scope_attn.disable(pipe) first")
    model = ""
    for entry in entries:  # what is refused is refused before any video is made
        with enabled(pipe, entry, settings):
            model = _pipelines.receipt(pipe).settings["model"]

    def of_pipe(seed):
        out = pipe(generator=torch.Generator().manual_seed(seed), **{"output_type": "np", **call})
        return out.frames[0]

    device = getattr(pipe, "_execution_device", torch.device("cpu"))

    def seconds_now():
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    steps = Steps(len(seeds) * (1 + len(entries)), progress)
    dense: dict[int, Any] = {}  # by seed: frames
    rows, notes = [], []
    # One method after the other, since graphs of torch.compile are a method's own.
    for entry in (Dense.entry, *entries):
        videos = []
        with enabled(pipe, entry, settings) if entry.method != "dense" else contextlib.nullcontext():
            for seed in seeds:
                began = seconds_now()
                frames = (make or of_pipe)(seed)
                video: dict[str, Any] = dict(seed=seed, seconds=seconds_now() - began)
                frames = torch.from_numpy(pictures_of(frames))
                if entry.method == "dense":
                    if len(frames) <= skip or min(frames.shape[1:3]) < quality.WINDOW:
                        raise ValueError(f"frames: got {list(frames.shape)}, expected more than skip={skip} of at least "
                                         f"{quality.WINDOW}x{quality.WINDOW} pixels")
                    dense[seed] = frames
                else:
                    if frames.shape != dense[seed].shape:
                        raise ValueError(f"seed {seed}: the video of {entry.name} has shape {list(frames.shape)}, and the dense one "
                                         f"{list(dense[seed].shape)}")
                    found = quality.means(list(zip(dense[seed], frames))[skip:], device)
                    video.update(psnr=found["psnr"], ssim=found["ssim"], **of_receipt(_pipelines.receipt(pipe)))
                videos.append(video)
                steps.step(f"{entry.name}, seed {seed}: {video['seconds']:.1f} s")
        rows.append(video_row(entry.name, videos, rows[0]["videos"] if rows else videos))
        why = collections.Counter(why for video in videos for why in video.pop("why", ()))
        if entry.method != "dense" and None in (video["density"] for video in videos):
            notes.append(f"{entry.name}: no call of a video was sparse: {', '.join(why)}")
        notes += [f"{entry.name}: {count:,} calls ran densely: {each}" for each, count in why.items() if each.startswith("refused")]
    on = torch.cuda.get_device_name(device) if device.type == "cuda" else machine(None)
    about = dict(kind="videos", pipeline=type(pipe).__name__, model=model, shape=list(dense[seeds[0]].shape), machine=on, seeds=seeds,
                 skip=skip, call={name: shown(value) for name, value in call.items()},
                 settings={name: shown(value) for name, value in settings.items()}, **about,
                 methods={entry.name: entry.about() for entry in entries})
    notes += [f"PSNR and SSIM: against the dense video of the same seed; means over {len(seeds)} seeds, in brackets their 95 % interval.",
              f"seconds and times as fast: medians over seeds{brackets(len(seeds))}; density: of sparse calls."]
    count, height, width, _ = about["shape"]
    title = f"{about['pipeline']} as {model}: {len(seeds)} videos of {count} frames, {width}x{height}, on {on}"
    return Comparison(about, rows, VIDEO_COLUMNS, title, notes)


@contextlib.contextmanager
def enabled(pipe: Any, entry: Entry, settings: Mapping[str, Any]):
    from . import _pipelines
    what: dict[str, Any] = dict(selector=entry.selector) if entry.selector else dict(method=entry.method)
    _pipelines.enable(pipe, **{**settings, **entry.settings, **what})
    try:
        yield
    finally:
        _pipelines.disable(pipe)


def of_receipt(receipt: Any) -> dict[str, Any]:
    """What a row tells of a video's calls."""
    if not receipt.calls:
        raise ValueError("make: it returned a video, and the pipeline made none; make it with `pipe`")
    choosing = [call.selection_seconds for call in receipt.calls]
    return dict(density=receipt.density, selection_seconds=None if None in choosing else sum(choosing),
                why=[call.why for call in receipt.calls if call.why])


def video_row(name: str, videos: list[dict[str, Any]], dense: list[dict[str, Any]]) -> dict[str, Any]:
    def each(what: str) -> list[Any]:
        return [video.get(what) for video in videos]

    row: dict[str, Any] = dict(name=name)
    for what in ("psnr", "ssim"):
        if what not in videos[0]:
            row.update({what: None, f"{what}_interval": None})
        else:
            row.update(dict(psnr="equal", psnr_interval=None) if None in each(what) else means(what, each(what)))
    density, choosing = each("density"), each("selection_seconds")
    row.update(density=1.0 if videos is dense else None if None in density else statistics.fmean(density),
               **medians("seconds", each("seconds")), selection_seconds=None if None in choosing else statistics.median(choosing),
               **medians("speedup", [one["seconds"] / taken for one, taken in zip(dense, each("seconds"))]), videos=videos)
    return row


# ---- figures

def medians(name: str, values: Sequence[float]) -> dict[str, Any]:
    """A median and its 95 % interval, by how many values may be on either side of it; of fewer than 6, the least and the greatest."""
    values, count = sorted(values), len(values)
    out, tail = 0, 0.5**count  # values left out at each end, and the chance that the median is among one more
    while tail <= 0.025:
        out += 1
        tail += math.comb(count, out) * 0.5**count
    low = max(out - 1, 0)
    return {name: statistics.median(values), f"{name}_interval": [values[low], values[-1 - low]] if count > 1 else None}


def brackets(count: int) -> str:
    """What stands there beside a median."""
    return "" if count == 1 else f", in brackets {'their 95 % interval' if count >= 6 else 'the least and the greatest'}"


def means(name: str, values: Sequence[float]) -> dict[str, Any]:
    """A mean and its 95 % interval, by Student's distribution."""
    mean, free = statistics.fmean(values), len(values) - 1
    if not free:
        return {name: mean, f"{name}_interval": None}
    quantile = STUDENT[free - 1] if free <= len(STUDENT) else 1.95996 + 2.372 / free + 2.823 / free**2  # to 0.002
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return {name: mean, f"{name}_interval": [mean - half, mean + half]}


def cell(row: Mapping[str, Any], name: str, form: str) -> str:
    """A figure, and in brackets its interval; tensors' seconds in ms."""
    value, interval = row[name], row.get(f"{name}_interval")
    if value is None or isinstance(value, str):
        return value or "–"
    if name == "speedup" and row["name"] == "dense":
        return "–"
    unit = 1e3 if "all_seconds" in row and name.endswith("seconds") else 1
    text = form.format(unit * value)
    return text if interval is None else f"{text} ({form.format(unit * interval[0])} to {form.format(unit * interval[1])})"


def markdown(lines: list[list[str]]) -> str:
    """A table of Markdown, aligned; the first line has the headings."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    shown = [f"| {' | '.join([line[0].ljust(widths[0]), *(each.rjust(width) for each, width in zip(line[1:], widths[1:]))])} |"
             for line in lines]
    shown.insert(1, f"|{'-' * (widths[0] + 2)}|{'|'.join('-' * (width + 1) + ':' for width in widths[1:])}|")
    return "\n".join(shown)


def machine(q: Any) -> str:
    """What q is on."""
    if getattr(q, "is_cuda", False):
        import torch
        return torch.cuda.get_device_name(q.device)
    from .doctor import cpu_name
    return f"{cpu_name()}, {os.cpu_count()} cores"
