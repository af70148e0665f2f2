"""Pipelines of diffusers with tiny random transformers, and their inputs: no text encoder, no VAE, latents out."""
import os
import types

import torch
from diffusers import (
    AutoencoderKLWan,
    ClassifierFreeGuidance,
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
    WanVACEPipeline,
    WanVACETransformer3DModel,
)

DEVICE = os.environ.get("SCOPE_TEST_DEVICE", "cpu")
DTYPE = torch.float32 if DEVICE == "cpu" else torch.bfloat16
ROUNDING = 1e-5 if DEVICE == "cpu" else 0.1  # how far two ways of the same sums may be apart at the end of a video
STEPS = 5  # of which Wan attends densely in the first


def randn(*shape, generator=None):
    return torch.randn(*shape, generator=generator).to(DEVICE, DTYPE)


def ready(transformer):
    """As from_pretrained gives it: what diffusers keeps in f32 is."""
    transformer.eval().to(DEVICE, DTYPE)
    for name, parameter in transformer.named_parameters():
        if not set(name.split(".")).isdisjoint(getattr(transformer, "_keep_in_fp32_modules", None) or ()):
            parameter.data = parameter.data.float()
    return transformer


def wan_transformer(seed=0, layers=3, in_channels=4, heads=2):
    torch.manual_seed(seed)
    return ready(WanTransformer3DModel(patch_size=(1, 2, 2), num_attention_heads=heads, attention_head_dim=24, in_channels=in_channels,
                                       out_channels=4, text_dim=16, freq_dim=32, ffn_dim=64, num_layers=layers))


def wan_scheduler():
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def wan(experts=1, heads=2, **config):
    pipe = WanPipeline(tokenizer=None, text_encoder=None, vae=None, transformer=wan_transformer(heads=heads), scheduler=wan_scheduler(),
                       transformer_2=wan_transformer(seed=1, heads=heads) if experts == 2 else None,
                       boundary_ratio=0.9 if experts == 2 else None, **config)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def make_wan(pipe, batch=1, seed=0, steps=STEPS, side=128, text_tokens=6, **options):
    """Latents of 4x16x16, 256 tokens, at 128 pixels."""
    generator = torch.Generator().manual_seed(seed)
    text, negative = randn(2, batch, text_tokens, 16, generator=generator)
    return pipe(prompt_embeds=text, negative_prompt_embeds=negative, height=side, width=side, num_frames=13, num_inference_steps=steps,
                generator=generator, output_type="latent", **options).frames


def vace():
    """Three blocks, of which two have a VACE block beside them; a VAE too, which encodes what the video is to follow."""
    torch.manual_seed(4)
    transformer = ready(WanVACETransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=24, in_channels=4, out_channels=4, text_dim=16, freq_dim=32,
        ffn_dim=64, num_layers=3, vace_layers=[0, 2], vace_in_channels=2 * 4 + 64))
    vae = ready(AutoencoderKLWan(base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0] * 4,
                                 latents_std=[1.0] * 4))
    pipe = WanVACEPipeline(tokenizer=None, text_encoder=None, vae=vae, transformer=transformer, scheduler=wan_scheduler())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def make_vace(pipe, batch=1, **options):
    """The pipeline makes one video at a time."""
    return make_wan(pipe, **options)


