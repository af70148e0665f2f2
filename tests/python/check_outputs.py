"""No result is lost: refused outputs, runs replaced whole, unfinished results, interrupts, names that are not UTF-8, full disks.

    check_outputs.py SCOPE-COMMAND REPOSITORY
"""
import contextlib
import ctypes
import glob
import json
import os
import pathlib
import platform
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zlib

SCOPE, REPOSITORY = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
checks = 0
# The command leaves ignored what its parent ignores, as nohup and a shell's & do.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def start(*arguments, **options):
    global checks
    checks += 1
    command = [SCOPE, *(a if isinstance(a, bytes) else str(a) for a in arguments)]
    return subprocess.Popen(command, stdout=options.pop("stdout", subprocess.PIPE), stderr=subprocess.PIPE, text=True,
                            errors="replace", **options)


def finish(process, code):
    said = "".join(text for text in process.communicate(timeout=120) if text)
    assert process.returncode == code, f"{process.args}: exit {process.returncode}, expected {code}: {said}"
    return said


def accept(*arguments, **options):
    return finish(start(*arguments, **options), 0)


def refuse(code, word, *arguments):
    """The command must exit with `code`, name `word`, and leave everything as it was."""
    before = snapshot()
    said = finish(start(*arguments), code)
    assert word.lower() in said.lower(), f"{arguments}: nothing about {word!r} in: {said}"
    assert snapshot() == before, f"{arguments}: changed {set(snapshot().items()) ^ set(before.items())}"


def snapshot(folder="."):
    """Every name below a folder with what is there."""
    out = {}
    for path in glob.glob(f"{glob.escape(folder)}/**", recursive=True, include_hidden=True):
        status = os.lstat(path)
        out[path] = os.readlink(path) if os.path.islink(path) else open(path, "rb").read() if os.path.isfile(path) else status.st_ino
    return out


def wait_for(pattern, process):
    while not glob.glob(pattern):
        assert process.poll() is None, f"it ended by itself: {process.communicate()}"
        time.sleep(0.002)


def read(path):
    with open(path) as file:
        return json.load(file)


def png(path, height, width):
    rows = b"".join(b"\0" + bytes((7 * x + 3 * y) % 256 for x in range(3 * width)) for y in range(height))
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def save_noise(path, shape):
    header = json.dumps({"noise": {"dtype": "F32", "shape": shape,
                                   "data_offsets": [0, size := 4 * shape[0] * shape[1] * shape[2] * shape[3]]}}).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + bytes(size))


def without_exchange():
    """Makes renameat2 fail from here on, as on file systems that do not have it."""
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, 316), (0x06, 0, 0, 0x00050000 | 22), (0x06, 0, 0, 0x7FFF0000)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(filters)))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program) == 0


