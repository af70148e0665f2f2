#!/usr/bin/env python3
"""Plants defects in a copy of the tree, one at a time, and says which of them a test catches."""
import argparse
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
LIST = ROOT / "tools/planted_defects.toml"
RESULTS = ROOT / "tools/planted_results.json"
WORK = ROOT / "build/planted"
HOSTS = ROOT / "build/hosts"  # where tests/hosts/run.sh installs them
HELP = """
The defects by hand are the rows of planted_defects.toml: a file, an exact text of it and what stands in its place. Beside them a
seeded script draws places of src/**/*.cpp and python/**/*.py (a sign, a bound, an index, a constant). For each defect the
programs that its row names are built and run first, and only if they pass all the others. A defect is caught, survived, or did not
compile (warnings are errors here, as in make test). One that hangs is caught.

  tools/planted_defects.py --check                        every text of the list still stands once in its file; seconds
  tools/planted_defects.py --python VENV/bin/python       all of them, for hours; VENV has PyTorch, diffusers and pytest
  tools/planted_defects.py --only mean --jobs 2           those whose names match
  tools/planted_defects.py --resume                       go on: what build/planted/results.json says was caught is not run again
  tools/planted_defects.py --table                        totals and survivors of planted_results.json, as Markdown
  tools/planted_defects.py --gpu OUT                      test programs with a defect each in a kernel, for --gpu-run; needs nvcc
  tools/planted_defects.py --gpu-run OUT                  runs them where a GPU is; writes OUT/results.json"""

TESTS = {  # programs to try first for a file, by how its path begins; the first line that fits counts
    "src/cpu/attend": "test_attend$",
    "src/cpu/kernels_s8": "test_products$",
    "src/cpu/kernels": "test_(attend|kmeans|compensate|select|score)$",
    "src/cpu/select_codes": "test_select_codes$",
    "src/cpu/select": "test_select$",
    "src/cpu/(mean|tail|proxy_rows)": "test_(tail|select)$",
    "src/cpu/compensate": "test_compensate$",
    "src/cpu/cocluster": "test_cocluster$",
    "src/cpu/kmeans": "test_kmeans$",
    "src/cpu/group": "test_group$",
    "src/cpu/encode": "test_(encode|blocks)$",
    "src/cpu/blocks": "test_blocks$",
    "src/cpu/quantise": "test_products$",
    "src/cpu/score": "test_score$",
    "src/cpu/(engine|elementwise)": "test_engine$",
    "src/cpu/bookkeeping": "test_bookkeeping$",
    "src/cpu": "test_rows$",
    "src/core": "test_(parallel|numeric)$",
    "src/capi": "test_(c_api|translate)$",
    "src/io/png": "test_png$",
    "src/io": "test_(io|temporary)$",
    "src/measure/video_quality": "test_video_quality$",
    "src/measure": "test_scoring$|python_heads",
    "src/methods": "test_(settings|methods|svoo|schedule)$",
    "src/pipeline/(schedule|stats)": "test_schedule$",
    "src/pipeline": "test_(call|svoo)$",
    "src/stages": "test_(rows|settings)$",
    "src/video/models/hunyuan": "test_hunyuan$",
    "src/video/stepper": "test_stepper$",
    "src/video": "test_(video|wan22)$",
    "cli": "python_(cli|generate|outputs|evaluate)",
}
PYTHON_TESTS = {
    "(integrations/comfyui|python/scope_attn/hosts/comfyui)": "comfyui",
    "python/scope_attn/reproduce": "reproduce_table reproduce_seeds reproduce",
    "python/scope_attn/hosts/sglang": "hosts/sglang",
    "python/scope_attn/hosts/vllm_omni": "hosts/vllm_omni",
    "python/scope_attn/(hosts|_receipt|_pipelines)": "steps diffusers",
    "python/scope_attn": "numpy steps",
}
PYTHON_REST = "numpy hosts/sglang hosts/vllm_omni comfyui steps reproduce_table reproduce_seeds reproduce diffusers torch ranks"
# Of ctest, in this order: what takes minutes comes last, and what no defect here can touch not at all.
SLOW = "python_(ablate|generate|inputs|campaign|outputs|checkpoint|known|steps|hunyuan)|install"
NEVER = "missing_header|python_planted"
LIMITS = {"build": 1500, "first": 1200, "rest": 2400}  # seconds; a run that passes its own hangs


