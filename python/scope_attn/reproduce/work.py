"""Checks everything, makes the videos that are missing, measures them, prints the table."""
from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import diffusers
import torch

from .._origin import origin
from . import metrics, quality, table
from .maker import Maker, backends
from .ranks import Ranks
from .results import Results, appeared, read_clips, write_json, write_whole
from .settings import BACKENDS, DIMENSIONS, LPIPSES, SETTINGS, Method, Refused, Setting, control, parse_method

PROFILE = -1  # in a list of work, in the place of a method's number


def run(options):
    setting = SETTINGS[options.setting]
    methods = make_methods(options)
    clips = read_clips(options.prompts, setting.from_image, options.first)
    for name in ("model", "frames", "steps"):
        setattr(options, name, getattr(options, name) or getattr(setting, name))
    if options.negative_prompt is None:
        options.negative_prompt = setting.negative
    elif options.negative_prompt == "none":
        options.negative_prompt = ""
    if options.negative_prompt and not setting.pipeline.startswith("Wan"):
        raise Refused("--negative-prompt: HunyuanVideo's guidance is embedded, so diffusers would ignore it; leave it out")
    about = dict(setting=options.setting, model=options.model, size=list(options.size), frames=options.frames, steps=options.steps,
                 seed=options.seed, target_density=options.target_density, negative_prompt=options.negative_prompt,
                 min_tokens=options.min_tokens, offload=options.offload, dense_backend=options.dense_backend, compile=options.compile,
                 prompts=[clip.about() for clip in clips])
    results = Results(options.out)
    results.check(about)
    profile = read_profile(options, results)
    packages = probe(options.metrics_python)
    ranks = Ranks()
    device = torch.device("cuda", ranks.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks.share("about", lambda: about) != about:
        raise Refused(f"rank {ranks.rank}: its options, prompts or images are not those of rank 0")
    ranks.wait("checked")  # before rank 0 begins the folder that the others look at

    unprofiled = any(method.name == "svoo" for method in methods) and profile is None and not results.profile.exists()
    missing = ranks.share("missing", lambda: [[PROFILE, 0]] * unprofiled + [
        [m, i] for m, method in enumerate(methods) for i in range(len(clips)) if not results.video(method.label, i).exists()])
    if missing:
        maker = Maker(options, setting, methods, results, device)
        if ranks.rank == 0:
            results.begin(about)
            if profile is not None:
                write_whole(results.profile, profile)
        ranks.wait("begun")
        begin = time.monotonic()
        for at, (m, i) in ranks.take("videos", list(enumerate(missing))):
            said = maker.profile(clips[i]) if m == PROFILE else maker.make(methods[m], i, clips[i])
            what = "svoo's profile" if m == PROFILE else f"{methods[m].label}, prompt {i}"
            left = (time.monotonic() - begin) / (at + 1) * (len(missing) - at - 1)  # all ranks together made at + 1
            print(f"{at + 1} of {len(missing)}: {what}: {said}; about {duration(left)} left", flush=True)
        del maker
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # another process may need it for its metrics
    ranks.wait("videos are made")
    skip = given_frames(options.model, setting)
    compare(methods, len(clips), results, ranks, device, skip)
    ranks.wait("all is compared")
    judge(methods, len(clips), results, ranks, device, skip, options.metrics_python or sys.executable, packages)
    ranks.wait("all is judged")
    if ranks.rank == 0:
        for method in methods:
            for i in range(len(clips)):
                appeared(results.video(method.label, i) if method.label == "dense" else results.measured(method.label, i))
        found = table.rows(results, methods, len(clips), options.setting)
        machines = sorted({machine for row in found for machine in row["machines"]})
        title = (f"{options.setting}: {options.model}, {options.size[0]}x{options.size[1]}, {options.frames} frames, "
                 f"{options.steps} steps, {len(clips)} prompts, dense attention {options.dense_backend}"
                 f"{', compiled' if options.compile else ''}, on {', '.join(machines)}")
        text = table.text(found, title, skip, table.notes(results, methods, len(clips), packages))
        write_json(options.out / "table.json", dict(origin(), **about, rows=found))
        write_whole(options.out / "table.md", text)
        print(text, flush=True)


def make_methods(options) -> list[Method]:
    """Dense attention first, then its control, then what was asked for; and the backend where none was named."""
    usual = BACKENDS["cuda" if torch.cuda.is_available() else "cpu"]
    options.dense_backend = options.dense_backend or usual[0]
    other = options.control_backend or next(name for name in usual if name != options.dense_backend)
    if options.control_backend and not options.control:
        raise Refused("--control-backend: there is no control row with --no-control")
    for option, name in (("--dense-backend", options.dense_backend), ("--control-backend", other)):
        if name not in backends():
            raise Refused(f'{option}: got "{name}", expected of diffusers\' {", ".join(backends())}')
    if other == options.dense_backend:
        raise Refused(f"--control-backend: got {other}, which dense videos are made with; name another, or give --no-control")
    methods = [parse_method(text, options.dense_backend) for text in dict.fromkeys(["dense", *options.methods])]
    if options.control:
        methods.insert(1, control(other))
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


def probe(python) -> dict[str, Any]:
    """What the metrics' interpreter has, as metrics.probe says it."""
    if python is None:
        return metrics.probe()
    try:
        done = subprocess.run([python, metrics.__file__, "probe"], capture_output=True, text=True)
    except OSError as error:
        raise Refused(f"--metrics-python: {python} does not run: {error}") from None
    if done.returncode != 0:
        raise Refused(f"--metrics-python: {python} is no Python 3.9 or later: {done.stderr.strip()[-300:]}")
    packages = json.loads(done.stdout)
    if not any(packages[name] for name in metrics.PACKAGES):
        raise Refused(f"--metrics-python: {python} has neither lpips nor vbench; {python} -m pip install lpips, or vbench, or both")
    if packages["missing"]:
        raise Refused(f"--metrics-python: {python} lacks {', '.join(packages['missing'])}, which lpips and vbench need")
    return packages


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def given_frames(model: str, setting: Setting) -> int:
    """The first frames that come from an image; HunyuanVideo's `latent_concat` drops those that would."""
    if setting.from_image and setting.pipeline.startswith("Hunyuan"):
        config = diffusers.HunyuanVideoTransformer3DModel.load_config(model, subfolder="transformer")
        return 0 if config.get("image_condition_type") == "latent_concat" else 1
    return 1 if setting.from_image else 0


def compare(methods: list[Method], clips: int, results: Results, ranks: Ranks, device: torch.device, skip: int):
    """PSNR and SSIM of what is not measured yet."""
    work = ranks.share("unmeasured", lambda: [[method.label, i] for method in methods if method.label != "dense" for i in range(clips)
                                              if not set(quality.MEASURES) <= set(results.read(results.measured(method.label, i)))])
    for label, i in ranks.take("measures", work):
        found = results.read(results.measured(label, i))
        dense, video = (appeared(results.video(each, i)) for each in ("dense", label))
        found.update(quality.compare(dense, video, skip, device))
        write_json(results.measured(label, i), found)


def judge(methods: list[Method], clips: int, results: Results, ranks: Ranks, device: torch.device, skip: int, python,
          packages: dict[str, Any]):
    """LPIPS and VBench of what is not measured yet, a process for each method. What fails leaves its columns empty, and a note."""
    def lacks_lpips(label: str, i: int) -> bool:
        return label != "dense" and not set(LPIPSES) <= set(results.read(results.measured(label, i)))

    def lacks_vbench(label: str) -> list[str]:
        found = results.read(results.vbench(label))
        return [name for name in DIMENSIONS if found.get("videos") != clips or name not in found]

    def job(label: str) -> dict[str, Any]:
        videos = [results.video(label, i).resolve() for i in range(clips)]
        pairs = [dict(reference=str(results.video("dense", i).resolve()), video=str(videos[i]), skip=skip,
                      out=str(results.measured(label, i).resolve())) for i in range(clips) if packages["lpips"] and lacks_lpips(label, i)]
        shown = [str(video / "clip.mp4") for video in videos]
        judged = packages["vbench"] and lacks_vbench(label) and all(Path(clip).exists() for clip in shown)
        return dict(device=str(device), pairs=pairs, clips=shown if judged else [], dimensions=lacks_vbench(label),
                    vbench=str(results.vbench(label).resolve()), notes=str(results.left_out(label).resolve()))

    labels = ranks.share("unjudged", lambda: [label for label in (method.label for method in methods)
                                              if job(label)["pairs"] or job(label)["clips"]])
    for label in ranks.take("judgements", labels):
        asked = job(label)
        if asked["clips"] and results.read(results.vbench(label)).get("videos") != clips:
            results.vbench(label).unlink(missing_ok=True)  # scores of fewer or more clips
        with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
            json.dump(asked, file)
            file.flush()
            done = subprocess.run([python, metrics.__file__, "measure", file.name], stdout=sys.stderr)
        if done.returncode != 0:
            write_json(results.left_out(label), [f"LPIPS and VBench: their process ended with status {done.returncode}, and said why on "
                                                 "standard error."])