def check_refused_files():
    for output in (".", "..", "folder", "new/", "missing/out", "in/out", "/dev/full", "n" * 250):
        # Before the input is even opened.
        refuse(3, "--output", "attend", "nothing.safetensors", "-o", output)
    refuse(2, "--output", "attend", "in", "-o", "")
    refuse(2, "--stats", "attend", "in", "-o", "o", "--stats", "")
    refuse(3, "--stats", "attend", "in", "-o", "o", "--stats", "missing/stats.json")
    for same in ("in", "./in", "folder/../in", "link", "hard"):
        refuse(2, "which is also input", "attend", "in", "-o", same)
        refuse(2, "which is also input", "attend", "in", "-o", "o", "--stats", same)
        refuse(2, "which is also input", "attend", "in", "-o", "o", "--state", same)
    refuse(2, "--stats: got o", "attend", "in", "-o", "o", "--stats", "o")
    refuse(2, "--stats: got ./o", "attend", "in", "-o", "folder/../o", "--stats", "./o")
    refuse(2, "--state: got o", "attend", "in", "-o", "o", "--state", "o")
    refuse(2, "which is also profile", "attend", "in", "--method", "svoo", "--set", "profile=p.csv", "--layer", 1, "--step",
           1, "--steps", 2, "-o", "p.csv")
    compare = ("compare", "in", "--methods", "svoo:profile=p.csv+codes=20", "--layer", 0, "--step", 0, "--steps", 2)
    refuse(2, "--csv: got a", *compare, "--json", "a", "--csv", "a")
    refuse(2, "--plots: got x-error.svg", *compare, "--csv", "x-error.svg", "--plots", "x-")
    refuse(2, "which is also profile", *compare, "--json", "p.csv")
    refuse(3, "--plots", *compare, "--plots", "missing/")
    refuse(2, "which is also an input", "profile", "0:0:in", "-o", "link")
    refuse(3, "--output", "profile", "0:0:nothing", "-o", "folder")
    refuse(3, "--output", "make-qkv", "-o", "folder")
    refuse(3, "--json", "bench", "--json", "missing/b.json")
    refuse(3, "--output", "inspect", "nothing", "-o", "in")
    refuse(2, "--output", "inspect", "in", "-o", "")
    for flag in ("--json", "--csv", "--plot"):
        refuse(2, "a frame of run", "evaluate", "run", "run", flag, "run/frame_001.png")
        refuse(3, flag, "evaluate", "run", "run", flag, "folder")
    refuse(2, "--csv: got a", "evaluate", "run", "run", "--json", "a", "--csv", "a")
    refuse(2, "run.json of run", "report", "run", "-o", "run/run.json")
    refuse(2, "which is also --qkv", "report", "run", "--qkv", "in", "-o", "in")
    refuse(3, "--output", "report", "run", "-o", "folder")
    small = ("ablate", *SMALL, "--seeds", 1, "--no-control")
    refuse(2, "--csv: got a", *small, "-o", "a", "--csv", "a")
    refuse(2, "--plot: got ./a", *small, "-o", "a", "--csv", "b", "--plot", "./a")
    refuse(2, "which is also --image", *small, "-o", "first.png")
    refuse(2, "which is also --model", *small, "--model", "./model", "-o", "model/config.json")


def check_runs():
    run = ("generate", *SMALL)
    for output in (".", "..", "run/..", "run/.", "/"):
        refuse(2, "expected the name of a folder", *run, "-o", output)
    refuse(2, "--output", *run, "-o", "")
    refuse(2, "is no folder", *run, "-o", "in")
    refuse(3, "--output", *run, "-o", "missing/run")
    refuse(3, "--output", *run, "-o", "n" * 250)
    refuse(2, "run/qkv/step_000_layer_00.safetensors lies in run", *run, "-o", "run", "--dump-qkv", "run/qkv", "--dump-steps", 0)
    refuse(2, "lies in", *run, "-o", "run", "--dump-qkv", "run")
    # A name that only begins like the run's does not lie in it.
    accept(*run, "-o", "near", "--dump-qkv", "near2", "--dump-steps", 0, "--dump-layers", 0)
    accept(*run, "-o", "near", "--checkpoint", "near.checkpoint")
    refuse(2, "run/frame_001.png lies in run", *run[:3], "--image", "run/frame_001.png", "-o", "run")
    refuse(2, "which is also --noise", *run, "--noise", "d/step_000_layer_00.safetensors", "-o", "new", "--dump-qkv", "d",
           "--dump-steps", 0)
    os.symlink("nowhere", "dangling")
    refuse(3, "--output", *run, "-o", "dangling")
    # What no run wrote.
    os.mkdir("mine")
    refuse_foreign = lambda name: refuse(2, f"holds {name}", *run, "-o", "mine")
    for name in ("notes.txt", "frame_1.png", "frame_00x.png", ".hidden"):
        accept(*run, "-o", "mine")
        open(f"mine/{name}", "w").write("mine")
        refuse_foreign(name)
        os.remove(f"mine/{name}")
    os.mkdir("mine/frame_010.png")
    refuse_foreign("frame_010.png")
    os.rmdir("mine/frame_010.png")
    with contextlib.suppress(FileNotFoundError):
        os.remove("mine/clip.mp4")  # a run's own, where there is ffmpeg
    os.symlink("../in", "mine/clip.mp4")
    refuse_foreign("clip.mp4")
    os.remove("mine/clip.mp4")
    os.remove("mine/run.json")
    refuse_foreign("frames without a run.json")

    # A run replaces another whole, through a link too, with or without RENAME_EXCHANGE; what bears a temporary's name is not taken for one.
    def leave_stale():
        for name in (f"stale.{os.getpid()}.tmp", f"stale.{os.getpid()}-0.tmp"):
            os.mkdir(name)
            open(f"{name}/frame_099.png", "w").write("stale")

    accept(*run, "-o", "stale/", preexec_fn=leave_stale)
    assert "frame_099.png" not in os.listdir("stale") and "run.json" in os.listdir("stale")
    assert [os.listdir(name) for name in glob.glob("stale.*.tmp")] == [["frame_099.png"]] * 2
    os.symlink("stale", "linked")
    for seed, before in ((1, None), (2, without_exchange if platform.machine() == "x86_64" else None)):
        names = set(os.listdir("."))
        accept(*run, "-o", "linked", "--seed", seed, preexec_fn=before)
        assert os.path.islink("linked") and read("stale/run.json")["seed"] == seed and set(os.listdir(".")) == names

    # Two that write the same: the later stands, the other is kept, and so is what a user put there meanwhile.
    for case in ("another run", "a note"):
        slow = start(*run[:5], "--steps", 60, "-o", "two", "--seed", 7, "--dump-qkv", "d2", "--dump-steps", 0, "--dump-layers", 0)
        wait_for("d2/*.tmp", slow)
        slow.send_signal(signal.SIGSTOP)
        if case == "a note":
            open("two/notes.txt", "w").write("mine")
        else:
            accept(*run, "-o", "two", "--seed", 8)
        theirs = {os.path.basename(k): v for k, v in snapshot("two").items() if os.path.isfile(k)}
        slow.send_signal(signal.SIGCONT)
        said = finish(slow, 0)
        assert read("two/run.json")["seed"] == 7 and os.listdir("d2") == ["step_000_layer_00.safetensors"]
        (other,) = glob.glob("two.*.other")
        assert f"kept as {other}" in said, said
        assert {os.path.basename(k): v for k, v in snapshot(other).items() if os.path.isfile(k)} == theirs
        os.rename(other, case)


