#!/usr/bin/env python3
"""What a script can check of our Markdown: check_prose.py REPOSITORY [SCOPE-COMMAND]

Lines and table cells that a reader can take in at once, links and anchors that lead somewhere, pages that say whom they are for,
terms that the glossary defines, and commands in examples that exist with the options they are given.
"""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(sys.argv[1]).resolve()
LINE, CELL, README_LINES = 120, 200, 160
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "integrations").rglob("*.md"),
                *(ROOT / "models").rglob("*.md"), *ROOT.glob(".github/**/*.md"), ROOT / "tests" / "data" / "README.md"])
SHELVES = ("guide", "reference", "notebook")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
wrong = []


def name(page):
    return page.relative_to(ROOT).as_posix()


def say(page, number, text):
    wrong.append(f"{name(page)}:{number}: {text}")


def lines_of(page):
    """(number, line, is code) of a page. Code is fenced, or indented after an empty line or other code."""
    fenced, before, inside = False, "", False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = line.lstrip().startswith("```")
        inside = not fenced and line.startswith("    ") and (inside or not before.strip())
        yield number, line, fenced or fence or inside
        fenced = fenced != fence
        before = line


def anchors(page):
    """What #… may name: headings as GitHub writes them, and ids set by hand."""
    found, counts = set(re.findall(r'(?:id|name)="([^"]+)"', page.read_text(encoding="utf-8"))), {}
    for _, line, code in lines_of(page):
        if code or not re.match(r"#{1,6} ", line):
            continue
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line.lstrip("#").strip()).lower()
        slug = re.sub(r"[^\w\- ]", "", heading.replace("`", "")).replace(" ", "-")
        count = counts.get(slug, 0)
        counts[slug] = count + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found


def check_shape(page):
    for number, line, code in lines_of(page):
        if code:
            continue
        if line.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line):
                if len(cell.strip()) > CELL:
                    say(page, number, f"a cell of {len(cell.strip())} characters, at most {CELL}: {cell.strip()[:40]}…")
        elif len(LINK.sub("", line)) > LINE:  # a link's address cannot be broken
            say(page, number, f"{len(line)} columns, at most {LINE}: {line[:40]}…")


def check_links(page):
    for number, line, code in lines_of(page):
        for target in () if code else LINK.findall(line):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists():
                say(page, number, f"{target} leads nowhere")
            elif anchor and file.suffix == ".md" and anchor not in anchors(file):
                say(page, number, f"{name(file)} has no heading #{anchor}")


def check_opening(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    if not lines or not lines[0].startswith("# "):
        say(page, 1, "expected a title, # …")
    elif page.parent.name in SHELVES and not (len(lines) > 2 and lines[1] == "" and re.match(r"[A-Z`*\[]", lines[2])):
        say(page, 3, "expected a sentence that says whom the page is for, and what they can do with it")


def check_terms():
    """Guides use the glossary's words in its meaning: each that uses one leads to it."""
    glossary = ROOT / "docs" / "guide" / "glossary.md"
    terms = re.findall(r"^\*\*([^*]+)\*\*", glossary.read_text(encoding="utf-8"), re.M)
    for term in terms:
        if terms.count(term) > 1:
            wrong.append(f"{name(glossary)}: {term} is defined {terms.count(term)} times")
    if terms != sorted(terms, key=str.lower):
        wrong.append(f"{name(glossary)}: the terms are not in the alphabet's order")
    hard = re.compile(r"\b(density|proxy|tail|codebooks?|receipt|known model|warm calls?|first calls?)\b")
    for page in sorted((ROOT / "docs" / "guide").glob("*.md")):
        text = "\n".join(line for _, line, code in lines_of(page) if not code)
        used = hard.search(text)
        if page != glossary and used and "glossary.md" not in text:
            say(page, 1, f'"{used[0]}" is used, and nothing leads to glossary.md')


def check_commands(command):
    """Examples: `scope` with its options, make's targets, modules and scripts."""
    help_of = {"": subprocess.run([command, "--help"], capture_output=True, text=True, check=True).stdout}
    subcommands = set(re.findall(r"^  ([a-z-]+) ", help_of[""], re.M))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        for number, line, code in lines_of(page):
            if not code or page.name == "CHANGELOG.md":
                continue
            line = line.split(" #")[0].rstrip("\\").strip()
            for call in re.findall(r"(?:^|/|; |&& )scope ([a-z][a-z-]*)((?: [^|;&]*)?)", line):
                if call[0] not in subcommands:
                    say(page, number, f"scope has no command {call[0]}")
                    continue
                if call[0] not in help_of:
                    help_of[call[0]] = subprocess.run([command, call[0], "--help"], capture_output=True, text=True, check=True).stdout
                for option in re.findall(r"(?<=\s)(--[a-z][a-z-]*)", " " + call[1]):
                    if not re.search(re.escape(option) + r"\b(?!-)", help_of[call[0]]):
                        say(page, number, f"scope {call[0]} has no {option}")
            for target in re.findall(r"(?:^|&& )make ([a-z-]+)", line):
                if target not in targets:
                    say(page, number, f"the Makefile has no {target}")
            for module in re.findall(r"python3? -m scope_attn\.([a-z_]+)", line):
                if not any((ROOT / "python" / "scope_attn" / f"{module}{end}").exists() for end in (".py", "/__main__.py")):
                    say(page, number, f"scope_attn has no module {module}")
            for script in re.findall(r"(?:^|\s)((?:tools|bench|tests)/[\w/]+\.(?:py|sh))", line):
                if not (ROOT / script).exists():
                    say(page, number, f"there is no {script}")


for page in PAGES:
    check_shape(page)
    check_links(page)
    check_opening(page)
readme = len((ROOT / "README.md").read_text(encoding="utf-8").splitlines())
if readme > README_LINES:
    wrong.append(f"README.md: {readme} lines, at most {README_LINES}")
check_terms()
if len(sys.argv) > 2:
    check_commands(sys.argv[2])
print("\n".join(wrong) or f"{len(PAGES)} pages are as they should be")
sys.exit(1 if wrong else 0)
