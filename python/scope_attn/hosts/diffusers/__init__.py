"""Pipelines of diffusers: enable(), disable() and receipt(), and where a pass through a transformer stands in a video."""
from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from typing import Any, Optional

import torch

from ... import _torch
from ..._receipt import Receipt
from ..session import Grid, Session, Tokens, packed_range
from . import parallel
from .backend import Enabled, Processor, processor_for
from .families import FAMILIES, Family, Text

EXPERTS = "transformer", "transformer_2", "transformer_ref"
MAX_TEXTS = 4  # branches of a pipeline that does not name them


class Expert(Enabled):
    """One transformer of a pipeline: its branches, and the text of each."""

    def __init__(self, name: str):
        self.name = name
        self.named: Optional[str] = None  # the branch, by the pipeline
        self.clear()

    def clear(self):
        self.branch_now: Optional[str] = None  # of the pass that runs; None: no pass has begun
        self.passes: dict[str, int] = {}  # by branch, where the scheduler does not count steps
        self.branches: dict[str, torch.Tensor] = {}  # texts by branch, where the pipeline names none
        self.lengths: dict[str, tuple[tuple[torch.Tensor, ...], list[int]]] = {}  # by branch: masks, and what was read from them
        self.tags: Any = None  # of tokens, and where they are not 0, packed
        self.text: tuple[int, Optional[list[int]], Any] = 0, None, None  # of the pass: tokens, valid ones of each sample, where they are
        self.grid: Grid = None  # of the pass

    def branch_of(self, text: torch.Tensor, video: Any) -> str:
        """By the pipeline's name, else by the text itself."""
        if self.named is not None:
            return self.named
        for branch, known in self.branches.items():
            if known is text:
                return branch
        if len(self.branches) == MAX_TEXTS:
            oldest = next(iter(self.branches))
            del self.branches[oldest]
            self.lengths.pop(oldest, None)
            video.drop_branch(oldest)
        branch = f"text {int(next(reversed(self.branches), 'text -1').split()[1]) + 1}"
        self.branches[branch] = text
        return branch

    def begin_text(self, text: Text, batch: int):
        """Of the pass that begins; masks and tags are read once for each prompt, since that waits for the GPU."""
        branch = self.branch_now
        if text.masks and (branch not in self.lengths or any(
                known is not mask for known, mask in zip(self.lengths[branch][0], text.masks))):
            self.lengths[branch] = text.masks, text.count(*text.masks)
        if text.tags is not None and (self.tags is None or self.tags[0] is not text.tags or len(self.tags[1]) != batch):
            self.tags = text.tags, _torch.pack_bits((text.tags.cpu() != 0).expand(batch, -1))
        self.text = text.tokens, self.lengths[branch][1] if text.masks else None, None if text.tags is None else self.tags[1]

    def tokens(self, q: torch.Tensor, text_first: bool) -> Tokens:
        """Of a call in this pass."""
        count, lengths, bits = self.text
        batch, tokens = q.shape[:2]
        video = tokens - count
        if bits is None:
            bits = packed_range(batch, tokens, 0 if text_first else video, count)
        return Tokens(count, bits, None if lengths is None else [video + valid for valid in lengths])


