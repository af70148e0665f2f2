"""Writes tests/data/video: small random Wan models with samples that diffusers made, and one of the bundled model.

    python tests/data/make_video_fixtures.py        (PyTorch, diffusers and safetensors; see tools/tiny_video/smoke_test.sh)
"""

import pathlib
import sys

import torch
from diffusers import UniPCMultistepScheduler
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tools" / "tiny_video"), str(HERE.parent / "python" / "torch")]

import video
import wan22
from sample import load, sample
from test_runner import GRID, euler, inputs, make

SMALL = dict(num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=6, freq_dim=16, ffn_dim=20)
CASES = {
    "t2v_sharded": SMALL,
    "i2v_image_branch": SMALL | dict(in_channels=9, image_dim=5, added_kv_proj_dim=24),
    "two_images_no_norm": SMALL | dict(image_dim=5, added_kv_proj_dim=24, pos_embed_seq_len=6, cross_attn_norm=False),
    "patches_over_time": SMALL | dict(patch_size=(2, 1, 3), in_channels=5, image_dim=5, num_layers=1),
}
STEPS, SHIFT, GUIDANCE = 2, 4.0, 3.0


def random_model(name, config):
    folder, seed = HERE / "video" / name, len(name)

    rounded(config, seed).bfloat16().save_pretrained(folder, max_shard_size="15KB" if "sharded" in name else "5GB")
    model = rounded(config, seed)
    given = {k: v.half() for k, v in inputs(model, seed).items()}
    out = euler(model, {k: v.float() for k, v in given.items()}, STEPS, SHIFT, GUIDANCE)[0]
    note = {"grid": "x".join(map(str, GRID)), "steps": str(STEPS), "shift": str(SHIFT), "guidance": str(GUIDANCE)}
    save_file({k: v.contiguous() for k, v in given.items()} | {"sample": out.contiguous()}, folder / "case.safetensors", note)


def rounded(config, seed):
    """A model with the numbers that its bf16 files hold, so that both sides compute with the same."""
    model = make(config, seed)
    for p in model.parameters():
        p.data = p.data.bfloat16().float()
    return model


def wan22_pipeline(name, config, seed, steps, guidance, guidance_2=None, **options):
    folder, count = HERE / "video" / name, 2 if "boundary" in options else 1
    pipe = wan22.pipeline([rounded(config, seed + i) for i in range(count)], **options)
    given = {k: v.half() for k, v in inputs(pipe.transformer, seed).items()}
    if options.get("expand"):
        given["condition"] = given["noise"][:, :1].flip(-1)
    sample = wan22.latents(pipe, {k: v.float() for k, v in given.items()}, steps, guidance, guidance_2)[-1][0]
    note = dict(grid="x".join(map(str, GRID)), steps=steps, shift=wan22.SHIFT, guidance=guidance, guidance_2=guidance_2 or guidance)
    wan22.save(wan22.pipeline([rounded(config, seed + i).bfloat16() for i in range(count)], **options), folder)
    save_file({k: v.contiguous() for k, v in given.items()} | {"sample": sample.contiguous()}, folder / "case.safetensors",
              {k: str(v) for k, v in note.items()})


def wan22_pipelines():
    eights = SMALL | dict(attention_head_dim=16, text_dim=8, ffn_dim=24)  # widths that a GPU takes
    wan22_pipeline("wan22_t2v", eights, 11, 6, 4.0, 3.0, boundary=0.875)
    wan22_pipeline("wan22_i2v", eights | dict(in_channels=10, num_layers=1), 21, 4, 3.5, boundary=0.9, image=True)
    wan22_pipeline("wan22_ti2v", eights, 31, 3, 5.0, expand=True, image=True)


def bundled_model():
    grid = (5, 4, 6)
    rgb, tokens = video.clips([video.HELD_OUT + 9], grid)
    first = (rgb[0, :, 0] * 255).round()
    noise = torch.randn(1, 12, 5, 8, 12, generator=torch.Generator().manual_seed(1)).half()
    latent = video.to_latent((first / 255)[None, :, None].expand(1, 3, 5, 16, 24).contiguous())
    out = sample(load(HERE.parents[1] / "models" / "tiny-wan"), latent, tokens, noise.float(), 4)
    tensors = {"noise": noise[0], "prompt_embeds": tokens[0], "sample": out[0], "first": first.permute(1, 2, 0).to(torch.uint8)}
    folder = HERE / "video" / "bundled"
    folder.mkdir(exist_ok=True)
    note = {"grid": "5x4x6", "steps": "4", "shift": "3.0", "guidance": "1.0"}
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "case.safetensors", note)


def unipc_steps():
    """Latents of every step, from velocities that a small function of the latent gives or, in the last case, that are random."""
    tensors, n = {}, 32
    torch.manual_seed(7)
    matrix = torch.randn(n, n) / n**0.5
    for name, steps, shift in (("one", 1, 3.0), ("two", 2, 5.0), ("three", 3, 1.0), ("twenty", 20, 5.0), ("fifty", 50, 3.0),
                               ("random", 40, 12.0)):
        scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
        scheduler.set_timesteps(steps)
        noise = latent = torch.randn(1, n)
        velocities, latents = [], []
        for t in scheduler.timesteps:
            velocities.append(torch.randn(1, n) if name == "random" else 2 * noise - torch.tanh(latent @ matrix + t / 1000))
            latent = scheduler.step(velocities[-1], t, latent, return_dict=False)[0]
            latents.append(latent)
        tensors |= {f"{name}.noise": noise[0], f"{name}.velocities": torch.cat(velocities), f"{name}.latents": torch.cat(latents),
                    f"{name}.timesteps": scheduler.timesteps.float(), f"{name}.shift": torch.tensor([shift])}
    # Rounding down hangs on the last bits of a level.
    for shift in (1.0, 3.0, 5.0, 7.0, 8.0, 12.0):
        scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
        timesteps = []
        for steps in range(1, 61):
            scheduler.set_timesteps(steps)
            timesteps.append(scheduler.timesteps.to(torch.int32))
        tensors[f"timesteps.{shift:.0f}"] = torch.cat(timesteps)
    save_file(tensors, HERE / "unipc.safetensors")


if __name__ == "__main__":
    unipc_steps()
    for name, config in CASES.items():
        random_model(name, config)
    wan22_pipelines()
    bundled_model()
    for path in (HERE / "video").rglob("*.*"):
        path.chmod(0o644)
    print(sum(p.stat().st_size for p in (HERE / "video").rglob("*") if p.is_file()), "bytes")
