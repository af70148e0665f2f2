"""How near a video is to the dense one, in PSNR and SSIM: as `scope evaluate` has them, and SSIM as SVG2's metric has it."""
from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

import numpy
import torch

WINDOW = 11  # of both SSIMs, in pixels


def read_frames(folder: Path) -> list[torch.Tensor]:
    """[height, width, 3] of bytes, each."""
    from PIL import Image  # which measuring needs not
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


def ssim(a: torch.Tensor, b: torch.Tensor, blur) -> float:
    """The mean over pixels and R, G, B, with the moments that `blur` gives."""
    moments = torch.stack([a, b, a * a, b * b, a * b]).flatten(0, 1)[:, None]
    ma, mb, maa, mbb, mab = blur(moments)[:, 0].unflatten(0, (5, 3))
    c1, c2 = 0.01**2, 0.03**2
    found = (2 * ma * mb + c1) * (2 * (mab - ma * mb) + c2) / ((ma**2 + mb**2 + c1) * (maa - ma**2 + mbb - mb**2 + c2))
    return float(found.mean())


def frame_ssim(a: torch.Tensor, b: torch.Tensor) -> float:
    """Gaussian windows that lie inside the frame."""
    def blur(moments):
        for kernel in (gaussian(a.device)[None, None, None], gaussian(a.device)[None, None, :, None]):
            moments = torch.nn.functional.conv2d(moments, kernel)
        return moments

    return ssim(a, b, blur)


def frame_ssim_box(a: torch.Tensor, b: torch.Tensor) -> float:
    """Square windows around every pixel, with zeros beyond the frame: svg/utils/metric.py of svg-project/Sparse-VideoGen (5ce7b01)."""
    return ssim(a, b, lambda moments: torch.nn.functional.avg_pool2d(moments, WINDOW, stride=1, padding=WINDOW // 2))


MEASURES = dict(psnr=frame_psnr, ssim=frame_ssim, ssim_box=frame_ssim_box)  # of two frames


def compare(reference: Path, video: Path, skip: int, device: torch.device) -> dict[str, Optional[float]]:
    """Means over the frames but for the first `skip`; None: infinite, since frames are equal."""
    both = read_frames(reference), read_frames(video)
    if len(both[0]) != len(both[1]) or len(both[0]) <= skip:
        raise ValueError(f"{reference}, {video}: got {len(both[0])} and {len(both[1])} frames, expected as many, and more than {skip}")
    return means(list(zip(*both))[skip:], device)


def means(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> dict[str, Optional[float]]:
    """Over pairs of frames, [height, width, 3] of bytes."""
    sums = dict.fromkeys(MEASURES, 0.0)
    for pair in pairs:
        a, b = (planes(frame, device) for frame in pair)
        for name, measure in MEASURES.items():
            sums[name] += measure(a, b) / len(pairs)
    return {name: value if math.isfinite(value) else None for name, value in sums.items()}
