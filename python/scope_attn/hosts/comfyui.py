"""ComfyUI over a session: recognises the model, finds each attention call's place in a run, and logs what was sparse.

patch(model) is what the node of integrations/comfyui calls. Its attention override sees every call of the model. The
video's self-attention goes to the session, everything else to the attention that ComfyUI would have used.
"""
from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import logging
import math
import threading
import weakref
from typing import Any, Callable, NamedTuple, Optional

import torch

from .. import _functions
from . import rotations
from .session import DenseCall, Place, Session, Tokens

KEY = "optimized_attention_override"
NAME = "scope_attention"
TARGET_DENSITY = 0.2  # of methods that have none of their own


class Refused(ValueError):
    """What the node cannot do, in words."""


# ---- the model


class Known(NamedTuple):
    """What we know of a video transformer. To add one: a function and a row in FAMILIES, and a stand-in in the test."""

    family: str  # how the names of its rows in models() begin
    layers: int
    heads: int
    dim: int
    rope: Any
    double_blocks: int  # single blocks are counted after them
    from_image: bool = False
    patch: tuple[int, ...] = ()  # of latents in a token, where text is joined to the video
    text_first: bool = False
    has_layout: bool = False  # the model says which tokens are the video's
    says_block: bool = True  # it sets block_index; otherwise the node does
    without_codes: str = ""  # why it takes no method with codebooks
    masks_are_dense: bool = False


def wan(model: Any) -> Known:
    layers, heads = len(model.blocks), model.num_heads
    return Known("wan", layers, heads, model.dim // heads, tuple(model.rope_embedder.axes_dim), layers,
                 from_image="i2v" in str(getattr(model, "model_type", "")))


def hunyuan(model: Any) -> Known:
    """HunyuanVideo and 1.5: text, and in 1.5 an image too, stands on one side of the video."""
    double_blocks, heads = len(model.double_blocks), model.num_heads
    return Known("hunyuanvideo", double_blocks + len(model.single_blocks), heads, model.hidden_size // heads,
                 tuple(model.params.axes_dim), double_blocks, patch=tuple(model.patch_size),
                 text_first=not getattr(model.double_blocks[0], "flipped_img_txt", False))


def minimax_h3(model: Any) -> Known:
    layers, attn = len(model.blocks), model.blocks[0].attn
    return Known("minimax-h3", layers, attn.heads, attn.head_dim, rotations.minimax_h3(attn.head_dim, len(model.rope.inv_freq)), layers,
                 has_layout=True)


def ltx(model: Any, family: str = "ltx") -> Known:
    layers, attn = len(model.transformer_blocks), model.transformer_blocks[0].attn1
    return Known(family, layers, attn.heads, attn.dim_head, None, layers, says_block=False,
                 without_codes=rotations.MIXED_IN_LTX, masks_are_dense=True)


FAMILIES: dict[str, Callable[[Any], Known]] = {
    "WanModel": wan,
    "HunyuanVideo": hunyuan,
    "MiniMaxH3Model": minimax_h3,
    "LTXAVModel": functools.partial(ltx, family="ltx-2"),
    "LTXVModel": ltx,
}


def recognise(model: Any) -> Known:
    names = [cls.__name__ for cls in type(model).__mro__]
    if any("Causal" in name for name in names):
        raise Refused(f"model: got {names[0]}, which is causal; expected one whose tokens all see each other")
    family = next((name for name in names if name in FAMILIES), None)
    if family is None:
        raise Refused(f"model: got {names[0]}, expected Wan 2.1 or 2.2, HunyuanVideo or 1.5, MiniMax-H3, LTX-Video or "
                      "LTX-2")
    try:
        known = FAMILIES[family](model)
    except AttributeError as error:
        raise Refused(f"model: {names[0]} of this version of ComfyUI is not as we know it: {error}") from error
    if known.rope is not None and len(known.rope) < 3:
        raise Refused(f"model: {names[0]} rotates {len(known.rope)} axes, expected time, height and width: this is no "
                      "video model")
    return known


# ---- inputs of the node


def read_settings(text: str) -> dict[str, str]:
    """name=value per line; # starts a comment."""
    found = {}
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if not line:
            continue
        name, equals, value = (part.strip() for part in line.partition("="))
        if not (name and equals and value):
            raise Refused(f'settings: got "{line}", expected name=value')
        if name in ("method", "target_density"):
            raise Refused(f"settings: {name} is an input of the node")
        found[name] = value
    return found


