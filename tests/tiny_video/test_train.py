"""Tests that training resumes, and that a wrong, killed or disk-starved run leaves the last checkpoint intact."""

import resource
import signal
import subprocess
import sys
import time

import pytest
import torch


@pytest.fixture
def train(repository, tmp_path):
    def run(*args, out="run", **options):
        command = [sys.executable, repository / "tools" / "tiny_video" / "train.py", "--smoke", "--out", tmp_path / out, *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)

    run.path = tmp_path / "run" / "checkpoint.pt"
    return run


def start(repository, folder):
    command = [sys.executable, repository / "tools" / "tiny_video" / "train.py", "--smoke", "--out", folder, "--save-minutes", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (folder / "checkpoint.pt").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return process


def test_resumed_run_equals_an_uninterrupted_one(train, tmp_path):
    forever = ("--minutes-full", 1e9)  # the learning rate follows the clock; an endless plan holds it still
    assert train("--max-steps", 4, *forever, out="straight").returncode == 0
    assert train("--max-steps", 2, *forever).returncode == 0
    assert "resumed at step 2" in train("--max-steps", 4, *forever).stdout
    a, b = (torch.load(tmp_path / n / "checkpoint.pt", weights_only=True) for n in ("straight", "run"))
    assert a["step"] == b["step"] == 4
    for name, value in a["net"].items():
        assert torch.equal(b["net"][name], value), name


def test_another_configuration_is_refused(train):
    assert train("--max-steps", 1).returncode == 0
    before = train.path.read_bytes()
    answer = train("--max-steps", 2, "--lr", 0.5)
    assert answer.returncode != 0 and "another configuration" in answer.stderr and "0.5" in answer.stderr
    assert train.path.read_bytes() == before


def test_unreadable_checkpoint_is_refused(train):
    train.path.parent.mkdir()
    train.path.write_bytes(b"not a checkpoint")
    answer = train("--max-steps", 1)
    assert answer.returncode != 0 and "not a readable checkpoint" in answer.stderr and "Traceback" not in answer.stderr
    assert train.path.read_bytes() == b"not a checkpoint"


def test_full_disk_keeps_the_last_checkpoint(train):
    assert train("--max-steps", 1).returncode == 0
    before = train.path.read_bytes()
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # writes fail as on a full disk
    answer = train("--max-steps", 2, preexec_fn=limit)
    assert answer.returncode != 0 and "could not be written" in answer.stderr and "intact" in answer.stderr
    assert train.path.read_bytes() == before and not list(train.path.parent.glob("*.tmp"))


def test_terminated_run_saves_and_says_so(repository, tmp_path):
    process = start(repository, tmp_path)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and "stopped at step" in output
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] >= 1


def test_killed_run_leaves_a_whole_checkpoint(repository, tmp_path):
    process = start(repository, tmp_path)
    time.sleep(0.7)  # with a save after every step, the kill falls into or near a write
    process.kill()
    process.communicate(timeout=60)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] >= 1
