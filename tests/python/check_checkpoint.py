"""`scope generate --checkpoint` from outside: runs that were stopped end with the bits of those that were not.

A checkpoint is never lost.

    check_checkpoint.py SCOPE-COMMAND REPOSITORY
"""
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import tensors

SCOPE, REPOSITORY = sys.argv[1:]
CASES = f"{REPOSITORY}/tests/data/video"
checks = 0


def command(flags):
    return [SCOPE, "generate", *(str(part) for name, value in flags.items() for part in ((name,) if value is None else (name, value)))]


def generate(flags, limit=None):
    # Python ignores SIGXFSZ and so does the command then: a write past the limit fails as on a full disk.
    set_limit = None if limit is None else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return subprocess.run(command(flags), capture_output=True, text=True, preexec_fn=set_limit, restore_signals=False)


def accept(flags):
    global checks
    checks += 1
    result = generate(flags)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def refuse(code, words, flags, **options):
    """It must say `words` and leave the checkpoint as it is, and nothing beside it."""
    global checks
    checks += 1
    before, was = sorted(os.listdir(FOLDER)), read(CHECKPOINT)
    result = generate({**flags, "-o": f"{FOLDER}/refused"}, **options)
    text = result.stdout + result.stderr
    assert result.returncode == code and words in text, f"{words!r}: exit {result.returncode}: {text}"
    assert sorted(os.listdir(FOLDER)) == before and read(CHECKPOINT) == was, words


def read(path):
    with open(path, "rb") as file:
        return file.read()


def steps_done():
    return int(tensors.load(CHECKPOINT)[1]["steps done"])


