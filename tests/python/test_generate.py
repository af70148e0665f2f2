"""`scope generate` from outside: what a run folder holds, what repeats, and hostile inputs that leave nothing behind."""
import json
import os
import re
import shutil

import numpy as np
import pytest

import pngs
import tensors

FRAMES = [f"frame_{i:03}.png" for i in range(5)]
EACH_HEAD = ("--target-density", 0.25, "--set", "target_scope=head", "--latents", "--seed", 3)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    path = tmp_path_factory.mktemp("t") / "first.png"
    pngs.write(path, pngs.slopes())
    return path


@pytest.fixture(scope="module")
def small(first):
    """The bundled model at a small grid."""
    return ("--grid", "5x4x6", "--image", first, "--steps", 5)


@pytest.fixture(scope="module")
def accept(scope):
    """accept(folder, *arguments): what is said of a run into the folder."""
    return lambda folder, *arguments: scope.accept("generate", "-o", folder, *arguments)


@pytest.fixture
def refuse(scope, tmp_path):
    return lambda code, words, *arguments, **options: scope.refuse(code, words, "generate", "-o", tmp_path / "refused", *arguments,
                                                                   **options)


@pytest.fixture(scope="module")
def each_head(accept, small, tmp_path_factory):
    """A run that meets its density in each head, with latents."""
    folder = tmp_path_factory.mktemp("t") / "scope"
    said = accept(folder, *small, *EACH_HEAD)
    assert "density 0.25" in said, said
    return folder


@pytest.fixture(scope="module")
def model(data):
    """A folder with its case, and flags for it."""
    folder = data / "video" / "i2v_image_branch"
    return folder, ("--model", folder, "--grid", "3x4x5", "--condition", folder / "case.safetensors", "--noise",
                    folder / "case.safetensors", "--steps", 2, "--shift", 4, "--guidance", 3)


@pytest.fixture(scope="module")
def experts(data):
    """Flags for a pipeline of two experts, without its folder."""
    case = data / "video" / "wan22_t2v" / "case.safetensors"
    return ("--grid", "3x4x5", "--condition", case, "--noise", case, "--steps", 6, "--method", "dense", "--guidance", 4, "--guidance-2", 3)


def run_of(folder):
    return json.load(open(folder / "run.json"))


def latents(folder):
    return tensors.load(folder / "latents.safetensors")[0]["latents"]


def same(a, b, names):
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in names)


def test_a_run_folder_holds_frames_latents_and_figures(each_head):
    run = run_of(each_head)
    assert run["grid"] == [5, 4, 6] and run["steps"] == 5 and run["seed"] == 3 and run["settings"]["rule"] == "online"
    assert run["settings"]["target_density"] == "0.25"
    assert set(os.listdir(each_head)) - {"clip.mp4"} == {*FRAMES, "run.json", "latents.safetensors"}
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


def test_one_rho_for_the_heads_of_a_call_meets_the_density_in_their_mean(accept, small, tmp_path):
    """The heads differ."""
    said = accept(tmp_path / "sample", *small, "--target-density", 0.25, "--seed", 3)
    # Scores differ in their last bits between instruction sets, and of 120 keys one is 0.008.
    assert abs(float(re.search(r"density ([0-9.]+)", said).group(1)) - 0.25) < 0.001, said
    calls = [c for layers in run_of(tmp_path / "sample")["layers"] for c in layers if not c["dense"]]
    assert all(abs(np.mean(c["head_density"]) - c["density"]) < 1e-9 and abs(c["density"] - 0.25) < 0.01 for c in calls)
    assert max(max(c["head_density"]) - min(c["head_density"]) for c in calls) > 0.05


def test_a_density_by_step_is_met(accept, small, tmp_path):
    """One of the steps is dense."""
    accept(tmp_path / "steps", *small, "--method", "scope-mean:dense_steps=0", "--set", "density_steps=0.2:1,0.6:0.5,1:0.25")
    run = run_of(tmp_path / "steps")
    assert run["settings"]["density_steps"] == "0.2:1,0.6:0.5,1:0.25" and run["settings"]["target_density"] == "none"
    for step, layers in enumerate(run["layers"]):
        for layer, call in enumerate(layers):
            wanted = 1 if layer < 1 else (1, 0.5, 0.5, 0.25, 0.25)[step]
            assert call["dense"] == (wanted == 1) and abs(call["density"] - wanted) < 0.01, (step, layer, call)


def test_the_same_seed_gives_the_same_bits(accept, small, each_head, tmp_path):
    accept(tmp_path / "again", *small, *EACH_HEAD, "--threads", 1)
    assert same(each_head, tmp_path / "again", [*FRAMES, "latents.safetensors"])


