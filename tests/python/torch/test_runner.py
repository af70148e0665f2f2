"""The native runner against diffusers' WanTransformer3DModel on random small models, and against the sampler of the bundled one."""

import pytest
import torch
from diffusers import UniPCMultistepScheduler, WanTransformer3DModel
from safetensors import safe_open

import images
import video
import wan22
from sample import load, noise_levels, sample

BASE = dict(num_attention_heads=2, attention_head_dim=24, in_channels=5, out_channels=5, text_dim=18, freq_dim=32, ffn_dim=40, num_layers=2)
CASES = {
    "t2v": dict(),
    "one head, odd widths": dict(num_attention_heads=1, attention_head_dim=22, in_channels=3, out_channels=3, text_dim=7, ffn_dim=33),
    "i2v by channels": dict(in_channels=11),
    "i2v with an image branch": dict(in_channels=9, image_dim=10, added_kv_proj_dim=48),
    "first and last image": dict(image_dim=10, added_kv_proj_dim=48, pos_embed_seq_len=14),
    "image tokens before the text": dict(image_dim=10),
    "no norm before cross-attention": dict(cross_attn_norm=False, eps=1e-3),
    "patches over time": dict(patch_size=(2, 1, 3), num_layers=3),
    "head of 128": dict(attention_head_dim=128, num_attention_heads=3, ffn_dim=200),
}
GRID = (3, 4, 5)


def randomise(model):
    """Makes every part matter: weights as large as their sums allow, gates and norms away from 0 and 1."""
    for name, p in model.named_parameters():
        if "norm" in name and name.endswith("weight") and p.ndim == 1:
            torch.nn.init.uniform_(p, 0.5, 1.5)
        else:
            torch.nn.init.normal_(p, std=p[0].numel() ** -0.5 if p.ndim > 1 and "table" not in name else 0.3)
    return model


def make(config, seed):
    torch.manual_seed(seed)
    return randomise(WanTransformer3DModel(**BASE | config).eval())


