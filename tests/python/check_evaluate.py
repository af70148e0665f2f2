"""`scope evaluate` against PSNR and SSIM in numpy float64, and clips that cannot be compared.

    check_evaluate.py SCOPE-COMMAND
"""
import csv
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

import numpy as np

import pngs

SCOPE = sys.argv[1]


def scope(*arguments):
    return subprocess.run([SCOPE, "evaluate", *arguments], capture_output=True, text=True)


def ssim(a, b):
    """Two-dimensional 11 x 11 windows inside the frame; mean over R, G and B."""
    x = np.arange(11) - 5
    weights = np.exp(-(x[:, None] ** 2 + x[None] ** 2) / (2 * 1.5**2))
    weights /= weights.sum()

    def mean(plane):
        return np.einsum("yxij,ij->yx", np.lib.stride_tricks.sliding_window_view(plane, (11, 11)), weights)

    values = []
    for c in range(3):
        p, q = a[..., c] / 255, b[..., c] / 255
        mp, mq = mean(p), mean(q)
        vp, vq, cov = mean(p * p) - mp**2, mean(q * q) - mq**2, mean(p * q) - mp * mq
        values.append(((2 * mp * mq + 1e-4) * (2 * cov + 9e-4) / ((mp**2 + mq**2 + 1e-4) * (vp + vq + 9e-4))).mean())
    return np.mean(values)


def clip(name, frames, first=0):
    os.makedirs(f"{folder}/{name}")
    for i, frame in enumerate(frames):
        pngs.write(f"{folder}/{name}/frame_{first + i:03d}.png", frame)
    return f"{folder}/{name}"


def refuse(words, *arguments):
    result = scope(*arguments)
    assert result.returncode == 3, f"{arguments}: exit {result.returncode}: {result.stdout}{result.stderr}"
    for word in words:
        assert word in result.stderr, f"{arguments}: nothing about {word!r} in: {result.stderr}"


with tempfile.TemporaryDirectory() as folder:
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:24, :40]
    frames = [np.stack([128 + 90 * np.sin(0.3 * x + t + c) * np.cos(0.2 * y) for c in range(3)], -1) for t in range(5)]
    noisy = [np.clip(f + rng.normal(0, 2 + 8 * t, f.shape), 0, 255) for t, f in enumerate(frames)]
    frames, noisy = ([f.astype(np.uint8) for f in fs] for fs in (frames, noisy))
    noisy[2] = frames[2]
    # 998 to 1002: the order is that of the numbers.
    a, b = clip("a", frames, 998), clip("b", noisy, 998)
    run = scope(a, b, "--json", f"{folder}/q.json", "--csv", f"{folder}/q.csv", "--plot", f"{folder}/q.svg")
    assert run.returncode == 0 and "5 frames of 40 x 24" in run.stdout and "1 frames are equal" in run.stdout, run
    got, table = json.load(open(f"{folder}/q.json")), list(csv.DictReader(open(f"{folder}/q.csv")))
    mse = [((f.astype(np.float64) - n) ** 2).mean() / 255**2 for f, n in zip(frames, noisy)]
    for i in range(5):
        frame, line = got["frames"][i], table[i]
        assert abs(frame["mse"] - mse[i]) < 1e-12 and abs(frame["ssim"] - ssim(frames[i], noisy[i])) < 1e-10, (i, frame)
        assert frame["psnr"] is None if i == 2 else abs(frame["psnr"] + 10 * np.log10(mse[i])) < 1e-9
        assert int(line["frame"]) == i and abs(float(line["ssim"]) - frame["ssim"]) < 1e-7
        assert line["psnr"] == "inf" if i == 2 else abs(float(line["psnr"]) - frame["psnr"]) < 1e-5
    assert got["psnr"] is None and abs(got["pooled_psnr"] + 10 * np.log10(np.mean(mse))) < 1e-9
    assert abs(got["ssim"] - np.mean([f["ssim"] for f in got["frames"]])) < 1e-12
    assert got["equal_frames"] == 1 and got["worst_frame"] == 4 and got["size"] == [40, 24]
    line = xml.etree.ElementTree.parse(f"{folder}/q.svg").find("{http://www.w3.org/2000/svg}polyline")
    assert len(line.get("points").split()) == 4
    assert scope(a, b, "--threads", "1").stdout == run.stdout
    # Without the equal frame both averages are finite, and differ.
    c, d = clip("c", frames[3:]), clip("d", noisy[3:])
    assert scope(c, d, "--json", f"{folder}/q.json").returncode == 0
    got = json.load(open(f"{folder}/q.json"))
    assert abs(got["psnr"] - np.mean([-10 * np.log10(m) for m in mse[3:]])) < 1e-9 and got["psnr"] > got["pooled_psnr"] + 0.01

    # Skipping it too; its numbers stay in the list.
    assert scope(a, b, "--skip", "3", "--json", f"{folder}/q.json").returncode == 0
    skipped = json.load(open(f"{folder}/q.json"))
    assert abs(skipped["psnr"] - got["psnr"]) < 1e-12 and skipped["skip"] == 3 and len(skipped["frames"]) == 5
    assert scope(a, b, "--skip", "5").returncode == 2

    refuse(["5", "2 frames"], a, c)
    refuse(["20 x 24", "40 x 24", "frame_001.png"], c, clip("odd", [frames[0], frames[1][:, :20]]))
    refuse(["10 x 10", "11 x 11"], clip("s", [frames[0][:10, :10]]), clip("t", [frames[1][:10, :10]]))
    refuse(["nowhere"], a, f"{folder}/nowhere")
    os.makedirs(f"{folder}/empty")
    refuse(["empty", ".png"], a, f"{folder}/empty")
    path = clip("broken", noisy[3:])
    with open(f"{path}/frame_001.png", "r+b") as file:
        file.truncate(200)
    refuse(["frame_001.png", "cut short"], c, path)
    path = clip("no_json", noisy[3:])
    open(f"{path}/run.json", "w").write("[1,")
    refuse(["run.json"], c, path)
print("evaluate: PSNR and SSIM agree with numpy")
