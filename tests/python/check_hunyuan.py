"""`scope generate` with HunyuanVideo from outside: dense and sparse runs, prompts with padding, and what is refused before any work.

    check_hunyuan.py SCOPE-COMMAND REPOSITORY
"""
import json
import os
import subprocess
import sys
import tempfile
import time

import numpy as np

import tensors

SCOPE, REPOSITORY = sys.argv[1:]
CASES = f"{REPOSITORY}/tests/data/video"
checks = 0


def generate(name, *more, grid="3x4x5", condition=None):
    global checks
    checks += 1
    folder = os.path.join(CASES, name)
    command = [SCOPE, "generate", "-o", f"{FOLDER}/out", "--model", folder, "--grid", grid, "--condition",
               condition or f"{folder}/case.safetensors", *map(str, more)]
    return subprocess.run(command, capture_output=True, text=True)


def accept(name, *more, **options):
    result = generate(name, *more, **options)
    assert result.returncode == 0, f"{name} {more}: {result.stdout}{result.stderr}"
    return tensors.load(f"{FOLDER}/out/latents.safetensors")[0]["latents"], json.load(open(f"{FOLDER}/out/run.json"))


def refuse(word, changes, name="hunyuan_single_blocks", *more, **options):
    """Exit 3 and a message, with the case's tensors so changed; None takes one away."""
    given = {k: v for k, v in (tensors.load(f"{CASES}/{name}/case.safetensors")[0] | changes).items() if v is not None}
    tensors.save(f"{FOLDER}/given.safetensors", given)
    os.path.exists(f"{FOLDER}/out") and os.rename(f"{FOLDER}/out", f"{FOLDER}/earlier{checks}")
    result = generate(name, "--steps", 1, *more, condition=f"{FOLDER}/given.safetensors", **options)
    assert result.returncode == 3 and word in result.stderr, f"{word!r}: exit {result.returncode}: {result.stderr}"
    assert not os.path.exists(f"{FOLDER}/out"), word


