"""How near a video is to the dense one, and how good it looks: PSNR and SSIM as `scope evaluate` has them, LPIPS and VBench."""
from __future__ import annotations

import functools
import importlib.util
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any, Optional

import numpy
import torch
from PIL import Image

WINDOW = 11  # of SSIM, in pixels
DIMENSIONS = "imaging_quality", "aesthetic_quality", "subject_consistency", "background_consistency"  # of VBench


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def read_frames(folder: Path) -> list[torch.Tensor]:
    """[height, width, 3] of bytes, each."""
    return [torch.from_numpy(numpy.array(Image.open(path).convert("RGB"))) for path in sorted(folder.glob("frame_*.png"))]


def planes(frame: torch.Tensor, device: torch.device) -> torch.Tensor:
    return frame.to(device).permute(2, 0, 1).double() / 255


def frame_psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of [3, height, width] in [0, 1]; infinite for equal ones."""
    mse = float((a - b).square().mean())
    return -10 * math.log10(mse) if mse > 0 else math.inf


@functools.lru_cache(maxsize=4)
def gaussian(device: torch.device) -> torch.Tensor:
    x = torch.arange(WINDOW, device=device, dtype=torch.float64) - WINDOW // 2
    weights = torch.exp(-x.square() / (2 * 1.5**2))
    return weights / weights.sum()


def frame_ssim(a: torch.Tensor, b: torch.Tensor) -> float:
    """Gaussian windows that lie inside the frame; the mean of R, G and B."""
    weights = gaussian(a.device)
    blurred = torch.stack([a, b, a * a, b * b, a * b]).flatten(0, 1)[:, None]
    for kernel in (weights[None, None, None], weights[None, None, :, None]):
        blurred = torch.nn.functional.conv2d(blurred, kernel)
    ma, mb, maa, mbb, mab = blurred[:, 0].unflatten(0, (5, 3))
    c1, c2 = 0.01**2, 0.03**2
    ssim = (2 * ma * mb + c1) * (2 * (mab - ma * mb) + c2) / ((ma**2 + mb**2 + c1) * (maa - ma**2 + mbb - mb**2 + c2))
    return float(ssim.mean())


@functools.lru_cache(maxsize=1)
def lpips_model(device: torch.device):
    import lpips
    return lpips.LPIPS(net="alex", verbose=False).to(device).eval()


def frame_lpips(a: torch.Tensor, b: torch.Tensor) -> float:
    with torch.no_grad():
        return float(lpips_model(a.device)(a[None].float() * 2 - 1, b[None].float() * 2 - 1))


def measures(device: torch.device) -> dict[str, Any]:
    """Of two frames, by name: those that can be taken here."""
    taken: dict[str, Any] = dict(psnr=frame_psnr, ssim=frame_ssim)
    if installed("lpips"):
        try:
            lpips_model(device)
            taken["lpips"] = frame_lpips
        except Exception as error:  # it downloads its weights
            print(f"LPIPS is left out: {error}", file=sys.stderr)
    return taken


def compare(reference: Path, video: Path, taken: dict[str, Any], skip: int, device: torch.device) -> dict[str, Optional[float]]:
    """Means over the frames but for the first `skip`; None: infinite, since frames are equal."""
    both = read_frames(reference), read_frames(video)
    if len(both[0]) != len(both[1]) or len(both[0]) <= skip:
        raise ValueError(f"{reference}, {video}: got {len(both[0])} and {len(both[1])} frames, expected as many, and more than {skip}")
    pairs = list(zip(*both))[skip:]
    sums = dict.fromkeys(taken, 0.0)
    for pair in pairs:
        a, b = (planes(frame, device) for frame in pair)
        for name, measure in taken.items():
            sums[name] += measure(a, b) / len(pairs)
    return {name: value if math.isfinite(value) else None for name, value in sums.items()}


def vbench(clips: list[Path], device: torch.device) -> dict[str, float]:
    """VBench's own means over clips, by dimension."""
    import vbench as package
    with tempfile.TemporaryDirectory() as scratch:
        videos = Path(scratch) / "videos"
        videos.mkdir()
        for i, clip in enumerate(clips):
            (videos / f"{i:04d}.mp4").symlink_to(clip.resolve())
        package.VBench(device, str(Path(package.__file__).parent / "VBench_full_info.json"), scratch).evaluate(
            videos_path=str(videos), name="clips", dimension_list=list(DIMENSIONS), mode="custom_input")
        results = json.loads((Path(scratch) / "clips_eval_results.json").read_text())
    return {name: float(results[name][0]) for name in DIMENSIONS}
