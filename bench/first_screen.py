#!/usr/bin/env python3
"""Draws the README's picture: frames of two clips beside their difference, and bars of how long whole runs take.

    scope generate --method dense -o dense --compute bf16 --condition models/tiny-wan/held_out.safetensors --example 2
    scope generate --method fast  -o fast  --compute bf16 --condition models/tiny-wan/held_out.safetensors --example 2
    bench/first_screen.py dense fast docs/img/first_screen.png

Both folders are results of `scope generate`. The bars are those of bench/results/h200_diffusers_*.json. It needs numpy and Pillow.
"""
import argparse
import json
import pathlib

import numpy
from PIL import Image, ImageDraw, ImageFont

import real_scale

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
WIDTH, MARGIN, GAP, BAR = 1200, 24, 12, 34
INK, PALE, OURS, PAPER = (33, 37, 41), (173, 181, 189), (25, 113, 194), (255, 255, 255)
TIMES = 8  # by which the difference is enlarged
# What runs, in linear layers of which kind; those that were not timed are left out.
RUNS = (("dense", "bf16", "compiled, cuDNN's attention", PALE), ("scope:target_density=0.2", "bf16", "SCOPE, {:.0f} % of the keys", PALE),
        ("fast", "bf16", "preset fast, {:.0f} %", OURS), ("fast:products=qk8", "fp8", "fast, qk8, fp8 layers", OURS))


def font(size):
    return ImageFont.load_default(size)


def frames(folder):
    return [numpy.asarray(Image.open(path).convert("RGB")) for path in sorted(folder.glob("frame_*.png"))]


def psnr(one, other):
    return 10 * numpy.log10(255**2 / numpy.mean((one.astype(float) - other) ** 2))


def pictures(dense, ours, shown):
    """Rows of a dense frame, ours, and the difference around grey, enlarged."""
    width = (WIDTH - 2 * MARGIN - 2 * GAP) // 3
    for number in shown:
        difference = numpy.clip(127.5 + TIMES * (ours[number].astype(float) - dense[number]), 0, 255).astype(numpy.uint8)
        pixels = (dense[number], ours[number], difference)
        yield [Image.fromarray(array).resize((width, width * array.shape[0] // array.shape[1]), Image.LANCZOS) for array in pixels]


def bars(draw, y, title, data):
    draw.text((MARGIN, y), title, INK, font(20))
    dense = real_scale.compiled_case(data, "dense")["run_s"]
    left, right = MARGIN + 260, WIDTH - MARGIN - 190
    for variant, linear, name, colour in RUNS:
        case = real_scale.compiled_case(data, variant, linear)
        if case is None:
            continue
        y += BAR
        seconds = case["run_s"]
        end = left + round((right - left) * seconds / dense)
        draw.text((MARGIN, y), name.format(100 * (case["density"] or 1)), INK, font(18))
        draw.rectangle((left, y, end, y + BAR - 10), colour)
        times = "" if variant == "dense" else f", {dense / seconds:.2f} times as fast"
        draw.text((end + 8, y), f"{seconds:,.0f} s{times}", INK, font(18))
    return y + BAR


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dense", type=pathlib.Path, help="folder of the dense clip")
    parser.add_argument("ours", type=pathlib.Path, help="folder of the sparse clip of the same seed")
    parser.add_argument("picture", type=pathlib.Path, help="the PNG to write")
    options = parser.parse_args()

    dense, ours = frames(options.dense), frames(options.ours)
    run = json.loads((options.ours / "run.json").read_text())
    near = numpy.mean([psnr(*pair) for pair in list(zip(dense, ours))[1:]])  # the model is given frame 0
    rows = list(pictures(dense, ours, (len(dense) // 2, len(dense) - 1)))
    height = rows[0][0].height
    models = [(title, json.loads((RESULTS / f"h200_diffusers_{name}.json").read_text())) for title, name in
              (("Wan2.1 14B, 720p, 50 steps, random weights, H200, diffusers", "wan"), ("HunyuanVideo 13B, the same", "hunyuan"))]
    top, under = MARGIN + 32, GAP + 44
    canvas = Image.new("RGB", (WIDTH, top + 2 * (height + GAP) + under + len(models) * (BAR * (len(RUNS) + 1) + 18) + MARGIN), PAPER)
    draw = ImageDraw.Draw(canvas)
    for column, title in enumerate(("dense attention", f"{run['method']}: {100 * run['density']:.0f} % of the keys",
                                    f"difference, {TIMES} times enlarged")):
        draw.text((MARGIN + column * (rows[0][0].width + GAP), MARGIN), title, INK, font(20))
    y = top
    for row in rows:
        for column, picture in enumerate(row):
            canvas.paste(picture, (MARGIN + column * (picture.width + GAP), y))
        y += height + GAP
    draw.text((MARGIN, y), f"Frames {len(dense) // 2} and {len(dense) - 1} of a clip by the bundled small model "
              f"({dense[0].shape[1]} x {dense[0].shape[0]} pixels, enlarged); PSNR of the whole clip {near:.1f} dB.", INK, font(18))
    y += under
    for title, data in models:
        y = bars(draw, y, title, data) + 18
    canvas.crop((0, 0, WIDTH, y + MARGIN)).save(options.picture, optimize=True)


main()
