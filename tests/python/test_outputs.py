"""No result is lost: refused outputs, runs replaced whole, unfinished results, interrupts, names that are not UTF-8, full disks."""
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
import time

import numpy as np
import pytest

import pngs
import tensors

pytestmark = pytest.mark.usefixtures("interruptible")
SMALL = ("--grid", "5x4x6", "--image", "first.png", "--steps", 2)
RUN = ("generate", *SMALL)


@pytest.fixture(scope="module")
def made(scope, bundled, tmp_path_factory):
    """A folder with an input, links to it, a folder, a model, a profile and a run."""
    folder = tmp_path_factory.mktemp("t")
    with contextlib.chdir(folder):
        pngs.write("first.png", pngs.slopes())
        scope.accept("make-qkv", "--grid", "3x4x5", "--rope", "12,10,10", "-o", "in")
        os.mkdir("folder")
        os.mkdir("model")  # of our own: a command that should be refused may succeed
        for name in os.listdir(bundled):
            (os.symlink if name.endswith(".safetensors") else shutil.copy)(bundled / name, f"model/{name}")
        scope.accept("profile", "0:0:in", "-o", "p.csv")
        scope.accept(*RUN, "-o", "run", "--dump-qkv", "d", "--dump-steps", 0)
    return folder


@pytest.fixture(autouse=True)
def folder(made, tmp_path, monkeypatch):
    """The working folder of a test: a copy of that folder."""
    shutil.copytree(made, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(tmp_path / "here")
    os.symlink("in", "link")
    os.link("in", "hard")


def finish(process, code):
    said = "".join(text for text in process.communicate(timeout=120) if text)
    assert process.returncode == code, f"{process.args}: exit {process.returncode}, expected {code}: {said}"
    return said


def contents(folder="."):
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


def without_exchange():
    """Makes renameat2 fail from here on, as on file systems that do not have it."""
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, 316), (0x06, 0, 0, 0x00050000 | 22), (0x06, 0, 0, 0x7FFF0000)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(filters)))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program) == 0


def test_outputs_that_cannot_be_are_refused_before_an_input_is_opened(scope):
    for output in (".", "..", "folder", "new/", "missing/out", "in/out", "/dev/full", "n" * 250):
        scope.refuse(3, "--output", "attend", "nothing.safetensors", "-o", output)


def test_outputs_of_attend_differ_from_inputs_and_one_another(scope):
    scope.refuse(2, "--output", "attend", "in", "-o", "")
    scope.refuse(2, "--stats", "attend", "in", "-o", "o", "--stats", "")
    scope.refuse(3, "--stats", "attend", "in", "-o", "o", "--stats", "missing/stats.json")
    for same in ("in", "./in", "folder/../in", "link", "hard"):
        scope.refuse(2, "which is also input", "attend", "in", "-o", same)
        scope.refuse(2, "which is also input", "attend", "in", "-o", "o", "--stats", same)
        scope.refuse(2, "which is also input", "attend", "in", "-o", "o", "--state", same)
    scope.refuse(2, "--stats: got o", "attend", "in", "-o", "o", "--stats", "o")
    scope.refuse(2, "--stats: got ./o", "attend", "in", "-o", "folder/../o", "--stats", "./o")
    scope.refuse(2, "--state: got o", "attend", "in", "-o", "o", "--state", "o")
    scope.refuse(2, "which is also profile", "attend", "in", "--method", "svoo", "--set", "profile=p.csv", "--layer", 1, "--step",
                 1, "--steps", 2, "-o", "p.csv")


