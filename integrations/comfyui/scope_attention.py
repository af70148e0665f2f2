"""A ComfyUI node that makes the self-attention of Wan and HunyuanVideo sparse: put this file into ComfyUI/custom_nodes."""
from __future__ import annotations

import collections
import functools
import logging
import math
import sys
import threading
from typing import Any, NamedTuple

import comfy.patcher_extension
import torch
from comfy_api.latest import ComfyExtension, io

try:
    import scope_attn
except ImportError as error:
    raise ImportError("SCOPE Attention needs the package scope_attn in ComfyUI's own Python. In a checkout of SCOPE, or with a wheel "
                      f'made by its `make wheel`: "{sys.executable}" -m pip install . (or the wheel\'s name)') from error

KEY = "optimized_attention_override"
NAME = "scope_attention"
FEW_STEPS = 8  # runs this short have no step to spare for a dense start, as the known row of distilled models says
REASONS = {scope_attn.Reason.DENSE_METHOD: "method dense", scope_attn.Reason.DENSE_LAYER: "first layers",
           scope_attn.Reason.DENSE_STEP: "first steps", scope_attn.Reason.DENSE_LAST_STEP: "last steps",
           scope_attn.Reason.DENSE_NOTHING: "no key or query takes part"}


class Refused(ValueError):
    """What the node cannot do, in words."""


# ---- the model


class Video(NamedTuple):
    """What the node must know of a video transformer."""

    row: scope_attn.Model  # whose rho and schedule it takes
    rope: tuple[int, ...]
    heads: int
    double_blocks: int  # single blocks are counted after them
    joint: bool  # text tokens stand among the video's
    text_first: bool
    patch: tuple[int, ...]


def recognise(model: Any) -> Video:
    names = [cls.__name__ for cls in type(model).__mro__]
    if any("Causal" in name for name in names):
        raise Refused(f"model: got {names[0]}, which is causal; expected one whose tokens all see each other")
    if "WanModel" in names:
        family, rope, heads, patch = "wan", model.rope_embedder.axes_dim, model.num_heads, model.patch_size
        layers = double_blocks = len(model.blocks)
        dim, text_first = model.dim // heads, False
    elif "HunyuanVideo" in names:
        family, rope, heads, patch = "hunyuanvideo", model.params.axes_dim, model.num_heads, model.patch_size
        double_blocks = len(model.double_blocks)
        layers, dim = double_blocks + len(model.single_blocks), model.hidden_size // heads
        text_first = not getattr(model.double_blocks[0], "flipped_img_txt", False)
    else:
        raise Refused(f"model: got {names[0]}, expected Wan 2.1, Wan 2.2 or HunyuanVideo")
    if len(rope) != 3:
        raise Refused(f"model: {names[0]} rotates {len(rope)} axes, expected time, height and width: this is no video model")
    rows = [row for row in scope_attn.models() if row.name.startswith(family)]
    image = "i2v" in str(getattr(model, "model_type", ""))
    row = min(rows, key=lambda row: ((row.layers, row.heads) != (layers, heads), ("i2v" in row.name) != image))
    if dim == row.dim and tuple(rope) != row.rope:
        raise Refused(f"model: {names[0]} rotates {list(rope)} channels along time, height and width, expected {list(row.rope)}")
    return Video(row, tuple(rope), heads, double_blocks, family == "hunyuanvideo", text_first, tuple(patch))


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
        if name in ("method", "target_density", "model"):
            raise Refused(f"settings: {name} is an input of the node")
        found[name] = value
    return found


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
            raise Refused("mask: it adds something other than 0 and -inf to the scores, expected keys that are there or not")
    if mask.all():
        return None
    if not mask.any(-1).all():
        raise Refused("mask: it leaves a sample without keys")
    return scope_attn.pack_bits(mask.expand(batch, tokens).contiguous())


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


