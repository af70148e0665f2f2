"""Replays the hostile inputs of inputs.py on the command and, where a library is given, those of calls.py on the C ABI.

    replay.py SCOPE-COMMAND [LIBSCOPE.SO]
"""
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import files
import inputs

SCOPE = os.path.abspath(sys.argv[1])
REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
SECONDS, MEGABYTES = 120, 2000  # no input may take more; most take a hundredth, and sanitizers ten times that
TRACES = ("terminate called", "what():", "runtime error", "sanitizer", "basic_string", "scope: [json.exception",
          "filesystem error", "stoi", "traceback")
wrong = []
# The command leaves ignored what its parent ignores, as nohup and a shell's & do.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def snapshot():
    """Every name below the folder with what is there."""
    found = {}
    for folder, folders, names in os.walk(b"."):
        for name in folders + names:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            plain = os.path.isfile(path) and not os.path.islink(path)
            identity = (status.st_ino, status.st_mtime_ns, status.st_size) if plain else status.st_ino
            found[path] = os.readlink(path) if os.path.islink(path) else identity
    return found


def remove(path):
    shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.remove(path)


def run(item):
    """Its status, what it said on both streams, its seconds and its memory."""
    options, after = inputs.SURROUNDINGS[item.within]() if item.within else ({}, None)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began = time.monotonic()
        process = subprocess.Popen([SCOPE, *(a if isinstance(a, bytes) else str(a) for a in item.arguments)], stdin=subprocess.DEVNULL,
                                   **{"stdout": out, "stderr": err, **options})
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


def replay(item, before):
    """Returns what is there afterwards."""
    status, (out, err), seconds, megabytes = run(item)
    after = snapshot()
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
    if problems:
        wrong.append(item)
        print(f"{item.arguments} {item.within}: {'; '.join(problems)}\n    {said.strip()[:600]}", file=sys.stderr)
    return {path: what for path, what in after.items() if os.path.normpath(path) not in made}


with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    files.make(REPOSITORY)
    there = snapshot()
    for item in inputs.INPUTS:
        there = replay(item, there)
    os.chdir("/")
count = len(inputs.INPUTS)
if len(sys.argv) > 2:
    import calls
    count += calls.replay(sys.argv[2], wrong)
print(f"{count} hostile inputs, {len(wrong)} not as they should be")
sys.exit(bool(wrong))