def inputs(model, seed):
    torch.manual_seed(seed + 1)
    c = model.config
    size = [n * p for n, p in zip(GRID, c.patch_size)]
    tokens = 512 if c.added_kv_proj_dim else 9
    out = {"noise": torch.randn(c.out_channels, *size), "prompt_embeds": torch.randn(tokens, c.text_dim),
           "negative_prompt_embeds": torch.randn(tokens, c.text_dim)}
    if c.in_channels > c.out_channels:
        out["condition"] = torch.randn(c.in_channels - c.out_channels, *size)
    if c.image_dim:
        out["image_embeds"] = torch.randn(*((2, c.pos_embed_seq_len // 2) if c.pos_embed_seq_len else (7,)), c.image_dim)
    return out


def euler_steps(steps, shift):
    """(timestep, how a velocity changes the latent) of each step."""
    levels = noise_levels(steps, shift)
    for i in range(steps):
        yield levels[i] * 1000, lambda v, x, i=i: x + (levels[i + 1] - levels[i]) * v


def unipc_steps(steps, shift):
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
    scheduler.set_timesteps(steps)
    for t in scheduler.timesteps:
        yield t.item(), lambda v, x, t=t: scheduler.step(v, t, x, return_dict=False)[0]


@torch.no_grad()
def sampled(model, given, steps, guidance):
    x = given["noise"][None].to(model.dtype)
    more = [given["condition"][None].to(model.dtype)] if "condition" in given else []
    image = given.get("image_embeds")
    image = None if image is None else image.to(model.dtype) if image.ndim == 3 else image[None].to(model.dtype)

    def velocity(name, time):
        return model(torch.cat([x, *more], 1), torch.tensor([time]), given[name][None].to(model.dtype), image).sample

    for time, step in steps:
        v = velocity("prompt_embeds", time)
        if guidance != 1:
            negative = velocity("negative_prompt_embeds", time)
            v = negative + guidance * (v - negative)
        x = step(v, x)
    return x.float()


def euler(model, given, steps, shift, guidance):
    return sampled(model, given, euler_steps(steps, shift), guidance)


def flags(folder, *more):
    return ["--model", folder, "--grid", "x".join(map(str, GRID)), "--method", "dense", "--shift", 4, *more]


@pytest.mark.parametrize("name", CASES)
def test_random_models_give_the_samples_of_diffusers(generate, tmp_path, name):
    model = make(CASES[name], len(name))
    model.save_pretrained(tmp_path / "model", max_shard_size="60KB" if name == "t2v" else "5GB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > (2 if name == "t2v" else 0)
    given = inputs(model, len(name))
    for steps, guidance in ((1, 1), (3, 4.5)):
        ours = generate(given, *flags(tmp_path / "model", "--steps", steps, "--guidance", guidance))
        theirs = euler(model, given, steps, 4, guidance)
        moved = (theirs - given["noise"]).norm()
        assert (ours - theirs).norm() / moved < 2e-6 * steps * guidance, name


@pytest.mark.parametrize("steps,guidance", ((1, 1), (2, 3), (9, 4.5)))
def test_unipc_gives_the_samples_of_diffusers(generate, tmp_path, steps, guidance):
    model = make(CASES["i2v by channels"], 3)
    model.save_pretrained(tmp_path / "model")
    given = inputs(model, 3)
    ours = generate(given, *flags(tmp_path / "model", "--steps", steps, "--guidance", guidance, "--sampler", "unipc"))
    theirs = sampled(model, given, unipc_steps(steps, 4), guidance)
    assert (ours - theirs).norm() / (theirs - given["noise"]).norm() < 2e-6 * steps * guidance


@pytest.mark.parametrize("image", (False, True))
def test_two_experts_give_the_samples_of_diffusers(generate, tmp_path, image):
    """Sampler and shift are the folder's; every number of steps runs other steps of each expert."""
    config = CASES["i2v by channels" if image else "t2v"]
    pipe = wan22.pipeline([make(config, 7), make(config, 8)], 0.9 if image else 0.875, image=image)
    wan22.save(pipe, tmp_path / "model")
    given = inputs(pipe.transformer, 7)
    for steps, guidance, guidance_2 in ((1, 4.0, 3.0), (5, 4.0, 2.0), (8, 3.5, None)):
        more = [] if guidance_2 is None else ["--guidance-2", guidance_2]
        ours = generate(given, "--model", tmp_path / "model", "--grid", "3x4x5", "--method", "dense", "--steps", steps,
                        "--guidance", guidance, *more)
        theirs = wan22.latents(pipe, given, steps, guidance, guidance_2)[-1]
        assert (ours - theirs).norm() / (theirs - given["noise"]).norm() < 2e-6 * steps * guidance, steps
        if steps > 1:
            other = wan22.latents(wan22.pipeline([pipe.transformer], image=image), given, steps, guidance)[-1]
            assert (other - theirs).norm() / theirs.norm() > 0.01, "the second expert ran"


@pytest.mark.parametrize("image", (False, True))
def test_timesteps_per_token_give_the_samples_of_diffusers(generate, tmp_path, image):
    pipe = wan22.pipeline([make({}, 9)], expand=True, image=image)
    wan22.save(pipe, tmp_path / "model")
    given = inputs(pipe.transformer, 9)
    if image:
        given["condition"] = torch.randn(5, 1, *given["noise"].shape[2:])
    for steps, guidance in ((1, 1.0), (4, 5.0)):
        theirs = wan22.latents(pipe, given, steps, guidance)[-1]
        # In Morton order the first frame is in many places.
        for method in ("dense", "sol:dense_steps=1"):
            ours = generate(given, "--model", tmp_path / "model", "--grid", "3x4x5", "--method", method, "--steps", steps,
                            "--guidance", guidance)
            assert (ours - theirs).norm() / (theirs - given["noise"]).norm() < 2e-6 * steps * guidance, (steps, method)
            assert not image or torch.equal(ours[0, :, :1], given["condition"])


def stored(model, folder, dtype):
    """The model as diffusers loads it: time embedding, rotation and norms stay f32 in a bf16 model."""
    return WanTransformer3DModel.from_pretrained(folder, torch_dtype=dtype).eval()


def test_bf16_differs_by_its_rounding(generate, tmp_path):
    """f32 diffusers is the truth; our bf16 must be as close to it as diffusers' own."""
    model = make(CASES["i2v with an image branch"], 5)
    model.save_pretrained(tmp_path / "model")
    given = inputs(model, 5)
    truth = euler(model, given, 2, 4, 1)
    theirs = (euler(stored(model, tmp_path / "model", torch.bfloat16), given, 2, 4, 1) - truth).norm()
    ours = (generate(given, *flags(tmp_path / "model", "--steps", 2, "--guidance", 1, "--compute", "bf16")) - truth).norm()
    assert 0.1 * theirs < ours < 1.2 * theirs


def test_bf16_checkpoints_are_read_as_they_are(generate, tmp_path):
    model = make({}, 6).bfloat16()
    model.save_pretrained(tmp_path / "model")
    given = inputs(model, 6)
    ours = generate(given, *flags(tmp_path / "model", "--steps", 1, "--guidance", 1))
    theirs = euler(stored(model, tmp_path / "model", torch.float32), given, 1, 4, 1)
    assert (ours - theirs).norm() / (theirs - given["noise"]).norm() < 2e-6


@torch.no_grad()
def test_bundled_model_gives_the_clip_of_its_sampler(generate, bundled, tmp_path):
    """At a grid that PyTorch does in seconds; the first frame comes as the bytes of a PNG."""
    rgb, tokens = video.clips([video.HELD_OUT + 7], (13, 5, 8))
    first = (rgb[0, :, 0] * 255).round() / 255
    images.write_png(tmp_path / "first.png", first)
    noise = torch.randn(1, 12, 13, 10, 16, generator=torch.Generator().manual_seed(3))
    theirs = sample(load(bundled), video.to_latent(first[None, :, None].expand(1, 3, 13, 20, 32).contiguous()), tokens, noise, 5)
    more = ["--image", tmp_path / "first.png", "--grid", "13x5x8", "--steps", 5, "--method", "dense"]
    ours = generate({"noise": noise, "prompt_embeds": tokens}, *more)
    assert (ours - theirs).norm() / theirs.norm() < 1e-4


def test_bundled_example_is_reproduced(generate, bundled):
    """The committed dense sample: 20 steps at 8,320 tokens, float32, by another implementation on a GPU."""
    with safe_open(bundled / "examples.safetensors", "pt") as file:
        noise, dense = file.get_tensor("noise"), file.get_tensor("dense").float()
    ours = generate({"noise": noise.float()}, "--condition", bundled / "examples.safetensors", "--method", "dense")
    assert images.psnr(video.to_rgb(ours), video.to_rgb(dense), 1) > 55