class Run(Enabled):
    """What enable() made of a pipeline."""

    def __init__(self, pipe: Any, family: Family, session: Session):
        self.pipe, self.scheduler = weakref.ref(pipe), pipe.scheduler
        self.family, self.session = family, session
        transformer = next(iter(transformers_of(pipe).values()))
        self.parameters = list(inspect.signature(type(transformer).forward).parameters)[1:]  # of a pass, in order
        self.experts: list[Expert] = []
        self.hooks: list[Any] = []
        self.timesteps: Any = None  # of the video that runs; another object is another video
        self.foreign = ""  # why the pass that runs cannot be this pipeline's
        session.begin(0)

    @torch.compiler.disable
    def begin(self, expert: Expert, transformer: Any, args: tuple, kwargs: dict):
        """Before each pass through a transformer."""
        pipe = self.pipe()
        self.scheduler = self.scheduler if pipe is None else pipe.scheduler
        self.foreign = why_foreign(self.scheduler)
        if self.foreign:
            expert.branch_now = ""
            return
        with as_known(transformer):
            layers = self.family.layers(transformer)
        first = getattr(self.scheduler, "begin_index", None) or 0  # above 0: video to video
        steps = len(self.scheduler.timesteps) - first
        counts = hasattr(self.scheduler, "step_index")
        index = self.scheduler.step_index if counts else None
        step = (first if index is None else index) - first
        if not counts:  # CogVideoX's do not, and the pipeline may run a part of the steps
            steps = min(steps, getattr(pipe, "num_timesteps", steps))
        video = self.session.video
        if self.timesteps is not self.scheduler.timesteps or (counts and step < video.step):
            video, self.timesteps = self.begin_video(steps, transformer), self.scheduler.timesteps
        given = {**dict(zip(self.parameters, args)), **kwargs}
        with as_known(transformer):
            expert.branch_now = expert.branch_of(given["encoder_hidden_states"], video)
            if self.session.selector is not None:
                expert.grid = self.family.grid(transformer.config, given)
            if self.family.text:
                expert.begin_text(self.family.text(given), len(given["hidden_states"]))
        if not counts:
            step = expert.passes.get(expert.branch_now, 0)
            expert.passes[expert.branch_now] = step + 1
        video.step = min(step, steps - 1)
        for index, attn in enumerate(layers):
            now = getattr(attn, "processor", attn)
            if not isinstance(now, Processor):
                self.session.refuse(RuntimeError(
                    f"layer {index} of {expert.name}: its processor was replaced by a {type(now).__name__} since enable(); "
                    "call scope_attn.disable(pipe) and scope_attn.enable(pipe) again"))

    def begin_video(self, steps: int, transformer: Any):
        for expert in self.experts:
            expert.clear()
        config = getattr(self.family.layers(transformer)[0].processor, "_parallel_config", None)
        about = parallel.ranks(config)
        return self.session.begin(steps, **about, rho_of_each_rank=bool(about) and self.session.density_over_heads)


def why_foreign(scheduler: Any) -> str:
    """Why the pass that begins cannot be that of the enabled pipeline, by its scheduler; "": it may be.

    Another pipeline around the same transformer steps a scheduler of its own, and ours stands still: at its end, or as it was made.
    """
    index, count = getattr(scheduler, "step_index", None), len(scheduler.timesteps)
    most = getattr(getattr(scheduler, "config", None), "num_train_timesteps", 0)
    as_made = getattr(scheduler, "num_inference_steps", None) is None and count == most
    if not as_made and (index is None or index < count):
        return ""
    return (f"the enabled pipeline's scheduler {'has no steps set' if as_made else 'is at its end'}, so this pass is another pipeline's; "
            "pipelines that share a transformer have to share the scheduler too, as from_pipe has it; or else call "
            "scope_attn.disable(pipe) and scope_attn.enable(pipe) when you change from one to the other")


@contextlib.contextmanager
def as_known(transformer: Any):
    """Says in words what a diffusers that we have not seen lacks."""
    try:
        yield
    except (AttributeError, LookupError) as error:
        raise RuntimeError(f"{type(transformer).__name__}: it is not as diffusers 0.36 to 0.42 have it: {error}; install one of these "
                           "versions, and quantise linear layers alone") from error


def transformers_of(pipe: Any) -> dict[str, Any]:
    """A pipeline's transformers by name, without the wrapper of torch.compile."""
    found = {name: getattr(pipe, name, None) for name in EXPERTS}
    return {name: getattr(model, "_orig_mod", model) for name, model in found.items() if model is not None}


def processors_of(pipe: Any) -> list[tuple[Any, Processor]]:
    """Every enabled self-attention and its processor."""
    return [(attn, attn.processor) for model in transformers_of(pipe).values() if type(model).__name__ in FAMILIES
            for attn in FAMILIES[type(model).__name__].layers(model) if isinstance(getattr(attn, "processor", None), Processor)]


