"""Makes videos with one pipeline of diffusers: every method gets its dense attention from the same backend, compiled or not."""
from __future__ import annotations

import sys
import time
import warnings
from typing import Any, Optional

import diffusers
import torch
from diffusers.models import attention_dispatch
from torch._dynamo.utils import counters

import scope_attn

from .._origin import origin
from ..hosts import diffusers as host
from .profile import Profile
from .results import Clip, Results, cropped, write_whole
from .settings import Method, Refused, Setting


def backends() -> list[str]:
    """diffusers' attention backends by name; "scope" is ours, for enabled layers alone."""
    return sorted(name.value for name in attention_dispatch.AttentionBackendName if name.value != "scope")


def now(device: torch.device) -> float:
    """Seconds, with all work on the device done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def stop(pipe, step, timestep, given):
    """After a video's first step."""
    pipe._interrupt = True
    return {}


def leave_out_padding(pipe):
    """Of HunyuanVideo: its text ends where the prompt does, and its blocks attend without a mask.

    The mask hides padding alone, so videos stay the same to rounding; and flash kernels, which take no mask, can run.
    """
    own = pipe.encode_prompt

    def encode_prompt(*args, **kwargs):
        embeds, pooled, mask = own(*args, **kwargs)
        valid = int(mask.sum(dtype=torch.int64))  # bf16 has no 257
        if len(mask) != 1 or not mask[0, :valid].all():
            raise Refused("HunyuanVideo's tokenizer: got padding before the end of a prompt, expected it behind (padding_side right)")
        return embeds[:, :valid], pooled, mask[:, :valid]

    pipe.encode_prompt = encode_prompt
    for block in (*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks):
        block.register_forward_pre_hook(lambda block, given: (*given[:3], None, *given[4:]))  # the fourth is the mask


