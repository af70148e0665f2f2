"""Replays the hostile inputs of inputs.py on the command, and those of calls.py on the C ABI."""
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
import types

import pytest

import calls
import files
import inputs

pytestmark = pytest.mark.usefixtures("interruptible")
SECONDS, MEGABYTES = 120, 2000  # no input may take more; most take a hundredth, and sanitizers ten times that
TRACES = ("terminate called", "what():", "runtime error", "sanitizer", "basic_string", "scope: [json.exception",
          "filesystem error", "stoi", "traceback")


@pytest.fixture(scope="module")
def place(scope, repository, tmp_path_factory):
    """The working folder: every file that the inputs name, and what is there."""
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("t"))
    files.make(repository)
    yield types.SimpleNamespace(there=scope.snapshot("."))
    os.chdir(before)


def remove(path):
    shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.remove(path)


def run(scope, item):
    """Its status, what it said on both streams, its seconds and its memory."""
    options, after = inputs.SURROUNDINGS[item.within]() if item.within else ({}, None)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began = time.monotonic()
        process = subprocess.Popen(scope.words(item.arguments), **{"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, **options})
        late = threading.Timer(SECONDS, process.kill)
        late.start()
        if after:
            after(process)
        _, status, usage = os.wait4(process.pid, 0)
        late.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        said = []
        for stream in (out, err):
            stream.seek(0)
            said.append(stream.read().decode(errors="replace"))
    return process.returncode, said, time.monotonic() - began, usage.ru_maxrss / 1024


@pytest.mark.parametrize("item", inputs.INPUTS, ids=map(str, range(len(inputs.INPUTS))))
def test_command(scope, place, item):
    status, (out, err), seconds, megabytes = run(scope, item)
    before, after = place.there, scope.snapshot(".")
    said, problems = out + err, []
    if status != item.status:
        problems.append(f"status {status}, expected {item.status}")
    problems += [f"nothing about {word!r}" for word in item.says if word.lower() not in said.lower()]
    problems += [f"a trace of the program: {word!r}" for word in TRACES if word in said.lower()]
    control = re.search("[\0-\x08\x0b-\x1f]", err.replace("\r\x1b[K", ""))
    if re.search(r"\d{100}", said.replace("9" * 900, "")) or len(err) > 6000 or control:
        problems.append("a message that no terminal should get")
    if seconds > SECONDS or megabytes > MEGABYTES:
        problems.append(f"{seconds:.1f} s and {megabytes:.0f} MB")
    made = {os.path.normpath(p) for p in after if p not in before}
    top = {p for p in made if os.path.dirname(p) not in made}
    if item.makes is not None and top != {os.fsencode(name) for name in item.makes}:
        problems.append(f"made {sorted(top)}, expected {sorted(item.makes)}")
    changed = {os.path.normpath(p) for p in before if after.get(p) != before[p]}
    if changed - {os.fsencode(name) for name in item.changes}:
        problems.append(f"changed {sorted(changed)}")
    if item.check and not problems:
        try:
            item.check()
        except (AssertionError, OSError, ValueError, KeyError) as error:
            problems.append(f"what it made is wrong: {type(error).__name__} {error}")
    for path in top:
        remove(path)
    place.there = {path: what for path, what in after.items() if os.path.normpath(path) not in made}
    assert not problems, f"{item.arguments} {item.within}: {'; '.join(problems)}\n    {said.strip()[:600]}"


@pytest.fixture(scope="module")
def hostile(library):
    return calls.Calls(library)


@pytest.mark.parametrize("part", ("runs", "selections", "plans", "tables", "states", "threads"))
def test_library(hostile, part):
    hostile.wrong.clear()
    getattr(hostile, part)()
    assert not hostile.wrong, "\n".join(hostile.wrong)
