#!/usr/bin/env python3
"""Error of scope-mean and of comfy-kitchen's sol_attn at equal density, on the same tensors, on the CPU.

The tensors are those of all heads of models/tiny-wan in one evaluation in the middle of its schedule. Each setting of
sol_attn gives every layer a density, and scope-mean runs at just that one. sol_attn is its eager reference, in float32, over
tokens in raster order, as ComfyUI's own node hands them over, and in Morton order. Needs comfy-kitchen, a wheel of PyPI.
"""
import argparse
import importlib.metadata
import pathlib
import sys

import torch

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tools/tiny_video"), str(ROOT / "python")]

import comfy_kitchen

import scope_attn
import video
from sample import load, noise_for, noise_levels

ROPE, BLOCK = (44, 42, 42), 64
SETTINGS = [*(dict(tau=tau) for tau in (2.0, 1.5, 1.0, 0.5)), *(dict(topk_ratio=ratio) for ratio in (0.05, 0.1, 0.2))]


def layers_of(grid):
    """q, k, v of every layer, [1, tokens, heads, dim], where the video is half noise by its schedule of 20 steps."""
    net, seed, found = load(str(ROOT / "models/tiny-wan")), video.HELD_OUT, []
    rgb, tokens = video.clips([seed], grid, "cpu")
    latent = video.to_latent(rgb)
    level = noise_levels(20)[10]
    x = (1 - level) * latent + level * noise_for([seed], latent.shape[1:], "cpu")

    def attend(layer, q, k, v):
        found.append(tuple(x.transpose(1, 2).float().contiguous() for x in (q, k, v)))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    with torch.no_grad():
        net(torch.cat([x, video.image_condition(latent)], 1), torch.tensor([level * 1000]), tokens, attend)
    return found


def morton(grid):
    """The order of tokens by the interleaved bits of t, y and x."""
    t, y, x = (axis.flatten() for axis in torch.meshgrid(*(torch.arange(size) for size in grid), indexing="ij"))
    code = sum(((axis >> bit) & 1) << (3 * bit + place) for bit in range(10) for place, axis in enumerate((x, y, t)))
    return torch.argsort(code, stable=True)


def sol_density(q, k, settings):
    """The share of pairs in exact blocks: channel j of v says which queries saw block j, with pooled blocks left out."""
    tokens, dim = q.shape[1], q.shape[3]
    blocks, seen = -(-tokens // BLOCK), 0
    for first in range(0, blocks, dim):
        v = torch.zeros_like(q)
        for j in range(first, min(first + dim, blocks)):
            v[:, j * BLOCK:(j + 1) * BLOCK, :, j - first] = 1
        saw = comfy_kitchen.sol_attn(q, k, v, tail=False, **settings) > 0
        size = torch.tensor([min(BLOCK, tokens - j * BLOCK) for j in range(first, min(first + dim, blocks))])
        seen += (saw[..., :len(size)] * size).sum().item()
    return seen / (q.shape[0] * q.shape[2] * tokens ** 2)


def relative(out, exact):
    return ((out - exact).norm() / exact.norm()).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grid", default="8x20x32", help="frames x rows x columns of tokens")
    grid = tuple(map(int, parser.parse_args().grid.split("x")))
    layers, order = layers_of(grid), morton(grid)
    attention, (_, tokens, heads, _) = torch.nn.functional.scaled_dot_product_attention, layers[0][0].shape
    exact = [attention(*(x.transpose(1, 2) for x in layer)).transpose(1, 2) for layer in layers]
    print(f"comfy-kitchen {importlib.metadata.version('comfy-kitchen')} (eager), {len(layers)} layers of {heads} heads, "
          f"{tokens:,} tokens; relative error, mean over layers\n")
    print("| sol_attn | order of its tokens | density | sol_attn | scope-mean |\n|---|---|---|---|---|")
    for name, index in (("raster", torch.arange(len(order))), ("Morton", order)):
        back = torch.argsort(index)
        for settings in SETTINGS:
            rows = []
            for (q, k, v), dense in zip(layers, exact):
                sorted_q, sorted_k, sorted_v = (x[:, index].contiguous() for x in (q, k, v))
                density = sol_density(sorted_q, sorted_k, settings)
                theirs = comfy_kitchen.sol_attn(sorted_q, sorted_k, sorted_v, **settings)[:, back]
                stats = scope_attn.Stats()
                ours = scope_attn.attention(q, k, v, rope=ROPE, layout="BNHD", method="scope-mean",
                                            target_density=density, stats=stats)
                assert abs(stats.density - density) < 0.01 * density + 1e-3, (stats.density, density)
                rows.append((density, relative(theirs, dense), relative(ours, dense)))
            density, theirs, ours = (sum(column) / len(rows) for column in zip(*rows))
            setting = ", ".join(f"{key}={value}" for key, value in settings.items())
            print(f"| {setting} | {name} | {density:.3f} | {theirs:.3f} | {ours:.3f} |", flush=True)


if __name__ == "__main__":
    main()
