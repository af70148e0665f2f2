"""Checks everything, makes the videos that are missing, measures them, prints the table."""
from __future__ import annotations

import sys
import time
import warnings
from typing import Any

import diffusers
import torch

import scope_attn

from .. import _diffusers
from . import quality, table
from .profile import Profile, now
from .ranks import Ranks
from .results import Clip, Results, appeared, cropped, read_clips, write_json, write_whole
from .settings import SETTINGS, Method, Refused, Setting, parse_method


def run(options):
    setting = SETTINGS[options.setting]
    methods = make_methods(options)
    clips = read_clips(options.prompts, setting.from_image, options.first)
    for name in ("model", "frames", "steps"):
        setattr(options, name, getattr(options, name) or getattr(setting, name))
    if options.negative_prompt and not setting.pipeline.startswith("Wan"):
        raise Refused("--negative-prompt: HunyuanVideo runs without one, as its authors run it")
    about = dict(setting=options.setting, model=options.model, size=list(options.size), frames=options.frames, steps=options.steps,
                 seed=options.seed, target_density=options.target_density, negative_prompt=options.negative_prompt,
                 min_tokens=options.min_tokens, offload=options.offload, prompts=[clip.about() for clip in clips])
    results = Results(options.out)
    results.check(about)
    profile = read_profile(options, results)
    ranks = Ranks()
    device = torch.device("cuda", ranks.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks.share("about", lambda: about) != about:
        raise Refused(f"rank {ranks.rank}: its options, prompts or images are not those of rank 0")
    ranks.wait("checked")  # before rank 0 begins the folder that the others look at

    measured = any(method.name == "svoo" for method in methods) and profile is None and not results.profile.exists()
    missing = ranks.share("missing", lambda: [[m, i] for m, method in enumerate(methods) for i in range(len(clips)) if
                                              not results.video(method.label, i).exists() or (measured and m == i == 0)])
    if missing:
        maker = Maker(options, setting, methods, results, device)
        if ranks.rank == 0:
            results.begin(about)
            if profile is not None:
                write_whole(results.profile, profile)
        ranks.wait("begun")
        begin = time.monotonic()
        for at, (m, i) in ranks.take("videos", list(enumerate(missing))):
            said = maker.make(methods[m], i, clips[i], profiled=measured and m == i == 0)
            left = (time.monotonic() - begin) / (at + 1) * (len(missing) - at - 1)  # all ranks together made at + 1
            print(f"video {at + 1} of {len(missing)}: {methods[m].label}, prompt {i}: {said}; about {duration(left)} left", flush=True)
        del maker
    ranks.wait("videos are made")
    skip = given_frames(options.model, setting)
    measure(methods, len(clips), results, ranks, device, skip)
    ranks.wait("all is measured")
    if ranks.rank == 0:
        for method in methods:
            for i in range(len(clips)):
                appeared(results.video(method.label, i) if method.name == "dense" else results.measured(method.label, i))
        found = table.rows(results, methods, len(clips), options.setting)
        machines = sorted({machine for row in found for machine in row["machines"]})
        title = (f"{options.setting}: {options.model}, {options.size[0]}x{options.size[1]}, {options.frames} frames, "
                 f"{options.steps} steps, {len(clips)} prompts, on {', '.join(machines)}")
        text = table.text(found, title, skip)
        write_json(options.out / "table.json", dict(about, rows=found))
        write_whole(options.out / "table.md", text)
        print(text, flush=True)


def make_methods(options) -> list[Method]:
    methods = [parse_method(text) for text in dict.fromkeys(["dense", *options.methods])]
    for method in methods:
        if method.name == "dense" and method.settings:
            raise Refused(f'--methods: got "{method.label}": dense is the pipeline\'s own attention, and takes no settings')
    if options.profile is not None and not any(method.name == "svoo" for method in methods):
        raise Refused("--profile: it is svoo's, which is not among --methods")
    return methods


def read_profile(options, results: Results):
    """Its text; None: it was not given."""
    if options.profile is None:
        return None
    try:
        text = options.profile.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"--profile: {error}") from None
    if results.profile.exists() and results.profile.read_text(encoding="utf-8") != text:
        raise Refused(f"--profile: {options.profile} is another than {results.profile}, which svoo's videos there were made with; "
                      "give another folder")
    return text


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Maker:
    """Makes videos with one pipeline."""

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
        if options.offload:
            self.pipe.enable_model_cpu_offload(device=device)
        else:
            self.pipe.to(device)
        self.pipe.set_progress_bar_config(disable=not sys.stderr.isatty())
        self.fixed: dict[str, Any] = dict(width=options.size[0], height=options.size[1], num_frames=options.frames, **setting.guidance)
        if options.negative_prompt:
            self.fixed["negative_prompt"] = options.negative_prompt
        for method in methods:
            try:
                self.enable(method)
            except (ValueError, TypeError, RuntimeError) as error:
                raise Refused(f"{method.label}: {error}") from None
            scope_attn.disable(self.pipe)
        self.warm = False

    def enable(self, method: Method):
        settings: dict[str, Any] = dict(method.settings)
        if method.name != "dense" and self.options.target_density is not None:
            settings.setdefault("target_density", self.options.target_density)
        profile = self.options.profile or self.results.profile
        if method.name == "svoo" and profile.exists():
            family = _diffusers.family_of(self.pipe)
            settings.update(profile=str(profile), layers=1 + max(family.depths_of(self.pipe.transformer)))
        scope_attn.enable(self.pipe, method.name, min_tokens=self.options.min_tokens, **settings)

    def call(self, clip: Clip, seed: int, **given):
        """The pipeline's output, and seconds."""
        if clip.image is not None:
            given["image"] = cropped(clip.image, self.options.size)
        generator = torch.Generator().manual_seed(seed)  # the CPU's: the same noise on every machine
        start = now(self.device)
        out = self.pipe(prompt=clip.prompt, generator=generator, **self.fixed, **given)
        return out, now(self.device) - start

    def make(self, method: Method, number: int, clip: Clip, profiled: bool) -> str:
        """Writes a video, and the profile if it is to be measured; says what came out."""
        if not self.warm:  # libraries and kernels load with their first use
            self.call(clip, 0, num_inference_steps=1, output_type="latent")
            self.warm = True
        while method.name == "svoo" and not self.results.profile.exists():  # another rank is at it
            time.sleep(0.2)
        seed, sparse, receipt = self.options.seed + number, method.name != "dense", None
        if not sparse and not profiled:
            out, seconds = self.call(clip, seed, num_inference_steps=self.options.steps, output_type="np")
        else:
            self.enable(method)
            try:
                profile = Profile(self.pipe) if profiled else None
                out, seconds = self.call(clip, seed, num_inference_steps=self.options.steps, output_type="np")
                receipt = scope_attn.receipt(self.pipe) if sparse else None
            finally:
                scope_attn.disable(self.pipe)
            if profile is not None:
                seconds -= profile.seconds
                write_whole(self.results.profile, profile.csv())
        density = receipt and receipt.density
        about = dict(method=method.label, prompt=clip.prompt, image=clip.image and str(clip.image), seed=seed, seconds=seconds,
                     density=density, receipt=receipt and str(receipt).splitlines(),
                     machine=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU",
                     versions=dict(torch=torch.__version__, diffusers=diffusers.__version__))
        self.results.write_video(method.label, number, out.frames[0], self.setting.fps, about)
        return f"{seconds:.1f} s" + (f", density {density:.3f}" if density else "")


