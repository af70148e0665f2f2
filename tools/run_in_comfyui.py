#!/usr/bin/env python3
"""Runs the node in a checkout of ComfyUI, on the CPU, and prints the log that docs/notebook/logs/ has.

tools/run_in_comfyui.py COMFYUI > docs/notebook/logs/comfyui_VERSION.txt

Node loader, model classes, patcher and samplers are ComfyUI's own, the models small and random. Each runs untouched, with
the node at density 1, where the difference is rounding, and at density 0.2.
"""
import argparse
import asyncio
import json
import logging
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import types
from datetime import date

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("comfyui", help="the folder that has ComfyUI's nodes.py")
comfyui = parser.parse_args().comfyui
sys.argv[1:] = ["--cpu"]  # ComfyUI reads them too
sys.path.insert(0, comfyui)
logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.INFO)

import comfy.options

comfy.options.enable_args_parsing()

import comfy.model_base
import comfy.model_patcher
import comfy.sample
import comfy.supported_models
import comfyui_version
import nodes
import torch

from scope_attn._c_api import library

NODE = pathlib.Path(__file__).parents[1] / "integrations/comfyui"
CPU = torch.device("cpu")
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
WAN = dict(image_model="wan2.1", model_type="t2v", dim=128, ffn_dim=128, num_heads=4, num_layers=3, freq_dim=32,
           text_dim=64, in_dim=16, out_dim=16, text_len=32, patch_size=(1, 2, 2))
VACE = dict(WAN, model_type="vace", num_layers=4, vace_layers=2, vace_in_dim=96)
I2V = dict(WAN, model_type="i2v", in_dim=36)
TI2V = dict(WAN, in_dim=48, out_dim=48)
CAMERA = dict(WAN, model_type="camera", in_dim=32)
ANIMATE = dict(WAN, model_type="animate", in_dim=36, num_layers=5)
S2V = dict(WAN, model_type="s2v", audio_inject_layers=[0])
HUMO = dict(WAN, model_type="humo", in_dim=16)
HUNYUAN = dict(image_model="hunyuan_video", in_channels=16, out_channels=16, patch_size=[1, 2, 2], hidden_size=128,
               num_heads=4, depth=2, depth_single_blocks=2, axes_dim=[8, 12, 12], mlp_ratio=2.0, qkv_bias=True,
               vec_in_dim=64, context_in_dim=64, theta=256, guidance_embed=True, byt5=False, meanflow=False,
               meanflow_sum=False, use_cond_type_embedding=False, vision_in_dim=None)
# As 1.5 is: one latent in a token, double blocks alone, no pooled text.
HUNYUAN15 = dict(HUNYUAN, patch_size=[1, 1, 1], in_channels=65, out_channels=32, depth=3, depth_single_blocks=0,
                 vec_in_dim=None, guidance_embed=False, use_cond_type_embedding=True)
LTXV = dict(image_model="ltxv", in_channels=128, cross_attention_dim=128, attention_head_dim=32, num_attention_heads=4,
            caption_channels=64, num_layers=3)


def latents_of(seed, channels, frames):
    return torch.randn(1, channels, frames, 16, 16, generator=torch.Generator().manual_seed(seed))


def patcher(config, base, shape, seed=0, **options):
    """A small random model in ComfyUI's own patcher."""
    torch.manual_seed(seed)
    model_config = config(dict(shape))
    model_config.set_inference_dtype(torch.float32, None)
    model = base(model_config, device=CPU, **options)
    with torch.no_grad():
        for parameter in model.diffusion_model.parameters():
            scale = 0.5 / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.2
            parameter.copy_(torch.randn_like(parameter) * scale)
    return comfy.model_patcher.ModelPatcher(model, load_device=CPU, offload_device=CPU)


def text(seed, tokens=24, channels=64, **more):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(1, tokens, channels, generator=generator), more]]


def sample(experts, latents, steps, more, cfg, first=0):
    """From step `first` on; each expert runs its share of the steps."""
    noise = torch.randn(latents, generator=torch.Generator().manual_seed(7))
    out, share = torch.zeros(latents), (steps - first) // len(experts)
    for start, model in zip(range(first, steps, share), experts):
        out = comfy.sample.sample(model, noise, steps, cfg, "euler", "simple", text(1, **more), text(2, **more), out,
                                  start_step=start, last_step=start + share, disable_pbar=True, seed=7)
        noise = torch.zeros(latents)
    return out


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        if record.getMessage().startswith("SCOPE attention:"):
            self.lines.append(record.getMessage())


def load_custom_node(path, parent):
    return asyncio.run(nodes.load_custom_node(str(path), module_parent=parent))