def test_outputs_of_other_commands_differ_from_inputs_and_one_another(scope):
    compare = ("compare", "in", "--methods", "svoo:profile=p.csv+codes=20", "--layer", 0, "--step", 0, "--steps", 2)
    scope.refuse(2, "--csv: got a", *compare, "--json", "a", "--csv", "a")
    scope.refuse(2, "--plots: got x-error.svg", *compare, "--csv", "x-error.svg", "--plots", "x-")
    scope.refuse(2, "which is also profile", *compare, "--json", "p.csv")
    scope.refuse(3, "--plots", *compare, "--plots", "missing/")
    scope.refuse(2, "which is also an input", "profile", "0:0:in", "-o", "link")
    scope.refuse(3, "--output", "profile", "0:0:nothing", "-o", "folder")
    scope.refuse(3, "--output", "make-qkv", "-o", "folder")
    scope.refuse(3, "--json", "bench", "--json", "missing/b.json")
    scope.refuse(3, "--output", "inspect", "nothing", "-o", "in")
    scope.refuse(2, "--output", "inspect", "in", "-o", "")


def test_outputs_of_commands_for_clips_are_none_of_their_files(scope):
    for flag in ("--json", "--csv", "--plot"):
        scope.refuse(2, "a frame of run", "evaluate", "run", "run", flag, "run/frame_001.png")
        scope.refuse(3, flag, "evaluate", "run", "run", flag, "folder")
    scope.refuse(2, "--csv: got a", "evaluate", "run", "run", "--json", "a", "--csv", "a")
    scope.refuse(2, "run.json of run", "report", "run", "-o", "run/run.json")
    scope.refuse(2, "which is also --qkv", "report", "run", "--qkv", "in", "-o", "in")
    scope.refuse(3, "--output", "report", "run", "-o", "folder")


def test_outputs_of_ablate_differ_from_inputs_and_one_another(scope):
    small = ("ablate", *SMALL, "--seeds", 1, "--no-control")
    scope.refuse(2, "--csv: got a", *small, "-o", "a", "--csv", "a")
    scope.refuse(2, "--plot: got ./a", *small, "-o", "a", "--csv", "b", "--plot", "./a")
    scope.refuse(2, "which is also --image", *small, "-o", "first.png")
    scope.refuse(2, "which is also --model", *small, "--model", "./model", "-o", "model/config.json")


def test_a_run_goes_into_a_folder_of_its_own(scope):
    for output in (".", "..", "run/..", "run/.", "/"):
        scope.refuse(2, "expected the name of a folder", *RUN, "-o", output)
    scope.refuse(2, "--output", *RUN, "-o", "")
    scope.refuse(2, "is no folder", *RUN, "-o", "in")
    scope.refuse(3, "--output", *RUN, "-o", "missing/run")
    scope.refuse(3, "--output", *RUN, "-o", "n" * 250)
    scope.refuse(2, "run/qkv/step_000_layer_00.safetensors lies in run", *RUN, "-o", "run", "--dump-qkv", "run/qkv", "--dump-steps", 0)
    scope.refuse(2, "lies in", *RUN, "-o", "run", "--dump-qkv", "run")
    # A name that only begins like the run's does not lie in it.
    scope.accept(*RUN, "-o", "near", "--dump-qkv", "near2", "--dump-steps", 0, "--dump-layers", 0)
    scope.accept(*RUN, "-o", "near", "--checkpoint", "near.checkpoint")
    scope.refuse(2, "run/frame_001.png lies in run", *RUN[:3], "--image", "run/frame_001.png", "-o", "run")
    scope.refuse(2, "which is also --noise", *RUN, "--noise", "d/step_000_layer_00.safetensors", "-o", "new", "--dump-qkv", "d",
                 "--dump-steps", 0)
    os.symlink("nowhere", "dangling")
    scope.refuse(3, "--output", *RUN, "-o", "dangling")


def test_what_no_run_wrote_is_not_replaced(scope):
    os.mkdir("mine")
    refuse_foreign = lambda name: scope.refuse(2, f"holds {name}", *RUN, "-o", "mine")
    for name in ("notes.txt", "frame_1.png", "frame_00x.png", ".hidden"):
        scope.accept(*RUN, "-o", "mine")
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


