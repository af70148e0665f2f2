"""The page of `scope report`: whole, lossless, fetching nothing; where there is Chromium, also that it works in a browser."""
import base64
import html
import json
import os
import re
import subprocess
import types

import numpy as np
import pytest

import pngs

COUNT, HEIGHT, WIDTH = 5, 14, 20
NASTY = "</script><b>"  # a name that would end the script
LAYERS, HEADS = [f"layer {i}" for i in range(3)], [f"{i}.{j}" for i in range(3) for j in range(2)]


def clip(folder, frames, run=None):
    pngs.clip(folder, frames)
    if run is not None:
        (folder / "run.json").write_text(json.dumps(run))
    return folder


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


def expect_in_browser(page, frames, sections, maps=()):
    """The page tries itself under #selftest: what its canvases show must be the frames."""
    browser = os.environ.get("SCOPE_CHROMIUM") or pytest.skip("SCOPE_CHROMIUM names no browser")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--window-size=1240,900",
               f"--user-data-dir={page.parent}/profile", "--dump-dom", f"file://{page}#selftest"]
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


@pytest.fixture(scope="module")
def frames():
    """Of three clips: dense, near, far."""
    rng = np.random.default_rng(1)
    dense = [rng.integers(0, 256, (HEIGHT, WIDTH, 3)).astype(np.uint8) for _ in range(COUNT)]
    near = [np.clip(f.astype(int) + rng.integers(-9, 10, f.shape), 0, 255).astype(np.uint8) for f in dense]
    near[1] = dense[1]  # an equal frame: its PSNR is infinite
    far = [np.clip(f.astype(int) + rng.integers(-60, 61, f.shape), 0, 255).astype(np.uint8) for f in dense]
    return dense, near, far


@pytest.fixture(scope="module")
def report(scope, frames, tmp_path_factory):
    """A page of the three clips: its path, its text, the data in it, and what the command said."""
    folder = tmp_path_factory.mktemp("t")
    dense, near, far = frames
    clips = [f"Dense={clip(folder / 'd', dense, run_json('dense', 1))}", f"{NASTY}={clip(folder / 'n', near, run_json('scope', 0.2))}",
             clip(folder / "far", far)]
    qkv, page = folder / "qkv.safetensors", folder / "page.html"
    scope.accept("make-qkv", "--grid", "5x7x10", "--rope", "16,8,8", "-o", qkv)
    said = scope.accept("report", *clips, "--qkv", qkv, "--skip", 2, "--title", "A & B", "-o", page)
    text = page.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return types.SimpleNamespace(folder=folder, page=page, qkv=qkv, text=text, data=json.loads(found.group(1)), said=said)


