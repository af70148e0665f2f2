"""The table of python -m scope_attn.reproduce from a folder made by hand: rows, names, columns and notes; it needs no PyTorch."""
import re
from pathlib import Path

import pytest

pytest.importorskip("numpy")
pytest.importorskip("PIL")
from scope_attn.reproduce import table
from scope_attn.reproduce.results import Results, write_json
from scope_attn.reproduce.settings import DIMENSIONS, PAPER_COLUMNS, SETTINGS, Method, control

LABELS = "dense", "dense:other", "sparge", "svg2", "svoo", "scope-paper", "scope-mean"
METHODS = [control("other") if ":" in label else Method(label, label, {}, "one") for label in LABELS]


@pytest.fixture
def results(tmp_path):
    """Three prompts, of which scope-mean lacks the last; figures that tell methods, prompts and measures apart."""
    found = Results(tmp_path)
    for m, label in enumerate(LABELS):
        for i, seconds in enumerate((10, 30, 11)[:2 if label == "scope-mean" else 3]):
            sparse = not label.startswith("dense")
            found.video(label, i).mkdir(parents=True)
            write_json(found.video(label, i) / "run.json", dict(seconds=seconds / (1 + m), machine=f"GPU {i % 2}",
                                                              density=0.2 + 0.1 * i if sparse else None))
            if label != "dense":
                write_json(found.measured(label, i), dict(psnr=None if label == "dense:other" and i else 20 + m + i, ssim=0.5 + m / 100,
                                                          ssim_box=0.6 + m / 100, lpips_alex=0.1 + m / 100, lpips_vgg=0.2 + m / 100,
                                                          lpips_svg2=0.3 + m / 100))
        write_json(found.vbench(label), {name: 0.1 * d + m / 100 for d, name in enumerate(DIMENSIONS)})
    return found


def test_rows(results):
    rows = table.rows(results, METHODS, 3, "wan2.1-t2v")
    assert [row["method"] for row in rows] == list(LABELS) and [row["videos"] for row in rows] == [3] * 6 + [2]
    assert [row["seconds"] for row in rows] == pytest.approx([11 / (1 + m) for m in range(6)] + [20 / 7]), "medians"
    assert [row["speedup"] for row in rows] == pytest.approx([1 + m for m in range(6)] + [77 / 20]), "over dense attention"
    assert [row["density"] for row in rows] == [None, None] + [pytest.approx(0.3)] * 4 + [pytest.approx(0.25)]
    assert [row["psnr"] for row in rows] == [None, "equal", 23, 24, 25, 26, 26.5]
    assert [rows[5][name] for name in ("ssim", "ssim_box", "lpips_alex", "lpips_vgg", "lpips_svg2", *DIMENSIONS)] == pytest.approx(
        [0.55, 0.65, 0.15, 0.25, 0.35, 0.05, 0.15, 0.25, 0.35])
    assert rows[0]["machines"] == ["GPU 0", "GPU 1"]
    two = table.rows(results, METHODS, 2, "wan2.1-t2v")
    assert two[2]["psnr"] == 22.5 and two[2]["videos"] == 2, "of the prompts that were asked for alone"


