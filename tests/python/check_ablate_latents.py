"""`scope ablate` with models that give latents: its figures in numpy from the latents of `scope generate`, its labels, refusals.

    check_ablate_latents.py SCOPE-COMMAND REPOSITORY
"""
import csv
import json
import os
import subprocess
import sys
import tempfile

import numpy as np

import tensors

SCOPE, REPOSITORY = sys.argv[1:]
TEXT, IMAGE, EXPERTS, KEPT = (f"{REPOSITORY}/tests/data/video/{name}"
                              for name in ("t2v_sharded", "i2v_image_branch", "wan22_t2v", "wan22_ti2v"))
checks = 0


def scope(*arguments):
    return subprocess.run([SCOPE, *map(str, arguments)], capture_output=True, text=True)


def accept(*arguments):
    global checks
    checks += 1
    result = scope(*arguments)
    assert result.returncode == 0, f"{arguments}: {result.stdout}{result.stderr}"
    return result.stdout


def refuse(code, word, *arguments):
    global checks
    checks += 1
    before = sorted(os.listdir(FOLDER))
    result = scope("ablate", "-o", f"{FOLDER}/refused.json", *arguments)
    assert result.returncode == code and word in result.stderr, f"{arguments}: exit {result.returncode}: {result.stderr}"
    assert sorted(os.listdir(FOLDER)) == before


def quality(dense, other, skip):
    """Mean PSNR, that of the mean error, and SSIM of [channels, T, H, W], each channel scaled by the dense video's range."""
    dense, other = dense.astype(np.float64), other.astype(np.float64)
    low, high = (f(axis=(1, 2, 3), keepdims=True) for f in (dense.min, dense.max))
    x, y = ((latent - low) / (high - low) for latent in (dense, other))
    mse = ((x - y)**2).mean(axis=(0, 2, 3))[skip:]
    at = np.arange(11) - 5
    weights = np.exp(-(at[:, None]**2 + at**2) / (2 * 1.5**2))
    weights /= weights.sum()

    def mean(values):
        return np.einsum("ctyxij,ij->ctyx", np.lib.stride_tricks.sliding_window_view(values, (11, 11), (2, 3)), weights)

    mx, my = mean(x), mean(y)
    vx, vy, cov = mean(x * x) - mx**2, mean(y * y) - my**2, mean(x * y) - mx * my
    ssim = (2 * mx * my + 1e-4) * (2 * cov + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4))
    return dict(psnr=(-10 * np.log10(mse)).mean(), pooled_psnr=-10 * np.log10(mse.mean()), ssim=ssim[:, skip:].mean())


with tempfile.TemporaryDirectory() as FOLDER:
    random = np.random.default_rng(0)

    def normal(*shape):
        return random.normal(0, 1, shape).astype(np.float32)

    text, image = f"{FOLDER}/text.safetensors", f"{FOLDER}/image.safetensors"
    tensors.save(text, {"prompt_embeds": normal(2, 7, 6), "negative_prompt_embeds": normal(2, 7, 6)})
    tensors.save(image, {"prompt_embeds": normal(512, 6), "image_embeds": normal(3, 5), "condition": normal(5, 3, 12, 14)})
    # Pipelines: two experts, and a first frame that stays as it is.
    experts, kept = f"{FOLDER}/experts.safetensors", f"{FOLDER}/kept.safetensors"
    tensors.save(experts, {"prompt_embeds": normal(2, 7, 8), "negative_prompt_embeds": normal(2, 7, 8)})
    tensors.save(kept, {"prompt_embeds": normal(7, 8), "condition": normal(4, 1, 12, 14)})
    for model, condition, skip, more in ((TEXT, text, 0, ("--shift", 3)), (IMAGE, image, 1, ("--shift", 3)),
                                         (EXPERTS, experts, 0, ("--guidance-2", 3)), (KEPT, kept, 1, ())):
        small = ("--model", model, "--grid", "3x6x7", "--condition", condition, "--steps", 5, *more)
        shown = accept("ablate", *small, "--seeds", 2, "--variants", "scope,scope-mean", "--density", "0.3", "-o", f"{FOLDER}/a.json",
                       "--csv", f"{FOLDER}/a.csv", "--plot", f"{FOLDER}/a.svg")
        data = json.load(open(f"{FOLDER}/a.json"))
        assert data["compared"] == "latents" and data["guidance"] == (1 if skip else 5) and data["shift"] == 3
        assert data.get("sampler") == ("unipc" if model in (EXPERTS, KEPT) else None)
        assert model != EXPERTS or (data["guidance_2"] == 3 and data["boundary"] == 875)
        assert "Variants, by latents" in shown and "are of latents" in shown and ("which is given" in shown) == bool(skip)
        assert "latents" in open(f"{FOLDER}/a.svg").read()
        lines = list(csv.DictReader(open(f"{FOLDER}/a.csv")))
        rows = {row["variant"]: row for row in data["rows"]}
        assert min(rows["dense in bf16"]["psnr"]) > max(rows["scope"]["psnr"])
        for seed in range(2):
            common = (*small, "--seed", seed, "--example", 0 if skip else seed)
            latents = {}
            for variant in ("dense", "scope", "scope-mean"):
                target = () if variant == "dense" else ("--target-density", 0.3)
                accept("generate", *common, "--method", variant, *target, "-o", f"{FOLDER}/run")
                latents[variant] = tensors.load(f"{FOLDER}/run/latents.safetensors")[0]["latents"]
            for variant in ("scope", "scope-mean"):
                expected = quality(latents["dense"], latents[variant], skip)
                (line,) = (line for line in lines if line["variant"] == variant and line["seed"] == str(seed))
                for name, value in expected.items():
                    assert np.isclose(rows[variant][name][seed], value, rtol=1e-9), (variant, seed, name, rows[variant][name][seed], value)
                    assert np.isclose(float(line[f"latents_{name}"]), value, rtol=1e-5)

    wan = ("--model", TEXT, "--condition", text)
    accept("ablate", *wan, "--grid", "1x6x7", "--seeds", 1, "--steps", 5, "--density", "0.5", "--no-control")  # no frame is given
    refuse(2, "--grid: this model needs one", *wan)
    refuse(3, "latents of 10 x 14 in a frame, and SSIM's window is 11 x 11", *wan, "--grid", "3x5x7")
    refuse(3, "one frame, which is given", "--model", IMAGE, "--condition", image, "--grid", "1x6x7")
    refuse(2, "--condition: this model needs a .safetensors file", "--model", TEXT, "--grid", "3x6x7")
    refuse(2, "--image: this model's latents are a VAE's", *wan, "--grid", "3x6x7", "--image", text)
    refuse(3, "condition has shape [5, 3, 12, 14], expected [5, 3, 12, 16]", "--model", IMAGE, "--condition", image, "--grid", "3x6x8")
    refuse(2, "--guidance: this model was trained without", "--guidance", 2)
    refuse(2, "--guidance-2: ", *wan, "--grid", "3x6x7", "--guidance-2", 2)
    refuse(3, "one frame, which is given", "--model", KEPT, "--condition", kept, "--grid", "1x6x7")
    tensors.save(kept, {"prompt_embeds": normal(7, 8)})  # it is made too
    accept("ablate", "--model", KEPT, "--condition", kept, "--grid", "1x6x7", "--seeds", 1, "--steps", 5, "--density", "0.5",
           "--no-control")
print(f"{checks} commands behaved")
