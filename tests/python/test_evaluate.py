"""`scope evaluate` against PSNR and SSIM in numpy float64, and clips that cannot be compared."""
import csv
import json
import xml.etree.ElementTree

import numpy as np
import pytest

import pngs


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


@pytest.fixture(scope="module")
def frames():
    y, x = np.mgrid[:24, :40]
    return [np.stack([128 + 90 * np.sin(0.3 * x + t + c) * np.cos(0.2 * y) for c in range(3)], -1).astype(np.uint8) for t in range(5)]


@pytest.fixture(scope="module")
def noisy(frames):
    """Ever noisier, but for the frame in the middle, which is equal."""
    rng = np.random.default_rng(0)
    noise = [rng.normal(0, 2 + 8 * t, frame.shape) for t, frame in enumerate(frames)]
    return [frame if t == 2 else np.clip(frame + noise[t], 0, 255).astype(np.uint8) for t, frame in enumerate(frames)]


@pytest.fixture(scope="module")
def mse(frames, noisy):
    return [((f.astype(np.float64) - n) ** 2).mean() / 255**2 for f, n in zip(frames, noisy)]


@pytest.fixture(scope="module")
def clips(frames, noisy, tmp_path_factory):
    """From 998 to 1002: the order is that of the numbers."""
    folder = tmp_path_factory.mktemp("t")
    return pngs.clip(folder / "a", frames, 998), pngs.clip(folder / "b", noisy, 998)


@pytest.fixture(scope="module")
def late(frames, noisy, tmp_path_factory):
    """The two clips without the equal frame and what comes before it."""
    folder = tmp_path_factory.mktemp("t")
    return pngs.clip(folder / "c", frames[3:]), pngs.clip(folder / "d", noisy[3:])


def test_figures_are_those_of_numpy(scope, clips, frames, noisy, mse, tmp_path):
    files = [tmp_path / f"q.{kind}" for kind in ("json", "csv", "svg")]
    said = scope.accept("evaluate", *clips, "--json", files[0], "--csv", files[1], "--plot", files[2])
    assert "5 frames of 40 x 24" in said and "1 frames are equal" in said, said
    got, table = json.load(open(files[0])), list(csv.DictReader(open(files[1])))
    for i in range(5):
        frame, line = got["frames"][i], table[i]
        assert abs(frame["mse"] - mse[i]) < 1e-12 and abs(frame["ssim"] - ssim(frames[i], noisy[i])) < 1e-10, (i, frame)
        assert frame["psnr"] is None if i == 2 else abs(frame["psnr"] + 10 * np.log10(mse[i])) < 1e-9
        assert int(line["frame"]) == i and abs(float(line["ssim"]) - frame["ssim"]) < 1e-7
        assert line["psnr"] == "inf" if i == 2 else abs(float(line["psnr"]) - frame["psnr"]) < 1e-5
    assert got["psnr"] is None and abs(got["pooled_psnr"] + 10 * np.log10(np.mean(mse))) < 1e-9
    assert abs(got["ssim"] - np.mean([f["ssim"] for f in got["frames"]])) < 1e-12
    assert got["equal_frames"] == 1 and got["worst_frame"] == 4 and got["size"] == [40, 24]
    line = xml.etree.ElementTree.parse(files[2]).find("{http://www.w3.org/2000/svg}polyline")
    assert len(line.get("points").split()) == 4
    assert scope.accept("evaluate", *clips, "--threads", 1) == said


def test_averages_are_over_frames_that_differ(scope, clips, late, mse, tmp_path):
    """Without the equal frame both averages are finite, and differ. A frame that is skipped stays in the list."""
    path = tmp_path / "q.json"
    scope.accept("evaluate", *late, "--json", path)
    got = json.load(open(path))
    assert abs(got["psnr"] - np.mean([-10 * np.log10(m) for m in mse[3:]])) < 1e-9 and got["psnr"] > got["pooled_psnr"] + 0.01
    scope.accept("evaluate", *clips, "--skip", 3, "--json", path)
    skipped = json.load(open(path))
    assert abs(skipped["psnr"] - got["psnr"]) < 1e-12 and skipped["skip"] == 3 and len(skipped["frames"]) == 5
    scope.refuse(2, "--skip", "evaluate", *clips, "--skip", 5)


def test_clips_that_do_not_fit_are_refused(scope, clips, late, frames, tmp_path):
    (a, _), (c, _) = clips, late
    clip = lambda name, images: pngs.clip(tmp_path / name, images)
    scope.refuse(3, ["5", "2 frames"], "evaluate", a, c)
    scope.refuse(3, ["20 x 24", "40 x 24", "frame_001.png"], "evaluate", c, clip("odd", [frames[0], frames[1][:, :20]]))
    scope.refuse(3, ["10 x 10", "11 x 11"], "evaluate", clip("s", [frames[0][:10, :10]]), clip("t", [frames[1][:10, :10]]))


def test_what_is_no_clip_is_refused(scope, clips, late, noisy, tmp_path):
    (a, _), (c, _) = clips, late
    scope.refuse(3, "nowhere", "evaluate", a, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    scope.refuse(3, ["empty", ".png"], "evaluate", a, tmp_path / "empty")
    broken = pngs.clip(tmp_path / "broken", noisy[3:])
    with open(broken / "frame_001.png", "r+b") as file:
        file.truncate(200)
    scope.refuse(3, ["frame_001.png", "cut short"], "evaluate", c, broken)
    no_json = pngs.clip(tmp_path / "no_json", noisy[3:])
    (no_json / "run.json").write_text("[1,")
    scope.refuse(3, "run.json", "evaluate", c, no_json)