def test_papers_rows(results):
    """Under each of ours the paper's row of the same method, by the paper's name; its one SSIM and LPIPS under each of ours."""
    rows = table.rows(results, METHODS, 3, "wan2.1-t2v")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.text(rows, "title", 0, []).splitlines()
             if line.startswith("|")]
    assert [line[0] for line in lines[2:]] == [
        "dense", "the paper's Full", "dense:other", "sparge", "the paper's SpargeAttn", "svg2", "the paper's SVG2", "svoo",
        "the paper's SVOO", "scope-paper", "the paper's Ours", "scope-mean"]
    theirs = {line[0]: dict(zip(lines[0], line)) for line in lines if line[0].startswith("the paper's")}
    assert [theirs[f"the paper's {name}"]["PSNR"] for name in ("Full", "SpargeAttn", "SVG2", "SVOO", "Ours")] == [
        "–", "23.86", "24.63", "25.71", "26.11"]
    assert theirs["the paper's Ours"] == {
        "": "the paper's Ours", "PSNR": "26.11", "SSIM": "0.844", "SSIM box": "0.844", "LPIPS Alex": "0.1004", "LPIPS VGG": "0.1004",
        "LPIPS SVG2": "0.1004", "ImageQual": "69.96%", "AesQual": "59.07%", "SubConsist": "95.93%", "BackConsist": "96.14%",
        "seconds": "1085", "speedup": "1.76×", "density": "–", "videos": "–"}
    ours = dict(zip(lines[0], lines[-3]))
    assert ours == {
        "": "scope-paper", "PSNR": "26.00", "SSIM": "0.550", "SSIM box": "0.650", "LPIPS Alex": "0.1500", "LPIPS VGG": "0.2500",
        "LPIPS SVG2": "0.3500", "ImageQual": "5.00%", "AesQual": "15.00%", "SubConsist": "25.00%", "BackConsist": "35.00%",
        "seconds": "1.833", "speedup": "6.00×", "density": "0.300", "videos": "3"}


def test_papers_figures():
    """Speedups are dense seconds over each row's own, as the paper rounds them; PAPER_COLUMNS name what stands where."""
    for setting in SETTINGS.values():
        assert list(setting.paper) == [label for label in LABELS if label not in ("dense:other", "scope-mean")]
        rows = [dict(zip(PAPER_COLUMNS, row)) for row in setting.paper.values()]
        for row in rows:
            assert row["speedup"] == pytest.approx(rows[0]["seconds"] / row["seconds"], abs=0.0101)
            assert all(0.5 < row[name] < 1 for name in DIMENSIONS)


def test_notes(results):
    """What the control is, that a given frame does not count, and what was left out, once."""
    rows = table.rows(results, METHODS, 3, "wan2.1-i2v")
    said = table.text(rows, "title", 1, ["a note"])
    assert "dense:other is the control: the dense video by another dense kernel" in said
    assert "without frame 0" in said and said.endswith("a note\n")
    said = table.text([row for row in rows if row["method"] != "dense:other"], "title", 0, [])
    assert "control" not in said and "without frame 0" not in said
    for label in ("dense", "svoo"):
        write_json(results.left_out(label), ["LPIPS is left out", f"of {label}"])
    assert table.notes(results, METHODS, 3, dict(lpips="0.1", vbench=None)) == [
        "ImageQual, AesQual, SubConsist, BackConsist: pip install vbench, here or where --metrics-python points, and run this again.",
        "LPIPS is left out", "of dense", "of svoo"]


def test_clips_that_were_not_made(results):
    """VBench's columns are empty where ffmpeg failed, and the note says whose."""
    for label in LABELS:
        for i in range(2):
            (results.video(label, i) / "clip.mp4").touch()
    packages = dict(lpips="0.1", vbench="0.1")
    assert table.notes(results, METHODS, 2, packages) == []
    (results.video("svoo", 1) / "clip.mp4").unlink()
    (note,) = table.notes(results, METHODS, 2, packages)
    assert "of svoo: VBench reads clip.mp4" in note


def test_settings_are_the_pages():
    """docs/guide/reproduce.md's table of the six settings."""
    page = (Path(__file__).parents[2] / "docs/guide/reproduce.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w.]+-[ti]2v)` \| (.*?) \|$", page, re.MULTILINE))
    assert list(rows) == list(SETTINGS)
    for name, setting in SETTINGS.items():
        guidance = dict.fromkeys(f"{value:g}" for value in setting.guidance.values())
        given = (setting.model, setting.frames, setting.steps, ", then ".join(guidance) + (", embedded" if setting.shift is None else ""),
                 "the pipeline's" if setting.shift is None else f"{setting.shift:g}")
        assert rows[name] == " | ".join(map(str, given)), name
