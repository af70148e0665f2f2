"""Samples clips with the tiny Wan: Euler steps of the flow from noise, first frame and motion tokens given."""

import argparse
import json
import os

import torch
from safetensors.torch import load_file

import images
import video
from net import TinyWan

SHIFT = 3.0


def load(folder, device="cpu"):
    """The net of a folder with config.json and diffusion_pytorch_model.safetensors, in float32."""
    with open(os.path.join(folder, "config.json")) as file:
        config = {k: v for k, v in json.load(file).items() if not k.startswith("_")}
    net = TinyWan(config)
    weights = load_file(os.path.join(folder, "diffusion_pytorch_model.safetensors"))
    net.load_state_dict({k: v.float() for k, v in weights.items()})
    return net.to(device).eval()


def noise_levels(steps, shift=SHIFT):
    u = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return (shift * u / (1 + (shift - 1) * u)).tolist()


def noise_for(seeds, shape, device):
    """Noise of each clip from its own seed on the CPU, so that it depends on neither batch nor device."""
    rows = [torch.randn(shape, generator=torch.Generator().manual_seed(int(s))) for s in seeds]
    return torch.stack(rows).to(device)


@torch.no_grad()
def sample(net, latent, tokens, noise, steps=20, attend=None, shift=SHIFT):
    """Only frame 0 of latent is used. attend(step, layer, q, k, v) replaces self-attention when given."""
    device = noise.device.type
    fixed, x, levels = video.image_condition(latent), noise.clone(), noise_levels(steps, shift)
    for step in range(steps):
        own = None if attend is None else lambda layer, q, k, v: attend(step, layer, q, k, v)
        time = torch.full((x.shape[0],), levels[step] * 1000, device=x.device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            velocity = net(torch.cat([x, fixed], 1), time, tokens, own)
        x = x + (levels[step + 1] - levels[step]) * velocity
    return x


def sample_seeds(net, seeds, grid, steps=20, batch=8, attend=None, device="cpu"):
    """(truth, sample), both [clips, 3, T, H, W] in [0, 1] on the CPU."""
    truths, samples, seeds = [], [], list(seeds)
    for i in range(0, len(seeds), batch):
        part = seeds[i : i + batch]
        rgb, tokens = video.clips(part, grid, device)
        latent = video.to_latent(rgb)
        out = sample(net, latent, tokens, noise_for(part, latent.shape[1:], device), steps, attend and attend(len(part)))
        truths.append(rgb.cpu())
        samples.append(video.to_rgb(out).cpu())
    return torch.cat(truths), torch.cat(samples)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/tiny-wan")
    parser.add_argument("--seed", type=int, default=video.HELD_OUT)
    parser.add_argument("--clips", type=int, default=1)
    parser.add_argument("--grid", type=video.parse_grid, default="13x20x32", help="frames x rows x columns, in tokens")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", required=True, help="PNG: for each clip a row of true frames and a row of sampled ones")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    grid, seeds = args.grid, range(args.seed, args.seed + args.clips)
    truth, out = sample_seeds(load(args.model, device), seeds, grid, args.steps, device=device)
    rows = [[clip[i, :, t] for t in range(grid[0])] for i in range(args.clips) for clip in (truth, out)]
    images.write_png(args.out, images.sheet(rows))
    print(f"PSNR against the truth, frames 1 on: {images.psnr(out, truth, 1):.2f} dB; {args.out}")


if __name__ == "__main__":
    main()