def load_node(source, name):
    """As ComfyUI loads what lies in custom_nodes."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / name
        shutil.copytree(source, path) if source.is_dir() else shutil.copy(source, path)
        before = set(nodes.NODE_CLASS_MAPPINGS)
        assert load_custom_node(path, "custom_nodes"), f"ComfyUI did not load {name}"
        found = nodes.NODE_CLASS_MAPPINGS.pop("ScopeAttention")
        assert set(nodes.NODE_CLASS_MAPPINGS) <= before
    return found


def check_workflow(ours):
    """Every node of the example is one of this version, with its inputs and outputs."""
    for name in ("model_advanced", "hunyuan", "video"):
        assert load_custom_node(f"{comfyui}/comfy_extras/nodes_{name}.py", "comfy_extras")
    for found in json.loads((NODE / "example_workflows/wan_2.1_t2v.json").read_text())["nodes"]:
        kind = ours if found["type"] == "ScopeAttention" else nodes.NODE_CLASS_MAPPINGS[found["type"]]
        given = {**kind.INPUT_TYPES().get("required", {}), **kind.INPUT_TYPES().get("optional", {})}
        widgets = [name for name, (of, *_) in given.items() if not isinstance(of, str) or of in WIDGETS]
        values = len(found["widgets_values"]) - (found["type"] == "KSampler")  # what becomes of the seed after a run
        assert {x["name"] for x in found["inputs"]} <= set(given) and values == len(widgets), found["type"]
        assert [x["type"] for x in found["outputs"]] == list(kind.RETURN_TYPES), found["type"]


def run(name, model, latents, steps=10, more=types.MappingProxyType({}), cfg=3.0, first=0, second=None):
    print(f"\n{name}, latents {list(latents)}, {steps} steps" + (f", of them {first} to {steps}" if first else ""))
    experts = [model] if second is None else [model, second]
    dense = sample(experts, latents, steps, more, cfg, first)
    for density in (1.0, 0.2):
        lines = Lines()
        logging.getLogger().addHandler(lines)
        patched = [node.execute(model=expert, method="scope-mean", target_density=density, min_tokens=1).result[0]
                   for expert in experts]
        out = sample(patched, latents, steps, more, cfg, first)
        logging.getLogger().removeHandler(lines)
        error = ((out - dense).norm() / dense.norm()).item()
        print(f"  density {density}: relative difference from the untouched model {error:.1e}")
        print("\n".join(f"    {line}" for line in lines.lines))
        assert error < 1e-4 if density == 1.0 else error > 1e-6, error
        assert len(lines.lines) == len(experts), lines.lines
        assert all(" calls sparse" in line and "dense calls ran" not in line and ", 0 calls sparse" not in line for line in lines.lines)
    again = sample(experts, latents, steps, more, cfg, first)
    assert torch.equal(again, dense), "the untouched model is as it was"


torch.set_num_threads(1)
commit = subprocess.run(["git", "-C", NODE, "describe", "--always", "--dirty"], capture_output=True, text=True, check=True).stdout.strip()
print(f"ComfyUI {comfyui_version.__version__}, PyTorch {torch.__version__}, Python {platform.python_version()}, CPU; "
      f"SCOPE at commit {commit}, library {library().version().decode()}, on {date.today()}")
load_node(NODE / "scope_attention.py", "scope_attention.py")
node = load_node(NODE, "scope-attention")
print("loaded by ComfyUI as one file and as a folder")
check_workflow(node)
print("the example workflow has the nodes, inputs and outputs of this version")
supported, base = comfy.supported_models, comfy.model_base
wan = patcher(supported.WAN21_T2V, base.WAN21, WAN)
run("Wan 2.1 T2V", wan, (1, 16, 5, 16, 16))
run("Wan 2.1 T2V, 4 steps", wan, (1, 16, 5, 16, 16), 4)
run("Wan, the second part of a schedule", wan, (1, 16, 5, 16, 16), first=5)
run("Wan 2.1 I2V", patcher(supported.WAN21_I2V, base.WAN21, I2V, image_to_video=True), (1, 16, 5, 16, 16),
    more=dict(concat_latent_image=latents_of(5, 16, 5), concat_mask=torch.ones(1, 1, 5, 16, 16)))
run("Wan 2.2 TI2V", patcher(supported.WAN22_T2V, base.WAN22, TI2V, image_to_video=True), (1, 48, 5, 16, 16))
run("Wan 2.2, two experts, each with a node", wan, (1, 16, 5, 16, 16),
    second=patcher(supported.WAN21_T2V, base.WAN21, WAN, seed=1))
run("Wan Fun camera", patcher(supported.WAN21_Camera, base.WAN21_Camera, CAMERA), (1, 16, 5, 16, 16))
run("Wan Animate", patcher(supported.WAN22_Animate, base.WAN22_Animate, ANIMATE), (1, 16, 5, 16, 16),
    more=dict(pose_video_latent=latents_of(6, 16, 4)))
run("Wan S2V with a reference", patcher(supported.WAN22_S2V, base.WAN22_S2V, S2V), (1, 16, 5, 16, 16),
    more=dict(reference_latents=[latents_of(8, 16, 1)]))
run("Wan HuMo with a reference", patcher(supported.WAN21_HuMo, base.WAN21_HuMo, HUMO), (1, 16, 5, 16, 16),
    more=dict(reference_latents=[latents_of(9, 16, 1)]))
run("Wan VACE", patcher(supported.WAN21_Vace, base.WAN21_Vace, VACE), (1, 16, 5, 16, 16))
hunyuan = patcher(supported.HunyuanVideo, base.HunyuanVideo, HUNYUAN)
pooled = dict(pooled_output=torch.randn(1, 64, generator=torch.Generator().manual_seed(3)))
run("HunyuanVideo", hunyuan, (1, 16, 5, 16, 16), more=pooled)  # both conditionings in one batch
mask = torch.arange(24)[None] < 17
run("HunyuanVideo, 7 of 24 text tokens are padding", hunyuan, (1, 16, 5, 16, 16), cfg=1.0,
    more=dict(pooled, attention_mask=mask.long()))
run("HunyuanVideo with a reference image", hunyuan, (1, 16, 5, 16, 16), more=dict(pooled, ref_latent=latents_of(4, 16, 1)), cfg=1.0)
run("LTX-Video", patcher(supported.LTXV, base.LTXV, LTXV), (1, 128, 5, 8, 8),
    more=dict(attention_mask=torch.ones(1, 24).long()))
run("HunyuanVideo 1.5", patcher(supported.HunyuanVideo15, base.HunyuanVideo15, HUNYUAN15), (1, 32, 5, 8, 8),
    more=pooled)