def family_of(pipe: Any) -> Family:
    models = transformers_of(pipe)
    if not models or not hasattr(pipe, "scheduler"):
        raise TypeError(f"pipe: got {type(pipe).__name__}, expected a diffusers pipeline with a video transformer and a scheduler")
    if "DiffusionForcing" in type(pipe).__name__:
        raise TypeError(f"pipe: got {type(pipe).__name__}, whose frames are at different steps; expected one whose frames go together")
    for name, model in models.items():
        family = FAMILIES.get(type(model).__name__)
        if family is None:
            raise TypeError(f"pipe.{name}: got {type(model).__name__}, expected one of {', '.join(FAMILIES)}")
        why = family.without(model) if family.without else ""
        if why:
            raise TypeError(f"pipe.{name}: {type(model).__name__}: {why}")
    return family


def check_layers(name: str, transformer: Any, family: Family):
    """Raises for a layer that could not be led to our backend."""
    for layer, attn in enumerate(family.layers(transformer)):
        if not hasattr(attn, "processor"):
            raise TypeError(f"pipe.{name}: layer {layer} is a {type(attn).__name__}, which hides the attention of diffusers; expected one "
                            "with a processor, as it stays where linear layers alone are quantised")
        config = getattr(attn.processor, "_parallel_config", None)
        if config is not None and parallel.why_not(family.splits, config):
            raise RuntimeError(f"pipe.{name}: {parallel.why_not(family.splits, config)}")
        kind = type(attn.processor).__name__
        if family.replaced and kind not in family.replaced:
            raise TypeError(f"pipe.{name}: layer {layer} has a {kind}, expected a {' or '.join(family.replaced)}")
        if not family.replaced and not hasattr(attn.processor, "_attention_backend"):
            raise TypeError(f"pipe.{name}: layer {layer} has a {kind}, expected a processor that attends through diffusers' backends")


def enable(pipe: Any, *, settings: dict[str, Any], **given: Any):
    """given: parameters of Session that the caller chose."""
    models = transformers_of(pipe)
    some = next(iter(models.values()), None)
    with as_known(some):
        family = family_of(pipe)
        if processors_of(pipe):
            raise RuntimeError("pipe: it is enabled already; call scope_attn.disable(pipe) first")
        for name, transformer in models.items():
            check_layers(name, transformer, family)
        heads, dim = family.heads_of(some)
        rope, depths = family.rope(some), family.depths_of(some)
    two_experts = len(models) > 1 or getattr(getattr(pipe, "config", None), "expand_timesteps", False)  # Wan2.2's
    channels = getattr(some.config, "in_channels", None), getattr(some.config, "out_channels", None)
    session = Session(family=family.rows, layers=1 + max(depths), heads=heads, dim=dim, rope=rope,
                      from_image=None not in channels and channels[0] != channels[1], experts=2 if two_experts else 1,
                      without_codes=family.without_codes, settings=settings, **given)
    run = Run(pipe, family, session)
    for name, transformer in models.items():
        expert = Expert(name)
        run.experts.append(expert)
        run.hooks.append(transformer.register_forward_pre_hook(functools.partial(run.begin, expert), with_kwargs=True))
        note_branches(transformer, expert)
        for layer, (attn, depth) in enumerate(zip(family.layers(transformer), family.depths_of(transformer))):
            attn.set_processor(processor_for(attn.processor, run, expert, layer, depth))


def note_branches(transformer: Any, expert: Expert):
    """Tells the expert what the pipeline calls the branch that runs."""
    if not hasattr(type(transformer), "cache_context"):
        return
    reference, own = weakref.ref(transformer), type(transformer).cache_context

    @contextlib.contextmanager
    def cache_context(name, **where):
        expert.named = name
        try:
            with own(reference(), name, **where):
                yield
        finally:
            expert.named = None

    transformer.cache_context = cache_context


def run_of(pipe: Any) -> Run:
    enabled = processors_of(pipe)
    if not enabled:
        raise RuntimeError("pipe: it is not enabled; call scope_attn.enable(pipe) first")
    return enabled[0][1].run


def disable(pipe: Any):
    run = run_of(pipe)
    for attn, processor in processors_of(pipe):
        attn.set_processor(processor.restored())
    for hook in run.hooks:
        hook.remove()
    for transformer in transformers_of(pipe).values():
        vars(transformer).pop("cache_context", None)


def receipt(pipe: Any) -> Receipt:
    return run_of(pipe).session.video.receipt
