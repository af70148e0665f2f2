#!/usr/bin/env python3
"""The latents of `scope generate` through diffusers' own VAE into a clip: an .mp4, or a folder of frames."""
import argparse
import os
import shutil
import sys
from pathlib import Path

ABOUT = """Decodes latents.safetensors with the VAE of a pipeline of diffusers (Wan2.1, Wan2.2, HunyuanVideo); nothing else of it is loaded.

  tools/decode_latents.py Wan-AI/Wan2.1-T2V-14B-Diffusers out/latents.safetensors -o clip.mp4
  tools/decode_latents.py Wan-AI/Wan2.1-T2V-14B-Diffusers out/latents.safetensors -o frames       # PNG, for `scope evaluate`

It needs PyTorch and diffusers; for .mp4 also imageio and imageio-ffmpeg."""


def decode(options):
    """Frames as an array [frames, height, width, 3] in [0, 1]."""
    import diffusers
    import torch
    from diffusers.video_processor import VideoProcessor
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    try:
        latents = load_file(options.latents)["latents"][None]
    except (OSError, KeyError, SafetensorError) as error:
        sys.exit(f"{options.latents}: expected the tensor `latents` that scope generate writes: {error!r}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vae = diffusers.AutoModel.from_pretrained(options.pipeline, subfolder="vae", torch_dtype=torch.float32).to(device)
    wan = "latents_mean" in vae.config
    channels = vae.config.z_dim if wan else vae.config.latent_channels
    if latents.shape[1] != channels:
        sys.exit(f"{options.latents}: got {latents.shape[1]} channels, and the VAE of {options.pipeline} takes {channels}")
    latents = latents.to(device)
    if wan:
        mean, std = (torch.tensor(vae.config[name], device=device).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
        latents = latents / (1.0 / std) + mean
    else:
        vae.enable_tiling()
        latents = latents / vae.config.scaling_factor
    with torch.no_grad():
        video = vae.decode(latents, return_dict=False)[0]
    if not wan:
        config = diffusers.HunyuanVideoTransformer3DModel.load_config(options.pipeline, subfolder="transformer")
        if config.get("image_condition_type") == "latent_concat":
            video = video[:, :, 4:]  # as diffusers' pipeline does
    return VideoProcessor(vae_scale_factor=8).postprocess_video(video, output_type="np")[0]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", help="folder, or repository of the Hugging Face Hub, in diffusers' format")
    parser.add_argument("latents", type=Path, help="latents.safetensors of a run")
    parser.add_argument("-o", "--output", type=Path, required=True, help="FILE.mp4, or a new folder for frame_000.png ...")
    parser.add_argument("--fps", type=int, default=16, help="of the .mp4; default: 16, Wan's; HunyuanVideo has 24")
    options = parser.parse_args(arguments)
    mp4 = options.output.suffix == ".mp4"
    if not options.output.parent.is_dir():
        parser.error(f"--output: there is no folder {options.output.parent}")
    if not mp4 and options.output.exists():
        parser.error(f"--output: {options.output} is there already; give a new folder, or a name that ends in .mp4")
    frames = decode(options)
    part = options.output.with_name(f".{os.getpid()}.{options.output.name}")
    try:
        if mp4:
            from diffusers.utils import export_to_video
            export_to_video(list(frames), str(part), fps=options.fps)
        else:
            from PIL import Image
            part.mkdir()
            for i, frame in enumerate((frames * 255).round().astype("uint8")):
                Image.fromarray(frame).save(part / f"frame_{i:03d}.png")
        os.replace(part, options.output)
    finally:
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink(missing_ok=True)
    print(f"{options.output}: {len(frames)} frames of {frames.shape[2]}x{frames.shape[1]}")


if __name__ == "__main__":
    main()
