"""The page of `scope report`: whole, lossless, fetching nothing; with a path to Chromium, also that it works in a browser.

    check_report.py SCOPE-COMMAND [CHROMIUM]
"""
import base64
import html
import json
import os
import re
import subprocess
import sys
import tempfile

import numpy as np

import pngs

SCOPE = sys.argv[1]
BROWSER = sys.argv[2] if len(sys.argv) > 2 else None
COUNT, HEIGHT, WIDTH = 5, 14, 20


def scope(*arguments):
    return subprocess.run([SCOPE, *arguments], capture_output=True, text=True)


def clip(name, frames, run=None):
    os.makedirs(f"{folder}/{name}")
    for i, frame in enumerate(frames):
        pngs.write(f"{folder}/{name}/frame_{i:03d}.png", frame)
    if run is not None:
        json.dump(run, open(f"{folder}/{name}/run.json", "w"))
    return f"{folder}/{name}"


def run_json(method, density, apart=None):
    """apart: how far the densities of the two heads are from their mean; None: they are not in the file."""
    def layer(step, index):
        dense = method == "dense" or step == 0 or index == 0
        mean = 1.0 if dense else density + 0.01 * index
        heads = {} if apart is None else {"head_density": [1, 1] if dense else [mean - apart, mean + apart]}
        return {"density": mean, "k_head": [0, 0] if dense else [40 + step, 50 + index], "dense": dense,
                "attention_seconds": 0.3 if method == "dense" else 0.1, "selection_seconds": 0 if dense else 0.02} | heads

    return {"model": "m", "method": method,
            "settings": {"rho": "0.9", "groups": "auto" if method == "dense" else "30", "seed": "3"}, "grid": [5, 7, 10],
            "steps": 4, "seed": 7, "density": density,
            "seconds": {"total": 17 if method == "dense" else 8.5, "dense_prefix": 12.5 if method == "dense" else 4, "sparse_attention": 2,
                        "selection": 1, "rest": 1.5},
            "layers": [[layer(step, index) for index in range(3)] for step in range(4)]}


def refuse(code, words, *arguments):
    page = f"{folder}/never.html"
    result = scope("report", *arguments, "-o", page)
    assert result.returncode == code, f"{arguments}: exit {result.returncode}, expected {code}: {result.stdout}{result.stderr}"
    for word in words:
        assert word in result.stderr, f"{arguments}: nothing about {word!r} in: {result.stderr}"
    assert not os.path.exists(page)


