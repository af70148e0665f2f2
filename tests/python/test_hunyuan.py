"""`scope generate` with HunyuanVideo from outside: dense and sparse runs, prompts with padding, and what is refused before any work."""
import json
import os
import subprocess
import time

import numpy as np
import pytest

import tensors

SINGLE, DOUBLE, IMAGE = "hunyuan_single_blocks", "hunyuan_double_blocks", "hunyuan_image_tokens"


@pytest.fixture
def words(data, tmp_path):
    """words(name, *more): of a command that runs a case's model, at its grid and with its condition unless others are given."""
    def command(name, *more, grid="3x4x5", condition=None):
        folder = data / "video" / name
        return ("generate", "-o", tmp_path / "out", "--model", folder, "--grid", grid, "--condition",
                condition or folder / "case.safetensors", *more)

    return command


@pytest.fixture
def accept(scope, words, tmp_path):
    """The latents and the run.json of a case."""
    def run(name, *more, **options):
        scope.accept(*words(name, *more, **options))
        return tensors.load(tmp_path / "out" / "latents.safetensors")[0]["latents"], json.load(open(tmp_path / "out" / "run.json"))

    return run


@pytest.fixture(scope="module")
def case(data):
    """case(name): the path of its tensors."""
    return lambda name: data / "video" / name / "case.safetensors"


# Every kind of block and of image.
@pytest.mark.parametrize("name,guidance,unless_told", ((DOUBLE, 1, 1), (SINGLE, 6, 6), (IMAGE, 6, 1)))
def test_dense_runs_give_the_samples_of_diffusers(accept, case, name, guidance, unless_told):
    flags = ["--noise", case(name), "--method", "dense", "--steps", 2, "--shift", 7]
    got, run = accept(name, *flags, "--guidance", guidance)
    assert np.abs(got - tensors.load(case(name))[0]["sample"]).max() < 1e-4, name
    assert run["guidance"] == guidance and [len(calls) for calls in run["layers"]] == [2, 2], "one pass a step"
    other, run = accept(name, *flags)
    assert run["guidance"] == unless_told and (np.abs(other - got).max() > 0.01) == (guidance != unless_told), name