def test_a_method_and_a_seed_change_the_latents(accept, small, each_head, tmp_path):
    """A run replaces an earlier one."""
    accept(tmp_path / "dense", *small, "--method", "dense", "--seed", 3, "--latents")
    assert not same(tmp_path / "dense", each_head, ["latents.safetensors"])
    accept(tmp_path / "dense", *small, "--method", "dense", "--seed", 4, "--latents")
    a, b = latents(each_head), latents(tmp_path / "dense")
    assert a.shape == b.shape == (12, 5, 8, 12) and np.abs(a - b).max() > 0.1


# Without ffmpeg nothing is missing.
@pytest.mark.parametrize("what,program", (
    ("fails", "exit 1"), ("stops halfway", 'for clip; do :; done; echo part > "$clip"; exit 1'), ("has no library", "exit 127"),
    ("dies", "kill -9 $$"), ("does nothing", "exit 0"), ("makes it", 'for clip; do :; done; echo made > "$clip"'), ("is absent", None)))
def test_an_ffmpeg_that_fails_is_told_and_all_but_the_clip_is_there(scope, small, each_head, monkeypatch, tmp_path, what, program):
    place = tmp_path / f"ffmpeg that {what}"
    place.mkdir()
    monkeypatch.setenv("PATH", str(place))
    if program is not None:
        (place / "ffmpeg").write_text(f"#!/bin/sh\n{program}\n")
        (place / "ffmpeg").chmod(0o755)
    result = scope("generate", "-o", place / "run", *small, *EACH_HEAD)
    failed = what not in ("makes it", "is absent")
    assert result.returncode == 3 * failed and ("there is no clip.mp4" in result.stderr) == failed, (what, result)
    clip = {"clip.mp4"} if what == "makes it" else set()
    assert set(os.listdir(place / "run")) == {*FRAMES, "run.json", "latents.safetensors"} | clip
    assert same(each_head, place / "run", FRAMES)


def test_qkv_of_a_step_feeds_the_other_commands(scope, accept, small, tmp_path):
    accept(tmp_path / "dense", *small, "--method", "dense", "--dump-qkv", tmp_path / "qkv", "--dump-steps", "1,4")
    assert sorted(os.listdir(tmp_path / "qkv")) == [f"step_00{s}_layer_0{n}.safetensors" for s in (1, 4) for n in range(6)]
    path = tmp_path / "qkv" / "step_004_layer_03.safetensors"
    file, meta = tensors.load(path)
    assert meta == {"grid": "5x4x6", "rope": "44,42,42"} and file["q"].shape == (2, 120, 128)
    scope.accept("attend", path, "-o", tmp_path / "o.safetensors")
    accept(tmp_path / "dense", *small, "--method", "dense", "--dump-qkv", tmp_path / "one", "--dump-layers", 2)
    assert os.listdir(tmp_path / "one") == ["step_002_layer_02.safetensors"]


def test_another_model_takes_latents_and_gives_latents(accept, model, tmp_path):
    folder, flags = model
    accept(tmp_path / "run", *flags, "--method", "dense")
    assert np.abs(latents(tmp_path / "run") - tensors.load(folder / "case.safetensors")[0]["sample"]).max() < 1e-4
    assert len(run_of(tmp_path / "run")["layers"][0]) == 2 * 2, "two layers, two branches"


def test_two_experts_run_with_the_sampler_and_shift_of_their_scheduler(accept, data, experts, tmp_path):
    """One expert in memory or both give the same bits."""
    pipeline = data / "video" / "wan22_t2v"
    two = ("--model", pipeline, *experts)
    assert "one expert in memory at a time" in accept(tmp_path / "two", *two)
    assert np.abs(latents(tmp_path / "two") - tensors.load(pipeline / "case.safetensors")[0]["sample"]).max() < 1e-4
    run = run_of(tmp_path / "two")
    assert {k: run[k] for k in ("model", "experts", "sampler", "shift", "guidance", "guidance_2", "boundary", "expert_steps")} == {
        "model": "wan22_t2v", "experts": "one", "sampler": "unipc", "shift": 3, "guidance": 4, "guidance_2": 3,
        "boundary": 875, "expert_steps": [2, 4]}, run
    assert "both experts in memory" in accept(tmp_path / "both", *two, "--experts", "both")
    assert run_of(tmp_path / "both")["experts"] == "both"
    assert same(tmp_path / "two", tmp_path / "both", ["latents.safetensors"])
    accept(tmp_path / "euler", *two, "--sampler", "euler", "--shift", 5)
    run = run_of(tmp_path / "euler")
    assert run["sampler"] == "euler" and run["shift"] == 5
    assert not same(tmp_path / "two", tmp_path / "euler", ["latents.safetensors"])


