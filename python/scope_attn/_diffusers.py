"""Pipelines of diffusers: which layers call us, where a call stands in a video, and what becomes of it.

Each video self-attention keeps its own processor, inside one that hands the layer's ticket to the attention backend "scope" in the
place of the mask. The backend, or in a compiled graph one operator, finds the layer by its ticket, and the rest is the host's.
"""
from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import time
import warnings
import weakref
from typing import Any, NamedTuple, Optional

import torch
from diffusers.models import attention_dispatch

from . import _functions, _processors, _torch
from ._plan import Plan, Reason, State, Stats, ranges_of, text_of
from ._receipt import Call, Receipt

EXPERTS = "transformer", "transformer_2", "transformer_ref"
MAX_TEXTS = 4  # branches of a pipeline that does not name them


class Text(NamedTuple):
    """Text tokens among the video's."""

    tokens: int  # of each sample
    masks: tuple[torch.Tensor, ...] = ()  # what says how many of them are valid; none: all are
    count: Any = None  # of the masks: so many in each sample
    tags: Optional[torch.Tensor] = None  # of each token, 0: the video's; None: the text stands behind or before them


class Family(NamedTuple):
    """What we know of a transformer class of diffusers."""

    rows: str  # how the names of its models() begin
    rope: Any  # of a transformer: how many channels it rotates along T, H and W, or which; None: it rotates none
    layers: Any  # of a transformer: its self-attentions, first to last
    text: Any = None  # of a pass's arguments by name: the Text behind the video's tokens; None: there is none
    text_first: bool = False  # it stands before them
    depths: Any = None  # of a transformer: the layers of the schedule that its self-attentions count as; None: their own order
    processors: Any = None  # by the name of a layer's own processor, ours in its place; None: its own, which dispatches
    rope_first: bool = False  # layers give their processor RoPE before the mask, and no text
    splits: bool = False  # by diffusers' plan for context parallelism

    def depths_of(self, model) -> list[int]:
        return self.depths(model) if self.depths else list(range(len(self.layers(model))))


def wan_rope(model):
    return model.rope.t_dim, model.rope.h_dim, model.rope.w_dim


def count_valid(*masks: torch.Tensor) -> list[int]:
    """diffusers counts them, wherever they stand, and so do we: in integers, since bf16 has no 257."""
    return sum(mask.sum(1, dtype=torch.int64) for mask in masks).tolist()


def hunyuan_text(given: dict[str, Any]) -> Text:
    return Text(given["encoder_hidden_states"].shape[1], (given["encoder_attention_mask"],), count_valid)


def hunyuan15_text(given: dict[str, Any]) -> Text:
    """Two texts and an image, which is not there if it is nothing but zeros."""
    image = given["image_embeds"]

    def count(mask, mask_2, image):
        first = image.shape[1] if image.any() else 0
        return [first + valid for valid in count_valid(mask, mask_2)]

    tokens = given["encoder_hidden_states"].shape[1] + given["encoder_hidden_states_2"].shape[1] + image.shape[1]
    return Text(tokens, (given["encoder_attention_mask"], given["encoder_attention_mask_2"], image), count)