class Forward:
    """What the blocks of one evaluation of the model share, so that the GPU is waited for once."""

    def __init__(self, sigmas: torch.Tensor, schedule: torch.Tensor, sampling: Any, before: Forward | None):
        self.sigmas, self.schedule = sigmas, schedule
        if before is not None and before.schedule is schedule:
            self.levels, self.done, self.steps = before.levels, before.done, before.steps
        else:
            self.levels = schedule.tolist()
            self.done, self.steps = whole_run(self.levels, sampling)
        sigma = float(sigmas.flatten()[0])
        ours = self.levels[:-1] or self.levels
        self.step = self.done + min(range(len(ours)), key=lambda i: abs(ours[i] - sigma))
        self.calls: collections.Counter = collections.Counter()
        self.mask: Any = None
        self.valid: Any = None
        self.texts: dict[tuple, Any] = {}


# ---- attention


class Run:
    """What a patched model keeps between calls: plans, and the states and counts of one sampling run."""

    def __init__(self, video: Video, method: str, target_density: float, min_tokens: int, strict: bool, settings: dict[str, str]):
        self.video, self.method, self.min_tokens, self.strict = video, method, min_tokens, strict
        self.settings = {"state_dtype?": "bf16", **settings}  # "?": ours, and not refused where it does nothing
        if target_density > 0 and method != "dense":
            self.settings["target_density"] = target_density
        row = next(row for row in scope_attn.methods() if row.name == method)
        if row.morton:
            raise Refused(f'method: got "{method}", whose blocks are of tokens in Morton order, and here they come in '
                          f"raster order; choose another method, or make the video with `scope generate --method {method}`")
        self.share_branches = row.shares_branches
        self.plans: dict[tuple, scope_attn.Plan] = {}
        self.host = threading.local()  # .called: a dense call is under way, and may come by an older override of ours
        self.reset()
        self.plan((1, video.heads, 4096, sum(video.rope)), "float32", "cpu", 50)  # refuses bad settings before the run

    def reset(self):
        self.states: dict[tuple, scope_attn.State] = {}
        self.stats: dict[tuple, scope_attn.Stats] = {}
        self.counts: collections.Counter = collections.Counter()
        self.forwards: dict[Any, Forward] = {}  # by device
        self.video_tokens: dict[Any, int] = {}  # by device
        self.sampling: Any = None
        self.started = False

    def plan(self, shape: tuple, dtype: str, device: str, steps: int) -> scope_attn.Plan:
        key = shape, dtype, device, steps <= FEW_STEPS
        if key not in self.plans:
            batch, heads, tokens, dim = shape
            settings = {"dense_steps?": 0, **self.settings} if steps <= FEW_STEPS else self.settings
            self.plans[key] = scope_attn.Plan(
                batch=batch, heads=heads, q_tokens=tokens, k_tokens=tokens, dim=dim, dtype=dtype, rope=self.video.rope,
                dense_queries=self.video.joint, method=self.method, model=self.video.row.name, device=device, **settings)
        return self.plans[key]

    def forward(self, options: dict, device: torch.device) -> Forward:
        for name in ("sigmas", "sample_sigmas", "uuids"):
            if options.get(name) is None:
                raise Refused(f"transformer_options: {name} is missing, without which a call has no place in the run; "
                              "use a sampler node of ComfyUI")
        now = self.forwards.get(device)
        if now is None or now.sigmas is not options["sigmas"]:
            now = self.forwards[device] = Forward(options["sigmas"], options["sample_sigmas"], self.sampling, now)
        return now

    def text(self, now: Forward, batch: int, tokens: int, video_tokens: int) -> Any:
        """The tokens beside the video's, packed."""
        key = batch, tokens, video_tokens
        if key not in now.texts:
            text = torch.zeros(batch, tokens, dtype=torch.bool)
            count = tokens - video_tokens
            text[:, slice(count) if self.video.text_first else slice(-count, None)] = True
            now.texts[key] = scope_attn.pack_bits(text)
        return now.texts[key]

    def attend(self, q, k, v, heads, mask, skip_reshape, scale, options) -> tuple[Any, str]:
        """The output, [batch, tokens, heads, dim], or None, and what was done: "sparse", or why it is dense."""
        axis = 2 if skip_reshape else 1
        tokens, device = q.shape[axis], q.device
        if k.shape[axis] != tokens:
            return None, "cross-attention"
        if "block_index" not in options:
            return None, "outside the blocks"
        if tokens < self.min_tokens:
            return None, f"fewer than {self.min_tokens} tokens"
        video_tokens = self.video_tokens.get(device)
        if self.video.joint:
            if video_tokens is None:
                raise Refused("transformer_options: the wrappers of this node were not called, which tell text from video")
            if tokens <= video_tokens:
                return None, "outside the blocks"
        if k.shape != q.shape or v.shape != q.shape:
            raise Refused(f"k, v: got shapes {list(k.shape)} and {list(v.shape)}, expected q's, {list(q.shape)}")
        now = self.forward(options, device)
        # A block may attend more than once, as VACE's do, and the model may be asked twice at one noise level.
        block, branch = (options.get("block_type"), options["block_index"]), tuple(options["uuids"])
        now.calls[block, branch] += 1
        layer = options["block_index"] + (self.video.double_blocks if options.get("block_type") == "single" else 0)

        if not skip_reshape:
            q, k, v = (x.unflatten(-1, (heads, -1)) for x in (q, k, v))
        batch, dim = q.shape[0], q.shape[-1]
        plan = self.plan((batch, heads, tokens, dim), str(q.dtype).partition(".")[2], str(device), now.steps)
        reason = plan.reason(layer, now.step, now.steps)
        if reason is not scope_attn.Reason.SPARSE and not plan.clusters(layer, now.step, now.steps):
            return None, REASONS.get(reason, reason.name)
        if mask is not None and now.mask is not mask:
            now.mask, now.valid = mask, valid_keys(mask, batch, tokens)
        text = self.text(now, batch, tokens, video_tokens) if self.video.joint else None
        key = block, None if self.share_branches else branch, now.calls[block, branch], batch, tokens, device
        given = dict(state=self.states.setdefault(key, scope_attn.State()), layout="BHND" if skip_reshape else "BNHD",
                     scale=scale or 0.0, layer=layer, step=now.step, steps=now.steps, keep=text, dense_queries=text,
                     valid_keys=None if mask is None else now.valid)
        if reason is not scope_attn.Reason.SPARSE:
            plan.cluster(q, k, **given)
            return None, REASONS.get(reason, reason.name)
        stats = scope_attn.Stats()
        out = plan.run(q, k, v, stats=stats, **given)
        if stats.reason is not scope_attn.Reason.SPARSE:
            return None, REASONS.get(stats.reason, stats.reason.name)
        self.stats[key] = stats
        return out.transpose(1, 2) if skip_reshape else out, "sparse"

    # ---- what ComfyUI calls

    def override_over(self, previous: Any) -> Any:
        """An attention override; calls that stay dense go on to the previous one."""
        def override(func, q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
            out = None
            if not getattr(self.host, "called", False):
                try:
                    out, what = self.attend(q, k, v, heads, mask, skip_reshape, kwargs.get("scale"), kwargs.get("transformer_options") or {})
                except (Refused, scope_attn.ScopeError, TypeError, ValueError) as error:
                    if self.strict:
                        raise
                    what = f"refused ({error})"
                    if what not in self.counts:
                        logging.warning("SCOPE attention: %s; the call runs dense", error)
                self.counts[what] += 1
            if out is None:
                outer, self.host.called = getattr(self.host, "called", False), True
                try:
                    host = func if previous is None else functools.partial(previous, func)
                    return host(q, k, v, heads, mask=mask, attn_precision=attn_precision, skip_reshape=skip_reshape,
                                skip_output_reshape=skip_output_reshape, **kwargs)
                finally:
                    self.host.called = outer
            return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)

        override = torch.compiler.disable(override)  # a compiled model leaves its graph here; ComfyUI's copies keep a function
        override.scope_run = self
        return override

    def install(self, options: dict):
        """Puts the override above any other."""
        current = options.get(KEY)
        if getattr(current, "scope_run", None) is not self:
            options[KEY] = self.override_over(current)

    def prepare(self, patcher: Any, timestep: Any, model_options: Any = None):
        """Before each step. A node after this one may have put its own override in the place of ours, before the first."""
        if not self.started:
            self.started, self.sampling = True, patcher.get_model_object("model_sampling")
            if model_options is not None:
                self.install(model_options["transformer_options"])

    def note_size(self, executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Around the diffusion model: how many tokens its video has."""
        self.video_tokens[x.device] = math.prod(-(-size // patch) for size, patch in zip(x.shape[2:], self.video.patch))
        return executor(x, *args, **kwargs)

    def finish(self, patcher: Any = None):
        """After a sampling run, whether it ended well or not."""
        if self.started or self.counts:
            try:
                logging.log(logging.INFO if self.counts["sparse"] else logging.WARNING, "SCOPE attention: %s", self.summary())
            finally:
                self.reset()

    def summary(self) -> str:
        if not self.counts:
            return "no attention call reached the node: a later node has replaced its override; put this one after it"
        dense = ", ".join(f"{count:,} {what}" for what, count in self.counts.most_common() if what != "sparse")
        density = ""
        if self.stats:
            try:
                density = f" (density {sum(stats.density for stats in self.stats.values()) / len(self.stats):.3f} in the last step)"
            except scope_attn.ScopeError as error:  # what only the device could find
                density = f" ({error})"
        return (f"{self.method}, schedule of {self.video.row.name}: {self.counts['sparse']:,} calls sparse{density}; "
                f"dense: {dense or 'none'}")


def patch(model: Any, method: str, target_density: float, min_tokens: int, strict: bool = True, settings: str = "") -> Any:
    """A clone of ComfyUI's model whose video self-attention is sparse."""
    if hasattr(model.model_options["transformer_options"].get(KEY), "scope_run"):
        raise Refused("model: it comes from a SCOPE Attention node already; keep one of them")
    run = Run(recognise(model.get_model_object("diffusion_model")), method, target_density, min_tokens, strict, read_settings(settings))
    patched = model.clone()
    run.install(patched.model_options["transformer_options"])
    events = comfy.patcher_extension.CallbacksMP
    patched.add_callback_with_key(events.ON_PREPARE_STATE, NAME, run.prepare)
    patched.add_callback_with_key(events.ON_CLEANUP, NAME, run.finish)
    patched.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, NAME, run.note_size)
    return patched


