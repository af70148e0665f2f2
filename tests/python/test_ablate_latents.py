"""`scope ablate` with models that give latents: its figures in numpy from those of `scope generate`, its labels, refusals."""
import csv
import json
import types

import numpy as np
import pytest

import tensors


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


@pytest.fixture(scope="module")
def inputs(data, tmp_path_factory):
    """(model, condition) of models from text and from an image, and of pipelines: two experts, a first frame that stays as it is."""
    random = np.random.default_rng(0)
    normal = lambda *shape: random.normal(0, 1, shape).astype(np.float32)
    folder, made = tmp_path_factory.mktemp("t"), types.SimpleNamespace()
    for name, model, given in (
            ("text", "t2v_sharded", {"prompt_embeds": normal(2, 7, 6), "negative_prompt_embeds": normal(2, 7, 6)}),
            ("image", "i2v_image_branch",
             {"prompt_embeds": normal(512, 6), "image_embeds": normal(3, 5), "condition": normal(5, 3, 12, 14)}),
            ("experts", "wan22_t2v", {"prompt_embeds": normal(2, 7, 8), "negative_prompt_embeds": normal(2, 7, 8)}),
            ("kept", "wan22_ti2v", {"prompt_embeds": normal(7, 8), "condition": normal(4, 1, 12, 14)}),
            ("made", "wan22_ti2v", {"prompt_embeds": normal(7, 8)})):
        tensors.save(folder / f"{name}.safetensors", given)
        setattr(made, name, ("--model", data / "video" / model, "--condition", folder / f"{name}.safetensors"))
    return made


@pytest.fixture
def refuse(scope, tmp_path):
    return lambda code, word, *arguments: scope.refuse(code, word, "ablate", "-o", tmp_path / "refused.json", *arguments)


# skip: of the frames, the first, which is given
@pytest.mark.parametrize("name,skip,more", (("text", 0, ("--shift", 3)), ("image", 1, ("--shift", 3)), ("experts", 0, ("--guidance-2", 3)),
                                            ("kept", 1, ())))
def test_figures_are_those_of_numpy(scope, inputs, tmp_path, name, skip, more):
    small = (*getattr(inputs, name), "--grid", "3x6x7", "--steps", 5, *more)
    shown = scope.accept("ablate", *small, "--seeds", 2, "--variants", "scope,scope-mean", "--density", 0.3, "-o", tmp_path / "a.json",
                         "--csv", tmp_path / "a.csv", "--plot", tmp_path / "a.svg")
    data = json.load(open(tmp_path / "a.json"))
    assert data["compared"] == "latents" and data["guidance"] == (1 if skip else 5) and data["shift"] == 3
    assert data.get("sampler") == ("unipc" if name in ("experts", "kept") else None)
    assert name != "experts" or (data["guidance_2"] == 3 and data["boundary"] == 875)
    assert "Variants, by latents" in shown and "are of latents" in shown and ("which is given" in shown) == bool(skip)
    assert "latents" in open(tmp_path / "a.svg").read()
    lines = list(csv.DictReader(open(tmp_path / "a.csv")))
    rows = {row["variant"]: row for row in data["rows"]}
    assert min(rows["dense in bf16"]["psnr"]) > max(rows["scope"]["psnr"])
    for seed in range(2):
        common = (*small, "--seed", seed, "--example", 0 if skip else seed)
        latents = {}
        for variant in ("dense", "scope", "scope-mean"):
            target = () if variant == "dense" else ("--target-density", 0.3)
            scope.accept("generate", *common, "--method", variant, *target, "-o", tmp_path / "run")
            latents[variant] = tensors.load(tmp_path / "run" / "latents.safetensors")[0]["latents"]
        for variant in ("scope", "scope-mean"):
            expected = quality(latents["dense"], latents[variant], skip)
            (line,) = (line for line in lines if line["variant"] == variant and line["seed"] == str(seed))
            for figure, value in expected.items():
                found = rows[variant][figure][seed]
                assert np.isclose(found, value, rtol=1e-9), (variant, seed, figure, found, value)
                assert np.isclose(float(line[f"latents_{figure}"]), value, rtol=1e-5)


@pytest.mark.parametrize("name", ("text", "made"))
def test_one_frame_that_is_made_is_compared(scope, inputs, name):
    scope.accept("ablate", *getattr(inputs, name), "--grid", "1x6x7", "--seeds", 1, "--steps", 5, "--density", 0.5, "--no-control")


def test_inputs_that_do_not_fit_are_refused(refuse, inputs):
    text, image = inputs.text, inputs.image
    refuse(2, "--grid: this model needs one", *text)
    refuse(3, "latents of 10 x 14 in a frame, and SSIM's window is 11 x 11", *text, "--grid", "3x5x7")
    refuse(3, "one frame, which is given", *image, "--grid", "1x6x7")
    refuse(3, "one frame, which is given", *inputs.kept, "--grid", "1x6x7")
    refuse(2, "--condition: this model needs a .safetensors file", *text[:2], "--grid", "3x6x7")
    refuse(2, "--image: this model's latents are a VAE's", *text, "--grid", "3x6x7", "--image", text[3])
    refuse(3, "condition has shape [5, 3, 12, 14], expected [5, 3, 12, 16]", *image, "--grid", "3x6x8")
    refuse(2, "--guidance: this model was trained without", "--guidance", 2)
    refuse(2, "--guidance-2: ", *text, "--grid", "3x6x7", "--guidance-2", 2)