def check_unfinished():
    ablate = ("ablate", *SMALL, "--variants", "scope", "--no-control", "-o", "r.json", "--csv", "r.csv", "--plot", "r.svg")
    accept(*ablate, "--seeds", 2)
    assert read("r.json")["finished"] is True and not glob.glob("r.json.*")
    earlier = {name: open(name).read() for name in ("r.json", "r.csv", "r.svg")}
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        stopped = start(*ablate, "--seeds", 2000)
        while "seed 1 of 2000 done" not in (line := stopped.stderr.readline()):
            assert line, "it ended by itself"
        stopped.send_signal(number)
        finish(stopped, code)
        assert {name: open(name).read() for name in earlier} == earlier, "a finished result was replaced"
        (kept,) = glob.glob("r.json.*.unfinished")
        data = read(kept)
        assert data["finished"] is False and 1 <= data["seeds"] < 2000
        for leftover in glob.glob("r.json.*"):
            os.rename(leftover, "stopped.json")  # SIGKILL may leave a temporary too
    sys.path.insert(0, f"{REPOSITORY}/bench")
    import report
    report.RESULTS = pathlib.Path(".")
    report.load("r.json")
    try:
        report.load("stopped.json")
        raise AssertionError("bench/report.py takes an unfinished result")
    except SystemExit as refused:
        assert "unfinished" in str(refused)

    bench = ("bench", "--grid", "2x4x4", "--heads", 1, "--repeat", 1, "--json", "b.json", "--density")
    accept(*bench, "0.3,0.5")
    earlier = open("b.json").read()
    assert json.loads(earlier)["finished"] is True and not glob.glob("b.json.*")
    stopped = start(*bench, ",".join(["0.3"] * 5000), stdout=subprocess.DEVNULL)
    wait_for("b.json.*.unfinished", stopped)
    stopped.send_signal(signal.SIGTERM)
    finish(stopped, 143)
    (kept,) = glob.glob("b.json.*")
    assert open("b.json").read() == earlier and read(kept)["finished"] is False

    # What another process wrote meanwhile is kept.
    slow = start("ablate", *SMALL, "--variants", "scope", "--no-control", "-o", "s.json", "--seeds", 10)
    wait_for("s.json.*.unfinished", slow)
    slow.send_signal(signal.SIGSTOP)
    open("s.json", "w").write("theirs")
    slow.send_signal(signal.SIGCONT)
    said = finish(slow, 0)
    (other,) = glob.glob("s.json.*")
    assert read("s.json")["finished"] and open(other).read() == "theirs" and f"kept as {other}" in said, said


