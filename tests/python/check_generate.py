"""`scope generate` from outside: what a run folder holds, what repeats, and hostile inputs that leave nothing behind.

    check_generate.py SCOPE-COMMAND REPOSITORY
"""
import json
import os
import re
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib

import numpy as np

import tensors

SCOPE, REPOSITORY = sys.argv[1:]
CASES = f"{REPOSITORY}/tests/data/video"
checks = 0


def generate(*arguments, limit=None):
    # Python ignores SIGXFSZ and so does the command then: a write past the limit fails as on a full disk.
    set_limit = None if limit is None else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    flags = {}  # a later value replaces an earlier one, which the command itself refuses
    at = 0
    while at < len(arguments):
        valued = arguments[at] != "--latents"
        flags[arguments[at]] = [arguments[at + 1]] if valued else []
        at += 2 if valued else 1
    command = [str(part) for name, value in flags.items() for part in (name, *value)]
    return subprocess.run([SCOPE, "generate", *command], capture_output=True, text=True, preexec_fn=set_limit, restore_signals=False)


def accept(*arguments):
    global checks
    checks += 1
    result = generate(*arguments)
    assert result.returncode == 0, f"{arguments}: {result.stdout}{result.stderr}"
    return result.stdout


def refuse(code, word, *arguments, **options):
    """The command must exit with `code`, name `word`, and leave neither a folder nor a temporary behind."""
    global checks
    checks += 1
    before = sorted(os.listdir(FOLDER))
    result = generate("-o", f"{FOLDER}/refused", *arguments, **options)
    text = result.stdout + result.stderr
    assert result.returncode == code, f"{arguments}: exit {result.returncode}, expected {code}: {text}"
    assert word.lower() in text.lower(), f"{arguments}: nothing about {word!r} in: {text}"
    assert sorted(os.listdir(FOLDER)) == before, f"{arguments}: left {set(os.listdir(FOLDER)) - set(before)} behind"


def png(path, height, width):
    rows = b"".join(b"\0" + bytes((7 * x + 3 * y) % 256 for x in range(3 * width)) for y in range(height))
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


