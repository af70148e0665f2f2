"""Measures the tiny video model on held-out seeds and writes figures.json and the sample sheet."""

import argparse
import json
import os
import time

import torch
import torch.nn.functional as F

import images
import video
from files import write_atomic
from sample import load, sample_seeds
from selector import Selector


def other_order(step, layer, q, k, v):
    """Dense attention with the keys in reverse, so summed in another order: the noise floor of comparisons with dense."""
    return F.scaled_dot_product_attention(q, k.flip(2), v.flip(2))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/tiny-wan")
    parser.add_argument("--out", required=True, help="folder for figures.json and the sheets")
    parser.add_argument("--clips", type=int, default=32, help="held-out seeds for PSNR against the truth")
    parser.add_argument("--sparse-clips", type=int, default=8, help="held-out seeds for the selectors")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--grid", type=video.parse_grid, default="13x20x32")
    parser.add_argument("--densities", default="0.1,0.2")
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    grid = args.grid
    os.makedirs(args.out, exist_ok=True)
    net = load(args.model, device)
    seeds = [video.HELD_OUT + i for i in range(args.clips)]
    started = time.monotonic()
    truth, dense = sample_seeds(net, seeds, grid, args.steps, args.batch, device=device)
    first = lambda clips: clips[:, :, :1].expand_as(clips)
    per_clip = [images.psnr(dense[i : i + 1], truth[i : i + 1], 1) for i in range(len(seeds))]
    figures = {
        "settings": {"grid": "x".join(map(str, grid)), "steps": args.steps, "shift": 3.0, "clips": args.clips, "device": device,
                     "dtype": "bf16 autocast" if device == "cuda" else "f32", "first_seed": video.HELD_OUT},
        "dense_vs_truth_db": images.psnr(dense, truth, 1),
        "dense_vs_truth_with_frame0_db": images.psnr(dense, truth),
        "dense_vs_truth_pooled_db": images.pooled_psnr(dense, truth, 1),
        "dense_vs_truth_worst_clip_db": min(per_clip),
        "dense_vs_truth_by_frame_db": [round(images.psnr(dense[:, :, t : t + 1], truth[:, :, t : t + 1]), 2) for t in range(grid[0])],
        "first_frame_copy_vs_dense_db": images.psnr(first(dense), dense, 1),
        "first_frame_copy_vs_truth_db": images.psnr(first(truth), truth, 1),
        "seconds_dense": time.monotonic() - started,
    }
    few = seeds[: args.sparse_clips]
    if few:
        reference = dense[: len(few)]

        def against_dense(attend):
            _, out = sample_seeds(net, few, grid, args.steps, min(args.batch, 4), attend, device)
            return out

        figures["control_dense_vs_dense_db"] = images.psnr(against_dense(lambda n: other_order), reference, 1)
        for density in map(float, args.densities.split(",")):
            for kind in ("thw", "random"):
                out = against_dense(lambda n: Selector(density, args.steps, kind))
                figures[f"{kind}_{density:g}_vs_dense_db"] = images.psnr(out, reference, 1)
                figures[f"{kind}_{density:g}_vs_truth_db"] = images.psnr(out, truth[: len(few)], 1)
    figures = {k: round(v, 2) if isinstance(v, float) else v for k, v in figures.items()}
    write_atomic(os.path.join(args.out, "figures.json"), (json.dumps(figures, indent=2) + "\n").encode())
    print(json.dumps(figures, indent=2))

    times = [round(f * (grid[0] - 1)) for f in (0, 0.25, 0.5, 0.75, 1)]
    rows = [[clip[i, :, t] for t in times] for i in range(min(6, len(seeds))) for clip in (truth, dense)]
    images.write_png(os.path.join(args.out, "samples.png"), images.sheet(rows))


if __name__ == "__main__":
    main()