def cog_rope(model):
    """As get_3d_rotary_pos_embed of diffusers cuts the channels; CogVideoX-2b has none."""
    dim = model.config.attention_head_dim
    return (dim // 4, dim // 8 * 3, dim // 8 * 3) if model.config.use_rotary_positional_embeddings else None


def minimax_rope(model):
    """Channel i turns with channel i + 3 f; the last ones do not turn."""
    f, dim = model.config.rope_freq_dim, model.config.attention_head_dim
    axes = [(*range(axis * f, axis * f + f), *range((axis + 3) * f, (axis + 4) * f)) for axis in range(3)]
    return (*axes, tuple(range(6 * f, dim))) if dim > 6 * f else tuple(axes)


def minimax_text(given: dict[str, Any]) -> Text:
    """Text and audio, among the video's tokens."""
    return Text(given["encoder_hidden_states"].shape[1] + given["audio_hidden_states"].shape[1], tags=given["token_tags"])


def rope_axes(model):
    return tuple(model.config.rope_axes_dim)


FAMILIES = {
    "WanTransformer3DModel": Family("wan", wan_rope, lambda model: [block.attn1 for block in model.blocks], splits=True),
    # A VACE block gives its result to the block that it counts as.
    "WanVACETransformer3DModel": Family("wan", wan_rope, lambda model: [block.attn1 for block in (*model.blocks, *model.vace_blocks)],
                                        depths=lambda model: [*range(len(model.blocks)), *model.config.vace_layers]),
    "HunyuanVideoTransformer3DModel": Family("hunyuanvideo-13b", rope_axes, lambda model: [
        block.attn for block in (*model.transformer_blocks, *model.single_transformer_blocks)], text=hunyuan_text),
    "HunyuanVideo15Transformer3DModel": Family("hunyuanvideo-1.5", rope_axes, lambda model: [
        block.attn for block in model.transformer_blocks], text=hunyuan15_text,
        processors={"HunyuanVideo15AttnProcessor2_0": _processors.HunyuanVideo15}),
    "CogVideoXTransformer3DModel": Family("cogvideox", cog_rope, lambda model: [block.attn1 for block in model.transformer_blocks],
                                          text=lambda given: Text(given["encoder_hidden_states"].shape[1]), text_first=True,
                                          processors={name: _processors.CogVideoX for name in
                                                      ("CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0")}),
    "MiniMaxH3Transformer3DModel": Family("wan", minimax_rope, lambda model: [block.attn for block in model.transformer_blocks],
                                          text=minimax_text, rope_first=True),
}


class Place(NamedTuple):
    """Where one pass through a transformer stands in a video."""

    step: int
    steps: int
    branch: str
    text_tokens: int  # behind the video's, or before them
    lengths: Optional[list[int]]  # valid text tokens of each sample; None: all are
    text_bits: Optional[torch.Tensor]  # where they are; None: together


class Enabled:
    """What hangs on an enabled pipeline: it can be neither copied nor pickled."""

    def __reduce_ex__(self, protocol):
        raise TypeError("an enabled pipeline holds states of this process: call scope_attn.disable(pipe), copy or pickle it, and enable "
                        "both again")


class Expert(Enabled):
    """One transformer: its states by branch and layer, which live as long as it is the one that runs."""

    def __init__(self, name: str, family: Family):
        self.name, self.family = name, family
        self.branch: Optional[str] = None  # that the pipeline named
        self.clear()

    def clear(self):
        self.place: Optional[Place] = None
        self.passes: dict[str, int] = {}  # by branch, where the scheduler does not count steps
        self.tags: Any = None  # of tokens, and where they are not 0, packed
        self.states: dict[str, dict[int, State]] = {}
        self.texts: dict[str, torch.Tensor] = {}  # by branch, where the pipeline names none
        self.lengths: dict[str, tuple[tuple[torch.Tensor, ...], list[int]]] = {}  # by branch: masks, and what was read from them

    def branch_of(self, text: torch.Tensor) -> str:
        """By the pipeline's name, else by the text itself."""
        if self.branch is not None:
            return self.branch
        for branch, known in self.texts.items():
            if known is text:
                return branch
        if len(self.texts) == MAX_TEXTS:
            oldest = next(iter(self.texts))
            for kept in (self.texts, self.states, self.lengths):
                kept.pop(oldest, None)
        branch = f"text {int(next(reversed(self.texts), 'text -1').split()[1]) + 1}"
        self.texts[branch] = text
        return branch

    def text_lengths(self, branch: str, text: Text) -> list[int]:
        """Valid text tokens, read once for each prompt."""
        if branch not in self.lengths or any(known is not mask for known, mask in zip(self.lengths[branch][0], text.masks)):
            self.lengths[branch] = text.masks, text.count(*text.masks)
        return self.lengths[branch][1]

    def text_bits(self, tags: torch.Tensor, batch: int) -> torch.Tensor:
        """Which tokens are not the video's, read once for each sequence."""
        if self.tags is None or self.tags[0] is not tags or len(self.tags[1]) != batch:
            self.tags = tags, _torch.pack_bits((tags.cpu() != 0).expand(batch, -1))
        return self.tags[1]


class Run(Enabled):
    """What enable() made of a pipeline."""

    def __init__(self, pipe, family, method, model, settings, rope, min_tokens, strict, shares_rho):
        self.pipe, self.scheduler = weakref.ref(pipe), pipe.scheduler
        self.family, self.method, self.model, self.rope = family, method, model, rope
        transformer = next(iter(transformers_of(pipe).values()))
        self.parameters = list(inspect.signature(type(transformer).forward).parameters)[1:]  # of a pass, in order
        self.texts = tuple(f"{name}={text_of(value)}" for name, value in settings.items())
        self.settings = {name.rstrip("?"): value for name, value in settings.items()}
        self.min_tokens, self.strict, self.shares_rho = min_tokens, strict, shares_rho
        self.shares_branches = any(row.name == method and row.shares_branches for row in _functions.methods())
        self.experts: list[Expert] = []
        self.hooks: list[Any] = []
        self.timesteps: Any = None  # of the video that runs; another object is another video
        self.warned = False
        self.receipt = self.new_receipt(0, None)

    def new_receipt(self, steps: int, parallel) -> Receipt:
        ulysses = parallel and parallel.context_parallel_config
        return Receipt(method=self.method, model=self.model, rope=self.rope, settings=dict(self.settings), min_tokens=self.min_tokens,
                       steps=steps, ranks=ulysses.ulysses_degree if ulysses else 1, rank=ulysses._ulysses_local_rank if ulysses else 0,
                       rho_of_each_rank=bool(ulysses and self.shares_rho))

    @torch.compiler.disable
    def begin(self, expert: Expert, transformer, args, kwargs):
        """Before each pass through a transformer."""
        pipe = self.pipe()
        self.scheduler = self.scheduler if pipe is None else pipe.scheduler
        first = getattr(self.scheduler, "begin_index", None) or 0  # above 0: video to video
        steps = len(self.scheduler.timesteps) - first
        counts = hasattr(self.scheduler, "step_index")
        index = self.scheduler.step_index if counts else None
        step = (first if index is None else index) - first
        if not counts:  # CogVideoX's do not, and the pipeline may run a part of the steps
            steps = min(steps, getattr(pipe, "num_timesteps", steps))
        place = expert.place
        if self.timesteps is not self.scheduler.timesteps or (counts and place is not None and step < place.step):
            parallel = getattr(self.family.layers(transformer)[0].processor, "_parallel_config", None)
            self.timesteps, self.receipt = self.scheduler.timesteps, self.new_receipt(steps, parallel)
            for every in self.experts:
                every.clear()
        for other in self.experts:
            if other is not expert and other.states:
                other.clear()
        given = {**dict(zip(self.parameters, args)), **kwargs}
        branch = expert.branch_of(given["encoder_hidden_states"])
        lengths, text_tokens, text_bits = None, 0, None
        if self.family.text:
            text = self.family.text(given)
            text_tokens, lengths = text.tokens, expert.text_lengths(branch, text) if text.masks else None
            text_bits = None if text.tags is None else expert.text_bits(text.tags, len(given["hidden_states"]))
        if not counts:
            step = expert.passes.get(branch, 0)
            expert.passes[branch] = step + 1
        expert.place = Place(min(step, steps - 1), steps, branch, text_tokens, lengths, text_bits)
        for index, attn in enumerate(self.family.layers(transformer)):
            if not isinstance(attn.processor, Processor):
                self.refuse(RuntimeError(f"layer {index} of {expert.name}: its processor was replaced by a {type(attn.processor).__name__} "
                                         "since enable(); call scope_attn.disable(pipe) and scope_attn.enable(pipe) again"))

    def refuse(self, error: Exception):
        """Raises it, or in lenient mode warns of the first."""
        if self.strict:
            raise error
        if not self.warned:
            self.warned = True
            warnings.warn(f"scope_attn: the pipeline's own attention runs in the place of sparse calls: {error}", stacklevel=3)


_numbers = itertools.count()
processors: weakref.WeakValueDictionary[int, Processor] = weakref.WeakValueDictionary()


class Processor(Enabled):
    """In the place of a layer's own processor, which it calls with our backend.

    The parameters are named because diffusers passes those alone that it finds in the signature.
    """

    # set_attention_backend and enable_parallelism look for these two, and set them: the backend is that of dense calls.
    _attention_backend = None
    _parallel_config = None

    def __init__(self, own, run: Run, expert: Expert, layer: int, depth: int):
        self.own, self.run, self.expert, self.layer, self.depth = own, run, expert, layer, depth
        replacements = run.family.processors
        self.routed = replacements[type(own).__name__]() if replacements else copy.copy(own)
        self.routed._attention_backend, self.routed._parallel_config = BACKEND, None
        self._attention_backend, self._parallel_config = (getattr(own, name, None) for name in ("_attention_backend", "_parallel_config"))
        number = next(_numbers)
        processors[number] = self
        self.ticket = _torch.ticket(number)

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None, image_rotary_emb=None):
        rotation = image_rotary_emb if rotary_emb is None else rotary_emb
        return self.routed(attn, hidden_states, encoder_hidden_states, (self.ticket, attention_mask), rotation)

    def restored(self):
        """The layer's own processor, with the backend that was chosen meanwhile."""
        for name in ("_attention_backend", "_parallel_config"):
            if getattr(self, name) is not getattr(self.own, name, None):
                setattr(self.own, name, getattr(self, name))
        return self.own

    def attend(self, q, k, v, mask, scale):
        """softmax(scale q k) v for [batch, tokens, heads, dim], of which Ulysses gives this rank a share of the tokens.

        It is attended to between two exchanges, with all tokens and a share of the heads; dense calls too, so that ranks of which one
        falls back to dense exchange alike.
        """
        if self._parallel_config is None or why_not_parallel(self.run.family, self._parallel_config):
            return self.attend_heads(q, k, v, mask, scale, self._parallel_config)

        def forward(context, q, k, v, mask, *rest, **options):
            return self.attend_heads(q, k, v, mask, scale, None)

        return attention_dispatch._templated_context_parallel_attention(q, k, v, mask, scale=scale, forward_op=forward, backward_op=None,
                                                                        _parallel_config=self._parallel_config)

    def attend_heads(self, q, k, v, mask, scale, parallel):
        """Sparse, or by the pipeline's own attention; `parallel`: the tokens are a share, which only the latter can do."""
        place = self.expert.place
        if place is None:
            raise RuntimeError(f"{self.expert.name}: its layers were called without it; call the transformer itself")
        start, out, why, stats = now(q), None, "", None
        tokens = q.shape[1] - place.text_tokens
        try:
            if parallel is not None:
                raise RuntimeError(why_not_parallel(self.run.family, parallel))
            if tokens < self.run.min_tokens:
                why = f"{tokens:,} tokens, min_tokens is {self.run.min_tokens:,}"
            else:
                out, why, stats = self.sparse(q, k, v, mask, scale, place, tokens)
        except (ValueError, TypeError, RuntimeError) as error:
            self.run.refuse(error)
            why = f"refused: {error}"
        if out is None:
            out = attention_dispatch.dispatch_attention_fn(q, k, v, attn_mask=mask, scale=scale, backend=self._attention_backend,
                                                           parallel_config=parallel)
        self.run.receipt.calls.append(Call(self.expert.name, self.layer, place.step, place.branch, why, stats, (start, now(q))))
        return out

    def sparse(self, q, k, v, mask, scale, place, tokens):
        """The output, why the call is dense, and statistics. Output None: the pipeline's own attention is to run it."""
        run = self.run
        if mask is not None and not run.family.text:
            raise ValueError(f"attention_mask: layer {self.layer} got one, and {type(self.own).__name__} has none when it is not causal")
        text = {}
        if run.family.text:
            lengths = None if place.lengths is None else [tokens + length for length in place.lengths]
            bits = place.text_bits
            if bits is None:
                bits = packed_text(q.shape[0], q.shape[1], 0 if run.family.text_first else tokens, place.text_tokens)
            text = dict(q_lengths=lengths, k_lengths=lengths, keep=bits, dense_queries=bits)
        plan = _functions.plan_for(_torch, q, k, True, bool(text), run.method, run.model, run.rope, run.texts)
        at = dict(layer=self.depth, step=place.step, steps=place.steps)
        reason = plan.reason(**at)
        if reason is not Reason.SPARSE and not plan.clusters(**at):
            return None, WHY[reason], None
        states = self.expert.states.setdefault("" if run.shares_branches else place.branch, {})
        if self.layer not in states:
            states[self.layer] = State()
        call = dict(state=states[self.layer], layout="BNHD", scale=scale or 0.0, **at, **text)
        if reason is not Reason.SPARSE:
            plan.cluster(q, k, **call)
            return None, WHY[reason], None
        stats = Stats()
        out = plan.run(q, k, v, stats=stats, **call)
        if place.step == place.steps - 1 and not run.shares_branches:
            del states[self.layer]  # the VAE, which comes next, needs the memory
        if stats.reason is not Reason.SPARSE:
            return None, WHY[stats.reason], None
        return out, "", stats


