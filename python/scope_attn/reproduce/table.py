"""The paper's table: a line of ours for each method, and the paper's own under it."""
from __future__ import annotations

import statistics
from typing import Any, Optional

from .quality import DIMENSIONS, installed
from .results import Results, ffmpeg
from .settings import COLUMNS, PAPER_METHODS, SETTINGS, Method

HEADINGS = dict(psnr="PSNR", ssim="SSIM", lpips="LPIPS", imaging_quality="ImageQual", aesthetic_quality="AesQual",
                subject_consistency="SubConsist", background_consistency="BackConsist",
                seconds="seconds", speedup="speedup", density="density", videos="videos")
FORMATS = dict(psnr="{:.2f}", ssim="{:.3f}", lpips="{:.4f}", seconds="{:.4g}", speedup="{:.2f}×", density="{:.3f}", videos="{}",
               **dict.fromkeys(DIMENSIONS, "{:.2%}"))


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
        for name in ("psnr", "ssim", "lpips"):
            values = [each[name] for each in measured if name in each]
            row[name] = "equal" if values and None in values else mean(values)
        row.update({name: results.read(results.vbench(method.label)).get(name) for name in DIMENSIONS})
        found.append(row)
    dense = next(row["seconds"] for row in found if row["method"] == "dense")
    for row in found:
        row["speedup"] = dense / row["seconds"] if dense and row["seconds"] else None
        paper = SETTINGS[setting].paper.get(row["method"])
        row["paper"] = dict(zip(COLUMNS, paper)) if paper else None
    return found


def text(found: list[dict[str, Any]], title: str, skip: int) -> str:
    """As Markdown, aligned."""
    names = [*COLUMNS, "density", "videos"]

    def cell(name: str, value: Any) -> str:
        return "–" if value is None else value if isinstance(value, str) else FORMATS[name].format(value)

    lines = [["", *(HEADINGS[name] for name in names)]]
    for row in found:
        lines.append([row["method"], *(cell(name, row[name]) for name in names)])
        if row["paper"]:
            lines.append([f"  the paper's {PAPER_METHODS[row['method']]}", *(cell(name, row["paper"].get(name)) for name in names)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    aligned = [[line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))] for line in lines]
    shown = [f"| {' | '.join(line)} |" for line in aligned]
    shown.insert(1, f"|{'-' * (widths[0] + 2)}|{'|'.join('-' * (width + 1) + ':' for width in widths[1:])}|")
    notes = ["PSNR (dB), SSIM and LPIPS are against our dense videos of the same prompts and seeds" +
             (", without frame 0, which is given" if skip else "") + "; seconds: a whole call of the pipeline, in the median; the paper's "
             "lines are its Tables 1 and 2, on NVIDIA H200s."]
    if not installed("lpips"):
        notes.append("LPIPS: pip install lpips, and run this again.")
    if not installed("vbench"):
        notes.append("ImageQual, AesQual, SubConsist, BackConsist: pip install vbench, and run this again.")
    elif not ffmpeg():
        notes.append("ImageQual, AesQual, SubConsist, BackConsist: VBench reads clip.mp4, and ffmpeg was not installed.")
    return "\n".join([f"### {title}", "", *shown, "", *notes]) + "\n"
