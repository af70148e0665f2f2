"""Writes the first frames and condition tokens of held-out clips, which is all that sampling takes: models/tiny-wan/held_out*.safetensors.

    python tools/tiny_video/held_out.py models/tiny-wan/held_out.safetensors
    python tools/tiny_video/held_out.py models/tiny-wan/held_out_720p.safetensors --grid 21x45x80 --clips 1
"""

import argparse
import os

import torch
from safetensors.torch import save

import video
from files import write_atomic

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("path")
parser.add_argument("--grid", type=video.parse_grid, default=(13, 20, 32))
parser.add_argument("--clips", type=int, default=8)
options = parser.parse_args()
seeds = [video.HELD_OUT + i for i in range(options.clips)]
rgb, tokens = video.clips(seeds, options.grid)
first = (rgb[:, :, :1] * 255).round().to(torch.uint8).permute(0, 2, 3, 4, 1).contiguous()
note = {"seeds": ",".join(map(str, seeds)), "grid": "x".join(map(str, options.grid)),
        "layout": "truth u8 [clip,frame,row,column,rgb], frame 0 alone"}
write_atomic(options.path, save({"prompt_embeds": tokens.contiguous(), "truth": first}, note))
print(f"{options.path}: {os.path.getsize(options.path)} bytes")