class RopeFirst(Processor):
    """The same, for layers that give RoPE before the mask."""

    def __call__(self, attn, hidden_states, rotary_emb=None, attention_mask=None):
        return self.routed(attn, hidden_states, rotary_emb, (self.ticket, attention_mask))


WHY = {Reason.SPARSE: "", Reason.DENSE_METHOD: "the method is dense", Reason.DENSE_LAYER: "the layer is below dense_layers",
       Reason.DENSE_STEP: "the step is within dense_steps", Reason.DENSE_LAST_STEP: "the step is within dense_last_steps",
       Reason.DENSE_NOTHING: "no query or no key takes part in selection", Reason.DENSE_OTHER: "the library says so"}


def why_not_parallel(family: Family, parallel) -> str:
    """Why layers with this configuration of diffusers cannot be sparse; "": they can."""
    if not family.splits:
        return "context parallelism: it is for Wan's plain transformers alone; run this one on one rank, or leave it dense"
    ring = parallel.context_parallel_config.ring_degree
    if ring > 1:
        return (f"context parallelism: got ring_degree={ring}, expected ulysses_degree alone: in a ring a rank sees the keys piece by "
                "piece, and choosing among them takes all; use ContextParallelConfig(ulysses_degree=...), or leave the pipeline dense")
    return ""


