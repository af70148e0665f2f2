#!/usr/bin/env python3
"""A prompt, and for image to video an image, through diffusers' own encoders into the file that `scope generate --condition` takes."""
import argparse
import json
import os
import sys
from pathlib import Path

ABOUT = """Encodes prompts with the text encoders of a pipeline of diffusers (Wan2.1, Wan2.2, HunyuanVideo), and for image to video the
image with its image encoder and VAE. The transformers, which are most of the weights, are not loaded.

  tools/encode_prompt.py Wan-AI/Wan2.1-T2V-14B-Diffusers --prompt "A cat walks" --negative "" -o prompt.safetensors
  tools/encode_prompt.py Wan-AI/Wan2.1-I2V-14B-720P-Diffusers --prompt "A cat walks" --negative "" --image cat.png -o cat.safetensors

docs/guide/prompt_to_video.md goes on from there. It needs PyTorch, diffusers, transformers and ftfy."""
PIPELINES = "WanPipeline", "WanImageToVideoPipeline", "HunyuanVideoPipeline", "HunyuanVideoImageToVideoPipeline"


def encode(options):
    """Tensors by the names of diffusers' arguments, each with a leading batch dimension; and the video's tokens along T, H and W."""
    import diffusers
    import torch
    from PIL import Image, ImageOps
    try:
        config = diffusers.DiffusionPipeline.load_config(options.pipeline)
        name = config["_class_name"]
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"{options.pipeline}: this is no pipeline of diffusers: {error}")
    if name not in PIPELINES:
        sys.exit(f"{options.pipeline}: got a {name}, expected one of {', '.join(PIPELINES)}")
    left_out = dict(transformer=None)
    if name == "WanPipeline" and config.get("expand_timesteps") and options.image:  # TI2V is saved as text to video, and does both
        name = "WanImageToVideoPipeline"
        left_out.update({part: None for part in ("image_encoder", "image_processor") if part not in config})
    wan, from_image = name.startswith("Wan"), "ImageToVideo" in name
    if from_image != bool(options.image):
        sys.exit(f"--image: {name} " + ("starts from one" if from_image else "takes none"))
    if from_image and len(options.prompt) > 1:
        sys.exit(f"--prompt: got {len(options.prompt)}, expected one beside an image")
    if options.negative is not None and not wan:
        sys.exit("--negative: HunyuanVideo embeds guidance, and runs without a negative prompt")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if wan:
        left_out["transformer_2"] = None
    types = dict(default=dtype, vae=torch.float32, **(dict(image_encoder=torch.float32) if wan else {}))  # as diffusers' pages load them
    pipe = getattr(diffusers, name).from_pretrained(options.pipeline, torch_dtype=types, **left_out).to(device)
    width, height = options.size
    multiple = 2 * pipe.vae_scale_factor_spatial
    if width % multiple or height % multiple:
        sys.exit(f"--size: got {width}x{height}, this pipeline takes multiples of {multiple}")
    image = pixels = None
    if from_image:
        image = ImageOps.fit(ImageOps.exif_transpose(Image.open(options.image)).convert("RGB"), options.size, Image.Resampling.LANCZOS)
        pixels = pipe.video_processor.preprocess(image, height=height, width=width).to(device, torch.float32)
    sized = dict(batch_size=len(options.prompt), height=height, width=width, num_frames=options.frames, dtype=torch.float32, device=device,
                 generator=torch.Generator().manual_seed(options.seed or 0))
    out = {}
    with torch.no_grad():
        if wan:
            out["prompt_embeds"], negative = pipe.encode_prompt(
                options.prompt, options.negative, options.negative is not None, max_sequence_length=512)
            if negative is not None:
                out["negative_prompt_embeds"] = negative
            latents = pipe.prepare_latents(*([pixels] if from_image else []), num_channels_latents=pipe.vae.config.z_dim, **sized)
            if from_image:
                latents, out["condition"] = latents[:2]  # of TI2V the first frame's alone, and a mask that is not needed
                if pipe.image_encoder is not None:
                    out["image_embeds"] = pipe.encode_image(image, device)
        else:
            kind, given = None, {}
            if from_image:
                config = diffusers.HunyuanVideoTransformer3DModel.load_config(options.pipeline, subfolder="transformer")
                kind = config["image_condition_type"]
                given = dict(image=image, image_embed_interleave=dict(latent_concat=2, token_replace=4)[kind])
            encoded = pipe.encode_prompt(prompt=options.prompt, **given)
            out["prompt_embeds"], out["pooled_prompt_embeds"], out["prompt_attention_mask"] = encoded
            sized.update(num_channels_latents=pipe.vae.config.latent_channels)
            if from_image:
                latents, condition = pipe.prepare_latents(pixels, image_condition_type=kind, **sized)
                if kind == "latent_concat":
                    condition[:, :, 1:] = 0
                    mask = torch.zeros_like(condition[:, :1])
                    mask[:, :, 0] = 1
                    condition = torch.cat([condition, mask], 1)
                out["condition"] = condition
            else:
                latents = pipe.prepare_latents(**sized)
    if options.seed is not None:
        out["noise"] = latents[:1]
    latent = latents.shape[2:]
    return {name: tensor.float().cpu().contiguous() for name, tensor in out.items()}, (latent[0], latent[1] // 2, latent[2] // 2)


def size(text):
    width, x, height = text.partition("x")
    if not (x and width.isdigit() and height.isdigit() and int(width) % 16 == int(height) % 16 == 0 and int(width) and int(height)):
        raise argparse.ArgumentTypeError(f'got "{text}", expected WIDTHxHEIGHT in multiples of 16, as 1280x720')
    return int(width), int(height)


def frames(text):
    if not text.isdigit() or int(text) % 4 != 1:
        raise argparse.ArgumentTypeError(f'got "{text}", expected one more than a multiple of 4, as 81')
    return int(text)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", help="folder, or repository of the Hugging Face Hub, in diffusers' format")
    parser.add_argument("--prompt", required=True, action="append", help="repeat for more, of which `scope generate --example` picks one")
    parser.add_argument("--negative", help='negative prompt, which may be "", for guidance; without it none is written')
    parser.add_argument("--image", type=Path, help="first frame; its middle is taken in the shape of --size")
    parser.add_argument("--size", type=size, default=(1280, 720), metavar="WxH",
                        help="of the video, for image and noise; default: 1280x720")
    parser.add_argument("--frames", type=frames, default=81, metavar="N", help="of the video, for image and noise; default: 81")
    parser.add_argument("--seed", type=int, help="also write diffusers' own noise of this seed, for `scope generate --noise`")
    parser.add_argument("-o", "--output", type=Path, required=True, help=".safetensors file to write")
    options = parser.parse_args(arguments)
    if options.image and not options.image.is_file():
        parser.error(f"--image: there is no file {options.image}")
    if not options.output.parent.is_dir():
        parser.error(f"--output: there is no folder {options.output.parent}")
    tensors, grid = encode(options)
    from safetensors.torch import save_file
    part = options.output.with_name(f".{options.output.name}.{os.getpid()}")
    try:
        save_file(tensors, part, metadata=dict(pipeline=options.pipeline, prompts=json.dumps(options.prompt, ensure_ascii=False)))
        os.replace(part, options.output)
    finally:
        part.unlink(missing_ok=True)
    width, height = options.size
    print(f"{options.output}: " + ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items()))
    print(f"{options.frames} frames of {width}x{height} are --grid {'x'.join(map(str, grid))}")


if __name__ == "__main__":
    main()