def hunyuan(**config):
    torch.manual_seed(2)
    transformer = ready(HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=24, num_layers=2, num_single_layers=1,
        num_refiner_layers=1, patch_size=2, text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(4, 10, 10), **config))
    pipe = HunyuanVideoPipeline(text_encoder=None, tokenizer=None, text_encoder_2=None, tokenizer_2=None, vae=None, transformer=transformer,
                                scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def make_hunyuan(pipe, batch=1, seed=0, steps=STEPS, **options):
    """Latents of 4x16x16, 256 tokens, and 10 of text, of which the last are padding, in the second sample more than in the first."""
    generator = torch.Generator().manual_seed(seed)
    text, negative = randn(2, batch, 10, 16, generator=generator)
    pooled = randn(2, batch, 8, generator=generator)
    mask = (torch.arange(10)[None] < torch.tensor([7, 4])[:batch, None]).to(DEVICE)
    return pipe(prompt_embeds=text, pooled_prompt_embeds=pooled[0], prompt_attention_mask=mask, negative_prompt_embeds=negative,
                negative_pooled_prompt_embeds=pooled[1], negative_prompt_attention_mask=mask.flip(0), true_cfg_scale=2.0, height=128,
                width=128, num_frames=13, num_inference_steps=steps, generator=generator, output_type="latent",
                **options).frames


class Sizes(torch.nn.Module):
    """What HunyuanVideo 1.5's pipeline asks its VAE."""

    device, temporal_compression_ratio, spatial_compression_ratio = torch.device(DEVICE), 4, 8
    config = types.SimpleNamespace(latent_channels=4)


def hunyuan15():
    torch.manual_seed(5)
    transformer = ready(HunyuanVideo15Transformer3DModel(
        in_channels=9, out_channels=4, num_attention_heads=2, attention_head_dim=24, num_layers=3, num_refiner_layers=1, patch_size=2,
        text_embed_dim=16, text_embed_2_dim=12, image_embed_dim=8, rope_axes_dim=(4, 10, 10), task_type="t2v"))
    pipe = HunyuanVideo15Pipeline(text_encoder=None, tokenizer=None, text_encoder_2=None, tokenizer_2=None, vae=Sizes(),
                                  transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
                                  guider=ClassifierFreeGuidance(guidance_scale=3.0))
    pipe.vision_num_semantic_tokens = 5
    pipe.set_progress_bar_config(disable=True)
    return pipe


def make_hunyuan15(pipe, batch=1, seed=0, steps=STEPS):
    """Latents of 4x16x16, 256 tokens, and 10 + 6 of text with padding, and 5 of an image that is not there."""
    generator = torch.Generator().manual_seed(seed)
    given = {}
    for name, valid in (("", [7, 4]), ("negative_", [3, 10])):
        given[f"{name}prompt_embeds"] = randn(batch, 10, 16, generator=generator)
        given[f"{name}prompt_embeds_2"] = randn(batch, 6, 12, generator=generator)
        given[f"{name}prompt_embeds_mask"] = (torch.arange(10)[None] < torch.tensor(valid)[:batch, None]).to(DEVICE)
        given[f"{name}prompt_embeds_mask_2"] = (torch.arange(6)[None] >= torch.tensor(valid)[:batch, None] // 2).to(DEVICE)
    return pipe(**given, height=128, width=128, num_frames=13, num_inference_steps=steps, generator=generator, output_type="latent").frames


def cogvideox(rotary=True, **config):
    torch.manual_seed(6)
    transformer = ready(CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=16, num_layers=3,
        sample_width=16, sample_height=16, sample_frames=13, max_text_seq_length=6, use_rotary_positional_embeddings=rotary, **config))
    scheduler = CogVideoXDDIMScheduler(prediction_type="v_prediction", timestep_spacing="trailing", rescale_betas_zero_snr=True)
    pipe = CogVideoXPipeline(tokenizer=None, text_encoder=None, vae=None, transformer=transformer, scheduler=scheduler)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def make_cogvideox(pipe, batch=1, seed=0, steps=STEPS):
    """Latents of 4x16x16, 256 tokens (in patches of two frames 128), behind 6 of text; both branches are one batch."""
    generator = torch.Generator().manual_seed(seed)
    text, negative = randn(2, batch, 6, 16, generator=generator)
    return pipe(prompt_embeds=text, negative_prompt_embeds=negative, height=128, width=128, num_frames=13, num_inference_steps=steps,
                guidance_scale=2.0, generator=generator, output_type="latent").frames


def minimax():
    """The denoising loop of the modular pipeline, which is all that the others do too."""
    from diffusers import MiniMaxH3Scheduler, MiniMaxH3Transformer3DModel
    from diffusers.modular_pipelines.minimax_h3.denoise import MiniMaxH3DenoiseStep
    torch.manual_seed(7)
    pipe = MiniMaxH3DenoiseStep().init_pipeline()
    pipe.update_components(scheduler=MiniMaxH3Scheduler(), audio_scheduler=MiniMaxH3Scheduler(), transformer=ready(
        MiniMaxH3Transformer3DModel(num_attention_heads=2, attention_head_dim=32, hidden_size=48, num_layers=3, num_refiner_layers=1,
                                    ffn_dim=64, in_channels=4, audio_in_channels=4, text_dim=16, freq_dim=32, time_embed_hidden_dim=32,
                                    time_embed_dim=16, rope_freq_dim=4)))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def make_minimax(pipe, batch=1, seed=0, steps=STEPS):
    """256 tokens of 4x8x8, with 6 of text before them and 10 of audio among them; one video at a time."""
    generator = torch.Generator().manual_seed(seed)
    for scheduler in (pipe.scheduler, pipe.audio_scheduler):
        scheduler.set_timesteps(steps + 1, device=DEVICE)
    tags = torch.zeros(272, dtype=torch.long)
    tags[:6], tags[100:110] = 1, 2
    places = torch.zeros(272, 3)
    places[tags == 0] = torch.cartesian_prod(*(torch.arange(float(n)) for n in (4, 8, 8)))
    layout = dict(token_tags=tags, position_ids=places, video_indices=(tags == 0).nonzero()[:, 0],
                  text_indices=(tags == 1).nonzero()[:, 0], audio_indices=(tags == 2).nonzero()[:, 0])
    rows = torch.zeros(272, dtype=torch.long, device=DEVICE)
    return pipe(latents=torch.randn(256, 16, generator=generator).to(DEVICE),
                audio_latents=torch.randn(10, 4, generator=generator).to(DEVICE), prompt_embeds=randn(1, 6, 16, generator=generator),
                timesteps=pipe.scheduler.timesteps, row_timestep_plan=[(timestep[None], rows) for timestep in pipe.scheduler.timesteps],
                audio_timesteps=pipe.audio_scheduler.timesteps,
                denoiser_input_fields={name: x.to(DEVICE) for name, x in layout.items()}).get("latents").clone()


class Loop:
    """A denoising loop over a real transformer and scheduler, for pipelines that would also need images, encoders and a VAE."""

    def __init__(self, transformer, given, latents=(4, 4, 16, 16), condition=0, branches=("cond", "uncond")):
        self.transformer, self.scheduler = transformer, FlowMatchEulerDiscreteScheduler(shift=3.0)
        self.given, self.latents, self.condition, self.branches = given, latents, condition, branches  # channels of a condition
        self.components = {"transformer": transformer}

    @torch.no_grad()
    def __call__(self, batch=1, seed=0, steps=STEPS):
        generator = torch.Generator().manual_seed(seed)
        latents = randn(batch, *self.latents, generator=generator)
        condition = randn(batch, self.condition, *self.latents[1:], generator=generator)
        inputs = {branch: self.given(batch, generator) for branch in self.branches}
        self.scheduler.set_timesteps(steps, device=DEVICE)
        for timestep in self.scheduler.timesteps:
            noise = []
            for branch in self.branches:
                with self.transformer.cache_context(branch):
                    noise.append(self.transformer(hidden_states=torch.cat([latents, condition], 1) if self.condition else latents,
                                                  timestep=timestep.expand(batch).to(DTYPE), **inputs[branch]).sample)
            latents = self.scheduler.step(sum(noise) / len(noise), timestep, latents).prev_sample
        return latents


def run_loop(pipe, **options):
    return pipe(**options)


WAN_SHAPE = dict(patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=24, in_channels=4, out_channels=4, text_dim=16,
                 freq_dim=32, ffn_dim=64, num_layers=3)


def wan_animate():
    """Text by cross-attention, a pose for all frames but the first, and a face that the first block looks at."""
    from diffusers import WanAnimateTransformer3DModel
    torch.manual_seed(8)
    transformer = ready(WanAnimateTransformer3DModel(
        **{**WAN_SHAPE, "in_channels": 12}, latent_channels=4, image_dim=None, motion_encoder_size=16, motion_style_dim=8, motion_dim=4,
        motion_encoder_dim=8, motion_encoder_channel_sizes={str(2**i): 8 for i in range(2, 5)}, face_encoder_hidden_dim=8,
        face_encoder_num_heads=2, inject_face_latents_blocks=3))

    def given(batch, generator):
        return dict(encoder_hidden_states=randn(batch, 6, 16, generator=generator),
                    pose_hidden_states=randn(batch, 4, 3, 16, 16, generator=generator),
                    face_pixel_values=randn(batch, 3, 12, 16, 16, generator=generator))

    return Loop(transformer, given, condition=8)


def chronoedit():
    from diffusers import ChronoEditTransformer3DModel
    torch.manual_seed(9)
    return Loop(ready(ChronoEditTransformer3DModel(**WAN_SHAPE)),
                lambda batch, generator: dict(encoder_hidden_states=randn(batch, 6, 16, generator=generator)))


def anyflow():
    """Any number of steps; both branches are one batch, which has no name."""
    from diffusers import AnyFlowPipeline, AnyFlowTransformer3DModel, FlowMapEulerDiscreteScheduler
    torch.manual_seed(15)
    pipe = AnyFlowPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=FlowMapEulerDiscreteScheduler(),
                           transformer=ready(AnyFlowTransformer3DModel(**WAN_SHAPE)))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def make_anyflow(pipe, **options):
    return make_wan(pipe, guidance_scale=2.0, **options)