@functools.lru_cache(maxsize=16)
def packed_text(batch: int, tokens: int, first: int, count: int) -> torch.Tensor:
    """The text among a video's tokens as a mask: every query sees it, and it sees everything."""
    text = torch.zeros(batch, tokens, dtype=torch.bool)
    text[:, first:first + count] = True
    return _torch.pack_bits(text)


def now(q: torch.Tensor) -> Any:
    """Seconds on the CPU, an event on a GPU, which nobody waits for."""
    if not q.is_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(q.device))
    return event


# ---- the attention backend, and the operator that stands for it in compiled graphs

# The ticket is said to change, so that torch.compile neither drops, repeats nor reorders calls.
_torch._library.define("layer_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) ticket, Tensor? mask, float? scale) -> Tensor",
                       tags=_torch._tags)


@torch.library.impl(_torch._library, "layer_attention", "CompositeExplicitAutograd")
def _layer_attention(q, k, v, ticket, mask, scale):
    out, like = processor_of(ticket).attend(q, k, v, mask, scale), torch.empty_like(q)
    return out if out.stride() == like.stride() else like.copy_(out)


torch.library.register_fake("scope_attn::layer_attention", lambda q, *rest: torch.empty_like(q), lib=_torch._library)
_operator = torch.ops.scope_attn.layer_attention.default