def density_for(method: str, density: str, target_density: float) -> Optional[float]:
    """None: the method's own."""
    own = next(row.default for row in _functions.settings(method) if row.name == "target_density")
    if method == "dense" or (density == "preset" and own != "none"):
        return None
    return target_density or None


# ---- masks, steps


def valid_keys(mask: torch.Tensor, batch: int, tokens: int) -> Any:
    """The keys that a mask leaves, packed; None: all of them. Reading a mask waits for the GPU."""
    shape = list(mask.shape)
    if mask.ndim == 2:  # one row for each query, or for each sample
        mask = mask[None] if shape[0] == tokens else mask[:, None]
    if mask.ndim == 3:
        mask = mask[:, None]
    if mask.ndim != 4 or mask.shape[-1] != tokens or mask.shape[0] not in (1, batch):
        raise Refused(f"mask: got shape {shape}, expected a value for each of {tokens} keys of {batch} samples")
    for name, axis in (("head", 1), ("query", 2)):
        if mask.shape[axis] != 1 and mask.stride(axis) != 0:
            raise Refused(f"mask: got shape {shape}, with a row for each {name}, expected one row of keys per sample")
    mask = mask[:, 0, 0].cpu()
    if mask.dtype != torch.bool:
        bias = mask.float()
        mask = bias == 0
        if not (mask | (bias <= -1e4)).all():
            raise Refused("mask: it adds something other than 0 and -inf to the scores, expected keys that are there "
                          "or not")
    if mask.all():
        return None
    if not mask.any(-1).all():
        raise Refused("mask: it leaves a sample without keys")
    return _functions.pack_bits(mask.expand(batch, tokens).contiguous())


@functools.lru_cache(maxsize=16)
def all_but(batch: int, tokens: int, ranges: tuple[tuple[int, int], ...]) -> Any:
    """The tokens outside these ranges, packed."""
    bits = torch.ones(batch, tokens, dtype=torch.bool)
    for start, stop in ranges:
        bits[:, start:stop] = False
    return _functions.pack_bits(bits)


def share_done(sigma: float, sampling: Any) -> float:
    """How much of a whole run lies before this noise level."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if float(sampling.percent_to_sigma(middle)) > sigma else (low, middle)
    return low


def whole_run(sigmas: list[float], sampling: Any) -> tuple[int, int]:
    """Steps before these and in all: samplers may run a part of the schedule, as Wan 2.2's two experts do."""
    steps = len(sigmas) - 1
    if sampling is None or steps < 1:
        return 0, max(steps, 1)
    start, end = share_done(sigmas[0], sampling), share_done(sigmas[-1], sampling)
    if end <= start:  # noise is added, or not as the model knows it
        return 0, steps
    total = max(steps, round(steps / (end - start)))
    return min(round(start * total), total - steps), total


class Evaluation:
    """What the blocks of one evaluation of the model share, so that the GPU is waited for once."""

    def __init__(self, sigmas: torch.Tensor, schedule: torch.Tensor, sampling: Any, before: Optional[Evaluation]):
        self.sigmas, self.schedule = sigmas, schedule
        if before is None or before.schedule is not schedule:
            self.levels = schedule.tolist()
            self.done, self.steps = whole_run(self.levels, sampling)
        else:
            self.levels, self.done, self.steps = before.levels, before.done, before.steps
        sigma = float(sigmas.flatten()[0])
        ours = self.levels[:-1] or self.levels
        self.step = self.done + min(range(len(ours)), key=lambda i: abs(ours[i] - sigma))
        self.calls: collections.Counter = collections.Counter()
        self.mask: Any = None  # weak: its memory is the model's to free
        self.valid: Any = None

    def valid_keys(self, mask: Any, batch: int, tokens: int) -> Any:
        if mask is None:
            return None
        if self.mask is None or self.mask() is not mask:
            self.mask, self.valid = weakref.ref(mask), valid_keys(mask, batch, tokens)
        return self.valid


def outside_allocation_graph() -> contextlib.AbstractContextManager:
    """What outlives a call is allocated in here: ComfyUI records a block's allocations, and expects them back at its end."""
    try:
        from comfy import model_prefetch
    except ImportError:
        return contextlib.nullcontext()
    pause = getattr(model_prefetch, "pause_malloc_graph", None)
    return pause() if pause else contextlib.nullcontext()


