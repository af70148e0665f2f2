#!/usr/bin/env python3
"""How far fp8 linear layers move whole videos, with dense attention and with `fast`: PSNR and SSIM against dense videos of the same seeds.

    SCOPE_LIBRARY=build/cuda/libscope.so PYTHONPATH=python python3 bench/fp8_gate.py --json bench/results/fp8_tiny_wan.json
    … --model FOLDER --frames FOLDER/clips/020.png,FOLDER/clips/060.png --steps 25 --json bench/results/fp8_clips_wan.json

The model is a folder with latents that are frames, as models/tiny-wan: its net (tools/tiny_video/net.py) and sampler are PyTorch's own,
and attention is that of hosts/session.py, which scope_attn.enable() uses too. Seed s takes first frame s, modulo how many there are;
without --frames the clips are the held-out ones of tools/tiny_video. On a GPU products are in bf16, on a CPU in f32. Each seed makes a
dense video, the control (dense again, by our own kernel), and the three variants. fp8 layers are those of the blocks
(bench/fp8_linear.py), with exact sums; --products scaled_mm takes PyTorch's fp8 kernel instead. Needs PyTorch, numpy, safetensors, and
Pillow for --frames; no diffusers. A file of --json of the same commit and options is gone on with, for more seeds too.
"""
import argparse
import contextlib
import functools
import json
import pathlib
import platform
import statistics
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools/tiny_video"))

import fp8_linear
import provenance
import scope_attn
import video
from sample import load, noise_for, sample
from scope_attn._compare import Steps
from scope_attn._origin import origin
from scope_attn._selector import Place
from scope_attn.hosts import rotations
from scope_attn.hosts.session import Session
from scope_attn.reproduce import quality

DENSE, CONTROL = "dense", "control"
VARIANTS = {  # attention, and whether linear layers are in fp8
    CONTROL: (CONTROL, False), "dense, fp8": (DENSE, True), "fast": ("fast", False), "fast, fp8": ("fast", True)}


class Gate:
    """One model, as it is and with fp8 layers."""

    def __init__(self, options):
        self.options, self.device = options, torch.device(options.device)
        notes = json.loads((pathlib.Path(options.model) / "scope.json").read_text())
        if notes.get("latent") != "rgb":
            sys.exit(f"--model: the latents of {options.model} are not frames, and there is no VAE here")
        self.shift, self.grid = notes["shift"], options.grid or tuple(notes["grid"])
        self.nets = {False: load(options.model, self.device), True: load(options.model, self.device)}
        self.fp8_layers, self.left = fp8_linear.quantise(self.nets[True].blocks, options.products)
        if self.left:
            print(f"not in fp8, since a side is no multiple of 16: {', '.join(self.left)}", file=sys.stderr)
        config = self.nets[False].config
        self.heads, self.dim = config["num_attention_heads"], config["attention_head_dim"]
        # Short videos would stay dense, and this is about rounding, not about time.
        self.session = Session(family="wan", layers=config["num_layers"], heads=self.heads, dim=self.dim, rope=rotations.wan(self.dim),
                               from_image=True, method="fast", min_tokens=0)
        frames = [read_frame(path, self.grid) for path in options.frames]
        self.names = options.frames or [str(seed) for seed in range(video.HELD_OUT, video.HELD_OUT + options.seeds)]
        self.names = [pathlib.Path(name).name for name in self.names]
        self.frames, self.text = frames, config["text_dim"]

    def clip(self, seed):
        """The latent whose first frame is the seed's, and its tokens."""
        if not self.frames:
            rgb, tokens = video.clips([video.HELD_OUT + seed], self.grid, self.device)
            return video.to_latent(rgb), tokens
        first = self.frames[seed % len(self.frames)].to(self.device)
        rgb = torch.zeros(1, 3, *self.size(), device=self.device)
        rgb[:, :, 0] = first
        return video.to_latent(rgb), torch.zeros(1, 1, self.text, device=self.device)

    def size(self):
        return self.grid[0], video.PATCH * self.grid[1], video.PATCH * self.grid[2]

    @torch.no_grad()
    def make(self, seed, attention, fp8):
        """Frames [frames, height, width, 3] of bytes, the share of keys that sparse calls kept, and seconds."""
        latent, tokens = self.clip(seed)
        steps, running = self.options.steps, self.session.begin(self.options.steps)

        def attend(step, layer, q, k, v):
            dense = functools.partial(torch.nn.functional.scaled_dot_product_attention, q, k, v)
            if attention == DENSE:
                return dense()
            if attention == CONTROL:
                return scope_attn.attention(q, k, v, method="dense")
            running.step = step
            return running.attend(q, k, v, Place(layer, step, "cond"), dense, layout="BHND")

        kernel = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if self.device.type == "cuda" else contextlib.nullcontext()
        began = time.monotonic()
        with kernel:
            out = sample(self.nets[fp8], latent, tokens, noise_for([seed], latent.shape[1:], self.device), steps, attend, self.shift)
        frames = (video.to_rgb(out)[0] * 255).round().to(torch.uint8).permute(1, 2, 3, 0).contiguous()
        if not torch.isfinite(out).all():
            sys.exit(f"seed {seed}: the video of {attention}{', fp8' if fp8 else ''} is not finite")
        return frames, running.receipt.density if attention == "fast" else 1.0, time.monotonic() - began

    def machine(self):
        if self.device.type == "cuda":
            return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        return {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads(),
                "instruction_set": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}


