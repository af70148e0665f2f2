"""Which results no longer speak for this code, a line each with the reason; bench/report.py --check prints them.

- A timing on a GPU is stale if the machine code of its kernels changed: its "device_code" is compared with a CUDA build of this tree.
- A timing on a CPU, or on a GPU without hashes, is stale if the sources of its kernels changed since its commit.
- Videos are stale unless a chain leads from their commit to this one: equal sources, or pairs of results/same_bits.json, for which
  tools/compare_builds.py found the same bits (bench/same_bits.py writes them).
- Videos of bench/fp8_gate.py are stale too if its PyTorch code changed.
- Files with a "source" were written by hand, carry their date, and are never fresh or stale.
"""
import json
import os
import pathlib
import subprocess

import provenance

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
CODE = ("CMakeLists.txt", "include", "src", "cli", "models")  # what a video can depend on; tools/measure_gpu.sh has the same list
IN_PYTORCH = ("bench/fp8_linear.py", "python/scope_attn/hosts/session.py", "tools/tiny_video/net.py", "tools/tiny_video/sample.py")
CPU = ("src/cpu", ":!src/cpu/kernels_s8.cpp", ":!src/cpu/quantise.cpp")  # no timing on a CPU has 8-bit products
BESIDE = ("h200_means.json", "h200_python.json", "h200_steps_wan_fp8.json")  # cited by hand, and read by no table
ALSO = {"h200_python.json": ("python/scope_attn/_c_api.py", "python/scope_attn/_functions.py", "python/scope_attn/_plan.py",
                             "python/scope_attn/_torch.py")}  # sources whose time a result holds beside the kernels'


def git(*arguments):
    """What git prints, or None where it fails."""
    try:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def code_of(commit):
    """The sources of a commit, as names of git's objects; None: the commit is not in history."""
    return git("rev-parse", *(f"{commit}:{path}" for path in CODE))


def changed(commit, *paths):
    """A reason if these files, as they lie here, differ from those of the commit."""
    names = git("diff", "--name-only", commit or "none", "--", *paths)
    if names is None:
        return f"commit {commit[:10] or '(none)'} is not in history"
    names = names.splitlines()
    return f"{len(names)} of its sources changed since {commit[:10]}, {names[0]} among them" if names else None


def timing(name, data, built):
    """built: the hashes of a CUDA build of this tree, or a sentence why there are none."""
    on_gpu = name.startswith("h200")
    also = changed(data["commit"], *ALSO[name]) if name in ALSO else None
    if on_gpu and data.get("device_code"):
        if isinstance(built, str):
            return built
        other = [source for source, code in data["device_code"].items() if built.get(source) != code]
        return f"the device code of {', '.join(other)} is another" if other else also
    return changed(data["commit"], *(["src/cuda"] if on_gpu else CPU)) or also


def same_bits():
    path = RESULTS / "same_bits.json"
    return json.loads(path.read_text())["pairs"] if path.exists() else []


def videos(data):
    commit = data["commit"]
    here, start = code_of("HEAD"), code_of(commit)
    if start is None:
        return f"commit {commit[:10] or '(none)'} is not in history"
    backend = "cuda" if "gpu" in data["machine"] else "cpu"
    pairs = [(code_of(p["old"]), code_of(p["new"])) for p in same_bits() if p["backend"] == backend]
    reached = {start}
    while more := {new for old, new in pairs if old in reached} - reached:
        reached |= more
    if here not in reached:
        count = git("rev-list", "--count", f"{commit}..HEAD", "--", *CODE)
        return f"{count} commits changed code since {commit[:10]}, and no comparison of bits reaches this one"
    return changed("HEAD", *CODE) or (changed(commit, *IN_PYTORCH) if data.get("kind") == "fp8" else None)


def built_code():
    """Hashes of the CUDA build in build/cuda (SCOPE_CUDA_BUILD), or why they say nothing."""
    folder = pathlib.Path(os.environ.get("SCOPE_CUDA_BUILD", ROOT / "build" / "cuda"))
    programs = [path for path in (folder / "libscope.so", folder / "bin" / "scope") if path.exists()]
    if len(programs) < 2:
        return f"there is no CUDA build in {folder.name} to compare device code with"
    sources = [path for path in (ROOT / "src").rglob("*") if path.suffix in (".cu", ".cuh", ".h")]
    newest = max(sources, key=lambda path: path.stat().st_mtime)
    if newest.stat().st_mtime > min(path.stat().st_mtime for path in programs):
        return f"the CUDA build in {folder.name} is older than {newest.relative_to(ROOT)}"
    return {source: code for path in programs for source, code in provenance.device_code(path).items()}


def check(results):
    """results: {file name: its JSON} of what pages show. Returns (stale, unchecked): lines of text."""
    if git("rev-parse", "HEAD") is None:
        return [], ["there is no git history to compare results with"]
    stale, unchecked, built = [], [], built_code()
    for name in BESIDE:
        results = {name: json.loads((RESULTS / name).read_text()), **results}
    for name, data in sorted(results.items()):
        if "source" in data:
            continue
        why = videos(data) if "tables" in data or data.get("kind") == "fp8" else timing(name, data, built)
        if why is not None and why == built:
            unchecked.append(name)
        elif why:
            stale.append(f"{name}: {why}")
    return stale, [f"{built}: {', '.join(unchecked)}"] if unchecked else []