def skyreels():
    from diffusers import SkyReelsV2Pipeline, SkyReelsV2Transformer3DModel
    torch.manual_seed(10)
    pipe = SkyReelsV2Pipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=wan_scheduler(),
                              transformer=ready(SkyReelsV2Transformer3DModel(**WAN_SHAPE)))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def framepack():
    """3 frames of history behind the video, an image before the text, of which the last tokens are padding."""
    from diffusers import HunyuanVideoFramepackTransformer3DModel
    torch.manual_seed(11)
    transformer = ready(HunyuanVideoFramepackTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=24, num_layers=2, num_single_layers=1,
        num_refiner_layers=1, patch_size=2, text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(4, 10, 10),
        image_condition_type=None, has_image_proj=True, image_proj_dim=8, has_clean_x_embedder=True))

    def given(batch, generator):
        indices = torch.arange(12)
        history = {f"latents_{name}": randn(batch, 4, frames, 16, 16, generator=generator)
                   for name, frames in (("clean", 1), ("history_2x", 2), ("history_4x", 4))}
        return dict(encoder_hidden_states=randn(batch, 10, 16, generator=generator),
                    pooled_projections=randn(batch, 8, generator=generator),
                    encoder_attention_mask=(torch.arange(10)[None] < torch.tensor([7, 4])[:batch, None]).to(DEVICE),
                    image_embeds=randn(batch, 5, 8, generator=generator), guidance=torch.full((batch,), 6000.0).to(DEVICE, DTYPE),
                    indices_latents=indices[:4], indices_latents_clean=indices[4:5], indices_latents_history_2x=indices[5:7],
                    indices_latents_history_4x=indices[7:11], **history)

    return Loop(transformer, given)