def test_a_pipeline_that_lacks_an_expert_is_refused(refuse, data, experts, tmp_path):
    pipeline, copy = data / "video" / "wan22_t2v", tmp_path / "one_of_two"
    refuse(2, "--guidance-2", "--model", pipeline / "transformer", *experts)
    shutil.copytree(pipeline, copy)
    refuse(2, "which is also --model", "--model", copy, *experts, "--profile-out", copy / "scheduler" / "scheduler_config.json")
    shutil.rmtree(copy / "transformer_2")
    refuse(3, "transformer_2", "--model", copy, *experts)


def test_options_that_are_wrong_are_refused(scope, refuse, small, model, first, tmp_path):
    folder, flags = model
    refuse(2, "there is no", *small, "--method", "scopee")
    refuse(2, "target_density", *small, "--target-density", 2)
    refuse(2, "--steps", *small[:-2], "--steps", 0)
    refuse(2, "TxHxW", "--grid", "5x4")
    refuse(2, "dump-steps", *small, "--dump-qkv", tmp_path / "qkv", "--dump-steps", 5)
    refuse(2, "dump-steps", *small, "--dump-qkv", tmp_path / "qkv", "--dump-steps", "1,")
    refuse(2, "dump-layers", *small, "--dump-qkv", tmp_path / "qkv", "--dump-layers", 6)
    refuse(2, "--guidance", *small, "--guidance", 3)
    refuse(2, "--condition", "--model", folder, "--grid", "3x4x5")
    refuse(2, "--grid", "--model", folder, "--condition", folder / "case.safetensors")
    refuse(2, "VAE", *flags, "--image", first)
    refuse(2, "--compute", *small, "--compute", "f16")
    scope.refuse(2, "which no run wrote", "generate", "-o", first.parent, *small)


def test_inputs_that_are_wrong_are_refused(scope, refuse, small, model, first, each_head, data, tmp_path):
    _, flags = model
    grid = lambda size: [size if flag == "3x4x5" else flag for flag in flags]
    refuse(3, "tiny-wann", "--model", "tiny-wann")
    refuse(3, "config.json", "--model", tmp_path / "nowhere")
    refuse(3, "got 24 x 16 pixels, this grid needs 32 x 16", "--grid", "5x4x8", "--image", first)
    refuse(3, "this grid needs 24 x 16", "--grid", "5x4x6")
    refuse(3, "up to 1024", "--grid", "5x4x1025", "--image", first)
    refuse(3, "--example", *small, "--example", 4)
    refuse(3, "nothing.png", "--grid", "5x4x6", "--image", tmp_path / "nothing.png")
    refuse(3, "run.json", *small, "--condition", each_head / "run.json")
    refuse(3, "noise has shape [12, 5, 8, 12], expected [12, 13, 40, 64]", "--noise", data / "video" / "bundled" / "case.safetensors")
    refuse(3, "condition has shape [5, 3, 8, 10], expected [5, 3, 8, 12]", *grid("3x4x6"))
    scope.refuse(3, "missing", "generate", *small, "-o", tmp_path / "missing" / "out")


def test_conditions_that_are_wrong_are_refused(scope, refuse, small, model, tmp_path):
    folder, flags = model
    at = flags.index("--condition")
    bad = tmp_path / "bad.safetensors"
    flags = (*flags[:at], *flags[at + 2:], "--condition", bad)
    given = tensors.load(folder / "case.safetensors")[0]
    scope.accept("make-qkv", "--grid", "2x4x5", "-o", bad)
    refuse(3, "prompt_embeds", *small, "--condition", bad)
    tensors.save(bad, {k: v for k, v in given.items() if k != "image_embeds"})
    refuse(3, "image_embeds", *flags)
    tensors.save(bad, {**given, "prompt_embeds": given["prompt_embeds"][:40]})
    refuse(3, "padded to 512", *flags)
    tensors.save(bad, {**given, "prompt_embeds": given["prompt_embeds"][:, :5]})
    refuse(3, "prompt_embeds has shape [512, 5], expected [n, 6]", *flags)


def test_weights_that_are_cut_are_refused(refuse, model, tmp_path):
    folder, flags = model
    copy = tmp_path / "broken"
    shutil.copytree(folder, copy)
    weights = copy / "diffusion_pytorch_model.safetensors"
    os.truncate(weights, weights.stat().st_size - 5)
    refuse(3, str(weights), "--model", copy, *flags[2:])


def test_a_full_disk_leaves_neither_a_run_nor_a_part_of_it(scope, refuse, accept, small, tmp_path):
    refuse(3, "frame_000.png", *small, "--method", "dense", limit=512)
    (tmp_path / "qkv").mkdir()
    refuse(3, "qkv/step", *small, "--method", "dense", "--dump-qkv", tmp_path / "qkv", limit=4096)
    accept(tmp_path / "run", *small)
    scope.refuse(3, "run", "generate", "-o", tmp_path / "run", *small, limit=4096)
