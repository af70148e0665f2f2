"""tools/encode_prompt.py, `scope generate` and tools/decode_latents.py against diffusers' pipelines, on whole tiny ones."""
import importlib.util
import json
import math
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
import diffusers
import numpy
from PIL import Image
from safetensors.torch import load_file, save_file

import tiny_folders
import tiny_pipelines as tiny

if tiny.DEVICE != "cpu":
    pytest.skip("the CPU shows it", allow_module_level=True)

ROOT = Path(__file__).parents[2]
SCOPE = os.environ.get("SCOPE_COMMAND", str(ROOT / "build/release/bin/scope"))
STEPS, SHIFT, GUIDANCE = 4, 3.0, 5.0


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompt_to_video")
    Image.radial_gradient("L").convert("RGB").save(folder / "first.png")
    return folder


def model(place, setting):
    if not (place / setting).exists():
        tiny_folders.save(setting, place / setting)
    return place / setting


def tool(name, *arguments):
    """Runs one of tools/ in this process."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main([str(argument) for argument in arguments])


def encode(place, setting, prompt="a cat walks"):
    out = place / f"{setting}.safetensors"
    tool("encode_prompt", model(place, setting), "--prompt", prompt, *(["--negative", "slow"] if setting[0] == "w" else []),
         *(["--image", place / "first.png"] if setting.endswith("i2v") else []), "--size", "256x144", "--frames", 9, "--seed", 3, "-o", out)
    return out


def by_diffusers(place, setting, **given):
    """The whole video, or latents, at the levels of `scope generate`."""
    index = diffusers.DiffusionPipeline.load_config(model(place, setting))
    pipe = getattr(diffusers, index["_class_name"]).from_pretrained(model(place, setting))
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    if setting.startswith("wan"):
        own = pipe.scheduler.set_timesteps
        pipe.scheduler.set_timesteps = lambda steps, device=None: own(sigmas=numpy.linspace(1, 1 / steps, steps), device=device)
        given["guidance_scale"] = GUIDANCE
    if setting.endswith("i2v"):
        given["image"] = Image.open(place / "first.png").crop((0, 56, 256, 200))
    return pipe(height=144, width=256, num_frames=9, num_inference_steps=STEPS, generator=torch.Generator().manual_seed(3),
                **{"output_type": "np", **given}).frames[0]


def psnr_of(place, folder, frames):
    ours = numpy.stack([numpy.asarray(Image.open(path)) for path in sorted((place / folder).glob("frame_*.png"))]) / 255
    assert ours.shape == frames.shape
    return -10 * math.log10(((ours - frames)**2).mean())


def test_ti2v_is_saved_as_text_to_video(place):
    """It takes an image all the same, whose latents are those of the first frame alone."""
    folder = place / "ti2v"
    shutil.copytree(model(place, "wan2.2-t2v"), folder)
    index = json.loads((folder / "model_index.json").read_text())
    assert index["_class_name"] == "WanPipeline"
    (folder / "model_index.json").write_text(json.dumps({**index, "expand_timesteps": True}))
    out = place / "ti2v.safetensors"
    tool("encode_prompt", folder, "--prompt", "a cat", "--image", place / "first.png", "--size", "256x144", "--frames", 9,
         "--seed", 3, "-o", out)
    found = load_file(out)
    assert found["condition"].shape == (1, found["noise"].shape[1], 1, *found["noise"].shape[3:])


def test_size_of_half_a_token_is_refused(place):
    config = model(place, "wan2.1-t2v") / "vae" / "config.json"
    folder = place / "coarse"
    shutil.copytree(model(place, "wan2.1-t2v"), folder)
    (folder / "vae" / "config.json").write_text(json.dumps({**json.loads(config.read_text()), "scale_factor_spatial": 16}))
    with pytest.raises(SystemExit, match="got 256x144, this pipeline takes multiples of 32"):
        tool("encode_prompt", folder, "--prompt", "a cat", "--size", "256x144", "--frames", 9, "-o", place / "coarse.safetensors")


@pytest.mark.skipif(not os.path.exists(SCOPE), reason="there is no scope command")
@pytest.mark.parametrize("setting", ("wan2.1-t2v", "wan2.1-i2v"))
def test_native(place, capsys, setting):
    """Prompt to frames without diffusers' transformer is what diffusers makes: nothing but the rounding to bytes lies between."""
    condition = encode(place, setting)
    assert "--grid 3x9x16" in capsys.readouterr().out
    subprocess.run([SCOPE, "generate", "--model", model(place, setting) / "transformer", "--grid", "3x9x16", "--condition", condition,
                    "--noise", condition, "--method", "dense", "--steps", str(STEPS), "--shift", str(SHIFT), "--guidance", str(GUIDANCE),
                    "-o", place / f"run-{setting}"], check=True)
    tool("decode_latents", model(place, setting), place / f"run-{setting}/latents.safetensors", "-o", place / f"native-{setting}")
    frames = by_diffusers(place, setting, prompt="a cat walks", negative_prompt="slow")
    assert psnr_of(place, f"native-{setting}", frames) > 55
    assert psnr_of(place, f"native-{setting}", by_diffusers(place, setting, prompt="a dog runs", negative_prompt="slow")) < 50


