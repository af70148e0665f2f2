"""LPIPS and VBench on a finished folder, by an interpreter that has their packages: it needs the standard library and those alone.

    PYTHON metrics.py probe              prints what the interpreter has, as JSON
    PYTHON metrics.py measure JOB        JOB: a JSON file that `judge` of work.py writes

VBench pins transformers 4.33, with which no pipeline here runs, so this file imports nothing of the package around it.
"""
from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import json
import os
import sys
import tempfile
from typing import Any

PACKAGES = "lpips", "vbench"
NEEDS = "numpy", "torch", "PIL"  # which both packages bring
NETS = dict(lpips_alex=("alex", -1.0), lpips_vgg=("vgg", -1.0), lpips_svg2=("vgg", 0.0))  # by column: net, and the value of black
DIMENSIONS = "imaging_quality", "aesthetic_quality", "subject_consistency", "background_consistency"  # of VBench
MODULES = "install it there (pkg_resources is in setuptools below 81)"
LPIPS_WEIGHTS = ("torchvision downloads its weights (alexnet-owt-7be5be79.pth, vgg16-397923af.pth) into ~/.cache/torch/hub/checkpoints, or "
                 "hub/checkpoints of $TORCH_HOME: put them there by hand where there is no network")
VBENCH_WEIGHTS = "it downloads its weights into ~/.cache/vbench, or $VBENCH_CACHE_DIR: put them there by hand where there is no network"


def probe() -> dict[str, Any]:
    """By package its version, or None where it is not installed; and what both need and is missing."""
    def version(name: str):
        if importlib.util.find_spec(name) is None:
            return None
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "of unknown version"

    return dict({name: version(name) for name in PACKAGES}, missing=[name for name in NEEDS if importlib.util.find_spec(name) is None])


def merge(path: str, found: dict[str, Any]):
    """Into a JSON file, which is replaced whole."""
    value = {}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    value.update(found)
    part = f"{path}.{os.getpid()}"
    with open(part, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False)
    os.replace(part, path)


def note(what: str, error: BaseException, weights: str) -> str:
    """Why it is left out, and what to do."""
    text = " ".join(str(error).split())[:300]
    return f"{what} is left out: {type(error).__name__}: {text}; {MODULES if 'No module named' in text else weights}, and run this again."


def frames_of(folder: str, skip: int):
    import numpy
    import torch
    from PIL import Image
    paths = sorted(glob.glob(os.path.join(glob.escape(folder), "frame_*.png")))[skip:]
    return [torch.from_numpy(numpy.array(Image.open(path).convert("RGB"))).permute(2, 0, 1)[None].float() / 255 for path in paths]


def lpips(job: dict[str, Any], device, notes: list[str]):
    """Means over frames, into each pair's file; a net whose weights are not there leaves its columns out."""
    import lpips as package
    import torch
    models: dict[str, Any] = {}
    for net in dict.fromkeys(net for net, _ in NETS.values()):
        try:
            models[net] = package.LPIPS(net=net, verbose=False).to(device).eval()
        except Exception as error:  # whatever a download says
            notes.append(note(f"LPIPS of the net {net}", error, LPIPS_WEIGHTS))
    for pair in job["pairs"] if models else []:
        both = [frames_of(pair[name], pair["skip"]) for name in ("reference", "video")]
        found = {}
        with torch.no_grad():
            for column, (net, black) in NETS.items():
                if net in models:
                    values = [models[net](*(black + (1 - black) * frame.to(device) for frame in frames)).item() for frames in zip(*both)]
                    found[column] = sum(values) / len(values)
        merge(pair["out"], found)


def vbench(job: dict[str, Any], device, notes: list[str]):
    """VBench's own means over clips, one dimension after the other, so that one which fails leaves the others."""
    import vbench as package
    for dimension in job["dimensions"]:
        try:
            with tempfile.TemporaryDirectory() as scratch:
                videos = os.path.join(scratch, "videos")
                os.mkdir(videos)
                for i, clip in enumerate(job["clips"]):
                    os.symlink(clip, os.path.join(videos, f"{i:04d}.mp4"))
                info = os.path.join(os.path.dirname(package.__file__), "VBench_full_info.json")
                package.VBench(device, info, scratch).evaluate(videos_path=videos, name="clips", dimension_list=[dimension],
                                                               mode="custom_input")
                with open(os.path.join(scratch, "clips_eval_results.json"), encoding="utf-8") as file:
                    merge(job["vbench"], {dimension: float(json.load(file)[dimension][0]), "videos": len(job["clips"])})
        except Exception as error:  # whatever a download, or a package of theirs, says
            notes.append(note(f"VBench's {dimension}", error, VBENCH_WEIGHTS))


def measure(job: dict[str, Any]):
    """What the job asks for; its file of notes says what had to be left out, and why."""
    notes: list[str] = []
    try:
        import torch
        device = torch.device(job["device"] if torch.cuda.is_available() else "cpu")
        for name, asked, work in (("LPIPS", job["pairs"], lpips), ("VBench", job["clips"], vbench)):
            try:
                if asked:
                    work(job, device, notes)
            except Exception as error:  # as an import of theirs that fails
                notes.append(note(name, error, "mend that"))
    finally:
        with open(job["notes"], "w", encoding="utf-8") as file:
            json.dump(notes, file)


if __name__ == "__main__":
    sys.path = [path for path in sys.path if os.path.realpath(path or ".") != os.path.dirname(os.path.realpath(__file__))]  # our profile.py
    if sys.argv[1] == "probe":
        print(json.dumps(probe()))
    else:
        with open(sys.argv[2], encoding="utf-8") as given:
            measure(json.load(given))
