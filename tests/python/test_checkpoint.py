"""`scope generate --checkpoint` from outside: runs that were stopped end with the bits of those that were not.

A checkpoint is never lost.
"""
import json
import os
import shutil
import signal
import subprocess
import time

import pytest

import tensors

BASE = {"--grid": "3x20x32", "--steps": 10, "--seed": 5, "--target-density": 0.2, "--sampler": "unipc", "--latents": None,
        "--set": "dense_steps=0"}
ABSENT = object()


def words(flags):
    """Of a command, from options with their values; None: it has none."""
    given = {name: value for name, value in flags.items() if value is not ABSENT}
    return "generate", *(part for name, value in given.items() for part in ((name,) if value is None else (name, value)))


def steps_done(checkpoint):
    return int(tensors.load(checkpoint)[1]["steps done"])


def stop(scope, flags, number):
    """Starts a run and ends it by a signal once its checkpoint is there, new."""
    checkpoint = flags["--checkpoint"]
    was = checkpoint.stat().st_ino if checkpoint.exists() else None
    run = scope.start(*words(flags), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not checkpoint.exists() or checkpoint.stat().st_ino == was:
        assert run.poll() is None, "it ended before it was stopped"
        time.sleep(0.002)
    run.send_signal(number)
    assert run.wait() == {signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}[number]
    assert not flags["-o"].exists(), "no run yet"


@pytest.fixture(scope="module")
def stopped(scope, tmp_path_factory):
    """Flags of a run that was stopped twice."""
    folder = tmp_path_factory.mktemp("t")
    flags = {**BASE, "--checkpoint": folder / "checkpoint", "-o": folder / "run"}
    stop(scope, flags, signal.SIGTERM)
    assert os.listdir(folder) == ["checkpoint"], "an interrupt leaves no temporary"
    first = steps_done(flags["--checkpoint"])
    stop(scope, flags, signal.SIGKILL)  # and a run that goes on may be stopped again
    assert steps_done(flags["--checkpoint"]) > first >= 1
    for name in os.listdir(folder):  # SIGKILL may leave a temporary
        if name.endswith(".tmp"):
            os.remove(folder / name)
    return flags


@pytest.fixture
def refuse(scope, tmp_path):
    return lambda code, said, flags, **options: scope.refuse(code, said, *words({**flags, "-o": tmp_path / "refused"}), **options)


@pytest.mark.parametrize("more,said", (
    ({"--seed": 6}, "seed is 5 there and 6 here"),
    ({"--steps": 12}, "steps is 10 there and 12 here"),
    ({"--method": "svg2"}, "method is scope there and svg2 here"),
    ({"--sampler": "euler"}, "sampler is unipc there and euler here"),
    ({"--target-density": 0.3}, "setting target_density is 0.2 there and 0.3 here"),
    ({"--shift": 4}, "shift is 3 there and 4 here"),
    ({"--compute": "bf16"}, "compute is f32 there and bf16 here"),
    ({"--example": 1}, "is of another run: condition is")), ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_a_checkpoint_of_another_run_is_refused_by_what_differs(refuse, stopped, more, said):
    refuse(2, said, {**stopped, **more})


def test_a_checkpoint_of_other_weights_is_refused(refuse, stopped, bundled, tmp_path):
    for name in ("config.json", "scope.json", "examples.safetensors", "diffusion_pytorch_model.safetensors"):
        data = bytearray((bundled / name).read_bytes())
        if name.startswith("diffusion"):
            data[-2] ^= 1
        (tmp_path / name).write_bytes(data)
    refuse(2, "is of another run: model is", {**stopped, "--model": tmp_path})


def test_a_full_disk_leaves_the_old_checkpoint(refuse, stopped):
    refuse(3, "checkpoint", stopped, limit=stopped["--checkpoint"].stat().st_size // 2)


def test_what_is_no_checkpoint_is_left_alone(refuse, stopped, tmp_path):
    path, kept = tmp_path / "checkpoint", stopped["--checkpoint"]
    for data, said in ((b"mine", "checkpoint: .safetensors"), (kept.read_bytes()[:-9], "checkpoint: ")):
        path.write_bytes(data)
        refuse(3, said, {**stopped, "--checkpoint": path})
    tensors.save(path, {"latent": tensors.load(kept)[0]["latent"]})
    refuse(3, "is no checkpoint; it is left alone", {**stopped, "--checkpoint": path})


def test_paths_and_options_that_do_not_go_together_are_refused(refuse, stopped, tmp_path):
    refuse(2, "lies in", {**stopped, "--checkpoint": tmp_path / "refused" / "checkpoint"})
    refuse(2, "excludes", {**stopped, "--dump-qkv": tmp_path / "qkv"})
    refuse(2, "--checkpoint", {**BASE, "--checkpoint-every": 2})


def test_a_stopped_run_ends_with_the_bits_of_one_that_was_not(scope, stopped, tmp_path):
    """What was done before is told too, and the checkpoint goes with the end of its run."""
    flags = {**stopped, "--checkpoint": tmp_path / "checkpoint", "-o": tmp_path / "run"}
    shutil.copy(stopped["--checkpoint"], flags["--checkpoint"])
    done = steps_done(flags["--checkpoint"])
    assert f"{done} of 10 steps are done" in scope.accept(*words(flags))
    assert not flags["--checkpoint"].exists()
    scope.accept(*words({**BASE, "-o": tmp_path / "whole"}))
    for name in ("latents.safetensors", "frame_000.png", "frame_002.png"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    runs = [json.load(open(tmp_path / name / "run.json")) for name in ("whole", "run")]
    same = lambda run: [[(c["density"], c["head_density"], c["k_head"], c["dense"]) for c in step] for step in run["layers"]]
    assert same(runs[0]) == same(runs[1]) and runs[0]["density"] == runs[1]["density"]
    assert all(c["selection_seconds"] > 0 and c["attention_seconds"] > 0 for step in runs[1]["layers"] for c in step if not c["dense"])


@pytest.fixture(scope="module")
def experts(scope, data, tmp_path_factory):
    """Flags of a run of two experts, with a checkpoint after every third step, that was stopped before the second expert."""
    folder, pipeline = tmp_path_factory.mktemp("t"), data / "video" / "wan22_t2v"
    case = pipeline / "case.safetensors"
    flags = {"--model": pipeline, "--grid": "3x4x5", "--condition": case, "--noise": case, "--steps": 600, "--method": "scope:groups=4",
             "--checkpoint": folder / "checkpoint", "--checkpoint-every": 3, "-o": folder / "run"}
    stop(scope, flags, signal.SIGTERM)
    assert steps_done(flags["--checkpoint"]) % 3 == 0
    return flags


def test_experts_go_on_with_the_bits_of_a_run_that_was_not_stopped(scope, experts, tmp_path):
    flags = {**experts, "--checkpoint": tmp_path / "checkpoint", "-o": tmp_path / "run"}
    shutil.copy(experts["--checkpoint"], flags["--checkpoint"])
    scope.accept(*words(flags))
    scope.accept(*words({**experts, "--checkpoint": ABSENT, "--checkpoint-every": ABSENT, "-o": tmp_path / "whole"}))
    assert (tmp_path / "run" / "latents.safetensors").read_bytes() == (tmp_path / "whole" / "latents.safetensors").read_bytes()


def test_every_part_of_the_identity_of_a_run_counts(scope, refuse, experts, data, tmp_path):
    """By the option or the file that changes it, and by the checkpoint's own word."""
    pipeline = data / "video" / "wan22_t2v"
    inputs, said = tensors.load(pipeline / "case.safetensors")
    changed = {}
    for name in ("noise", "prompt_embeds", "negative_prompt_embeds"):
        changed[name] = tmp_path / name
        tensors.save(changed[name], {**inputs, name: inputs[name] + 1}, said)
    copy = tmp_path / "model"
    shutil.copytree(pipeline, copy)
    index = json.load(open(copy / "model_index.json"))
    (copy / "model_index.json").write_text(json.dumps({**index, "boundary_ratio": index["boundary_ratio"] / 2}))
    options = {
        "method": {"--method": "svg2:groups=4"},
        "grid": {"--grid": "3x4x4", "--noise": ABSENT},  # whose shape is that of the grid
        "steps": {"--steps": 601},
        "sampler": {"--sampler": "euler"},
        "shift": {"--shift": 9},
        "boundary": {"--model": copy},
        "guidance": {"--guidance": 9},
        "guidance-2": {"--guidance-2": 9},
        "seed": {"--noise": ABSENT},
        "noise": {"--noise": changed["noise"]},
        "prompt": {"--condition": changed["prompt_embeds"]},
        "negative prompt": {"--condition": changed["negative_prompt_embeds"]},
        "compute": {"--compute": "bf16"},
        "setting groups": {"--method": "scope:groups=5"},
    }
    for name, more in options.items():
        refuse(2, f"is of another run: {name} is", {**experts, **more})
    # The rest is changed in the file, name by name.
    arrays, names = tensors.load(experts["--checkpoint"])
    tables = json.loads(scope.accept("methods", "--json"))
    known = {*options, *(f"setting {row['name']}" for row in tables["settings"]), "version", "model", "condition",
             "embedded guidance", "backend", "instruction set"}
    assert known | {"steps done"} == set(names), known ^ set(names)
    flags = {**experts, "--checkpoint": tmp_path / "checkpoint"}
    for name in sorted(known):
        tensors.save(flags["--checkpoint"], arrays, {**names, name: "other"})
        refuse(2, f"is of another run: {name} is other there", flags)
        tensors.save(flags["--checkpoint"], arrays, {other: value for other, value in names.items() if other != name})
        refuse(2, f"is of another run: {name} is nothing there", flags)