def check_browser(page, frames, sections, maps=()):
    """The page tries itself under #selftest: what its canvases show must be the frames."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--window-size=1240,900",
               f"--user-data-dir={folder}/profile", "--dump-dom", f"file://{page}#selftest"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    found = re.search(r'<pre id="selftest"[^>]*>(.*?)</pre>', dom)
    assert found, f"the page did not try itself: {dom[-2000:]}"
    result = json.loads(html.unescape(found.group(1)))
    assert "error" not in result, result
    assert result["fetched"] == [] and result["runs"] == len(frames) and not result["wide"], result
    assert result["sections"] == sections, result
    assert result["maps"] == [list(each) for each in maps], result["maps"]
    count = len(frames[0])

    def corner(image):
        return [x for pixel in image[0, :3] for x in (*map(int, pixel), 255)]

    for seen, frame in zip(result["frames"], (0, count - 1), strict=True):
        assert seen["frame"] == frame and seen["counter"] == f"frame {frame} of {count - 1}"
        assert seen["first"] == [corner(clip_frames[frame]) for clip_frames in frames], seen
    assert all(a != b for a, b in zip(result["frames"][0]["sums"], result["frames"][1]["sums"])), "the slider moved nothing"
    last = [clip_frames[-1].astype(int) for clip_frames in frames]
    differences = [last[0], *(np.minimum(255, 4 * abs(other - last[0])) for other in last[1:])]
    assert result["difference"] == [corner(image) for image in differences], result["difference"]
    assert result["restored"] == result["frames"][1]["sums"] and result["played"] != count - 1, result


with tempfile.TemporaryDirectory() as folder:
    rng = np.random.default_rng(1)
    dense = [rng.integers(0, 256, (HEIGHT, WIDTH, 3)).astype(np.uint8) for _ in range(COUNT)]
    near = [np.clip(f.astype(int) + rng.integers(-9, 10, f.shape), 0, 255).astype(np.uint8) for f in dense]
    near[1] = dense[1]  # an equal frame: its PSNR is infinite
    far = [np.clip(f.astype(int) + rng.integers(-60, 61, f.shape), 0, 255).astype(np.uint8) for f in dense]
    nasty = "</script><b>"  # a name that would end the script
    clips = [f"Dense={clip('d', dense, run_json('dense', 1))}", f"{nasty}={clip('n', near, run_json('scope', 0.2))}", clip("far", far)]
    layers, heads = [f"layer {i}" for i in range(3)], [f"{i}.{j}" for i in range(3) for j in range(2)]
    qkv, page = f"{folder}/qkv.safetensors", f"{folder}/page.html"
    assert scope("make-qkv", "--grid", "5x7x10", "--rope", "16,8,8", "-o", qkv).returncode == 0
    result = scope("report", *clips, "--qkv", qkv, "--skip", "2", "--title", "A & B", "-o", page)
    assert result.returncode == 0, result.stderr
    text = open(page).read()
    # Nothing to fetch: no address but that of the SVG namespace, no element that loads, and a policy that forbids it.
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<link|<iframe|@import|url\(", text) and "default-src 'none'" in text
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    data = json.loads(found.group(1))
    assert data["title"] == "A & B" and [run["name"] for run in data["runs"]] == ["Dense", nasty, "far"]
    assert (data["frames"], data["height"], data["width"], data["skip"]) == (COUNT, HEIGHT, WIDTH, 2)
    for run, frames in zip(data["runs"], (dense, near, far)):
        sheet = pngs.read(base64.b64decode(run["sheets"][0].split(",")[1]))
        for i, frame in enumerate(frames):
            y, x = i // data["columns"] * HEIGHT, i % data["columns"] * WIDTH
            assert np.array_equal(sheet[y:y + HEIGHT, x:x + WIDTH], frame), "a frame is not what it was"
    assert data["runs"][0]["quality"] is None and data["runs"][1]["quality"]["frames"][1]["psnr"] is None
    mse = [((a.astype(float) - b) ** 2).mean() / 255**2 for a, b in zip(dense, far)]
    assert abs(data["runs"][2]["quality"]["psnr"] - np.mean([-10 * np.log10(m) for m in mse[2:]])) < 1e-9
    # The printed table: 6 of 12 calls ran sparse, in 0.12 s each, which took 0.3 s densely.
    table = [line.split() for line in result.stdout.splitlines()[2:5]]
    near_dense, unknown = ([f"{run['quality']['psnr']:.2f}", "dB", f"{run['quality']['ssim']:.4f}"] for run in data["runs"][1:])
    assert table == [["Dense", "1.000", "17.0", "s"], [nasty, "0.200", *near_dense, "8.5", "s", "2.00x", "0.7", "s", "2.50x"],
                     ["far", *unknown]], result.stdout
    # Sparse calls alone: layers 1 and 2 of steps 1 to 3.
    assert data["runs"][0]["density"] == 1 and abs(data["runs"][1]["density"] - 0.215) < 1e-12 and data["runs"][2]["density"] is None
    assert [len(row["images"]) for row in data["clusters"][0]["rows"]] == [5, 5, 5]
    if BROWSER:
        check_browser(page, (dense, near, far),
                      ["Clips", "PSNR by frame", "Where the time went", "Density and k_head", "Clusters of the keys", "Settings"],
                      [(f"{nasty}: density", layers), (f"{nasty}: k_head", heads)])

    # Heads that differ have a row each in the map of densities; heads that do not share their layer's.
    together, unlike = clip("together", near, run_json("scope", 0.2, 0.002)), clip("unlike", far, run_json("scope", 0.2, 0.1))
    assert scope("report", together, unlike, "-o", page).returncode == 0
    if BROWSER:
        check_browser(page, (near, far), ["Clips", "PSNR by frame", "Where the time went", "Density and k_head", "Settings"],
                      [("together: density", layers), ("together: k_head", heads), ("unlike: density", heads), ("unlike: k_head", heads)])

    # Frames that need two sheets of 4096 x 4096, three rows of three on each.
    large = [np.full((1300, 1100, 3), (10 * i, 100, 200 - i), np.uint8) for i in range(14)]
    assert scope("report", clip("large", large), "-o", page).returncode == 0
    data = json.loads(re.search(r'id="data">(.*?)</script>', open(page).read(), re.S).group(1))
    assert (data["columns"], data["per_sheet"], len(data["runs"][0]["sheets"])) == (3, 9, 2)
    if BROWSER:
        check_browser(page, (large,), ["Clips"])

    refuse(3, ["2 frames", "has 5"], f"{folder}/d", clip("short", dense[:2]))
    refuse(3, ["10 x 14", "20 x 14"], f"{folder}/d", clip("narrow", [f[:, :10] for f in dense]))
    refuse(3, ["nowhere"], f"{folder}/d", f"{folder}/nowhere")
    refuse(2, ["--skip", "got 5"], f"{folder}/d", f"{folder}/n", "--skip", "5")
    refuse(2, ["--head", "0..1"], f"{folder}/d", "--qkv", qkv, "--head", "2")
    for name, change, words in (("a", {"seconds": {"total": 1}}, ["run.json", "dense_prefix"]),
                                ("b", {"layers": [[{"density": 1}]]}, ["run.json", "layer"]),
                                ("c", {"layers": [[], []]}, ["run.json", "step"]), ("e", {"grid": "5x7x10"}, ["run.json", "grid"]),
                                ("f", {"layers": [[{"density": 1, "dense": False, "k_head": [1, 2],
                                                    "head_density": [0.1]}]]}, ["run.json", "head_density"])):
        refuse(3, words, f"{folder}/d", clip(name, dense, run_json("scope", 0.2) | change))
print("report: whole, lossless, nothing fetched" + ("; it works in a browser" if BROWSER else ""))