def read_frame(path, grid):
    """[3, height, width] in [0, 1], shrunk where the grid is not the picture's."""
    import numpy
    from PIL import Image
    picture = Image.open(path).convert("RGB").resize((video.PATCH * grid[2], video.PATCH * grid[1]), Image.Resampling.BOX)
    return torch.from_numpy(numpy.array(picture)).permute(2, 0, 1) / 255


def new_row(name):
    attention, fp8 = VARIANTS[name]
    return {"variant": name, "control": name == CONTROL, "attention": attention, "linear": "fp8" if fp8 else "bf16", "psnr": [], "ssim": [],
            "density": [], "seconds": []}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "models/tiny-wan"), help="folder")
    parser.add_argument("--frames", type=lambda text: text.split(","), default=[], help="PNG files, separated by commas: first frames")
    parser.add_argument("--grid", type=video.parse_grid, help="tokens along T, H and W, as 13x20x32; without it the model's")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--products", choices=fp8_linear.PRODUCTS, default="exact", help="of fp8 layers")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default="", help="without it the one that the library was built from")
    parser.add_argument("--json", help="written anew after each seed")
    options = parser.parse_args()
    gate = Gate(options)
    about = {"kind": "fp8", **origin(), "model": pathlib.Path(options.model).resolve().name, "grid": list(gate.grid),
             "steps": options.steps, "shift": gate.shift, "compute": "bf16" if gate.device.type == "cuda" else "f32",
             "products": options.products, "fp8_layers": gate.fp8_layers, "not_in_fp8": gate.left, "machine": gate.machine(),
             "first_seed": 0, "settings": gate.session.settings}
    about["commit"] = options.commit or about["commit"]
    result = {**about, "finished": False, "seeds": 0, "rows": [new_row(name) for name in VARIANTS]}
    begun = provenance.load(options.json, about["commit"]) if options.json else {}
    if all(begun.get(key) == json.loads(json.dumps(value)) for key, value in about.items()):
        result = {**begun, "finished": False}
    result["clips"], result["clip_names"] = len(gate.names), gate.names
    todo = range(result["seeds"], options.seeds)
    steps = Steps(len(todo) * (1 + len(VARIANTS)), lambda line: print(line, file=sys.stderr, flush=True), "fp8 gate")
    for seed in todo:
        dense, _, seconds = gate.make(seed, DENSE, False)
        result.setdefault("dense_seconds", []).append(seconds)
        steps.step(f"dense, seed {seed}: {seconds:.1f} s")
        for row in result["rows"]:
            frames, density, seconds = gate.make(seed, *VARIANTS[row["variant"]])
            # The first frame is the given one.
            found = quality.means(list(zip(dense, frames))[1:], gate.device)
            for key, value in (("psnr", found["psnr"]), ("ssim", found["ssim"]), ("density", density), ("seconds", seconds)):
                row[key].append(value)
            psnr = "equal" if found["psnr"] is None else f"{found['psnr']:.2f} dB"
            steps.step(f"{row['variant']}, seed {seed}: {psnr}, {seconds:.1f} s")
        result["seeds"] = seed + 1
        if options.json:
            provenance.save(options.json, result)
    result["finished"] = True
    if options.json:
        provenance.save(options.json, result)
    for row in result["rows"]:
        psnr = "equal" if None in row["psnr"] else f"{statistics.fmean(row['psnr']):.2f} dB"
        print(f"{row['variant']}: PSNR {psnr}, SSIM {statistics.fmean(row['ssim']):.4f}, density {statistics.fmean(row['density']):.4f}, "
              f"{result['seeds']} seeds")


if __name__ == "__main__":
    main()