def kandinsky():
    """Latents with their channels last."""
    from diffusers import Kandinsky5Transformer3DModel
    torch.manual_seed(12)
    transformer = ready(Kandinsky5Transformer3DModel(
        in_visual_dim=4, in_text_dim=16, in_text_dim2=8, time_dim=32, out_visual_dim=4, patch_size=(1, 2, 2), model_dim=48, ff_dim=64,
        num_text_blocks=1, num_visual_blocks=3, axes_dims=(8, 8, 8)))
    for weight in transformer.parameters():
        if not weight.any():  # of gates, which would leave every block out
            torch.nn.init.normal_(weight, std=0.1)

    def given(batch, generator):
        return dict(encoder_hidden_states=randn(batch, 6, 16, generator=generator), pooled_projections=randn(batch, 8, generator=generator),
                    visual_rope_pos=[torch.arange(n, device=DEVICE) for n in (4, 8, 8)], text_rope_pos=torch.arange(6, device=DEVICE))

    return Loop(transformer, given, latents=(4, 16, 16, 4))


def ltx():
    from diffusers import LTXPipeline, LTXVideoTransformer3DModel
    torch.manual_seed(13)
    transformer = ready(LTXVideoTransformer3DModel(in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=24,
                                                   cross_attention_dim=48, num_layers=3, caption_channels=16))
    pipe = LTXPipeline(scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), vae=None, text_encoder=None, tokenizer=None,
                       transformer=transformer)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def text_with_masks(batch, tokens, channels, generator):
    """Two prompts, as LTX's pipelines take them."""
    given = {}
    for name in ("", "negative_"):
        given[f"{name}prompt_embeds"] = randn(batch, tokens, channels, generator=generator)
        given[f"{name}prompt_attention_mask"] = torch.ones(batch, tokens, dtype=torch.long, device=DEVICE)
    return given


