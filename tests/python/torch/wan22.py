"""Wan2.2 in diffusers' own pipelines on small random transformers: latents in, latents of every step out."""

import types

import torch
from diffusers import UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline

SHIFT = 3.0


def scheduler():
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT)


class FromImage(WanImageToVideoPipeline):
    """The latents of the image are given; there is no VAE to make them."""

    def prepare_latents(self, *_):
        if not self.config.expand_timesteps:
            return self.noise, self.given
        still = torch.ones(1, 1, *self.noise.shape[2:])
        still[:, :, 0] = 0
        return self.noise, self.given, still


FromImage.__name__ = WanImageToVideoPipeline.__name__  # which is what a saved pipeline says


def pipeline(experts, boundary=None, expand=False, image=False):
    """A pipeline of one or two transformers without encoders."""
    parts = dict(tokenizer=None, text_encoder=None, vae=None, scheduler=scheduler(), transformer=experts[0],
                 transformer_2=experts[1] if len(experts) > 1 else None, boundary_ratio=boundary, expand_timesteps=expand)
    pipe = FromImage(**parts, image_encoder=None, image_processor=None) if image else WanPipeline(**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def save(pipe, folder, **shards):
    """As save_pretrained would, but for the parts that are not there."""
    pipe.save_config(folder)
    pipe.scheduler.save_pretrained(folder / "scheduler")
    for name in ("transformer", "transformer_2"):
        if getattr(pipe, name) is not None:
            getattr(pipe, name).save_pretrained(folder / name, **shards)


@torch.no_grad()
def latents(pipe, given, steps, guidance, guidance_2=None):
    """The latents after each step; the last are the sample, batch dimension included."""
    found = []
    noise = given["noise"][None].float()
    scale = pipe.vae_scale_factor_spatial
    arguments = dict(prompt_embeds=given["prompt_embeds"][None],
                     negative_prompt_embeds=given["negative_prompt_embeds"][None], latents=noise,
                     num_frames=4 * (noise.shape[2] - 1) + 1, height=noise.shape[3] * scale, width=noise.shape[4] * scale,
                     num_inference_steps=steps, guidance_scale=guidance, guidance_scale_2=guidance_2, output_type="latent",
                     callback_on_step_end=lambda pipe, i, t, kept: found.append(kept["latents"]) or {})
    if isinstance(pipe, FromImage):
        pipe.noise, pipe.given = noise, given["condition"][None]
        object.__setattr__(pipe, "vae", types.SimpleNamespace(config=types.SimpleNamespace(z_dim=noise.shape[1])))
        arguments["image"] = torch.zeros(1, 3, arguments["height"], arguments["width"])
    sample = pipe(**arguments).frames
    return [*found[:-1], sample]