def test_a_run_replaces_another_whole(scope):
    """Through a link too, with or without RENAME_EXCHANGE; what bears a temporary's name is not taken for one."""
    def leave_stale():
        for name in (f"stale.{os.getpid()}.tmp", f"stale.{os.getpid()}-0.tmp"):
            os.mkdir(name)
            open(f"{name}/frame_099.png", "w").write("stale")

    scope.accept(*RUN, "-o", "stale/", preexec_fn=leave_stale)
    assert "frame_099.png" not in os.listdir("stale") and "run.json" in os.listdir("stale")
    assert [os.listdir(name) for name in glob.glob("stale.*.tmp")] == [["frame_099.png"]] * 2
    os.symlink("stale", "linked")
    for seed, before in ((1, None), (2, without_exchange if platform.machine() == "x86_64" else None)):
        names = set(os.listdir("."))
        scope.accept(*RUN, "-o", "linked", "--seed", seed, preexec_fn=before)
        assert os.path.islink("linked") and read("stale/run.json")["seed"] == seed and set(os.listdir(".")) == names


@pytest.mark.parametrize("case", ("another run", "a note"))
def test_what_was_put_there_meanwhile_is_kept(scope, case):
    """Two write the same: the later stands."""
    if case == "a note":
        scope.accept(*RUN, "-o", "two", "--seed", 6)
    slow = scope.start(*RUN[:5], "--steps", 60, "-o", "two", "--seed", 7, "--dump-qkv", "d2", "--dump-steps", 0, "--dump-layers", 0)
    wait_for("d2/*.tmp", slow)
    slow.send_signal(signal.SIGSTOP)
    if case == "a note":
        open("two/notes.txt", "w").write("mine")
    else:
        scope.accept(*RUN, "-o", "two", "--seed", 8)
    theirs = {os.path.basename(k): v for k, v in contents("two").items() if os.path.isfile(k)}
    slow.send_signal(signal.SIGCONT)
    said = finish(slow, 0)
    assert read("two/run.json")["seed"] == 7 and os.listdir("d2") == ["step_000_layer_00.safetensors"]
    (other,) = glob.glob("two.*.other")
    assert f"kept as {other}" in said, said
    assert {os.path.basename(k): v for k, v in contents(other).items() if os.path.isfile(k)} == theirs


def test_an_ablation_that_is_stopped_never_replaces_a_finished_one(scope, repository, monkeypatch):
    ablate = ("ablate", *SMALL, "--variants", "scope", "--no-control", "-o", "r.json", "--csv", "r.csv", "--plot", "r.svg")
    scope.accept(*ablate, "--seeds", 2)
    assert read("r.json")["finished"] is True and not glob.glob("r.json.*")
    earlier = {name: open(name).read() for name in ("r.json", "r.csv", "r.svg")}
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        stopped = scope.start(*ablate, "--seeds", 2000)
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
    monkeypatch.syspath_prepend(repository / "bench")
    import report
    monkeypatch.setattr(report, "RESULTS", pathlib.Path("."))
    report.load("r.json")
    with pytest.raises(SystemExit, match="unfinished"):
        report.load("stopped.json")


def test_a_bench_that_is_stopped_never_replaces_a_finished_one(scope):
    bench = ("bench", "--grid", "2x4x4", "--heads", 1, "--repeat", 1, "--json", "b.json", "--density")
    scope.accept(*bench, "0.3,0.5")
    earlier = open("b.json").read()
    assert json.loads(earlier)["finished"] is True and not glob.glob("b.json.*")
    stopped = scope.start(*bench, ",".join(["0.3"] * 5000), stdout=subprocess.DEVNULL)
    wait_for("b.json.*.unfinished", stopped)
    stopped.send_signal(signal.SIGTERM)
    finish(stopped, 143)
    (kept,) = glob.glob("b.json.*")
    assert open("b.json").read() == earlier and read(kept)["finished"] is False