def test_the_folder_of_a_pipeline_says_the_shift(accept, case, tmp_path):
    pipeline = tmp_path / "pipeline"
    (pipeline / "scheduler").mkdir(parents=True)
    os.symlink(case(SINGLE).parent, pipeline / "transformer")
    index = {"_class_name": "HunyuanVideoPipeline", "transformer": ["diffusers", "HunyuanVideoTransformer3DModel"],
             "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"]}
    (pipeline / "model_index.json").write_text(json.dumps(index))
    (pipeline / "scheduler" / "scheduler_config.json").write_text(
        json.dumps({"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 7.0}))
    got, run = accept(pipeline, "--noise", case(SINGLE), "--method", "dense", "--steps", 2, condition=case(SINGLE))
    assert run["shift"] == 7 and np.abs(got - tensors.load(case(SINGLE))[0]["sample"]).max() < 1e-4


def test_the_row_of_a_known_model_sets_schedule_and_clustering(accept):
    """Of the dense steps too."""
    run = accept(SINGLE, "--steps", 10, "--known", "hunyuanvideo-13b", "--method", "scope")[1]
    assert run["known"]["model"] == "hunyuanvideo-13b" and run["known"]["settings"]["warm_prefix"] == "yes", run["known"]
    assert [[call["dense"] for call in calls] for calls in run["layers"]] == [[True, True]] + 9 * [[True, False]]


@pytest.mark.parametrize("compute", ("f32", "bf16"))
def test_sparse_runs_have_the_text_among_the_tokens(accept, case, compute):
    """A density is by the call's valid keys."""
    flags = ["--steps", 4, "--seed", 5, "--compute", compute]
    dense, run = accept(IMAGE, *flags, "--method", "dense", grid="8x4x5")
    assert all(call["dense"] for calls in run["layers"] for call in calls)
    sparse, run = accept(IMAGE, *flags, "--method", "scope-mean", "--target-density", 0.25, "--set", "dense_steps=0.25",
                         "--set", "dense_layers=0", grid="8x4x5")
    for step, calls in enumerate(run["layers"]):
        assert all(call["dense"] == (step == 0) and abs(call["density"] - (1 if step == 0 else 0.25)) < 0.01 for call in calls), calls
    assert np.abs(sparse - dense).max() > 1e-3 and np.abs(sparse - dense).mean() < 0.2 * np.abs(dense).mean()
    image = tensors.load(case(IMAGE))[0]["condition"]
    assert dense.shape == (2, 8, 8, 10) and all((clip[:, :1] == image.astype(np.float32)).all() for clip in (dense, sparse))


def test_qkv_of_a_call_has_the_text_without_padding(scope, accept, tmp_path):
    """Behind the tokens of the video."""
    accept(DOUBLE, "--method", "dense", "--steps", 2, "--dump-qkv", tmp_path / "qkv")
    path = tmp_path / "qkv" / "step_001_layer_01.safetensors"
    file, meta = tensors.load(path)
    assert file["q"].shape == (2, 60 + 9, 6) and meta["grid"] == "3x4x5"
    scope.accept("attend", path, "--text", 9, "-o", tmp_path / "o.safetensors")


def test_a_stopped_run_goes_on_bit_for_bit(scope, accept, words, case, tmp_path):
    """And refuses the checkpoint of another prompt or guidance."""
    whole = ["--steps", 1000, "--method", "scope-mean", "--target-density", 0.4, "--set", "dense_layers=0", "--guidance", 6]
    sample = accept(SINGLE, *whole)[0]
    os.rename(tmp_path / "out", tmp_path / "whole")
    checkpoint = tmp_path / "checkpoint"
    process = scope.start(*words(SINGLE, *whole, "--checkpoint", checkpoint), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not checkpoint.exists():
        assert process.poll() is None
        time.sleep(0.001)
    process.terminate()
    assert process.wait() == 143 and not (tmp_path / "out").exists()
    given, other = tensors.load(case(SINGLE))[0], tmp_path / "given.safetensors"
    tensors.save(other, given | {"pooled_prompt_embeds": given["pooled_prompt_embeds"] + np.float16(1)})
    scope.refuse(2, "embedded guidance", *words(SINGLE, *whole[:-1], 5, "--checkpoint", checkpoint))
    scope.refuse(2, "prompt", *words(SINGLE, *whole, "--checkpoint", checkpoint, condition=other))
    assert (accept(SINGLE, *whole, "--checkpoint", checkpoint)[0] == sample).all()


def test_masks_may_be_of_any_type(accept, case, tmp_path):
    given, path = tensors.load(case(SINGLE))[0], tmp_path / "given.safetensors"
    once = accept(SINGLE, "--steps", 1)[0]
    for kind in (np.int64, np.uint8, np.float32):
        tensors.save(path, given | {"prompt_attention_mask": given["prompt_attention_mask"].astype(kind)})
        assert (accept(SINGLE, "--steps", 1, condition=path)[0] == once).all(), kind


def long_prompt(length):
    """257 tokens, of which so many count."""
    return {"prompt_embeds": np.ones((257, 5), np.float32), "prompt_attention_mask": (np.arange(257) < length).astype(np.float32)}


def test_a_prompt_may_have_the_longest_length(accept, case, tmp_path):
    tensors.save(tmp_path / "given.safetensors", tensors.load(case(SINGLE))[0] | long_prompt(256))
    accept(SINGLE, "--steps", 1, condition=tmp_path / "given.safetensors")


# (what is said, the case's tensors that are changed: None takes one away, the case, flags, options)
@pytest.mark.parametrize("word,changes,name,more,options", (
    ("got 257 tokens, this model takes up to 256", long_prompt(257), SINGLE, (), {}),
    ("there is no tensor \"pooled_prompt_embeds\"", {"pooled_prompt_embeds": None}, SINGLE, (), {}),
    ("pooled_prompt_embeds has shape [5], expected [4]", {"pooled_prompt_embeds": np.ones(5, np.float32)}, SINGLE, (), {}),
    ("prompt_embeds has shape [13, 6], expected [n, 5]", {"prompt_embeds": np.ones((13, 6), np.float32)}, SINGLE, (), {}),
    ("prompt_attention_mask has shape [12], expected [13]", {"prompt_attention_mask": np.ones(12, np.float32)}, SINGLE, (), {}),
    ("must begin with ones", {"prompt_attention_mask": np.zeros(13, np.float32)}, SINGLE, (), {}),
    ("none behind its first 0", {"prompt_attention_mask": (np.arange(13) != 3).astype(np.float32)}, SINGLE, (), {}),
    ("there is no tensor \"condition\"", {"condition": None}, IMAGE, (), {}),
    ("condition has shape [2, 1, 8, 10], expected [2, 1, 8, 12]", {}, IMAGE, (), {"grid": "3x4x6"}),
    ("condition has shape [3, 3, 8, 10], expected [3, 3, 8, 12]", {}, DOUBLE, (), {"grid": "3x4x6"}),
    ("a profile does not measure", {}, SINGLE, ("--method", "dense", "--profile-out", "profile.csv"), {})),
    ids=lambda value: value.split(",")[0] if isinstance(value, str) and " " in value else "")
def test_inputs_that_do_not_fit_are_refused(scope, words, case, monkeypatch, tmp_path, word, changes, name, more, options):
    monkeypatch.chdir(tmp_path)
    given = {k: v for k, v in (tensors.load(case(name))[0] | changes).items() if v is not None}
    tensors.save("given.safetensors", given)
    scope.refuse(3, word, *words(name, "--steps", 1, *more, condition="given.safetensors", **options))


def test_a_prompt_of_another_family_is_refused(scope, words, case):
    scope.refuse(3, "prompt_embeds has shape [9, 6], expected [n, 5]", *words(SINGLE, condition=case("t2v_sharded")))
