#!/usr/bin/env python3
"""Compares two builds by tools/compare_builds.py and, if every bit is the same, records the pair in bench/results/same_bits.json.

    bench/same_bits.py OLD OLD-COMMIT NEW NEW-COMMIT [--backend cuda] [--quick]

OLD and NEW are scope commands. A chain of such pairs keeps tables of videos fresh (bench/staleness.py). --quick compares a few cases of
each group, and so records nothing.
"""
import argparse
import datetime
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILE = ROOT / "bench" / "results" / "same_bits.json"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name, text in (("old", "a scope command"), ("old_commit", "what it was built from"), ("new", "another"), ("new_commit", "likewise")):
    parser.add_argument(name, help=text)
parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
parser.add_argument("--quick", action="store_true", help="a few cases; nothing is recorded")
options = parser.parse_args()
compare = [sys.executable, str(ROOT / "tools" / "compare_builds.py"), options.old, options.new, "--backend", options.backend]
subprocess.run(compare + ["--quick"] * options.quick, check=True)
if options.quick:
    print("a few cases are the same; recorded is only what all are")
    sys.exit()
data = json.loads(FILE.read_text())
data["pairs"].append({"old": options.old_commit, "new": options.new_commit, "backend": options.backend,
                      "date": datetime.date.today().isoformat()})
FILE.write_text(json.dumps(data, indent=1) + "\n")
print(f"recorded in {FILE.relative_to(ROOT)}")