def test_the_page_fetches_nothing(report):
    """No address but that of the SVG namespace, no element that loads, and a policy that forbids it."""
    assert set(re.findall(r"https?://[^\"' ]+", report.text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<link|<iframe|@import|url\(", report.text) and "default-src 'none'" in report.text


def test_frames_are_lossless(report, frames):
    data = report.data
    assert data["title"] == "A & B" and [run["name"] for run in data["runs"]] == ["Dense", NASTY, "far"]
    assert (data["frames"], data["height"], data["width"], data["skip"]) == (COUNT, HEIGHT, WIDTH, 2)
    for run, clip_frames in zip(data["runs"], frames):
        sheet = pngs.read(base64.b64decode(run["sheets"][0].split(",")[1]))
        for i, frame in enumerate(clip_frames):
            y, x = i // data["columns"] * HEIGHT, i % data["columns"] * WIDTH
            assert np.array_equal(sheet[y:y + HEIGHT, x:x + WIDTH], frame), "a frame is not what it was"


def test_figures_are_those_of_the_runs(report, frames):
    runs = report.data["runs"]
    assert runs[0]["quality"] is None and runs[1]["quality"]["frames"][1]["psnr"] is None
    mse = [((a.astype(float) - b) ** 2).mean() / 255**2 for a, b in zip(frames[0], frames[2])]
    assert abs(runs[2]["quality"]["psnr"] - np.mean([-10 * np.log10(m) for m in mse[2:]])) < 1e-9
    # The printed table: 6 of 12 calls ran sparse, in 0.12 s each, which took 0.3 s densely.
    table = [line.split() for line in report.said.splitlines()[2:5]]
    near, unknown = ([f"{run['quality']['psnr']:.2f}", "dB", f"{run['quality']['ssim']:.4f}"] for run in runs[1:])
    assert table == [["Dense", "1.000", "17.0", "s"], [NASTY, "0.200", *near, "8.5", "s", "2.00x", "0.7", "s", "2.50x"],
                     ["far", *unknown]], report.said
    # Sparse calls alone: layers 1 and 2 of steps 1 to 3.
    assert runs[0]["density"] == 1 and abs(runs[1]["density"] - 0.215) < 1e-12 and runs[2]["density"] is None
    assert [len(row["images"]) for row in report.data["clusters"][0]["rows"]] == [5, 5, 5]


def test_the_page_works_in_a_browser(report, frames):
    sections = ["Clips", "PSNR by frame", "Where the time went", "Density and k_head", "Clusters of the keys", "Settings"]
    expect_in_browser(report.page, frames, sections, [(f"{NASTY}: density", LAYERS), (f"{NASTY}: k_head", HEADS)])


def test_heads_that_differ_have_a_row_each_in_a_browser(scope, frames, tmp_path):
    """Those that do not share the row of their layer."""
    together, unlike = (clip(tmp_path / name, frames[i], run_json("scope", 0.2, apart))
                        for name, i, apart in (("together", 1, 0.002), ("unlike", 2, 0.1)))
    scope.accept("report", together, unlike, "-o", tmp_path / "page.html")
    expect_in_browser(tmp_path / "page.html", frames[1:],
                      ["Clips", "PSNR by frame", "Where the time went", "Density and k_head", "Settings"],
                      [("together: density", LAYERS), ("together: k_head", HEADS), ("unlike: density", HEADS), ("unlike: k_head", HEADS)])


@pytest.fixture(scope="module")
def large(scope, tmp_path_factory):
    """Frames that need two sheets of 4096 x 4096, and their page."""
    folder = tmp_path_factory.mktemp("t")
    images = [np.full((1300, 1100, 3), (10 * i, 100, 200 - i), np.uint8) for i in range(14)]
    scope.accept("report", clip(folder / "large", images), "-o", folder / "page.html")
    return images, folder / "page.html"


def test_many_frames_take_several_sheets(large):
    """Three rows of three on each."""
    data = json.loads(re.search(r'id="data">(.*?)</script>', large[1].read_text(encoding="utf-8"), re.S).group(1))
    assert (data["columns"], data["per_sheet"], len(data["runs"][0]["sheets"])) == (3, 9, 2)


def test_several_sheets_work_in_a_browser(large):
    expect_in_browser(large[1], large[:1], ["Clips"])


def test_clips_that_do_not_fit_are_refused(scope, report, frames, tmp_path):
    first, page = report.folder / "d", tmp_path / "never.html"
    scope.refuse(3, ["2 frames", "has 5"], "report", first, clip(tmp_path / "short", frames[0][:2]), "-o", page)
    scope.refuse(3, ["10 x 14", "20 x 14"], "report", first, clip(tmp_path / "narrow", [f[:, :10] for f in frames[0]]), "-o", page)
    scope.refuse(3, "nowhere", "report", first, tmp_path / "nowhere", "-o", page)
    scope.refuse(2, ["--skip", "got 5"], "report", first, report.folder / "n", "--skip", 5, "-o", page)
    scope.refuse(2, ["--head", "0..1"], "report", first, "--qkv", report.qkv, "--head", 2, "-o", page)


@pytest.mark.parametrize("change,part", (
    ({"seconds": {"total": 1}}, "dense_prefix"), ({"layers": [[{"density": 1}]]}, "layer"), ({"layers": [[], []]}, "step"),
    ({"grid": "5x7x10"}, "grid"),
    ({"layers": [[{"density": 1, "dense": False, "k_head": [1, 2], "head_density": [0.1]}]]}, "head_density")))
def test_a_run_json_that_is_wrong_is_refused(scope, report, frames, tmp_path, change, part):
    second = clip(tmp_path / "wrong", frames[0], run_json("scope", 0.2) | change)
    scope.refuse(3, ["run.json", part], "report", report.folder / "d", second, "-o", tmp_path / "never.html")