with tempfile.TemporaryDirectory() as FOLDER:
    # The samples of diffusers, every kind of block and of image.
    for name, guidance, unless_told in (("hunyuan_double_blocks", 1, 1), ("hunyuan_single_blocks", 6, 6), ("hunyuan_image_tokens", 6, 1)):
        case = f"{CASES}/{name}/case.safetensors"
        flags = ["--noise", case, "--method", "dense", "--steps", 2, "--shift", 7]
        got, run = accept(name, *flags, "--guidance", guidance)
        assert np.abs(got - tensors.load(case)[0]["sample"]).max() < 1e-4, name
        assert run["guidance"] == guidance and [len(calls) for calls in run["layers"]] == [2, 2], "one pass a step"
        other, run = accept(name, *flags)
        assert run["guidance"] == unless_told and (np.abs(other - got).max() > 0.01) == (guidance != unless_told), name
    # A pipeline's folder says the shift.
    os.mkdir(f"{FOLDER}/pipeline")
    os.symlink(os.path.abspath(f"{CASES}/hunyuan_single_blocks"), f"{FOLDER}/pipeline/transformer")
    os.mkdir(f"{FOLDER}/pipeline/scheduler")
    index = {"_class_name": "HunyuanVideoPipeline", "transformer": ["diffusers", "HunyuanVideoTransformer3DModel"],
             "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"]}
    json.dump(index, open(f"{FOLDER}/pipeline/model_index.json", "w"))
    json.dump({"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 7.0},
              open(f"{FOLDER}/pipeline/scheduler/scheduler_config.json", "w"))
    case = f"{CASES}/hunyuan_single_blocks/case.safetensors"
    got, run = accept(f"{FOLDER}/pipeline", "--noise", case, "--method", "dense", "--steps", 2, condition=case)
    assert run["shift"] == 7 and np.abs(got - tensors.load(case)[0]["sample"]).max() < 1e-4
    # What a known model's row sets: the schedule, and clustering in the dense steps.
    run = accept("hunyuan_single_blocks", "--steps", 10, "--known", "hunyuanvideo-13b", "--method", "scope")[1]
    assert run["known"]["model"] == "hunyuanvideo-13b" and run["known"]["settings"]["warm_prefix"] == "yes", run["known"]
    assert [[call["dense"] for call in calls] for calls in run["layers"]] == [[True, True]] + 9 * [[True, False]]

    # Sparse, with the text of the prompt among the tokens; a density by the call's valid keys.
    for compute in ("f32", "bf16"):
        flags = ["--steps", 4, "--seed", 5, "--compute", compute]
        dense, run = accept("hunyuan_image_tokens", *flags, "--method", "dense", grid="8x4x5")
        assert all(call["dense"] for calls in run["layers"] for call in calls)
        sparse, run = accept("hunyuan_image_tokens", *flags, "--method", "scope-mean", "--target-density", 0.25,
                             "--set", "dense_steps=0.25", "--set", "dense_layers=0", grid="8x4x5")
        for step, calls in enumerate(run["layers"]):
            assert all(call["dense"] == (step == 0) and abs(call["density"] - (1 if step == 0 else 0.25)) < 0.01 for call in calls), calls
        assert np.abs(sparse - dense).max() > 1e-3 and np.abs(sparse - dense).mean() < 0.2 * np.abs(dense).mean()
        image = tensors.load(f"{CASES}/hunyuan_image_tokens/case.safetensors")[0]["condition"]
        assert dense.shape == (2, 8, 8, 10) and all((clip[:, :1] == image.astype(np.float32)).all() for clip in (dense, sparse))

    # q, k, v of a call: the video's tokens, then the text's without padding.
    accept("hunyuan_double_blocks", "--method", "dense", "--steps", 2, "--dump-qkv", f"{FOLDER}/qkv")
    file, meta = tensors.load(f"{FOLDER}/qkv/step_001_layer_01.safetensors")
    assert file["q"].shape == (2, 60 + 9, 6) and meta["grid"] == "3x4x5"
    attend = [SCOPE, "attend", f"{FOLDER}/qkv/step_001_layer_01.safetensors", "--text", "9", "-o", f"{FOLDER}/o.safetensors"]
    assert subprocess.run(attend, capture_output=True).returncode == 0

    # A run that was stopped goes on from its checkpoint, bit for bit, and refuses that of another prompt or guidance.
    whole = ["--steps", 1000, "--method", "scope-mean", "--target-density", 0.4, "--set", "dense_layers=0", "--guidance", 6]
    sample = accept("hunyuan_single_blocks", *whole)[0]
    os.rename(f"{FOLDER}/out", f"{FOLDER}/whole")
    checkpoint = f"{FOLDER}/checkpoint"
    command = [SCOPE, "generate", "-o", f"{FOLDER}/out", "--model", f"{CASES}/hunyuan_single_blocks", "--grid", "3x4x5",
               "--condition", case]
    process = subprocess.Popen([*command, *map(str, whole), "--checkpoint", checkpoint], stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    while not os.path.exists(checkpoint):
        assert process.poll() is None
        time.sleep(0.001)
    process.terminate()
    assert process.wait() == 143 and not os.path.exists(f"{FOLDER}/out")
    given = tensors.load(case)[0]
    tensors.save(f"{FOLDER}/given.safetensors", given | {"pooled_prompt_embeds": given["pooled_prompt_embeds"] + np.float16(1)})
    for flags, options in (([*whole[:-1], 5], {}), (whole, {"condition": f"{FOLDER}/given.safetensors"})):
        result = generate("hunyuan_single_blocks", *flags, "--checkpoint", checkpoint, **options)
        assert result.returncode == 2 and ("embedded guidance" if flags[-1] == 5 else "prompt") in result.stderr, result.stderr
    assert (accept("hunyuan_single_blocks", *whole, "--checkpoint", checkpoint)[0] == sample).all()

    # Masks of any type; a prompt of the longest length.
    given = tensors.load(f"{CASES}/hunyuan_single_blocks/case.safetensors")[0]
    once = accept("hunyuan_single_blocks", "--steps", 1)[0]
    for kind in (np.int64, np.uint8, np.float32):
        tensors.save(f"{FOLDER}/given.safetensors", given | {"prompt_attention_mask": given["prompt_attention_mask"].astype(kind)})
        assert (accept("hunyuan_single_blocks", "--steps", 1, condition=f"{FOLDER}/given.safetensors")[0] == once).all(), kind
    many = {"prompt_embeds": np.ones((257, 5), np.float32), "prompt_attention_mask": np.ones(257, np.float32)}
    many["prompt_attention_mask"][256:] = 0
    tensors.save(f"{FOLDER}/given.safetensors", given | many)
    accept("hunyuan_single_blocks", "--steps", 1, condition=f"{FOLDER}/given.safetensors")

    many["prompt_attention_mask"][256:] = 1
    refuse("got 257 tokens, this model takes up to 256", many)
    refuse("there is no tensor \"pooled_prompt_embeds\"", {"pooled_prompt_embeds": None})
    refuse("pooled_prompt_embeds has shape [5], expected [4]", {"pooled_prompt_embeds": np.ones(5, np.float32)})
    refuse("prompt_embeds has shape [13, 6], expected [n, 5]", {"prompt_embeds": np.ones((13, 6), np.float32)})
    refuse("prompt_attention_mask has shape [12], expected [13]", {"prompt_attention_mask": np.ones(12, np.float32)})
    refuse("must begin with ones", {"prompt_attention_mask": np.zeros(13, np.float32)})
    refuse("none behind its first 0", {"prompt_attention_mask": (np.arange(13) != 3).astype(np.float32)})
    refuse("there is no tensor \"condition\"", {"condition": None}, "hunyuan_image_tokens")
    refuse("condition has shape [2, 1, 8, 10], expected [2, 1, 8, 12]", {}, "hunyuan_image_tokens", grid="3x4x6")
    refuse("condition has shape [3, 3, 8, 10], expected [3, 3, 8, 12]", {}, "hunyuan_double_blocks", grid="3x4x6")
    refuse("a profile does not measure", {}, "hunyuan_single_blocks", "--method", "dense", "--profile-out", f"{FOLDER}/profile.csv")
    # A prompt of another family's model.
    wan = f"{CASES}/t2v_sharded/case.safetensors"
    result = generate("hunyuan_single_blocks", condition=wan)
    assert result.returncode == 3 and "prompt_embeds has shape [9, 6], expected [n, 5]" in result.stderr, result.stderr
print(f"{checks} commands behaved")