def make_ltx(pipe, batch=1, seed=0, steps=STEPS):
    """256 tokens of 4x8x8; both branches are one batch."""
    generator = torch.Generator().manual_seed(seed)
    return pipe(**text_with_masks(batch, 6, 16, generator), height=256, width=256, num_frames=25, num_inference_steps=steps,
                guidance_scale=3.0, generator=generator, output_type="latent").frames


class LtxSizes(torch.nn.Module):
    """What LTX-2's pipeline asks its VAEs beside decoding."""

    device, dtype = torch.device(DEVICE), DTYPE
    spatial_compression_ratio, temporal_compression_ratio, mel_compression_ratio = 32, 8, 4

    def __init__(self, channels, **config):
        super().__init__()
        self.latents_mean, self.latents_std = torch.zeros(channels, device=DEVICE), torch.ones(channels, device=DEVICE)
        self.config = types.SimpleNamespace(scaling_factor=1.0, **config)


def ltx2(gated=True, perturbed=True):
    """Video and audio streams; guidance by a block that is left out and by streams apart, as LTX-2.3 has it."""
    from diffusers import LTX2Pipeline, LTX2VideoTransformer3DModel
    from diffusers.pipelines.ltx2 import LTX2TextConnectors
    torch.manual_seed(14)
    transformer = ready(LTX2VideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=24, cross_attention_dim=48, audio_in_channels=128,
        audio_out_channels=128, audio_num_attention_heads=2, audio_attention_head_dim=12, audio_cross_attention_dim=24, num_layers=3,
        caption_channels=16, gated_attn=gated, audio_gated_attn=gated, perturbed_attn=perturbed))
    connectors = ready(LTX2TextConnectors(
        caption_channels=16, text_proj_in_factor=1, video_connector_num_attention_heads=2, video_connector_attention_head_dim=8,
        video_connector_num_layers=1, video_connector_num_learnable_registers=None, audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=8, audio_connector_num_layers=1, audio_connector_num_learnable_registers=None))
    pipe = LTX2Pipeline(scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), vae=LtxSizes(4),
                        audio_vae=LtxSizes(128, sample_rate=16000, mel_hop_length=160, mel_bins=64, latent_channels=8),
                        text_encoder=None, tokenizer=None, connectors=connectors, transformer=transformer, vocoder=None)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def make_ltx2(pipe, batch=1, seed=0, steps=STEPS, **options):
    """256 tokens of 4x8x8, and 13 of audio in a stream of their own."""
    generator = torch.Generator().manual_seed(seed)
    given = dict(guidance_scale=3.0, stg_scale=1.0, modality_scale=2.0, spatio_temporal_guidance_blocks=[1])
    if not pipe.transformer.config.perturbed_attn:
        given.update(stg_scale=0.0, audio_stg_scale=0.0, spatio_temporal_guidance_blocks=None)
    return pipe(**text_with_masks(batch, 6, 16, generator), height=256, width=256, num_frames=25, num_inference_steps=steps,
                generator=generator, output_type="latent", **{**given, **options}).frames