@pytest.mark.parametrize("setting", ("wan2.2-i2v", "hunyuan-t2v", "hunyuan-i2v"))
def test_round_trip(place, setting):
    """diffusers makes the same of the tensors as of the prompt, and the same frames come of its latents."""
    given = load_file(encode(place, setting))
    negative = {} if setting.startswith("hunyuan") else dict(negative_prompt="slow")
    frames = by_diffusers(place, setting, prompt="a cat walks", **negative)
    prompt = {name: tensor for name, tensor in given.items() if "prompt" in name}
    latents = by_diffusers(place, setting, output_type="latent", latents=given["noise"], **prompt)
    save_file(dict(latents=latents), place / f"{setting}-latents.safetensors")
    tool("decode_latents", model(place, setting), place / f"{setting}-latents.safetensors", "-o", place / f"frames-{setting}")
    assert psnr_of(place, f"frames-{setting}", frames) > 55
    if setting == "wan2.2-i2v":
        assert given["condition"].shape == (1, 8, 3, 18, 32) and (given["condition"][0, :4, 0] == 1).all()
        assert (given["condition"][0, :4, 1:] == 0).all()
    elif setting == "hunyuan-i2v":
        assert given["condition"].shape == (1, 4, 1, 18, 32)


def test_several_prompts(place):
    """Each is the sample that it is alone."""
    out = place / "several.safetensors"
    tool("encode_prompt", model(place, "wan2.1-t2v"), "--prompt", "a dog", "--prompt", "a cat walks", "-o", out)
    both, one = load_file(out), load_file(encode(place, "wan2.1-t2v"))
    assert set(both) == {"prompt_embeds"} and both["prompt_embeds"].shape == (2, 512, 16)
    assert torch.allclose(both["prompt_embeds"][1], one["prompt_embeds"][0], atol=1e-6)


def test_mp4(place):
    pytest.importorskip("imageio_ffmpeg")
    save_file(dict(latents=torch.randn(4, 3, 8, 8)), place / "noise.safetensors")
    tool("decode_latents", model(place, "wan2.1-t2v"), place / "noise.safetensors", "-o", place / "clip.mp4")
    assert (place / "clip.mp4").read_bytes()[4:8] == b"ftyp"


def test_refused(place, capsys):
    """In words, and nothing is written."""
    wan, from_image, out = model(place, "wan2.1-t2v"), model(place, "wan2.1-i2v"), place / "refused"
    save_file(dict(latents=torch.randn(5, 3, 8, 8)), place / "five.safetensors")
    prompt = "--prompt", "a cat", "-o", out
    for words, name, arguments in (
            ("WanPipeline takes none", "encode_prompt", (wan, "--image", place / "first.png", *prompt)),
            ("WanImageToVideoPipeline starts from one", "encode_prompt", (from_image, *prompt)),
            ("there is no file", "encode_prompt", (from_image, "--image", place / "none.png", *prompt)),
            ("got 2, expected one", "encode_prompt", (from_image, "--image", place / "first.png", "--prompt", "a dog", *prompt)),
            ("this is no pipeline", "encode_prompt", (place / "no/such/folder", *prompt)),
            ("runs without a negative prompt", "encode_prompt", (model(place, "hunyuan-t2v"), "--negative", "", *prompt)),
            ("expected one more than a multiple of 4", "encode_prompt", (wan, "--frames", "80", *prompt)),
            ("expected the tensor `latents`", "decode_latents", (wan, place / "first.png", "-o", out)),
            ("got 5 channels", "decode_latents", (wan, place / "five.safetensors", "-o", out)),
            ("is there already", "decode_latents", (wan, place / "five.safetensors", "-o", place))):
        with pytest.raises(SystemExit) as refused:
            tool(name, *arguments)
        assert words in f"{refused.value.code} {capsys.readouterr().err}" and not out.exists() and not list(place.glob(".*"))
