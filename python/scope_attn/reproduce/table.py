"""The paper's table: a line of ours for each method, and the paper's own under it."""
from __future__ import annotations

import statistics
from typing import Any, Optional

from .._compare import markdown
from .results import Results
from .settings import COLUMNS, DIMENSIONS, LPIPSES, PAPER_COLUMNS, PAPER_METHODS, SETTINGS, SSIMS, Method

HEADINGS = dict(psnr="PSNR", ssim="SSIM", ssim_box="SSIM box", lpips_alex="LPIPS Alex", lpips_vgg="LPIPS VGG", lpips_svg2="LPIPS SVG2",
                imaging_quality="ImageQual", aesthetic_quality="AesQual", subject_consistency="SubConsist",
                background_consistency="BackConsist", seconds="seconds", speedup="speedup", density="density", videos="videos")
FORMATS = dict(psnr="{:.2f}", seconds="{:.4g}", speedup="{:.2f}×", density="{:.3f}", videos="{}", **dict.fromkeys(SSIMS, "{:.3f}"),
               **dict.fromkeys(LPIPSES, "{:.4f}"), **dict.fromkeys(DIMENSIONS, "{:.2%}"))


def rows(results: Results, methods: list[Method], clips: int, setting: str) -> list[dict[str, Any]]:
    """What is there of each method. None: not measured; "equal": PSNR of videos that are."""
    def mean(values) -> Optional[float]:
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if known else None

    found = []
    for method in methods:
        runs = [results.read(results.video(method.label, i) / "run.json") for i in range(clips)]
        runs = [run for run in runs if run]
        measured = [results.read(results.measured(method.label, i)) for i in range(clips)]
        measured = [each for each in measured if each]
        row: dict[str, Any] = dict(method=method.label, videos=len(runs), machines=sorted({run["machine"] for run in runs}),
                                   density=mean(run.get("density") for run in runs),
                                   seconds=statistics.median(run["seconds"] for run in runs) if runs else None)
        for name in ("psnr", *SSIMS, *LPIPSES):
            values = [each[name] for each in measured if name in each]
            row[name] = "equal" if values and None in values else mean(values)
        row.update({name: results.read(results.vbench(method.label)).get(name) for name in DIMENSIONS})
        found.append(row)
    dense = next(row["seconds"] for row in found if row["method"] == "dense")
    for row in found:
        row["speedup"] = dense / row["seconds"] if dense and row["seconds"] else None
        paper = SETTINGS[setting].paper.get(row["method"])
        row["paper"] = dict(zip(PAPER_COLUMNS, paper)) if paper else None
    return found


def notes(results: Results, methods: list[Method], clips: int, packages: dict[str, Any]) -> list[str]:
    """What is missing in the table, and how to have it."""
    said = [f"{what}: pip install {package}, here or where --metrics-python points, and run this again."
            for package, what in (("lpips", "LPIPS"), ("vbench", "ImageQual, AesQual, SubConsist, BackConsist")) if not packages[package]]
    bare = [method.label for method in methods if not all((results.video(method.label, i) / "clip.mp4").exists() for i in range(clips))]
    if packages["vbench"] and bare:
        said.append(f"ImageQual, AesQual, SubConsist, BackConsist of {', '.join(bare)}: VBench reads clip.mp4, which "
                    f"ffmpeg did not make of every "
                    "video: install ffmpeg, remove the folders of those videos, and run this again.")
    left_out = [note for method in methods for note in results.read(results.left_out(method.label)) or []]
    return said + list(dict.fromkeys(left_out))


def text(found: list[dict[str, Any]], title: str, skip: int, notes: list[str]) -> str:
    """As Markdown, aligned."""
    names = [*COLUMNS, "density", "videos"]

    def cell(name: str, value: Any) -> str:
        return "–" if value is None else value if isinstance(value, str) else FORMATS[name].format(value)

    def paper(row: dict[str, Any], name: str) -> Any:
        return row["paper"].get("ssim" if name in SSIMS else "lpips" if name in LPIPSES else name)

    lines = [["", *(HEADINGS[name] for name in names)]]
    for row in found:
        lines.append([row["method"], *(cell(name, row[name]) for name in names)])
        if row["paper"]:
            lines.append([f"  the paper's {PAPER_METHODS[row['method']]}", *(cell(name, paper(row, name)) for name in names)])
    about = ["PSNR (dB), SSIM and LPIPS are against our dense videos of the same prompts and seeds" +
             (", without frame 0, which is given" if skip else "") + "; seconds: a whole call of the pipeline, in the median; the paper's "
             "lines are its Tables 1 and 2, on NVIDIA H200s. It does not say which SSIM and LPIPS it has, so its figure stands under each."]
    controls = [row["method"] for row in found if row["method"].startswith("dense:")]
    if controls:
        about.append(f"{controls[0]} is the control: the dense video by another dense kernel. Its PSNR, SSIM and LPIPS are what rounding "
                     "alone does.")
    return "\n".join([f"### {title}", "", markdown(lines), "", *about, *notes]) + "\n"