@dataclasses.dataclass(frozen=True)
class Defect:
    name: str
    file: str
    old: str
    new: str
    why: str = ""
    first: str = ""  # ctest's regular expression, or pytest files of tests/python_package by what follows test_, with cases as in
    # diffusers:vace,scale; hosts/sglang: tests/hosts/test_sglang_real.py
    line: int = 0  # of a drawn one
    program: str = ""  # of a kernel's: the test that is to catch it; `first` is then where a header's defect is compiled

    @property
    def python(self) -> bool:
        return self.file.endswith(".py")

    @property
    def gpu(self) -> bool:
        return bool(self.program)

    @property
    def key(self) -> str:
        return hashlib.sha256("\0".join((self.file, self.old, self.new, str(self.line))).encode()).hexdigest()[:12]

    def planted(self, text: str) -> str:
        """The file's text with the defect in it."""
        if self.line:
            lines = text.splitlines(keepends=True)
            if lines[self.line - 1].rstrip("\n") != self.old:
                raise ValueError(f"{self.name}: line {self.line} of {self.file} is another")
            lines[self.line - 1] = self.new + "\n"
            return "".join(lines)
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has its text {text.count(self.old)} times, expected once: {self.old!r}")
        if self.old == self.new:
            raise ValueError(f"{self.name}: it changes nothing")
        return text.replace(self.old, self.new)

    def first_tests(self) -> str:
        if self.first:
            return self.first
        return next((tests for start, tests in (PYTHON_TESTS if self.python else TESTS).items()
                     if re.match(start, self.file)), "test_call$")


def listed(kind: str) -> list[dict]:
    import tomllib  # of Python 3.11; a machine that runs kernels alone may have an older one
    return tomllib.loads(LIST.read_text(encoding="utf-8"))[kind]


def by_hand() -> list[Defect]:
    rows = [Defect(**row) for row in listed("defect")]
    names = [row.name for row in rows]
    if len(set(names)) != len(names):
        raise ValueError(f"{LIST.name}: {', '.join({name for name in names if names.count(name) > 1})} twice")
    return rows


def judged() -> dict[tuple[str, str, str], str]:
    """Why drawn defects survive, by file and lines."""
    return {(row["file"], row["old"].strip(), row["new"].strip()): row["why"] for row in listed("survivor")}


# ---- drawing


def blank(match: re.Match) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def code_of(text: str, python: bool) -> str:
    """The text with comments and strings blanked, so that columns stay."""
    if python:
        pattern = r'[rfbRFB]{0,2}(?:"""[\s\S]*?"""|\'\'\'[\s\S]*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')|#[^\n]*'
    else:
        pattern = r'//[^\n]*|/\*[\s\S]*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\''
    return re.sub(pattern, blank, text)


# Lines whose numbers are sizes of scratch, tiles, bounds of types, names or messages.
NO_PLACE = re.compile(r"^\s*(#|import|from|using|template|static_assert|extern|case|raise|def |class |assert|\"\"\"|@)|"
                      r"arena\.take|constexpr|fail\(|operator|to_string|^\s*\w+ \w+\[\w+\]|Status::|fmt::|static_cast<[^>]*>\(-|"
                      r"LIKELY|version|lru_cache|warn|print\(|logging|struct |__|->")


def changes(line: str, python: bool):
    """What can be planted on a line of code: (kind, start, end, text)."""
    for kind, pattern, put in (("bound", r" (<=?|>=?) ", {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}),
                               ("sign", r"(?<=[\w\])]) ([+-]|\+=|-=) ", {"+": "-", "-": "+", "+=": "-=", "-=": "+="})):
        for found in re.finditer(pattern, line):
            yield kind, found.start(1), found.end(1), put[found[1]]
    for found in re.finditer(r"(?<=\w)\[(\w+)\]", line):
        if not (python and found[1] in ("int", "str", "bytes", "Any")) and not found[1][0].isupper():
            yield "index", found.start(1), found.end(1), str(int(found[1]) + 1) if found[1].isdigit() else f"{found[1]} + 1"
    for found in re.finditer(r"(?<![\w.\[])(\d+(?:\.\d+)?(?:e-?\d+)?)(f?)(?![\w.\]])", line):
        number = found[1]
        put = str(int(number) + 1) if number.isdigit() else repr(2 * float(number)) if float(number) else "1.0"
        yield "constant", found.start(1), found.end(1), put