# ---- attention


class OfThread(threading.local):
    """What a thread of ComfyUI is in: several run a model that is spread over GPUs."""

    def __init__(self):
        self.in_dense = False  # a dense call is under way, and may come by an older override of ours
        self.owners: list[Any] = []  # the modules around the call that say which attention the checkpoint prefers


class Run:
    """A patched model: its session, and what it notes between the first call and the last of one sampling run."""

    def __init__(self, known: Known, session: Session):
        self.known, self.session = known, session
        self.receipt: Any = None  # of the latest run
        self.hooks: list[Any] = []
        self.lock = threading.Lock()
        self.reset()

    def reset(self):
        self.session.video = None
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        self.thread = OfThread()
        self.left: collections.Counter = collections.Counter()  # to ComfyUI, by what they are
        self.branches: dict[tuple, str] = {}
        self.evaluations: dict[Any, Evaluation] = {}  # by device
        self.video_at: dict[Any, tuple[int, int]] = {}  # by device: its tokens, and images before it
        self.below = ""  # who runs dense calls, if not ComfyUI
        self.sampling: Any = None
        self.started = False

    def not_ours(self, q: Any, k: Any, heads: int, axis: int, options: dict) -> str:
        """What a call is that is no self-attention of the video's; "": it is one."""
        known, tokens = self.known, q.shape[axis]
        if k.shape[axis] != tokens:
            return "cross-attention"
        dim = q.shape[-1] if axis == 2 else q.shape[-1] // heads
        if (heads, dim) != (known.heads, known.dim):  # audio's
            return f"of {heads} heads of {dim} channels"
        if "block_index" not in options:
            return "outside the blocks"
        layout = options.get("minimax_h3_layout") if known.has_layout else None
        if layout is not None and getattr(layout, "seq_len", tokens) != tokens:
            return "outside the blocks"
        if known.patch and q.device in self.video_at and tokens <= sum(self.video_at[q.device]):
            return "outside the blocks"
        return ""

    def evaluation(self, options: dict, device: torch.device) -> Evaluation:
        for name in ("sigmas", "sample_sigmas", "uuids"):
            if options.get(name) is None:
                raise Refused(f"transformer_options: {name} is missing, without which a call has no place in the run; "
                              "use a sampler node of ComfyUI")
        now = self.evaluations.get(device)
        if now is None or now.sigmas is not options["sigmas"]:
            now = self.evaluations[device] = Evaluation(options["sigmas"], options["sample_sigmas"], self.sampling, now)
        return now

    def place(self, options: dict, now: Evaluation) -> Place:
        """A block may attend more than once, as VACE's do, and the model may be asked twice at one noise level."""
        depth = options["block_index"] + (self.known.double_blocks if options.get("block_type") == "single" else 0)
        uuids = tuple(options["uuids"])
        branch = self.branches.setdefault(uuids, f"conditioning {len(self.branches)}")
        turn = now.calls[depth, uuids]
        now.calls[depth, uuids] += 1
        return Place(depth + turn * self.known.layers, now.step, branch, depth=depth)

    def tokens(self, q: Any, axis: int, mask: Any, options: dict, now: Evaluation) -> Tokens:
        if mask is not None and self.known.masks_are_dense:
            raise DenseCall("the call has a mask")
        batch, tokens = q.shape[0], q.shape[axis]
        valid = now.valid_keys(mask, batch, tokens)
        video = self.video_ranges(q.device, tokens, options)
        if video is None:
            return Tokens(valid_keys=valid)
        others = tokens - sum(stop - start for start, stop in video)
        return Tokens(others, all_but(batch, tokens, video), valid_keys=valid)

    def video_ranges(self, device: torch.device, tokens: int, options: dict) -> Optional[tuple[tuple[int, int], ...]]:
        """Where the video's tokens are; None: there are no others."""
        if self.known.has_layout:
            layout = options.get("minimax_h3_layout")
            if layout is None:
                raise Refused("transformer_options: minimax_h3_layout is missing, which tells video from text and "
                              "audio; ComfyUI 0.35 and newer set it")
            try:
                ranges = tuple((start, stop) for start, stop, kind in layout.segments if kind == "video")
            except (AttributeError, TypeError, ValueError) as error:
                raise Refused(f"minimax_h3_layout of this version of ComfyUI is not as we know it: {error}") from error
            if not ranges or ranges[0][0] < 0 or ranges[-1][1] > tokens:
                raise Refused(f"minimax_h3_layout: got a video at {ranges}, expected some of {tokens} tokens")
            return ranges
        if not self.known.patch:
            return None
        if device not in self.video_at:
            raise Refused("transformer_options: the wrappers of this node were not called, which tell text from video")
        count, images = self.video_at[device]
        first = tokens - count if self.known.text_first else images
        return ((first, first + count),)

    def attend(self, q, k, v, heads, mask, skip_reshape, scale, options, dense) -> tuple[Any, bool]:
        """The output, and whether it is sparse: then it is laid out as q."""
        axis = 2 if skip_reshape else 1
        what = self.not_ours(q, k, heads, axis, options)
        if what:
            self.left[what] += 1
            return dense(), False
        try:
            now = self.evaluation(options, q.device)
        except Refused as error:
            self.session.refuse(error)
            self.left[f"refused ({error})"] += 1
            return dense(), False
        with self.lock:
            video = self.session.video
            if video is None or video.steps != now.steps:
                video = self.session.begin(now.steps)
                self.receipt = video.receipt
        if not skip_reshape:
            q, k, v = (x.unflatten(-1, (heads, -1)) for x in (q, k, v))
        ran = []

        def noted_dense():
            ran.append(dense())
            return ran[0]

        out = video.attend(q, k, v, self.place(options, now), noted_dense,
                           lambda: self.tokens(q, axis, mask, options, now), "BHND" if skip_reshape else "BNHD", scale)
        return out, not ran

    # ---- what ComfyUI calls

    def override_over(self, previous: Any) -> Any:
        """An attention override; calls that stay dense go on to the previous one."""
        def override(func, q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False,
                     skip_output_reshape=False, **kwargs):
            def dense():
                outer, self.thread.in_dense = self.thread.in_dense, True
                try:
                    return self.host_attention(func, previous)(
                        q, k, v, heads, mask=mask, attn_precision=attn_precision, skip_reshape=skip_reshape,
                        skip_output_reshape=skip_output_reshape, **kwargs)
                finally:
                    self.thread.in_dense = outer

            if self.thread.in_dense:
                return dense()
            out, sparse = self.attend(q, k, v, heads, mask, skip_reshape, kwargs.get("scale"),
                                      kwargs.get("transformer_options") or {}, dense)
            if not sparse:
                return out
            out = out.transpose(1, 2) if skip_reshape else out
            return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)

        # A compiled model leaves its graph here. It is a function, since ComfyUI's deep copies keep those as they are.
        outside = torch.compiler.disable(override)
        outside.scope_run = self
        return outside

    def host_attention(self, func: Any, previous: Any) -> Any:
        """An earlier override, or what the checkpoint prefers, or ComfyUI's default.

        ComfyUI forgets the preference where there is any override.
        """
        if previous is not None:
            if getattr(previous, "scope_run", None) is not self:
                self.below = getattr(previous, "__module__", None) or type(previous).__name__
            return functools.partial(previous, func)
        owners = self.thread.owners
        return owners[-1].comfy_attention.function or func if owners else func

    def install(self, options: dict):
        """Puts the override above any other."""
        current = options.get(KEY)
        if getattr(current, "scope_run", None) is not self:
            options[KEY] = self.override_over(current)

    def prepare(self, patcher: Any, timestep: Any, model_options: Any = None, *_: Any, **__: Any):
        """Before each step. By the first, a later node may have put its own override in the place of ours."""
        if self.started:
            return
        self.started, self.sampling = True, patcher.get_model_object("model_sampling")
        if model_options is not None:
            self.install(model_options["transformer_options"])
        self.follow_preferences(patcher.get_model_object("diffusion_model"))

    def follow_preferences(self, model: Any):
        """Notes the module that attends, while some of them say which attention their checkpoint prefers."""
        owners = [module for module in getattr(model, "modules", tuple)() if hasattr(module, "comfy_attention")]
        if all(owner.comfy_attention.function is None for owner in owners):
            return

        @torch.compiler.disable
        def enter(owner, args):
            self.thread.owners.append(owner)

        @torch.compiler.disable
        def leave(owner, args, out):
            self.thread.owners.pop()

        for owner in owners:
            self.hooks += [owner.register_forward_pre_hook(enter), owner.register_forward_hook(leave, always_call=True)]

    def note_size(self, executor: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Around a model that joins text to its video: how many tokens the video has, and an image before it."""
        def count(latents):
            return math.prod(-(-size // patch) for size, patch in zip(latents.shape[2:], self.known.patch))

        names = inspect.signature(getattr(executor, "original", executor)).parameters
        image = {**dict(zip(names, (x, *args))), **kwargs}.get("ref_latent")
        self.video_at[x.device] = count(x), 0 if image is None else count(image)
        return executor(x, *args, **kwargs)

    def finish(self, patcher: Any = None, *_: Any):
        """After a sampling run, whether it ended well or not."""
        if not (self.started or self.left or self.session.video):
            return
        try:
            sparse = self.session.video is not None and any(call.sparse for call in self.receipt.calls)
            logging.log(logging.INFO if sparse else logging.WARNING, "SCOPE attention: %s", self.summary())
        finally:
            self.reset()

    def summary(self) -> str:
        if self.session.video is None and not self.left:
            return ("no attention call reached the node: another node attends in its place; keep one of them, or put "
                    "this one after it")
        told = [self.receipt.line() if self.session.video else "no call of a video's layer"]
        if self.left:
            told.append("left to ComfyUI: " + ", ".join(f"{count:,} {what}" for what, count in self.left.most_common()))
        if self.below:
            told.append(f"dense calls ran in the override of {self.below}")
        return "; ".join(told)


def add_block_index(patcher: Any, layers: int):
    """For models that do not say which block runs, over what replaces the block already."""
    replaced = patcher.model_options["transformer_options"].get("patches_replace", {}).get("dit", {})

    def block(index, previous):
        def run(args, more):
            args = {**args, "transformer_options": {**args["transformer_options"], "block_index": index}}
            return previous(args, more) if previous else more["original_block"](args)
        return run

    for index in range(layers):
        run = block(index, replaced.get(("double_block", index)))
        patcher.set_model_patch_replace(run, "dit", "double_block", index)


def patch(model: Any, method: str = "scope-mean", target_density: float = TARGET_DENSITY, min_tokens: int = 0,
          strict: bool = True, settings: str = "", density: str = "preset", sparse_from: float = -1.0,
          sparse_to: float = 1.0) -> Any:
    """A clone of ComfyUI's model whose video self-attention is sparse.

    density: "preset": methods with a density of their own keep it; anything else: target_density is for them too.
    target_density 0: what the method takes by itself, 0.2 for scope-mean. min_tokens 0: the least at which the device gains.
    sparse_from below 0: after the dense steps of the known model.
    """
    try:
        from comfy.patcher_extension import CallbacksMP, WrappersMP
        events = CallbacksMP.ON_PREPARE_STATE, CallbacksMP.ON_CLEANUP, WrappersMP.DIFFUSION_MODEL
    except (ImportError, AttributeError) as error:
        raise Refused(f"ComfyUI: this version lacks what the node needs ({error}); 0.7.0 and newer have it") from error
    on_prepare, on_cleanup, around_model = events
    if model.get_callbacks(on_cleanup, NAME):
        raise Refused("model: it comes from a SCOPE Attention node already; keep one of them")
    known, given = recognise(model.get_model_object("diffusion_model")), read_settings(settings)
    window = None if sparse_from < 0 and sparse_to >= 1 else (None if sparse_from < 0 else sparse_from, sparse_to)
    session = Session(family=known.family, layers=known.layers, heads=known.heads, dim=known.dim, rope=known.rope,
                      from_image=known.from_image, without_codes=known.without_codes, method=method,
                      target_density=density_for(method, density, target_density), model=given.pop("model", None),
                      window=window, min_tokens=min_tokens or None, strict=strict, settings=given, warn=logging.warning,
                      permanent=outside_allocation_graph)
    logging.info("SCOPE attention takes the settings of %s (%s)", session.model, session.why_model)
    run = Run(known, session)
    patched = model.clone()
    run.install(patched.model_options["transformer_options"])
    if not known.says_block:
        add_block_index(patched, known.layers)
    patched.add_callback_with_key(on_prepare, NAME, run.prepare)
    patched.add_callback_with_key(on_cleanup, NAME, run.finish)
    if known.patch:
        patched.add_wrapper_with_key(around_model, NAME, run.note_size)
    return patched
