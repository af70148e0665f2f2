"""The tables of fp8 linear layers that bench/report.py writes: figures from results, and "not measured" where there are none."""
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "bench"))
import real_scale
import video_report


def loader(**results):
    """load(name) of these results; others are not there."""
    def load(name):
        try:
            return results[name.removesuffix(".json")]
        except KeyError:
            raise FileNotFoundError(name) from None

    return load


def gate(seeds):
    rows = {"control": [60.0, None, 62.0], "dense, fp8": [40.0, 41.0, 42.0], "fast": [38.0, 38.0, 38.0], "fast, fp8": [36.0, 37.0, 38.0]}
    return dict(commit="c" * 40, machine=dict(gpu="a GPU", torch="2"), model="tiny-wan", grid=[1, 2, 3], compute="bf16", steps=20,
                shift=3.0, seeds=seeds, clips=seeds, clip_names=["0", "1", "2"][:seeds], fp8_layers=60, products="exact",
                rows=[dict(variant=name, psnr=psnr[:seeds], ssim=[0.5] * seeds) for name, psnr in rows.items()])


def passes(**seconds):
    """Cases by "linear_variant"."""
    cases = [dict(mode="compiled", linear=linear, variant=variant.replace("qk8", "fast:products=qk8"), run_s=run_s, peak_bytes=2**30)
             for name, run_s in seconds.items() for linear, variant in [name.split("_")]]
    return dict(commit="c" * 40, machine=dict(gpu="a GPU"), repeat=3, cases=cases)


def row(text, title):
    """The cells of a table's row."""
    found, = (line for line in text.splitlines() if line.startswith(f"| {title} |"))
    return [cell.strip() for cell in found.strip("|").split("|")][1:]


def test_videos():
    text = video_report.fp8(loader(fp8_tiny_wan=gate(3)))
    assert row(text, "`fast`") == ["not measured", "not measured", "38.00 (38.00 to 38.00)", "0.5000 (0.5000 to 0.5000)"]
    assert row(text, "control: dense, by our own kernel")[2] == "equal"
    # Three differences, -2, -1 and 0: 4.303 standard errors of 1 / sqrt(3) on both sides.
    assert row(text, "what fp8 layers take from `fast`, seed by seed")[2] == "-1.00 (-3.48 to +1.48)"
    assert "60 layers in fp8" in text and "`tiny-wan`, 1×2×3; 3 seeds of 3 held-out clips" in text
    assert row(video_report.fp8(loader(fp8_tiny_wan=gate(1))), "dense, fp8 linear layers")[2] == "40.00"
    assert set(row(video_report.fp8(loader()), "`fast`")) == {"not measured"}


def test_together():
    old = passes(bf16_dense=100.0, bf16_fast=50.0)
    for case in old["cases"]:
        del case["linear"]  # which results had not before there was a choice
    new = passes(bf16_dense=100.0, bf16_fast=40.0, bf16_qk8=32.0, torchao_dense=80.0, torchao_fast=25.0, torchao_qk8=20.0)
    text = real_scale.together(loader(h200_diffusers_wan=new, h200_diffusers_hunyuan=old, fp8_clips_wan=gate(3)))
    no = ["not measured"] * 3
    assert row(text, "compiled dense") == ["1.00", "1.00", "1.0", "1.00", "1.00", "1.0", "–", "–"]
    assert row(text, "dense, fp8 linear layers") == ["1.25", "1.00", "1.0", *no, "41.0", "not measured"]
    assert row(text, "`fast`") == ["2.50", "2.50", "1.0", "2.00", "2.00", "1.0", "38.0", "not measured"]
    assert row(text, "`fast`, fp8 linear layers") == ["4.00", "3.20", "1.0", *no, "37.0", "not measured"]
    assert row(text, "`fast`, `qk8`, fp8 linear layers") == ["5.00", "4.00", "1.0", *no, "not measured", "not measured"]
    assert "`bench/results/h200_diffusers_wan.json`" in text


@pytest.mark.parametrize("linear", ["fp8", "torchao"])
def test_either_fp8(linear):
    data = passes(bf16_dense=9.0, **{f"{linear}_dense": 6.0})
    assert real_scale.compiled_case(data, "dense")["run_s"] == 9 and real_scale.compiled_case(data, "dense", "fp8")["run_s"] == 6
