"""Every file operation and thread start of the command fails once, in turn: it says so, what was there stays, and no temporary is left.

    check_faults.py SCOPE-COMMAND REPOSITORY FAULT-SHIM
"""
import contextlib
import glob
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib

import numpy

SCOPE, REPOSITORY, SHIM = map(os.path.abspath, sys.argv[1:])
IO, MEMORY = 3, 5  # exit codes
failed = survived = 0


def run(at, arguments, **variables):
    environment = dict(os.environ, LD_PRELOAD="../shim.so", SCOPE_FAULT_UNDER=os.getcwd(), SCOPE_FAULT_AT=str(at),
                       PATH="", **variables)  # without ffmpeg, whose operations are its own
    return subprocess.run([SCOPE, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=120)


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


def each_fault(*arguments, **variables):
    """The command in a copy of this folder, once for each of its file operations."""
    global failed, survived
    counter = os.path.abspath("../count")
    before = snapshot()

    def in_copy(at, **more):
        shutil.rmtree("../copy", ignore_errors=True)
        shutil.copytree(".", "../copy")
        with contextlib.chdir("../copy"):
            done = run(at, arguments, **variables, **more)
            return done, snapshot()

    done, expected = in_copy(0, SCOPE_FAULT_COUNT=counter)
    assert done.returncode == 0, done.stderr
    with open(counter) as file:
        operations = int(file.read())
    assert operations > 5, operations
    for at in range(1, operations + 1):
        done, after = in_copy(at)
        what = f"{arguments}, operation {at} of {operations}: exit {done.returncode}, {done.stderr!r}"
        if done.returncode == 0:
            survived += 1
            wrong = expected
        else:
            failed += 1
            wrong = before
            assert done.returncode == IO and done.stderr.startswith("scope: ") and "terminate" not in done.stderr, what
        assert after == wrong, f"{what}; differs in {[k for k in {*after, *wrong} if after.get(k) != wrong.get(k)]}"


def save_png(path, height, width):
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    header, rows = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), bytes(height * (3 * width + 1))
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


place = "/dev/shm" if os.path.isdir("/dev/shm") else None  # files are synced some hundred times
with tempfile.TemporaryDirectory(dir=place) as folder, contextlib.chdir(folder):
    shutil.copy(SHIM, "shim.so")  # LD_PRELOAD takes no path with a space, but one relative to where a command runs
    os.mkdir("work")
    os.chdir("work")
    for i, name in enumerate("qkv"):
        numpy.save(f"{name}.npy", numpy.random.default_rng(i).standard_normal((1, 2, 40, 16), numpy.float32))
    with open("profile.csv", "w") as file:
        file.write("step,layer,head,density\n0,0,0,0.25\n0,0,1,0.5\n")
    for name in ("in.safetensors", "out.safetensors", "out.npy", "stats.json", "frames.csv"):  # what must stay
        with open(name, "w") as file:
            file.write("[]")
    inputs = ("--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--rope", "8,4,4", "--threads", 1)
    each_fault("make-qkv", "--grid", "2x4x5", "--rope", "8,4,4", "-o", "in.safetensors")
    each_fault("attend", *inputs, "-o", "out.npy", "--method", "svoo", "--set", "profile=profile.csv",
               "--layer", 0, "--step", 30, "--steps", 50, "--set", "dense_layers=0")
    assert run(0, ("make-qkv", "--grid", "2x4x5", "--rope", "8,4,4", "-o", "in.safetensors")).returncode == 0
    attend = ("attend", "in.safetensors", "-o", "out.safetensors", "--stats", "stats.json", "--state", "warm", "--threads")
    each_fault(*attend, 1)
    each_fault(*attend, 1, SCOPE_FAULT_RENAME="none")
    for start in (1, 2, 3):  # of the thread that takes interrupts, and of two that compute
        before, done = snapshot(), run(0, (*attend, 3), SCOPE_FAULT_THREAD=str(start))
        assert done.returncode == MEMORY and done.stderr.startswith("scope: ") and snapshot() == before, (start, done)
    # A run: frames and JSON in a folder that is replaced as a whole; then its frames are read.
    save_png("first.png", 16, 24)
    model = f"{REPOSITORY}/models/tiny-wan"  # elsewhere: its hundreds of tensors are read as those of attend are
    generate = ("generate", "--model", model, "--grid", "5x4x6", "--image", "first.png", "--steps", 1, "--threads", 1, "-o", "run")
    assert run(0, generate).returncode == 0
    each_fault(*generate, "--seed", 3)
    each_fault("evaluate", "run", "run", "--json", "quality.json", "--csv", "frames.csv", "--plot", "psnr.svg")
print(f"{failed} faults were told and left everything, {survived} did no harm")