def check_interrupts():
    accept("generate", *SMALL, "-o", "kept", "--seed", 3)
    before = snapshot()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process = start("generate", *SMALL[:4], "--steps", 10000, "-o", "kept", "--dump-qkv", "d3/deep", "--dump-steps", 0)
        wait_for("d3/deep/*layer_05*.tmp", process)
        process.send_signal(number)
        assert "interrupted" in finish(process, 128 + number)
        assert snapshot() == before, f"changed {set(snapshot()) ^ set(before)}"
    # In the midst of a single long call.
    process = start("bench", "--grid", "21x45x80", "--heads", 8, "--threads", 1, "--json", "long.json")
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    began = time.time()
    finish(process, 130)
    assert time.time() - began < 10 and snapshot() == before
    # What the parent ignores stays ignored.
    process = start("generate", *SMALL[:4], "--steps", 60, "-o", "kept", "--dump-qkv", "d4", "--dump-steps", 0,
                    preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    wait_for("d4/*.tmp", process)
    process.send_signal(signal.SIGHUP)
    finish(process, 0)


def check_names():
    """Names that are not UTF-8 end up escaped in every JSON."""
    os.symlink("model", b"model\xff")
    save_noise(b"noise\xff", [12, 5, 8, 12])
    accept("generate", *SMALL, "--model", b"./model\xff", "--noise", b"noise\xff", "-o", b"run\xff")
    run = read(b"run\xff/run.json")
    assert run["model"] == "model\\xff" and run["noise"] == "noise\\xff", run
    os.link("p.csv", b"p\xff.csv")
    svoo = b"svoo:codes=20+profile=p\xff.csv"
    accept("attend", "in", "--method", svoo, "--layer", 0, "--step", 0, "--steps", 1, "--set", "dense_steps=0", "-o",
           "o.safetensors", "--stats", b"stats\xff")
    assert read(b"stats\xff")["settings"]["profile"] == "p\\xff.csv"
    with open("o.safetensors", "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    assert json.loads(header["__metadata__"]["settings"])["profile"] == "p\\xff.csv"
    os.link("in", b"in\xff\xe9")
    place = ("--layer", 0, "--step", 0, "--steps", 1)
    accept("compare", b"in\xff\xe9", "--methods", svoo + b"+dense_steps=0+dense_layers=0", "--density", 0.5, "--repeat", 1,
           *place, "--json", "c.json", "--plots", "c-")
    data = read("c.json")
    assert data["input"] == "in\\xff\\xe9", data["input"]
    assert list(data["settings"]) == ["svoo:codes=20+profile=p\\xff.csv+dense_steps=0+dense_layers=0"], data["settings"]
    open("c-recall.svg", encoding="utf-8").read()
    accept("evaluate", "run", b"run\xff", "--json", "e.json")
    assert read("e.json")["clip"] == "run\\xff"
    accept("report", "run", b"run\xff", "-o", "report.html")
    assert "run\\\\xff" in open("report.html", encoding="utf-8").read()
    accept("ablate", *SMALL, "--model", b"./model\xff", "--seeds", 1, "--no-control", "-o", b"a\xff", "--plot", "a.svg")
    assert read(b"a\xff")["model"] == "model\\xff"


def check_full_stdout():
    for arguments in (("methods",), ("--help",), ("--version",), ("attend", "in", "-o", "full.safetensors")):
        with open("/dev/full", "w") as full:
            assert "No space left" in finish(start(*arguments, stdout=full), 3)
    assert os.path.exists("full.safetensors"), "the result is there all the same"


with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
    png("first.png", 16, 24)
    SMALL = ("--grid", "5x4x6", "--image", "first.png", "--steps", "2")
    accept("make-qkv", "--grid", "3x4x5", "--rope", "12,10,10", "-o", "in")
    os.symlink("in", "link")
    os.link("in", "hard")
    os.mkdir("folder")
    os.mkdir("model")  # of our own: a command that should be refused may succeed
    for name in os.listdir(f"{REPOSITORY}/models/tiny-wan"):
        (os.symlink if name.endswith(".safetensors") else shutil.copy)(f"{REPOSITORY}/models/tiny-wan/{name}", f"model/{name}")
    accept("profile", "0:0:in", "-o", "p.csv")
    accept("generate", *SMALL, "-o", "run", "--dump-qkv", "d", "--dump-steps", 0)
    for check in (check_refused_files, check_runs, check_unfinished, check_interrupts, check_names, check_full_stdout):
        check()
print(f"{checks} commands behaved")