def processor_of(ticket) -> Processor:
    return processors[ticket.item()]


def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, _parallel_config=None):
    """The attention backend "scope"."""
    if not isinstance(attn_mask, tuple):
        raise RuntimeError('the attention backend "scope" is for layers that scope_attn.enable(pipe) found: choose the backend of dense '
                           'calls by set_attention_backend("native"), and call scope_attn.enable(pipe)')
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise RuntimeError("q, k, v: they require gradients, and sparse attention has no backward pass; use torch.no_grad(), or "
                           "scope_attn.disable(pipe) to train")
    if is_causal or dropout_p:
        raise ValueError(f"is_causal, dropout_p: got {is_causal}, {dropout_p}, expected neither: every token of a video sees all others")
    ticket, mask = attn_mask
    if torch.compiler.is_compiling():
        return _operator(query, key, value, ticket, mask, scale)
    return processor_of(ticket).attend(query, key, value, mask, scale)


def register_backend():
    """A name of ours in diffusers' list of backends, which is an enumeration."""
    names = attention_dispatch.AttentionBackendName
    name = str.__new__(names, "scope")
    name._name_, name._value_ = "SCOPE", "scope"
    names._member_map_["SCOPE"] = names._value2member_map_["scope"] = name
    attention_dispatch._AttentionBackendRegistry.register(name)(attend)
    return name


