"""Whole pipelines of diffusers with tiny random weights, as folders: text encoders, tokenizers and VAEs too, nothing downloaded.

    tiny_folders.py FOLDER SETTING...        the settings of scope_attn.reproduce
"""
import sys

import torch
import transformers
from diffusers import (
    AutoencoderKLHunyuanVideo,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoImageToVideoPipeline,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

HEADERS = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<image>"  # of HunyuanVideo's templates
WORDS = ["<pad>", "<unk>", "</s>", *HEADERS, "a", "cat", "dog", "walk", "run", "slow"]
WORDS += [f"<{i}>" for i in range(len(WORDS), 271)] + ["\n\n"]  # where Llama has it: diffusers 0.36 looks for the number
SIZE = 16  # channels of every encoder


def tokenizer(most):
    """Words, up to four letters at a time, so that HunyuanVideo's templates are as long as they must be; it knows few of them."""
    tokens = Tokenizer(models.WordLevel({name: i for i, name in enumerate(WORDS)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n\n|\w{1,4}|[^\w\s]"), "removed", invert=True)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", unk_token="<unk>", eos_token="</s>",
                                                additional_special_tokens=list(HEADERS), model_max_length=most)


def vision(image, patch):
    return transformers.CLIPVisionConfig(hidden_size=SIZE, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
                                         image_size=image, patch_size=patch, projection_dim=SIZE)


def images(side):
    return transformers.CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})


def wan(setting):
    from_image, experts = setting.endswith("i2v"), 2 if setting.startswith("wan2.2") else 1
    encoder = transformers.UMT5EncoderModel(transformers.UMT5Config(vocab_size=len(WORDS), d_model=SIZE, d_kv=8, d_ff=16, num_layers=2,
                                                                    num_heads=2))
    vae = AutoencoderKLWan(base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4)

    def transformer():
        return WanTransformer3DModel(patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=24,
                                     in_channels=12 if from_image else 4, out_channels=4, text_dim=SIZE, freq_dim=32, ffn_dim=32,
                                     num_layers=2, **(dict(image_dim=SIZE, added_kv_proj_dim=48) if from_image and experts == 1 else {}))

    parts = dict(tokenizer=tokenizer(512), text_encoder=encoder, vae=vae, transformer=transformer(),
                 scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0))
    if experts == 2:
        parts.update(transformer_2=transformer(), boundary_ratio=0.9)
    if not from_image:
        return WanPipeline(**parts)
    first = experts == 1
    return WanImageToVideoPipeline(image_encoder=transformers.CLIPVisionModel(vision(28, 14)) if first else None,
                                   image_processor=images(28) if first else None, **parts)


def hunyuan(setting):
    from_image = setting.endswith("i2v")
    llama = transformers.LlamaConfig(vocab_size=len(WORDS), hidden_size=SIZE, intermediate_size=16, num_hidden_layers=3,
                                     num_attention_heads=2, pad_token_id=0)
    clip = transformers.CLIPTextConfig(vocab_size=len(WORDS), hidden_size=SIZE, intermediate_size=16, num_hidden_layers=2,
                                       num_attention_heads=2, projection_dim=SIZE, eos_token_id=2)
    vae = AutoencoderKLHunyuanVideo(latent_channels=4, down_block_types=["HunyuanVideoDownBlock3D"] * 4,
                                    up_block_types=["HunyuanVideoUpBlock3D"] * 4, block_out_channels=[4] * 4, layers_per_block=1,
                                    norm_num_groups=2)
    transformer = HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=24, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, patch_size=2, text_embed_dim=SIZE, pooled_projection_dim=SIZE, rope_axes_dim=(4, 10, 10),
        guidance_embeds=True, image_condition_type="token_replace" if from_image else None)
    with torch.no_grad():
        transformer.proj_out.weight *= 4  # so that the last bit of a pixel is not all that attention changes
    parts = dict(tokenizer=tokenizer(1024), tokenizer_2=tokenizer(77), text_encoder_2=transformers.CLIPTextModel(clip), vae=vae,
                 transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0))
    if not from_image:
        return HunyuanVideoPipeline(text_encoder=transformers.LlamaModel(llama), **parts)
    # 24 x 24 patches: HunyuanVideo's template has room for as many.
    llava = transformers.LlavaConfig(vision_config=vision(336, 14), text_config=llama, image_token_index=WORDS.index("<image>"),
                                     pad_token_id=0)
    return HunyuanVideoImageToVideoPipeline(text_encoder=transformers.LlavaForConditionalGeneration(llava),
                                            image_processor=images(336), **parts)


def save(setting, folder):
    torch.manual_seed(0)
    (wan if setting.startswith("wan") else hunyuan)(setting).save_pretrained(folder)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        save(name, f"{sys.argv[1]}/{name}")
