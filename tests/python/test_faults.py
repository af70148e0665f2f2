"""Every file operation and thread start of the command fails once, in turn: it says so, what was there stays, and no temporary is left."""
import contextlib
import glob
import json
import os
import pathlib
import shutil
import tempfile

import numpy as np
import pytest

import pngs

BUILT = pathlib.Path(__file__).parents[2] / "build" / "release" / "tests" / "libfault_shim.so"
SHIM = os.path.abspath(os.environ.get("SCOPE_FAULT_SHIM", BUILT))
IO, MEMORY = 3, 5  # exit codes


@pytest.fixture(autouse=True)
def folder():
    """A working folder, in memory where that can be had: files are synced some hundred times."""
    place = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=place) as folder, contextlib.chdir(folder):
        # LD_PRELOAD takes no path with a space, but one relative to where a command runs.
        shutil.copy(SHIM, "shim.so")
        os.mkdir("work")
        os.chdir("work")
        for i, name in enumerate("qkv"):
            np.save(f"{name}.npy", np.random.default_rng(i).standard_normal((1, 2, 40, 16), np.float32))
        with open("profile.csv", "w") as file:
            file.write("step,layer,head,density\n0,0,0,0.25\n0,0,1,0.5\n")
        for name in ("in.safetensors", "out.safetensors", "out.npy", "stats.json", "frames.csv"):  # what must stay
            with open(name, "w") as file:
                file.write("[]")
        yield


@pytest.fixture
def run(scope):
    """run(fault, *arguments): the command in which operation `fault` fails; 0: none."""
    def command(fault, *arguments, **variables):
        environment = dict(os.environ, LD_PRELOAD="../shim.so", SCOPE_FAULT_UNDER=os.getcwd(), SCOPE_FAULT_AT=str(fault),
                           PATH="", **variables)  # without ffmpeg, whose operations are its own
        return scope(*arguments, env=environment, timeout=120)

    return command


def snapshot():
    """Every name with its contents; what has times in it only by whether it is whole."""
    out = {}
    for path in sorted(glob.glob("**", recursive=True)):
        if os.path.isdir(path):
            out[path] = "folder"
        elif path.endswith(".json"):
            with open(path) as file:
                out[path] = sorted(json.load(file))
        else:
            with open(path, "rb") as file:
                out[path] = file.read()
    return out


@pytest.fixture
def each_fault(run):
    """each_fault(*arguments): the command in a copy of this folder, once for each of its file operations."""
    def command(*arguments, **variables):
        counter = os.path.abspath("../count")
        before = snapshot()

        def in_copy(fault, **more):
            shutil.rmtree("../copy", ignore_errors=True)
            shutil.copytree(".", "../copy")
            with contextlib.chdir("../copy"):
                return run(fault, *arguments, **variables, **more), snapshot()

        done, expected = in_copy(0, SCOPE_FAULT_COUNT=counter)
        assert done.returncode == 0, done.stderr
        with open(counter) as file:
            operations = int(file.read())
        assert operations > 5, operations
        for fault in range(1, operations + 1):
            done, after = in_copy(fault)
            what = f"{arguments}, operation {fault} of {operations}: exit {done.returncode}, {done.stderr!r}"
            if done.returncode == 0:
                wanted = expected
            else:
                wanted = before
                assert done.returncode == IO and done.stderr.startswith("scope: ") and "terminate" not in done.stderr, what
            assert after == wanted, f"{what}; differs in {[k for k in {*after, *wanted} if after.get(k) != wanted.get(k)]}"

    return command


MAKE = ("make-qkv", "--grid", "2x4x5", "--rope", "8,4,4", "-o", "in.safetensors")
ATTEND = ("attend", "in.safetensors", "-o", "out.safetensors", "--stats", "stats.json", "--state", "warm", "--threads")


def test_make_qkv(each_fault):
    each_fault(*MAKE)


def test_attend_with_npy_and_a_profile(each_fault):
    each_fault("attend", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--rope", "8,4,4", "--threads", 1, "-o", "out.npy",
               "--method", "svoo", "--set", "profile=profile.csv", "--layer", 0, "--step", 30, "--steps", 50, "--set", "dense_layers=0")


@pytest.mark.parametrize("variables", ({}, {"SCOPE_FAULT_RENAME": "none"}), ids=("", "without rename"))
def test_attend_with_safetensors_and_a_state(run, each_fault, variables):
    assert run(0, *MAKE).returncode == 0
    each_fault(*ATTEND, 1, **variables)


@pytest.mark.parametrize("start", (1, 2, 3))  # of the thread that takes interrupts, and of two that compute
def test_starts_of_threads(run, start):
    assert run(0, *MAKE).returncode == 0
    before, done = snapshot(), run(0, *ATTEND, 3, SCOPE_FAULT_THREAD=str(start))
    assert done.returncode == MEMORY and done.stderr.startswith("scope: ") and snapshot() == before, (start, done)


def test_generate_and_evaluate(bundled, run, each_fault):
    """A run: frames and JSON in a folder that is replaced as a whole; then its frames are read."""
    pngs.write("first.png", np.zeros((16, 24, 3)))
    # The model is elsewhere: its hundreds of tensors are read as those of attend are.
    generate = ("generate", "--model", bundled, "--grid", "5x4x6", "--image", "first.png", "--steps", 1, "--threads", 1, "-o", "run")
    assert run(0, *generate).returncode == 0
    each_fault(*generate, "--seed", 3)
    each_fault("evaluate", "run", "run", "--json", "quality.json", "--csv", "frames.csv", "--plot", "psnr.svg")