BACKEND = register_backend()


# ---- what users call

def transformers_of(pipe) -> dict[str, Any]:
    """A pipeline's transformers by name, without the wrapper of torch.compile."""
    found = {name: getattr(pipe, name, None) for name in EXPERTS}
    return {name: getattr(model, "_orig_mod", model) for name, model in found.items() if model is not None}


def processors_of(pipe) -> list[tuple[Any, Processor]]:
    """Every enabled self-attention and its processor."""
    return [(attn, attn.processor) for model in transformers_of(pipe).values() if type(model).__name__ in FAMILIES
            for attn in FAMILIES[type(model).__name__].layers(model) if isinstance(attn.processor, Processor)]


def family_of(pipe) -> Family:
    models = transformers_of(pipe)
    if not models or not hasattr(pipe, "scheduler"):
        raise TypeError(f"pipe: got {type(pipe).__name__}, expected a diffusers pipeline with a video transformer and a scheduler")
    for name, model in models.items():
        if type(model).__name__ not in FAMILIES:
            causal = getattr(getattr(model, "config", None), "num_frame_per_block", 1) > 1
            raise TypeError(f"pipe.{name}: got {type(model).__name__}{', which is causal here' if causal else ''}, expected one of "
                            f"{', '.join(FAMILIES)}")
    return FAMILIES[type(model).__name__]


def row_of(pipe, family: Family, model, rope, layers: int) -> str:
    """The row of models() that is most like this transformer: rho and schedule are its."""
    config = model.config
    second = getattr(pipe, "transformer_2", None) is not None or getattr(getattr(pipe, "config", None), "expand_timesteps", False)
    from_image = config.in_channels != (getattr(config, "out_channels", None) or config.in_channels)

    def likeness(row):
        return (row.rope == rope, row.layers == layers, row.heads == config.num_attention_heads,
                row.name.startswith("wan2.2") == bool(second), ("i2v" in row.name) == from_image)

    return max((row for row in _functions.models() if row.name.startswith(family.rows)), key=likeness).name


