#!/usr/bin/env python3
"""Copies the Markdown of this repository into a folder from which MkDocs makes a site: site_source.py FOLDER

Links to files that are no pages (sources, tests) become plain text, since the site does not hold them.
"""
import pathlib
import re
import shutil
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def main(folder):
    shutil.rmtree(folder, ignore_errors=True)
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    images = [path for path in (ROOT / "docs" / "img").iterdir() if path.is_file()]
    logs = list((ROOT / "docs" / "notebook" / "logs").glob("*.txt"))
    there = {*pages, *images, *logs, ROOT / "LICENSE"}
    for page in pages:
        def link(match, page=page):
            path = match[2].partition("#")[0]
            if not path or re.match(r"[a-z]+:", path):
                return match[0]
            file = (page.parent / path).resolve()
            if file.is_dir() and any(other.is_relative_to(file) for other in pages):
                first = min(other for other in pages if other.is_relative_to(file))
                return f"[{match[1]}]({path.rstrip('/')}/{first.relative_to(file).as_posix()})"
            return match[0] if file in there else match[1]
        to = folder / page.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(LINK.sub(link, page.read_text(encoding="utf-8")), encoding="utf-8")
    for path in (*images, *logs, ROOT / "LICENSE"):
        to = folder / path.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, to)


if len(sys.argv) != 2:
    sys.exit(__doc__)
main(pathlib.Path(sys.argv[1]))