def drawn(seed: int, count: int) -> list[Defect]:
    """The same for one seed and one tree: files and places in an order of their own, as many kinds of each."""
    tracked = subprocess.run(["git", "ls-files", "src/*.cpp", "python/*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    places: dict[str, list[Defect]] = {}
    for file in sorted(tracked.stdout.split()):
        if file.startswith("src/cuda") or file in ("src/core/fmt.cpp", "python/scope_attn/doctor.py"):
            continue
        python = file.endswith(".py")
        text = (ROOT / file).read_text(encoding="utf-8")
        code = code_of(text, python)
        for number, (line, clean) in enumerate(zip(text.splitlines(), code.splitlines()), 1):
            if NO_PLACE.search(clean) or line.lstrip().startswith('"'):  # the rest of a message
                continue
            for kind, start, end, put in changes(clean, python):
                new = line[:start] + put + line[end:]
                places.setdefault(kind, []).append(Defect(f"{kind} {file}:{number}:{start + 1}", file, line, new, line=number))
    dice = random.Random(seed)
    for found in places.values():
        dice.shuffle(found)
    kinds, out, files = ["bound", "sign", "index", "constant"], [], {}
    while len(out) < count:
        kind = kinds[len(out) % len(kinds)]
        # At most two of a file, so that they spread.
        place = next(place for place in places[kind] if files.get(place.file, 0) < 2 and place not in out)
        files[place.file] = files.get(place.file, 0) + 1
        out.append(place)
    return out


# ---- planting


class Stopped(Exception):
    """A command ran past its limit."""


def command(words, limit: float, log, **options) -> int:
    """Its status; everything it started ends with it."""
    process = subprocess.Popen([str(word) for word in words], stdout=log, stderr=subprocess.STDOUT, start_new_session=True, **options)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        raise Stopped from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Tree:
    """A copy of the repository with a build of its own."""

    def __init__(self, name: str, python: str):
        self.path, self.python, self.library = WORK / name, python, WORK / "libscope.so"
        self.build = self.path / "build/release"
        self.log = WORK / f"{name}.log"
        self.environment = {**os.environ, "CCACHE_BASEDIR": str(self.path), "CCACHE_NOHASHDIR": "1", "OMP_NUM_THREADS": "1",
                            "CCACHE_SLOPPINESS": "pch_defines,time_macros,include_file_mtime,include_file_ctime",
                            "PYTHONDONTWRITEBYTECODE": "1"}
        if shutil.which("ccache"):
            self.environment["CMAKE_CXX_COMPILER_LAUNCHER"] = "ccache"

    def copy(self):
        """Every file as the repository has it."""
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        for name in filter(None, names):
            here, there = ROOT / name, self.path / name
            if here.is_file() and not (there.exists() and there.read_bytes() == here.read_bytes()):
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(here, there)

    def prepare(self):
        """The library, for defects of Python, and the names of the tests; what else a defect needs is built for it."""
        with self.log.open("w") as log:
            for words in (["cmake", "--preset", "release"], ["cmake", "--build", self.build, "-j", "2", "--target", "scope"]):
                if command(words, 7200, log, cwd=self.path, env=self.environment) != 0:
                    raise RuntimeError(f"{self.path}: it does not build; see {self.log}")
        found = json.loads(subprocess.run(["ctest", "--show-only=json-v1"], cwd=self.build, capture_output=True, text=True,
                                          check=True).stdout)
        self.tests = [test["name"] for test in found["tests"]]

    def try_ctest(self, first: str, whole: bool) -> tuple[str, str]:
        """Those that the row names, with a tenth of the seeded cases; whole: with all cases, and then all others."""
        programs = [name for name in self.tests if re.search(first, name)]
        if not programs:
            raise ValueError(f"no test matches {first}")
        targets = [name for name in programs if not name.startswith(("python_", "install"))]
        if len(targets) < len(programs):
            targets += ["scope", "scope_command"]
        with self.log.open("w") as log:
            build = ["cmake", "--build", self.build, "-j", "2"] + ([] if whole else ["--target", *targets])
            if command(build, LIMITS["build"], log, env=self.environment) != 0:
                return "did not compile", ""
            choices = [["-R", first]] + ([["-E", f"{first}|{SLOW}|{NEVER}"], ["-R", SLOW, "-E", f"{first}|{NEVER}"]] if whole else [])
            for choice in choices:
                caught = self.ctest(choice, whole, log)
                if caught:
                    return "caught", caught
        return "survived", ""

    def ctest(self, choice: list[str], whole: bool, log) -> str:
        """The test that fails; "": none."""
        environment = {**self.environment, "GTEST_FAIL_FAST": "1", "SCOPE_CASES": "1" if whole else "0.1"}
        words = ["ctest", "--test-dir", self.build, "-j", "2", "--stop-on-failure", "--output-on-failure", *choice]
        before = log.tell()
        try:
            status = command(words, LIMITS["rest" if whole else "first"], log, env=environment)
        except Stopped:
            return f"a hang of {' '.join(choice)}"
        if status == 0:
            return ""
        text = self.log.read_bytes()[before:].decode(errors="replace")
        failed = re.findall(r"Test +#\d+: (\S+) .*\*\*\*", text)
        case = re.findall(r"\[  FAILED  \] (\S+?),? ", text)
        return " ".join([*(failed[:1] or ["ctest"]), *case[:1]])

    def try_pytest(self, first: str, whole: bool) -> tuple[str, str]:
        environment = {**self.environment, "SCOPE_LIBRARY": str(self.library)}
        rest = [name for name in PYTHON_REST.split() if name not in first.split()]
        with self.log.open("w") as log:
            for name in rest if whole else first.split():
                name, _, cases = name.partition(":")
                path = str(self.path / "python")
                words = [self.python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/python_package/test_{name}.py"]
                words += ["-k", cases.replace(",", " or ")] if cases else []
                if name.startswith("hosts/"):
                    host = HOSTS / name.removeprefix("hosts/")
                    if not host.is_dir():
                        raise ValueError(f"{host} is not there: tests/hosts/install.sh PYTORCH_VENV {HOSTS} puts it there")
                    words[words.index(f"tests/python_package/test_{name}.py")] = f"tests/hosts/test_{host.name}_real.py"
                    path = f"{path}:{host}"
                before = log.tell()
                try:
                    status = command(words, LIMITS["first"], log, cwd=self.path, env={**environment, "PYTHONPATH": path})
                except Stopped:
                    return "caught", f"a hang of test_{name}"
                if status not in (0, 5):  # 5: there was nothing to run
                    text = self.log.read_bytes()[before:].decode(errors="replace")
                    case = re.findall(r"^(?:FAILED|ERROR) \S*?(test_\w+\.py(?:::\S+)?)", text, re.MULTILINE)
                    return "caught", (case or [f"test_{name}"])[0]
        return "survived", ""

    def run(self, defect: Defect, whole: bool) -> tuple[str, str]:
        file = self.path / defect.file
        sound = file.read_text(encoding="utf-8")
        file.write_text(defect.planted(sound), encoding="utf-8")
        try:
            return (self.try_pytest if defect.python else self.try_ctest)(defect.first_tests(), whole)
        finally:
            file.write_text(sound, encoding="utf-8")


def area(file: str) -> str:
    for start, name in (("src/cpu", "stages on the CPU"), ("src/pipeline", "pipeline"), ("src/capi", "C ABI"), ("src/io", "files"),
                        ("src/measure", "measures"), ("src/video", "native runner"), ("cli", "command"), ("src/cuda", "kernels"),
                        ("integrations", "hosts"), ("python/scope_attn/(hosts|_receipt|_pipelines)", "hosts"),
                        ("python/scope_attn/reproduce", "reproduce"), ("python", "Python package"), ("src", "methods and core")):
        if re.match(start, file):
            return name
    return "other"


def run_all(defects: list[Defect], options):
    """All by the tests that their rows name, then by all tests those that are left: few, and minutes each."""
    WORK.mkdir(parents=True, exist_ok=True)
    path = WORK / "results.json"
    results = json.loads(path.read_text()) if options.resume and path.exists() else {}
    trees: dict[bool, queue.Queue[Tree]] = {False: queue.Queue(), True: queue.Queue()}  # of Python's: they need no build of their own
    for number in range(options.jobs):
        for python in (False, True):
            tree = Tree(f"{'python' if python else 'tree'}{number}", options.python)
            tree.copy()
            if not python:
                tree.prepare()
            trees[python].put(tree)
    shutil.copy(WORK / "tree0/build/release/libscope.so", WORK / "libscope.so")
    lock = threading.Lock()

    def one(defect: Defect, whole: bool):
        queue_of = trees[defect.python]
        tree, start = queue_of.get(), time.monotonic()
        try:
            status, by = tree.run(defect, whole)
        finally:
            queue_of.put(tree)
        with lock:
            drawn_one = {"line": defect.line, "old": defect.old.strip(), "new": defect.new.strip()} if defect.line else {}
            results[defect.key] = {"name": defect.name, "file": defect.file, **drawn_one, "status": status, "by": by}
            part = path.with_suffix(".part")
            part.write_text(json.dumps(results, indent=1) + "\n")
            part.replace(path)
            print(f"{time.strftime('%H:%M:%S')} {time.monotonic() - start:5.0f} s  "
                  f"{status if whole or status != 'survived' else 'later':15}  "
                  f"{defect.name}" + (f"  ({by})" if by else ""), flush=True)

    for whole in (False, True):
        # What survived is tried again: there may be a test by now.
        todo = [defect for defect in defects if results.get(defect.key, {"status": "survived"})["status"] == "survived"]
        print(f"{len(todo)} of {len(defects)} defects by {'all' if whole else 'the first'} tests", flush=True)
        pools = {python: concurrent.futures.ThreadPoolExecutor(options.jobs) for python in (False, True)}
        for future in concurrent.futures.as_completed([pools[defect.python].submit(one, defect, whole) for defect in todo]):
            future.result()
        if options.first:
            break
    found = [results[defect.key] for defect in defects]
    if not options.only:
        commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        about = {"commit": commit, "seed": options.seed, "drawn": options.drawn, "tests": "the first" if options.first else "all"}
        RESULTS.write_text(json.dumps({**about, "defects": found}, indent=1) + "\n")
    for status in ("caught", "survived", "did not compile"):
        print(f"{status}: {sum(row['status'] == status for row in found)}")
    for row in found:
        if row["status"] == "survived":
            print(f"  {row['name']}" + (f": {row['old']}  ->  {row['new']}" if "line" in row else ""))


def table():
    """Totals by area, and the survivors with why."""
    rows, why = json.loads(RESULTS.read_text())["defects"], judged()
    print("| where | by hand: caught of | drawn: caught of | survived |\n|---|---|---|---|")
    for name in dict.fromkeys(area(row["file"]) for row in rows):
        here = [row for row in rows if area(row["file"]) == name and row["status"] != "did not compile"]
        cells = []
        for drawn_ones in (False, True):
            some = [row for row in here if ("line" in row) == drawn_ones]
            cells.append(f"{sum(row['status'] == 'caught' for row in some)} of {len(some)}" if some else "–")
        print(f"| {name} | {cells[0]} | {cells[1]} | {sum(row['status'] == 'survived' for row in here)} |")
    for row in rows:
        if row["status"] == "survived":
            print(f"\n- `{row['file']}:{row.get('line', '')}`: "
                  f"{why.get((row['file'], row.get('old', ''), row.get('new', '')), 'no test yet')}")


# ---- kernels


def prepare_gpu(defects: list[Defect], out: pathlib.Path):
    """A stripped test program for each defect: the object with it is compiled anew, all else is a sound build's, for sm_90a."""
    build, programs = ROOT / "build/sm90", sorted({defect.program for defect in defects})
    launchers = [f"-DCMAKE_{kind}_COMPILER_LAUNCHER=ccache" for kind in ("CXX", "CUDA")] if shutil.which("ccache") else []
    subprocess.run(["cmake", "--preset", "cuda", "-B", build, "-DCMAKE_CUDA_ARCHITECTURES=90a-real", *launchers], cwd=ROOT, check=True)
    subprocess.run(["cmake", "--build", build, "-j", "2", "--target", *programs], check=True)
    rows = json.loads((build / "compile_commands.json").read_text())
    compiles = {os.path.relpath(row["file"], ROOT): row["command"] for row in rows}
    out.mkdir(parents=True, exist_ok=True)
    manifest = []
    for program in programs:  # as it is, to see that it passes where the others are to fail
        subprocess.run(["strip", "-o", out / f"sound.{program}", build / "tests" / program], check=True)
        manifest.append({"name": f"sound {program}", "program": f"sound.{program}", "sound": True})
    for defect in defects:
        name = re.sub(r"\W+", "_", defect.name)
        manifest.append({"name": defect.name, "program": name, "file": defect.file, "why": defect.why})
        if (out / name).exists():  # go on
            continue
        print(defect.name, flush=True)
        copy, objects = out / "sources", []
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(ROOT / "src", copy / "src")
        (copy / defect.file).write_text(defect.planted((copy / defect.file).read_text()))
        for file in [defect.file] if defect.file.endswith(".cu") else defect.first.split():
            objects.append(copy / f"{pathlib.Path(file).name}.o")  # as the archive calls it
            words = re.sub(r" -X?\S*Werror\S*", "", compiles[file]).replace(f"{ROOT}/src", f"{copy}/src")  # what is unused now may stay
            subprocess.run(re.sub(r" -o \S+", f" -o {objects[-1]}", words), shell=True, cwd=build, check=True)
        archive = copy / "libscope_core.a"
        shutil.copy(build / archive.name, archive)
        subprocess.run(["ar", "r", archive, *objects], check=True)
        commands = subprocess.run(["ninja", "-C", build, "-t", "commands", f"tests/{defect.program}"], capture_output=True,
                                  text=True, check=True)
        link = commands.stdout.strip().splitlines()[-1].replace(f" {archive.name}", f" {archive}")
        subprocess.run(link.replace(f"-o tests/{defect.program}", f"-o {copy / name}"), shell=True, cwd=build, check=True)
        subprocess.run(["strip", "-o", out / name, copy / name], check=True)
        shutil.rmtree(copy)
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    print(f"{len(manifest)} programs in {out}")


def run_gpu(folder: pathlib.Path):
    results = []
    for row in json.loads((folder / "manifest.json").read_text()):
        start, text, status = time.monotonic(), "", "caught"
        try:
            done = subprocess.run([folder / row["program"], "--gtest_filter=-*OnCpu.*", "--gtest_fail_fast"],
                                  env={**os.environ, "SCOPE_BACKEND": "cuda"}, capture_output=True, text=True,
                                  errors="replace", timeout=300)
            text = done.stdout + done.stderr
            if "[GPU tests skipped]" in text or " 0 tests ran" in text:
                status = "skipped"
            elif done.returncode == 0:
                status = "survived"
        except subprocess.TimeoutExpired:
            text = "it hangs"
        by = re.findall(r"\[  FAILED  \] (\S+?),? ", text)
        ran = re.search(r"(\d+) tests? from", text)
        results.append({"name": row["name"], "status": status, "by": by[0] if by else text.strip().splitlines()[-1][:100]
                        if status == "caught" else "",
                        "tests": int(ran[1]) if ran else 0, "seconds": round(time.monotonic() - start, 1)})
        expected = "survived" if row.get("sound") else "caught"
        print(f"{'  ' if status == expected else '! '}{status:9} {row['name']}  {results[-1]['by']}", flush=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, epilog=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only see that every defect of the list can be planted")
    parser.add_argument("--list", action="store_true", help="only print them")
    parser.add_argument("--table", action="store_true", help="only print the table of planted_results.json")
    parser.add_argument("--only", help="a regular expression of names")
    parser.add_argument("--first", action="store_true", help="only the tests that the rows name, with a tenth of their cases")
    parser.add_argument("--jobs", type=int, default=1, help="trees to work in at once, of C++ and of Python each")
    parser.add_argument("--resume", action="store_true", help="go on with build/planted/results.json")
    parser.add_argument("--seed", type=int, default=1, help="of those that are drawn")
    parser.add_argument("--drawn", type=int, default=48, help="how many are drawn")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with PyTorch, diffusers and pytest")
    parser.add_argument("--gpu", type=pathlib.Path, metavar="OUT", help="prepare test programs with defects in kernels")
    parser.add_argument("--gpu-run", type=pathlib.Path, metavar="OUT", help="run them")
    options = parser.parse_args()
    if options.gpu_run:
        return run_gpu(options.gpu_run.resolve())
    if options.table:
        return table()
    hand = by_hand()
    defects = [defect for defect in hand if not defect.gpu] + ([] if options.check or options.gpu else drawn(options.seed, options.drawn))
    for defect in hand:
        defect.planted((ROOT / defect.file).read_text(encoding="utf-8"))
    if options.only:
        hand, defects = ([defect for defect in some if re.search(options.only, defect.name)] for some in (hand, defects))
    if options.list:
        for defect in [*defects, *[defect for defect in hand if defect.gpu]]:
            print(f"{defect.name}: {defect.file}\n  - {defect.old.strip()}\n  + {defect.new.strip()}")
    elif options.check:
        print(f"{len(hand)} defects by hand can be planted, {sum(defect.gpu for defect in hand)} of them in kernels")
    elif options.gpu:
        prepare_gpu([defect for defect in hand if defect.gpu], options.gpu.resolve())
    else:
        run_all(defects, options)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"planted_defects: {error}")