def enable(pipe, method, target_density, min_tokens, strict, model, settings):
    family = family_of(pipe)
    if processors_of(pipe):
        raise RuntimeError("pipe: it is enabled already; call scope_attn.disable(pipe) first")
    _functions.refuse_morton(method)
    if min_tokens < 0:
        raise ValueError(f"min_tokens: got {min_tokens}, expected 0 or more")
    models = transformers_of(pipe)
    some = next(iter(models.values()))
    rope = family.rope(some)
    for name, transformer in models.items():
        for layer, attn in enumerate(family.layers(transformer)):
            parallel = getattr(attn.processor, "_parallel_config", None)
            if parallel is not None and why_not_parallel(family, parallel):
                raise RuntimeError(f"pipe.{name}: {why_not_parallel(family, parallel)}")
            kind = type(attn.processor).__name__
            if family.processors and kind not in family.processors:
                raise TypeError(f"pipe.{name}: layer {layer} has a {kind}, expected a {' or '.join(family.processors)}")
            if not family.processors and not hasattr(attn.processor, "_attention_backend"):
                raise TypeError(f"pipe.{name}: layer {layer} has a {kind}, expected a processor that attends through diffusers' backends")
    settings = {"state_dtype?": "bf16", **settings}
    own = next(setting.default for setting in _functions.settings(method) if setting.name == "target_density")  # a preset's
    if target_density is not None:
        settings["target_density"] = target_density
    elif own != "none":
        settings.setdefault("target_density?", own)  # so that the receipt says it
    model = model or row_of(pipe, family, some, rope, 1 + max(family.depths_of(some)))
    heads, dim = some.config.num_attention_heads, some.config.attention_head_dim
    plan = Plan(batch=1, heads=heads, q_tokens=32768, k_tokens=32768, dim=dim, method=method, model=model, **ranges_of(rope),
                **settings)  # refuses
    shares_rho = plan.setting("target_scope") == "sample" and (
        plan.setting("rule") == "target" or any(plan.setting(name) != "none" for name in ("target_density", "density_steps")))
    run = Run(pipe, family, method, model, settings, rope, min_tokens, strict, shares_rho)
    for name, transformer in models.items():
        expert = Expert(name, family)
        run.experts.append(expert)
        run.hooks.append(transformer.register_forward_pre_hook(functools.partial(run.begin, expert), with_kwargs=True))
        note_branches(transformer, expert)
        for layer, (attn, depth) in enumerate(zip(family.layers(transformer), family.depths_of(transformer))):
            attn.set_processor((RopeFirst if family.rope_first else Processor)(attn.processor, run, expert, layer, depth))


def note_branches(transformer, expert: Expert):
    """Tells the expert what the pipeline calls the branch that runs."""
    reference, own = weakref.ref(transformer), type(transformer).cache_context

    @contextlib.contextmanager
    def cache_context(name, **where):
        expert.branch = name
        try:
            with own(reference(), name, **where):
                yield
        finally:
            expert.branch = None

    transformer.cache_context = cache_context


def run_of(pipe) -> Run:
    enabled = processors_of(pipe)
    if not enabled:
        raise RuntimeError("pipe: it is not enabled; call scope_attn.enable(pipe) first")
    return enabled[0][1].run


def disable(pipe):
    run = run_of(pipe)
    for attn, processor in processors_of(pipe):
        attn.set_processor(processor.restored())
    for hook in run.hooks:
        hook.remove()
    for transformer in transformers_of(pipe).values():
        del transformer.cache_context


def receipt(pipe) -> Receipt:
    return run_of(pipe).receipt