def stop(flags, number):
    """Starts a run and ends it by a signal once its checkpoint is there, new."""
    global checks
    checks += 1
    was = os.stat(CHECKPOINT).st_ino if os.path.exists(CHECKPOINT) else None
    run = subprocess.Popen(command(flags), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not os.path.exists(CHECKPOINT) or os.stat(CHECKPOINT).st_ino == was:
        assert run.poll() is None, "it ended before it was stopped"
        time.sleep(0.002)
    run.send_signal(number)
    assert run.wait() == {signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}[number]
    assert not os.path.exists(flags["-o"]), "no run yet"


def check_identity(flags, pipeline, case):
    """Every part of a run's identity, by the option or the file that changes it, and by the checkpoint's own word."""
    copy = f"{FOLDER}/two/model"  # in the folder of a run, since nothing beside the checkpoint may change
    inputs, said = tensors.load(case)
    changed = {}
    for name in ("noise", "prompt_embeds", "negative_prompt_embeds"):
        changed[name] = f"{FOLDER}/two/{name}"
        tensors.save(changed[name], {**inputs, name: inputs[name] + 1}, said)
    shutil.copytree(pipeline, copy)
    index = json.load(open(f"{copy}/model_index.json"))
    with open(f"{copy}/model_index.json", "w") as file:
        json.dump({**index, "boundary_ratio": index["boundary_ratio"] / 2}, file)
    absent = object()
    options = {
        "method": {"--method": "svg2:groups=4"},
        "grid": {"--grid": "3x4x4", "--noise": absent},  # whose shape is that of the grid
        "steps": {"--steps": 601},
        "sampler": {"--sampler": "euler"},
        "shift": {"--shift": 9},
        "boundary": {"--model": copy},
        "guidance": {"--guidance": 9},
        "guidance-2": {"--guidance-2": 9},
        "seed": {"--noise": absent},
        "noise": {"--noise": changed["noise"]},
        "prompt": {"--condition": changed["prompt_embeds"]},
        "negative prompt": {"--condition": changed["negative_prompt_embeds"]},
        "compute": {"--compute": "bf16"},
        "setting groups": {"--method": "scope:groups=5"},
    }
    for name, more in options.items():
        given = {flag: value for flag, value in {**flags, **more}.items() if value is not absent}
        refuse(2, f"is of another run: {name} is", given)
    # The rest is changed in the file, name by name.
    kept, (arrays, names) = read(CHECKPOINT), tensors.load(CHECKPOINT)
    tables = json.loads(subprocess.run([SCOPE, "methods", "--json"], capture_output=True, check=True).stdout)
    known = {*options, *(f"setting {row['name']}" for row in tables["settings"]), "version", "model", "condition",
             "embedded guidance", "backend", "instruction set"}
    assert known | {"steps done"} == set(names), known ^ set(names)
    for name in sorted(known):
        tensors.save(CHECKPOINT, arrays, {**names, name: "other"})
        refuse(2, f"is of another run: {name} is other there", flags)
        tensors.save(CHECKPOINT, arrays, {other: value for other, value in names.items() if other != name})
        refuse(2, f"is of another run: {name} is nothing there", flags)
    with open(CHECKPOINT, "wb") as file:
        file.write(kept)


with tempfile.TemporaryDirectory() as FOLDER:
    CHECKPOINT = f"{FOLDER}/checkpoint"
    base = {"--grid": "3x20x32", "--steps": 10, "--seed": 5, "--target-density": 0.2, "--sampler": "unipc",
            "--latents": None, "--set": "dense_steps=0"}
    accept({**base, "-o": f"{FOLDER}/whole"})
    flags = {**base, "--checkpoint": CHECKPOINT, "-o": f"{FOLDER}/run"}
    stop(flags, signal.SIGTERM)
    assert os.listdir(FOLDER) != [] and sorted(os.listdir(FOLDER)) == ["checkpoint", "whole"], "an interrupt leaves no temporary"
    first = steps_done()
    stop(flags, signal.SIGKILL)  # and a run that goes on may be stopped again
    assert steps_done() > first >= 1, (first, steps_done())
    for name in os.listdir(FOLDER):  # SIGKILL may leave a temporary
        if name.endswith(".tmp"):
            os.remove(f"{FOLDER}/{name}")

    # Of another run: refused by what differs.
    for more, name in (({"--seed": 6}, "seed is 5 there and 6 here"), ({"--steps": 12}, "steps is 10 there and 12 here"),
                       ({"--method": "svg2"}, "method is scope there and svg2 here"),
                       ({"--sampler": "euler"}, "sampler is unipc there and euler here"),
                       ({"--target-density": 0.3}, "setting target_density is 0.2 there and 0.3 here"),
                       ({"--shift": 4}, "shift is 3 there and 4 here"),
                       ({"--compute": "bf16"}, "compute is f32 there and bf16 here"),
                       ({"--example": 1}, "is of another run: condition is")):
        refuse(2, name, {**flags, **more})
    model = f"{FOLDER}/whole/model"
    os.mkdir(model)
    for name in ("config.json", "scope.json", "examples.safetensors", "diffusion_pytorch_model.safetensors"):
        data = bytearray(read(f"{REPOSITORY}/models/tiny-wan/{name}"))
        if name.startswith("diffusion"):
            data[-2] ^= 1
        with open(f"{model}/{name}", "wb") as file:
            file.write(data)
    refuse(2, "is of another run: model is", {**flags, "--model": model})

    # A full disk leaves the old one, and the run goes on from it when there is room.
    refuse(3, "checkpoint", flags, limit=os.path.getsize(CHECKPOINT) // 2)

    # What is no checkpoint is nobody's to replace.
    kept = read(CHECKPOINT)
    for data, words in ((b"mine", "checkpoint: .safetensors"), (kept[:-9], "checkpoint: ")):
        with open(CHECKPOINT, "wb") as file:
            file.write(data)
        refuse(3, words, flags)
    tensors.save(CHECKPOINT, {"latent": tensors.load(f"{FOLDER}/whole/latents.safetensors")[0]["latents"]})
    refuse(3, "is no checkpoint; it is left alone", flags)
    with open(CHECKPOINT, "wb") as file:
        file.write(kept)

    # Paths and options that do not go together.
    refuse(2, "lies in", {**flags, "--checkpoint": f"{FOLDER}/refused/checkpoint"})
    refuse(2, "excludes", {**flags, "--dump-qkv": f"{FOLDER}/qkv"})
    refuse(2, "--checkpoint", {**base, "--checkpoint-every": 2})

    done = steps_done()
    said = accept(flags)
    assert f"{done} of 10 steps are done" in said, said
    assert not os.path.exists(CHECKPOINT), "it goes with the end of its run"
    for name in ("latents.safetensors", "frame_000.png", "frame_002.png"):
        assert read(f"{FOLDER}/run/{name}") == read(f"{FOLDER}/whole/{name}"), name
    runs = [json.load(open(f"{FOLDER}/{name}/run.json")) for name in ("whole", "run")]
    same = lambda run: [[(c["density"], c["head_density"], c["k_head"], c["dense"]) for c in step] for step in run["layers"]]
    assert same(runs[0]) == same(runs[1]) and runs[0]["density"] == runs[1]["density"], "what was done before is told too"
    assert all(c["selection_seconds"] > 0 and c["attention_seconds"] > 0 for step in runs[1]["layers"] for c in step if not c["dense"])

    # Every third step; two experts, stopped before the second.
    pipeline, case = f"{CASES}/wan22_t2v", f"{CASES}/wan22_t2v/case.safetensors"
    two = {"--model": pipeline, "--grid": "3x4x5", "--condition": case, "--noise": case, "--steps": 600, "--method": "scope:groups=4"}
    accept({**two, "-o": f"{FOLDER}/two"})
    flags = {**two, "--checkpoint": CHECKPOINT, "--checkpoint-every": 3, "-o": f"{FOLDER}/stopped"}
    stop(flags, signal.SIGTERM)
    assert steps_done() % 3 == 0
    check_identity(flags, pipeline, case)
    accept(flags)
    assert read(f"{FOLDER}/stopped/latents.safetensors") == read(f"{FOLDER}/two/latents.safetensors")
print(f"{checks} commands behaved")