with tempfile.TemporaryDirectory() as FOLDER:
    # The bundled model at a small grid.
    png(f"{FOLDER}/first.png", 16, 24)
    small = ("--grid", "5x4x6", "--image", f"{FOLDER}/first.png", "--steps", 5)
    each_head = ("--target-density", "0.25", "--set", "target_scope=head", "--latents", "--seed", 3)
    said = accept("-o", f"{FOLDER}/scope", *small, *each_head)
    assert "density 0.25" in said, said
    run = json.load(open(f"{FOLDER}/scope/run.json"))
    assert run["grid"] == [5, 4, 6] and run["steps"] == 5 and run["seed"] == 3 and run["settings"]["rule"] == "online"
    assert run["settings"]["target_density"] == "0.25"
    files = [f"frame_{i:03}.png" for i in range(5)]
    assert set(os.listdir(f"{FOLDER}/scope")) - {"clip.mp4"} == {*files, "run.json", "latents.safetensors"}
    for step, layers in enumerate(run["layers"]):
        assert len(layers) == 6
        for layer, call in enumerate(layers):
            assert call["dense"] == (step < 1 or layer < 1), (step, layer, call)
            assert len(call["k_head"]) == 2 and call["attention_seconds"] > 0 and call["selection_seconds"] >= 0
            assert call["density"] == 1 if call["dense"] else abs(call["density"] - 0.25) < 0.01
            assert all(abs(d - call["density"]) < 0.01 for d in call["head_density"]) and len(call["head_density"]) == 2
    seconds = run["seconds"]
    assert abs(sum(v for k, v in seconds.items() if k != "total") - seconds["total"]) < 1e-6 and min(seconds.values()) > 0
    timed = sum(c["attention_seconds"] + c["selection_seconds"] for layers in run["layers"] for c in layers)
    assert abs(timed - seconds["dense_prefix"] - seconds["sparse_attention"] - seconds["selection"]) < 1e-6

    # One rho for the heads of a call: they differ, and their mean meets the density.
    said = accept("-o", f"{FOLDER}/sample", *small, "--target-density", "0.25", "--seed", 3)
    # Scores differ in their last bits between instruction sets, and of 120 keys one is 0.008.
    assert abs(float(re.search(r"density ([0-9.]+)", said).group(1)) - 0.25) < 0.001, said
    calls = [c for layers in json.load(open(f"{FOLDER}/sample/run.json"))["layers"] for c in layers if not c["dense"]]
    assert all(abs(np.mean(c["head_density"]) - c["density"]) < 1e-9 and abs(c["density"] - 0.25) < 0.01 for c in calls)
    assert max(max(c["head_density"]) - min(c["head_density"]) for c in calls) > 0.05

    # A density by step, one of them dense.
    accept("-o", f"{FOLDER}/steps", *small, "--method", "scope-mean:dense_steps=0", "--set", "density_steps=0.2:1,0.6:0.5,1:0.25")
    run = json.load(open(f"{FOLDER}/steps/run.json"))
    assert run["settings"]["density_steps"] == "0.2:1,0.6:0.5,1:0.25" and run["settings"]["target_density"] == "none"
    for step, layers in enumerate(run["layers"]):
        for layer, call in enumerate(layers):
            wanted = 1 if layer < 1 else (1, 0.5, 0.5, 0.25, 0.25)[step]
            assert call["dense"] == (wanted == 1) and abs(call["density"] - wanted) < 0.01, (step, layer, call)

    read = lambda name, file: open(f"{FOLDER}/{name}/{file}", "rb").read()
    accept("-o", f"{FOLDER}/again", *small, *each_head, "--threads", 1)
    assert all(read("scope", f) == read("again", f) for f in [*files, "latents.safetensors"]), "the same seed gives the same bits"
    accept("-o", f"{FOLDER}/dense", *small, "--method", "dense", "--seed", 3, "--latents")
    assert read("dense", "latents.safetensors") != read("scope", "latents.safetensors")
    accept("-o", f"{FOLDER}/dense", *small, "--method", "dense", "--seed", 4, "--latents")  # replaces
    a, b = (tensors.load(f"{FOLDER}/{n}/latents.safetensors")[0]["latents"] for n in ("scope", "dense"))
    assert a.shape == b.shape == (12, 5, 8, 12) and np.abs(a - b).max() > 0.1

    # An ffmpeg that fails: the command says so and exits with 3, and all but the clip is there. Without ffmpeg nothing is missing.
    programs = {"fails": "exit 1", "stops halfway": 'for clip; do :; done; echo part > "$clip"; exit 1', "has no library": "exit 127",
                "dies": "kill -9 $$", "does nothing": "exit 0", "makes it": 'for clip; do :; done; echo made > "$clip"', "is absent": None}
    usual = os.environ["PATH"]
    for what, program in programs.items():
        os.environ["PATH"] = place = f"{FOLDER}/ffmpeg that {what}"
        os.mkdir(place)
        if program is not None:
            with open(f"{place}/ffmpeg", "w") as file:
                file.write(f"#!/bin/sh\n{program}\n")
            os.chmod(f"{place}/ffmpeg", 0o755)
        result = generate("-o", f"{place}/run", *small, *each_head)
        failed = what not in ("makes it", "is absent")
        said = result.stderr.strip()
        assert result.returncode == 3 * failed and ("there is no clip.mp4" in said) == failed, (what, result)
        clip = {"clip.mp4"} if what == "makes it" else set()
        assert set(os.listdir(f"{place}/run")) == {*files, "run.json", "latents.safetensors"} | clip
        assert all(read("scope", f) == open(f"{place}/run/{f}", "rb").read() for f in files)
    os.environ["PATH"] = usual

    # q, k, v of a step feed the other commands.
    accept("-o", f"{FOLDER}/dense", *small, "--method", "dense", "--dump-qkv", f"{FOLDER}/qkv", "--dump-steps", "1,4")
    assert sorted(os.listdir(f"{FOLDER}/qkv")) == [f"step_00{s}_layer_0{n}.safetensors" for s in (1, 4) for n in range(6)]
    file, meta = tensors.load(f"{FOLDER}/qkv/step_004_layer_03.safetensors")
    assert meta == {"grid": "5x4x6", "rope": "44,42,42"} and file["q"].shape == (2, 120, 128)
    accept("-o", f"{FOLDER}/dense", *small, "--method", "dense", "--dump-qkv", f"{FOLDER}/one", "--dump-layers", "2")
    assert os.listdir(f"{FOLDER}/one") == ["step_002_layer_02.safetensors"]
    attend = [SCOPE, "attend", f"{FOLDER}/qkv/step_004_layer_03.safetensors", "-o", f"{FOLDER}/o.safetensors"]
    assert subprocess.run(attend, capture_output=True).returncode == 0

    # Another model: latents in, latents out.
    model, case = f"{CASES}/i2v_image_branch", f"{CASES}/i2v_image_branch/case.safetensors"
    other = ("--model", model, "--grid", "3x4x5", "--condition", case, "--noise", case, "--steps", 2, "--shift", 4, "--guidance", 3)
    accept("-o", f"{FOLDER}/latents", *other, "--method", "dense")
    got = tensors.load(f"{FOLDER}/latents/latents.safetensors")[0]["latents"]
    assert np.abs(got - tensors.load(case)[0]["sample"]).max() < 1e-4
    assert len(json.load(open(f"{FOLDER}/latents/run.json"))["layers"][0]) == 2 * 2, "two layers, two branches"

    # A pipeline of two experts: sampler and shift are its scheduler's, one expert in memory or both give the same bits.
    pipeline, case = f"{CASES}/wan22_t2v", f"{CASES}/wan22_t2v/case.safetensors"
    two = ("--model", pipeline, "--grid", "3x4x5", "--condition", case, "--noise", case, "--steps", 6, "--method", "dense",
           "--guidance", 4, "--guidance-2", 3)
    assert "one expert in memory at a time" in accept("-o", f"{FOLDER}/two", *two)
    got = tensors.load(f"{FOLDER}/two/latents.safetensors")[0]["latents"]
    assert np.abs(got - tensors.load(case)[0]["sample"]).max() < 1e-4
    run = json.load(open(f"{FOLDER}/two/run.json"))
    assert {k: run[k] for k in ("model", "experts", "sampler", "shift", "guidance", "guidance_2", "boundary", "expert_steps")} == {
        "model": "wan22_t2v", "experts": "one", "sampler": "unipc", "shift": 3, "guidance": 4, "guidance_2": 3,
        "boundary": 875, "expert_steps": [2, 4]}, run
    assert "both experts in memory" in accept("-o", f"{FOLDER}/both", *two, "--experts", "both")
    assert json.load(open(f"{FOLDER}/both/run.json"))["experts"] == "both"
    assert read("two", "latents.safetensors") == read("both", "latents.safetensors")
    accept("-o", f"{FOLDER}/euler", *two, "--sampler", "euler", "--shift", 5)
    run = json.load(open(f"{FOLDER}/euler/run.json"))
    assert run["sampler"] == "euler" and run["shift"] == 5 and read("two", "latents.safetensors") != read("euler", "latents.safetensors")
    refuse(2, "--guidance-2", *two, "--model", f"{pipeline}/transformer")
    shutil.copytree(pipeline, f"{FOLDER}/one_of_two")
    refuse(2, "which is also --model", *two, "--model", f"{FOLDER}/one_of_two", "--profile-out",
           f"{FOLDER}/one_of_two/scheduler/scheduler_config.json")
    shutil.rmtree(f"{FOLDER}/one_of_two/transformer_2")
    refuse(3, "transformer_2", *two, "--model", f"{FOLDER}/one_of_two")
    case = f"{CASES}/i2v_image_branch/case.safetensors"

    # Usage: 2.
    refuse(2, "there is no", *small, "--method", "scopee")
    refuse(2, "target_density", *small, "--target-density", "2")
    refuse(2, "--steps", *small, "--steps", "0")
    refuse(2, "TxHxW", "--grid", "5x4")
    refuse(2, "dump-steps", *small, "--dump-qkv", f"{FOLDER}/qkv", "--dump-steps", "5")
    refuse(2, "dump-steps", *small, "--dump-qkv", f"{FOLDER}/qkv", "--dump-steps", "1,")
    refuse(2, "dump-layers", *small, "--dump-qkv", f"{FOLDER}/qkv", "--dump-layers", "6")
    refuse(2, "--guidance", *small, "--guidance", "3")
    refuse(2, "--condition", "--model", model, "--grid", "3x4x5")
    refuse(2, "--grid", "--model", model, "--condition", case)
    refuse(2, "VAE", *other, "--image", f"{FOLDER}/first.png")
    refuse(2, "--compute", *small, "--compute", "f16")
    result = generate("-o", FOLDER, *small)
    assert result.returncode == 2 and "which no run wrote" in result.stderr, result.stderr

    # Bad input: 3.
    refuse(3, "tiny-wann", "--model", "tiny-wann")
    refuse(3, "config.json", "--model", f"{FOLDER}/nowhere")
    refuse(3, "got 24 x 16 pixels, this grid needs 32 x 16", "--grid", "5x4x8", "--image", f"{FOLDER}/first.png")
    refuse(3, "this grid needs 24 x 16", "--grid", "5x4x6")
    refuse(3, "up to 1024", "--grid", "5x4x1025", "--image", f"{FOLDER}/first.png")
    refuse(3, "--example", *small, "--example", "4")
    refuse(3, "nothing.png", "--grid", "5x4x6", "--image", f"{FOLDER}/nothing.png")
    refuse(3, "run.json", *small, "--condition", f"{FOLDER}/scope/run.json")
    refuse(3, "noise has shape [12, 5, 8, 12], expected [12, 13, 40, 64]", "--noise", f"{CASES}/bundled/case.safetensors")
    refuse(3, "condition has shape [5, 3, 8, 10], expected [5, 3, 8, 12]", *other, "--grid", "3x4x6")
    refuse(3, "prompt_embeds", *small, "--condition", f"{FOLDER}/qkv/step_004_layer_03.safetensors")
    data = tensors.load(case)[0]
    tensors.save(f"{FOLDER}/bad.safetensors", {k: v for k, v in data.items() if k != "image_embeds"})
    refuse(3, "image_embeds", *other, "--condition", f"{FOLDER}/bad.safetensors")
    tensors.save(f"{FOLDER}/bad.safetensors", {**data, "prompt_embeds": data["prompt_embeds"][:40]})
    refuse(3, "padded to 512", *other, "--condition", f"{FOLDER}/bad.safetensors")
    tensors.save(f"{FOLDER}/bad.safetensors", {**data, "prompt_embeds": data["prompt_embeds"][:, :5]})
    refuse(3, "prompt_embeds has shape [512, 5], expected [n, 6]", *other, "--condition", f"{FOLDER}/bad.safetensors")
    shutil.copytree(model, f"{FOLDER}/broken")
    weights = f"{FOLDER}/broken/diffusion_pytorch_model.safetensors"
    size = os.path.getsize(weights)
    os.truncate(weights, size - 5)
    refuse(3, weights, *other, "--model", f"{FOLDER}/broken")
    refuse(3, "missing", *small, "-o", f"{FOLDER}/missing/out")

    # A full disk: neither the run nor a part of it.
    refuse(3, "frame_000.png", *small, "--method", "dense", limit=512)
    refuse(3, "qkv/step", *small, "--method", "dense", "--dump-qkv", f"{FOLDER}/qkv", limit=4096)
    assert not [f for f in os.listdir(f"{FOLDER}/qkv") if f.endswith(".tmp")]
    before = read("scope", "run.json")
    result = generate("-o", f"{FOLDER}/scope", *small, limit=4096)
    assert result.returncode == 3 and read("scope", "run.json") == before, "the earlier run is intact"
print(f"{checks} commands behaved")
