"""Exports the EMA weights as a diffusers Wan folder, example conditions with a golden sample, and real q, k, v of chosen heads."""

import argparse
import json
import math
import os

import torch
from safetensors.torch import save

import video
from files import write_atomic
from net import CONFIG
from sample import load, noise_for, sample

WEIGHTS = "diffusion_pytorch_model.safetensors"
ROPE = "44,42,42"


def write_tensors(path, tensors, metadata=None):
    write_atomic(path, save({k: t.contiguous().cpu() for k, t in tensors.items()}, metadata))
    print(f"{path}: {os.path.getsize(path)} bytes")


def write_config(folder):
    config = {"_class_name": "WanTransformer3DModel", "_diffusers_version": "0.40.0", **CONFIG}
    write_atomic(os.path.join(folder, "config.json"), (json.dumps(config, indent=2) + "\n").encode())


def write_model(checkpoint, folder):
    """Matrices and vectors in bf16: 14 MB; the same names as diffusers' WanTransformer3DModel."""
    ema = torch.load(checkpoint, map_location="cpu", weights_only=True)["ema"]
    os.makedirs(folder, exist_ok=True)
    write_config(folder)
    write_tensors(os.path.join(folder, WEIGHTS), {k: v.bfloat16() for k, v in ema.items()}, {"format": "pt"})


def write_examples(net, folder, device, count=4, grid=(13, 20, 32)):
    """Held-out clips for a demo, and noise with its dense sample of the first one, for parity tests in other languages."""
    seeds = [video.HELD_OUT + i for i in range(count)]
    rgb, tokens = video.clips(seeds, grid, device)
    bytes_of = lambda x: (x * 255).round().to(torch.uint8).permute(0, 2, 3, 4, 1)
    latent = video.to_latent(bytes_of(rgb).permute(0, 4, 1, 2, 3).float() / 255)  # what a reader of the bytes has
    noise = noise_for(seeds[:1], latent.shape[1:], device).half()
    out = sample(net, latent[:1], tokens[:1], noise.float())
    tensors = {"prompt_embeds": tokens, "truth": bytes_of(rgb), "noise": noise, "dense": out.half()}
    note = {"seeds": ",".join(map(str, seeds)), "grid": "x".join(map(str, grid)), "steps": "20", "shift": "3.0",
            "layout": "truth u8 [clip,frame,row,column,rgb]; noise, dense [1,12,frame,row/2,column/2] of clip 0"}
    write_tensors(os.path.join(folder, "examples.safetensors"), tensors, note)


class Capture:
    """Keeps q, k, v of every layer at one step of a sampling run."""

    def __init__(self, at):
        self.at, self.layers = at, []

    def __call__(self, step, layer, q, k, v):
        if step == self.at:
            self.layers.append((q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def sharpness(q, k, rows=256):
    """Per head: mean softmax mass on the strongest 1 % of the keys, and perplexity, over evenly spaced queries."""
    tokens = q.shape[1]
    some = q[:, torch.linspace(0, tokens - 1, min(rows, tokens)).long().to(q.device)].float()
    p = torch.softmax(some @ k.float().mT / math.sqrt(q.shape[-1]), -1)
    mass = p.topk(math.ceil(tokens / 100), -1).values.sum(-1).mean(-1)
    perplexity = torch.exp(-(p * p.clamp_min(1e-30).log()).sum(-1)).mean(-1)
    return mass.tolist(), perplexity.tolist()


def central(tensor, grid, window):
    """[tokens, dim] -> the tokens of the window in the middle of each frame; RoPE is relative, so they attend as they are."""
    (_, rows, cols), (frames, height, width) = grid, window
    y, x = (rows - height) // 2, (cols - width) // 2
    return tensor.unflatten(0, grid)[:frames, y : y + height, x : x + width].flatten(0, 2)


def write_heads(net, path, grid, seed, chosen, device, window=None, steps=20):
    """Writes the chosen heads ("layer.head", or "peaked"/"diffuse" for the extremes beyond layer 0) of one middle step."""
    window = window or grid
    if any(small > big for small, big in zip(window, grid)):
        raise SystemExit(f"error: the window {window} is larger than the grid {grid}")
    rgb, tokens = video.clips([seed], grid, device)
    latent = video.to_latent(rgb)
    capture = Capture(steps // 2)
    sample(net, latent, tokens, noise_for([seed], latent.shape[1:], device), steps, capture)
    table = {}
    for layer, (q, k, _) in enumerate(capture.layers):
        for head, (mass, perplexity) in enumerate(zip(*sharpness(q[0], k[0]))):
            table[layer, head] = mass
            print(f"{grid} layer {layer} head {head}: mass on the top 1 % {mass:.3f}, perplexity {perplexity:.0f}")
    later = {key: mass for key, mass in table.items() if key[0] > 0}
    named = {"peaked": max(later, key=later.get), "diffuse": min(later, key=later.get)}
    heads = [named[c] if c in named else tuple(map(int, c.split("."))) for c in chosen]
    pick = lambda i: torch.stack([central(capture.layers[layer][i][0, head], grid, window) for layer, head in heads]).bfloat16()
    text = lambda numbers: "x".join(map(str, numbers))
    note = {"grid": text(window), "cut_from": text(grid), "rope": ROPE, "seed": str(seed), "step": f"{steps // 2} of {steps}",
            "heads": ",".join(f"layer {layer} head {head}" for layer, head in heads),
            "top1_mass": ",".join(f"{table[h]:.3f}" for h in heads)}
    write_tensors(path, {"q": pick(0), "k": pick(1), "v": pick(2)}, note)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", help="checkpoint.pt of train.py: writes config.json and weights into --model first")
    parser.add_argument("--model", default="models/tiny-wan")
    parser.add_argument("--examples", action="store_true", help="write examples.safetensors into --model")
    parser.add_argument("--heads", help="write q, k, v to this .safetensors file")
    parser.add_argument("--grid", type=video.parse_grid, default="13x20x32")
    parser.add_argument("--window", type=video.parse_grid, help="keep only the tokens of such a window in the middle of the frame")
    parser.add_argument("--seed", type=int, default=video.HELD_OUT)
    parser.add_argument("--pick", default="peaked,diffuse", help='heads as "layer.head", "peaked" or "diffuse", comma-separated')
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.checkpoint:
        write_model(args.checkpoint, args.model)
    net = load(args.model, device)
    if args.examples:
        write_examples(net, args.model, device)
    if args.heads:
        write_heads(net, args.heads, args.grid, args.seed, args.pick.split(","), device, args.window)


if __name__ == "__main__":
    main()