class Maker:
    def __init__(self, options, setting: Setting, methods: list[Method], results: Results, device: torch.device):
        self.options, self.setting, self.results, self.device = options, setting, results, device
        kind = getattr(diffusers, setting.pipeline)
        try:
            found = kind.load_config(options.model)["_class_name"]
        except (OSError, ValueError, KeyError) as error:
            raise Refused(f"--model: {options.model}: {error}") from None
        if found != setting.pipeline:
            raise Refused(f"--model: {options.model} is a {found}, and {options.setting} takes a {setting.pipeline}")
        wan = setting.pipeline.startswith("Wan")
        # As diffusers' own pages load the two families.
        types = (dict(default=torch.bfloat16, vae=torch.float32, image_encoder=torch.float32) if wan else
                 dict(default=torch.float16, transformer=torch.bfloat16))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # 0.42 has another name for torch_dtype
            self.pipe = kind.from_pretrained(options.model, torch_dtype=types if device.type == "cuda" else torch.float32)
        if setting.shift is not None:
            self.pipe.scheduler = type(self.pipe.scheduler).from_config(self.pipe.scheduler.config, flow_shift=setting.shift)
        if not wan:
            self.pipe.vae.enable_tiling()
            leave_out_padding(self.pipe)
        if options.offload:
            self.pipe.enable_model_cpu_offload(device=device)
        else:
            self.pipe.to(device)
        self.pipe.set_progress_bar_config(disable=not sys.stderr.isatty())
        self.transformers = list(host.transformers_of(self.pipe).values())
        self.fixed: dict[str, Any] = dict(width=options.size[0], height=options.size[1], num_frames=options.frames, **setting.guidance)
        if options.negative_prompt:
            self.fixed["negative_prompt"] = options.negative_prompt
        self.backend = ""  # diffusers' own choice so far
        for backend in dict.fromkeys(method.backend for method in methods):
            self.try_backend(backend)
        self.ready: Optional[str] = None  # the label of the method that the pipeline is set up for
        self.enabled = False
        for method in methods:
            try:
                self.prepare(method)
            except (ValueError, TypeError, RuntimeError) as error:
                raise Refused(f"{method.label}: {error}") from None
        self.plain(options.dense_backend)
        if options.compile:
            for transformer in self.transformers:
                if not hasattr(transformer, "compile_repeated_blocks"):
                    raise Refused(f"--compile: diffusers {diffusers.__version__} cannot compile a {type(transformer).__name__} by blocks")
                transformer.compile_repeated_blocks(fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager")

    def try_backend(self, backend: str):
        """A small call, since many backends refuse some machines, types or shapes."""
        config = self.transformers[0].config
        q = torch.zeros(1, 64, config.num_attention_heads, config.attention_head_dim, device=self.device,
                        dtype=torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        try:
            self.set_backend(backend)
            attention_dispatch.dispatch_attention_fn(q, q, q, backend=attention_dispatch.AttentionBackendName(backend))
        except Exception as error:  # whatever a package of kernels says
            raise Refused(f"--dense-backend, --control-backend: {backend} does not run here: {error}") from None

    def set_backend(self, backend: str):
        if self.backend != backend:
            for transformer in self.transformers:
                transformer.set_attention_backend(backend)
        self.backend = backend

    def plain(self, backend: str):
        """The pipeline's own attention, by this backend."""
        if self.enabled:
            scope_attn.disable(self.pipe)
        self.enabled, self.ready = False, None
        self.set_backend(backend)
        if self.options.compile:
            torch._dynamo.reset()  # graphs of the method before; PyTorch keeps 8 and then gives up

    def prepare(self, method: Method):
        """Sets the pipeline up for a method. It stays so for the method's other videos, and its graphs with it."""
        if self.ready == method.label:
            return
        self.plain(method.backend)
        if method.sparse:
            self.enable(method)
        self.ready = method.label

    def enable(self, method: Method):
        settings: dict[str, Any] = dict(method.settings)
        if self.options.target_density is not None:
            settings.setdefault("target_density", self.options.target_density)
        elif method.name == "scope-mean":  # its own rule, in the place of the careful density that enable() gives it
            settings.setdefault("target_density", "none")
        profile = self.options.profile or self.results.profile
        if method.name == "svoo" and profile.exists():
            family = host.family_of(self.pipe)
            settings.update(profile=str(profile), layers=1 + max(family.depths_of(self.pipe.transformer)))
        scope_attn.enable(self.pipe, method.name, min_tokens=self.options.min_tokens, **settings)
        self.enabled = True

    def call(self, clip: Clip, seed: int, **given):
        """The pipeline's output, and seconds."""
        if clip.image is not None:
            given["image"] = cropped(clip.image, self.options.size)
        generator = torch.Generator().manual_seed(seed)  # the CPU's: the same noise on every machine
        start = now(self.device)
        out = self.pipe(prompt=clip.prompt, generator=generator, **self.fixed, **given)
        return out, now(self.device) - start

    def profile(self, clip: Clip) -> str:
        """Writes SVOO's profile, of a dense video that is made for it alone."""
        self.plain(self.options.dense_backend)
        scope_attn.enable(self.pipe, min_tokens=sys.maxsize)  # no video is as long: every call is dense, and can be watched
        self.enabled = True
        profile = Profile(self.pipe)
        _, seconds = self.call(clip, self.options.seed, num_inference_steps=self.options.steps, output_type="latent")
        write_whole(self.results.profile, profile.csv())
        return f"{seconds:.1f} s"

    def make(self, method: Method, number: int, clip: Clip) -> str:
        """Writes a video; says what came out."""
        while method.name == "svoo" and not self.results.profile.exists():  # another rank is at it
            time.sleep(0.2)
        new = self.ready != method.label
        self.prepare(method)
        seed = self.options.seed + number
        if new or self.options.compile:  # kernels load with their first use; a graph is compiled for each length of a prompt
            self.call(clip, seed, num_inference_steps=self.options.steps, output_type="latent", callback_on_step_end=stop)
        graphs = counters["stats"]["unique_graphs"]
        out, seconds = self.call(clip, seed, num_inference_steps=self.options.steps, output_type="np")
        graphs = counters["stats"]["unique_graphs"] - graphs
        receipt = scope_attn.receipt(self.pipe) if method.sparse else None
        density = receipt and receipt.density
        about = dict(**origin(), method=method.label, prompt=clip.prompt, image=clip.image and str(clip.image), seed=seed, seconds=seconds,
                     density=density, receipt=receipt and str(receipt).splitlines(), backend=method.backend, graphs_compiled=graphs,
                     machine=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU",
                     versions=dict(torch=torch.__version__, diffusers=diffusers.__version__))
        self.results.write_video(method.label, number, out.frames[0], self.setting.fps, about)
        return (f"{seconds:.1f} s" + (f", density {density:.3f}" if density else "") +
                (f", of which compiling {graphs} graphs took a part" if graphs else ""))