def test_what_another_process_wrote_meanwhile_is_kept(scope):
    slow = scope.start("ablate", *SMALL, "--variants", "scope", "--no-control", "-o", "s.json", "--seeds", 10)
    wait_for("s.json.*.unfinished", slow)
    slow.send_signal(signal.SIGSTOP)
    open("s.json", "w").write("theirs")
    slow.send_signal(signal.SIGCONT)
    said = finish(slow, 0)
    (other,) = glob.glob("s.json.*")
    assert read("s.json")["finished"] and open(other).read() == "theirs" and f"kept as {other}" in said, said


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
def test_an_interrupted_run_leaves_everything_as_it_was(scope, number):
    before = contents()
    process = scope.start("generate", *SMALL[:4], "--steps", 10000, "-o", "run", "--dump-qkv", "d3/deep", "--dump-steps", 0)
    wait_for("d3/deep/*layer_05*.tmp", process)
    process.send_signal(number)
    assert "interrupted" in finish(process, 128 + number)
    assert contents() == before, f"changed {set(contents()) ^ set(before)}"


def test_a_single_long_call_is_interrupted_in_its_midst(scope):
    before = contents()
    process = scope.start("bench", "--grid", "21x45x80", "--heads", 8, "--threads", 1, "--json", "long.json")
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    began = time.time()
    finish(process, 130)
    assert time.time() - began < 10 and contents() == before


def test_what_the_parent_ignores_stays_ignored(scope):
    process = scope.start("generate", *SMALL[:4], "--steps", 60, "-o", "run", "--dump-qkv", "d4", "--dump-steps", 0,
                          preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    wait_for("d4/*.tmp", process)
    process.send_signal(signal.SIGHUP)
    finish(process, 0)


def test_names_that_are_not_utf8_are_escaped_in_every_json(scope):
    os.symlink("model", b"model\xff")
    tensors.save(b"noise\xff", {"noise": np.zeros((12, 5, 8, 12), np.float32)})
    scope.accept("generate", *SMALL, "--model", b"./model\xff", "--noise", b"noise\xff", "-o", b"run\xff")
    run = read(b"run\xff/run.json")
    assert run["model"] == "model\\xff" and run["noise"] == "noise\\xff", run
    os.link("p.csv", b"p\xff.csv")
    svoo = b"svoo:codes=20+profile=p\xff.csv"
    scope.accept("attend", "in", "--method", svoo, "--layer", 0, "--step", 0, "--steps", 1, "--set", "dense_steps=0", "-o",
                 "o.safetensors", "--stats", b"stats\xff")
    assert read(b"stats\xff")["settings"]["profile"] == "p\\xff.csv"
    with open("o.safetensors", "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    assert json.loads(header["__metadata__"]["settings"])["profile"] == "p\\xff.csv"
    os.link("in", b"in\xff\xe9")
    place = ("--layer", 0, "--step", 0, "--steps", 1)
    scope.accept("compare", b"in\xff\xe9", "--methods", svoo + b"+dense_steps=0+dense_layers=0", "--density", 0.5, "--repeat", 1,
                 *place, "--json", "c.json", "--plots", "c-")
    data = read("c.json")
    assert data["input"] == "in\\xff\\xe9", data["input"]
    assert list(data["settings"]) == ["svoo:codes=20+profile=p\\xff.csv+dense_steps=0+dense_layers=0"], data["settings"]
    open("c-recall.svg", encoding="utf-8").read()
    scope.accept("evaluate", "run", b"run\xff", "--json", "e.json")
    assert read("e.json")["clip"] == "run\\xff"
    scope.accept("report", "run", b"run\xff", "-o", "report.html")
    assert "run\\\\xff" in open("report.html", encoding="utf-8").read()
    scope.accept("ablate", *SMALL, "--model", b"./model\xff", "--seeds", 1, "--no-control", "-o", b"a\xff", "--plot", "a.svg")
    assert read(b"a\xff")["model"] == "model\\xff"


def test_a_full_standard_output_is_told(scope):
    for arguments in (("methods",), ("--help",), ("--version",), ("attend", "in", "-o", "full.safetensors")):
        with open("/dev/full", "w") as full:
            assert "No space left" in finish(scope.start(*arguments, stdout=full), 3)
    assert os.path.exists("full.safetensors"), "the result is there all the same"