class ScopeAttention(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ScopeAttention",
            display_name="SCOPE Attention",
            category="model_patches",
            description="Sparse self-attention for Wan 2.1, Wan 2.2 and HunyuanVideo, without training. The end of each run says in "
                        "ComfyUI's log how many calls were sparse, and why others were dense.",
            inputs=[
                io.Model.Input("model"),
                io.Combo.Input("method", default="scope-mean", tooltip="How keys are chosen.",
                               options=[method.name for method in scope_attn.methods() if not method.morton]),
                io.Float.Input("target_density", default=0.2, min=0.0, max=1.0, step=0.01,
                               tooltip="The share of keys that is kept. 0: the method's own, as of fast and quality, or what its rule gives."),
                io.Int.Input("min_tokens", default=8192, min=0, max=1 << 30, tooltip="Shorter sequences attend densely, which is faster."),
                io.Boolean.Input("strict", default=True, tooltip="Stop with an error where sparse attention is impossible. Off: warn and "
                                                                 "attend densely."),
                io.String.Input("settings", default="", multiline=True, optional=True,
                                tooltip="Any setting of SCOPE by its own name, one name=value per line, such as dense_steps=0.1."),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, method, target_density, min_tokens, strict=True, settings="") -> io.NodeOutput:
        return io.NodeOutput(patch(model, method, target_density, min_tokens, strict, settings))


class ScopeExtension(ComfyExtension):
    async def get_node_list(self):
        return [ScopeAttention]


async def comfy_entrypoint() -> ScopeExtension:
    return ScopeExtension()