def given_frames(model: str, setting: Setting) -> int:
    """The first frames that come from an image; HunyuanVideo's `latent_concat` drops those that would."""
    if setting.from_image and setting.pipeline.startswith("Hunyuan"):
        config = diffusers.HunyuanVideoTransformer3DModel.load_config(model, subfolder="transformer")
        return 0 if config.get("image_condition_type") == "latent_concat" else 1
    return 1 if setting.from_image else 0


def measure(methods: list[Method], clips: int, results: Results, ranks: Ranks, device: torch.device, skip: int):
    """What is not measured yet, and can be here. A package that fails, as without its weights, leaves its columns empty."""
    names = {"psnr", "ssim"} | ({"lpips"} if quality.installed("lpips") else set())
    work = ranks.share("unmeasured", lambda: [[method.label, i] for method in methods if method.name != "dense" for i in range(clips)
                                              if not names <= set(results.read(results.measured(method.label, i)))])
    measures = quality.measures(device) if work else {}
    for label, i in ranks.take("measures", work):
        found = results.read(results.measured(label, i))
        videos = (appeared(results.video(each, i)) for each in ("dense", label))
        found.update(quality.compare(*videos, measures, skip, device))
        write_json(results.measured(label, i), found)
    if not quality.installed("vbench"):
        return
    labels = ranks.share("unjudged", lambda: [method.label for method in methods
                                              if results.read(results.vbench(method.label)).get("videos") != clips])
    for label in ranks.take("judgements", labels):
        shown = [appeared(results.video(label, i)) / "clip.mp4" for i in range(clips)]
        if not all(clip.exists() for clip in shown):
            continue
        try:
            write_json(results.vbench(label), dict(quality.vbench(shown, device), videos=clips))
        except Exception as error:
            print(f"VBench is left out of {label}: {error}", file=sys.stderr)
