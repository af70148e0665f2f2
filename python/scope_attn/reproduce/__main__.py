"""The command, and what its --help teaches; the work is in work.py, which needs PyTorch and diffusers."""
from __future__ import annotations

import argparse
import errno
import math
import signal
import sys
from pathlib import Path
from typing import Optional

from .settings import METHODS, SETTINGS, Refused

ABOUT = """Makes the paper's table for one of its six settings from your own weights: each prompt's video with dense attention and
with every method, from the same seed, through diffusers; then PSNR, SSIM, LPIPS, VBench's scores, seconds and
speedup, with the paper's own figures under ours. scope-paper is SCOPE with the paper's settings; scope-mean is our own.

  python -m scope_attn.reproduce --setting wan2.1-t2v --prompts prompts.txt --out results/wan2.1-t2v
  python -m scope_attn.reproduce --setting wan2.2-i2v --prompts images.tsv --out results/wan2.2-i2v --first 4
  torchrun --nproc-per-node 8 -m scope_attn.reproduce --setting hunyuan-t2v --prompts prompts.txt --out /shared/hunyuan

--prompts has a prompt on each line; for image to video a line is IMAGE, a tab, PROMPT, with the image's path from the
file's folder. Images are cropped in the middle to the shape of --size. Prompt i has the seed --seed + i.

Stop it whenever you like: the same command goes on where it stopped, and when nothing is missing it prints the table
at once. Give more prompts or methods later; other options need another folder. Under torchrun every process takes videos from
one list, with --out on a file system that all machines share; what a process that dies was at is made by the next run.

--out gets METHOD/0000/ for each video (frame_000.png ..., clip.mp4 where ffmpeg is, run.json), what was measured beside it
(0000.quality.json, vbench.json, left_out.json), profile.csv, table.md and table.json. Frames of a 720p video take about 120 MB.
`scope evaluate` compares such folders."""

EPILOG = """Methods run as their rows in docs/reference/settings.md say for the model: its schedule, and each method's own rule
for what it keeps. --target-density D makes all of them keep the share D. A method may carry settings, as scope:rho=0.8+groups=200.

Every dense call has the backend of --dense-backend: the dense videos, and the dense steps and layers of sparse methods. The control
is the dense video by another backend: it shows what rounding alone does to PSNR, SSIM and LPIPS.

svoo takes a profile of the model: --profile, or the one that a dense video of the first prompt is made and measured for.

LPIPS and VBench are measured where their packages are installed. VBench pins a version of transformers with which no pipeline
here runs, so give it an environment of its own, and its interpreter here:
  python3 -m venv vb && vb/bin/pip install lpips vbench
  python -m scope_attn.reproduce ... --metrics-python vb/bin/python"""


def size(text: str) -> tuple[int, int]:
    width, x, height = text.partition("x")
    if not (x and width.isdigit() and height.isdigit() and all(16 <= int(n) <= 8192 and int(n) % 16 == 0 for n in (width, height))):
        raise argparse.ArgumentTypeError(f'got "{text}", expected WIDTHxHEIGHT in multiples of 16, as 1280x720')
    return int(width), int(height)


def whole(low: int, high: int, form: str = ""):
    def parse(text: str) -> int:
        if not text.isdigit() or not low <= int(text) <= high or (form and int(text) % 4 != 1):
            raise argparse.ArgumentTypeError(f'got "{text}", expected a number in {low}..{high}{form}')
        return int(text)

    return parse


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f'got "{text}", expected a share in (0, 1]')
    return value


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser("python -m scope_attn.reproduce", description=ABOUT, epilog=EPILOG, allow_abbrev=False,
                                      formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--setting", required=True, choices=SETTINGS, help="one of %(choices)s", metavar="SETTING")
    command.add_argument("--prompts", required=True, type=Path, metavar="FILE", help="a prompt on each line, or IMAGE<tab>PROMPT")
    command.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="results, and where to go on from")
    command.add_argument("--methods", nargs="+", default=list(METHODS), metavar="METHOD",
                         help=f"default: {' '.join(METHODS)}; dense runs anyway")
    command.add_argument("--target-density", type=share, metavar="D",
                         help="share of keys that every sparse method keeps; default: each has its own rule")
    command.add_argument("--profile", type=Path, metavar="CSV",
                         help="svoo's, by `scope profile` or of SVOO's authors; default: measured in a dense video of the first prompt")
    command.add_argument("--model", metavar="NAME",
                         help="folder, or repository of the Hugging Face Hub, in diffusers' format; default: the setting's")
    command.add_argument("--size", type=size, default=(1280, 720), metavar="WxH", help="default: 1280x720")
    command.add_argument("--frames", type=whole(1, 1025, ", one more than a multiple of 4"), metavar="N",
                         help="default: 81 for Wan, 129 for HunyuanVideo")
    command.add_argument("--steps", type=whole(1, 1000), metavar="N", help="default: 40 for wan2.1-i2v and Wan2.2, else 50")
    command.add_argument("--seed", type=whole(0, 2**62), default=0, metavar="N", help="of the first prompt; default: 0")
    command.add_argument("--first", type=whole(1, 10**6), metavar="N", help="take the first N prompts; default: all")
    command.add_argument("--negative-prompt", metavar="TEXT|none",
                         help="of Wan; default: that of SVG2's and SpargeAttn's scripts, in English for Wan2.1 and in Chinese for Wan2.2")
    command.add_argument("--dense-backend", metavar="NAME", help="diffusers' attention backend for every dense call; default: "
                         "_native_cudnn on a GPU, native on the CPU")
    command.add_argument("--control-backend", metavar="NAME", help="the control's; default: _native_flash on a GPU, _native_math on the "
                         "CPU; where that is --dense-backend, the default of --dense-backend")
    command.add_argument("--no-control", dest="control", action="store_false", help="make no control videos")
    command.add_argument("--compile", action="store_true", help="compile the transformer's blocks, for every method alike; each video is "
                         "preceded by a step that is not counted, in which they compile. On the CPU blocks are traced only")
    command.add_argument("--metrics-python", type=Path, metavar="PATH",
                         help="the interpreter that measures LPIPS and VBench, in a process of its own; default: this one")
    command.add_argument("--min-tokens", type=whole(0, 10**9), default=4096, metavar="N",
                         help="shorter videos attend densely; default: 4096")
    command.add_argument("--offload", action="store_true", help="keep on the GPU only the part of the pipeline that runs; seconds grow")
    return command


def main(arguments: Optional[list[str]] = None) -> int:
    options = parser().parse_args(arguments)
    try:
        try:
            from .work import run
        except ImportError as error:
            raise Refused(f"{error}; it needs PyTorch, diffusers, transformers, accelerate, ftfy, numpy and Pillow") from None
        run(options)
    except Refused as refused:
        print(f"reproduce: {refused}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("reproduce: stopped; all that was made before is whole: the same command goes on from there", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"reproduce: {error}; all that was made before is whole: make room, and give the same command again", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # torchrun's; what is half written is removed
    sys.exit(main())
