"""The paper's six settings: what each is made with, and what the paper says came out."""
from __future__ import annotations

from typing import Any, NamedTuple, Optional

from .metrics import DIMENSIONS, NETS

# The paper does not say which SSIM and which LPIPS it has, so its one figure stands under each of ours.
SSIMS = "ssim", "ssim_box"
LPIPSES = tuple(NETS)
COLUMNS = "psnr", *SSIMS, *LPIPSES, *DIMENSIONS, "seconds", "speedup"
PAPER_COLUMNS = "psnr", "ssim", "lpips", *DIMENSIONS, "seconds", "speedup"
PAPER_METHODS = {"dense": "Full", "sparge": "SpargeAttn", "svg2": "SVG2", "svoo": "SVOO", "scope-paper": "Ours"}  # by our names
METHODS = *PAPER_METHODS, "scope-mean"

# Dense attention, and the control's, unless they are named: by the device's type. cuDNN's is the fastest dense kernel that comes
# with PyTorch for Hopper, so no speedup is over a slow one.
BACKENDS = {"cuda": ("_native_cudnn", "_native_flash"), "cpu": ("native", "_native_math")}

# Negative prompts are those of the baselines' scripts. Wan2.1: wan_t2v_inference.py and wan_i2v_inference.py of
# svg-project/Sparse-VideoGen (5ce7b01), and inference_examples/wan_infer.py of thu-ml/SpargeAttn (bfd980b).
WAN21_NEGATIVE = (
    "Bright tones, overexposed, static, blurred details, subtitles, style, works, paintings, images, static, overall gray, worst quality, "
    "low quality, JPEG compression residue, ugly, incomplete, extra fingers, poorly drawn hands, poorly drawn faces, deformed, disfigured, "
    "misshapen limbs, fused fingers, still picture, messy background, three legs, many people in the background, walking backwards")
# Wan2.2: the same script of SpargeAttn; it is sample_neg_prompt in wan/configs/shared_config.py of Wan-Video/Wan2.2 (42bf4cf).
WAN22_NEGATIVE = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，残缺的，多余的手指，"
    "画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走")


class Refused(Exception):
    """The user's to mend; nothing was done yet."""


class Setting(NamedTuple):
    pipeline: str  # a class of diffusers
    model: str  # a repository on the Hugging Face Hub
    frames: int
    steps: int
    guidance: dict[str, float]  # arguments of the pipeline
    shift: Optional[float]  # of the noise levels; None: the scheduler's own
    fps: int
    negative: str  # prompt, of the baselines' scripts
    paper: dict[str, tuple[Optional[float], ...]]  # by method: PAPER_COLUMNS, shares in [0, 1]

    @property
    def from_image(self) -> bool:
        return "ImageToVideo" in self.pipeline


def figures(*rows: str) -> dict[str, tuple[Optional[float], ...]]:
    """Rows of the paper's tables, in the order of PAPER_METHODS."""
    def value(text: str) -> Optional[float]:
        return None if text == "--" else float(text[:-1]) / 100 if text.endswith("%") else float(text.rstrip("sx"))

    return {method: tuple(map(value, row.split())) for method, row in zip(PAPER_METHODS, rows)}


# Steps, guidance and shift are those that each model's authors give for 720p: the paper does not say its own.
SETTINGS: dict[str, Setting] = {
    "wan2.1-t2v": Setting(
        "WanPipeline", "Wan-AI/Wan2.1-T2V-14B-Diffusers", 81, 50, dict(guidance_scale=5.0), 5.0, 16, WAN21_NEGATIVE, figures(
        "--    --    --     70.03% 59.06% 96.01% 96.31% 1913s 1.00x",
        "23.86 0.791 0.1461 69.78% 59.09% 95.94% 96.21% 1293s 1.48x",
        "24.63 0.804 0.1268 70.12% 58.76% 95.58% 95.84% 1211s 1.58x",
        "25.71 0.831 0.1083 69.93% 59.06% 95.22% 95.57% 1117s 1.71x",
        "26.11 0.844 0.1004 69.96% 59.07% 95.93% 96.14% 1085s 1.76x")),
    "wan2.1-i2v": Setting(
        "WanImageToVideoPipeline", "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers", 81, 40, dict(guidance_scale=5.0), 5.0, 16,
        WAN21_NEGATIVE, figures(
        "--    --    --     72.09% 60.95% 95.16% 95.63% 1672s 1.00x",
        "23.14 0.722 0.1484 72.11% 60.68% 95.02% 95.59% 1121s 1.49x",
        "23.87 0.757 0.1341 72.27% 60.37% 94.32% 95.11% 1063s 1.57x",
        "24.82 0.787 0.1153 72.11% 60.72% 94.22% 95.24% 997s 1.68x",
        "26.77 0.838 0.0854 72.15% 60.78% 94.96% 95.61% 966s 1.73x")),
    "wan2.2-t2v": Setting(
        "WanPipeline", "Wan-AI/Wan2.2-T2V-A14B-Diffusers", 81, 40, dict(guidance_scale=4.0, guidance_scale_2=3.0), 12.0, 16,
        WAN22_NEGATIVE, figures(
        "--    --    --     71.18% 61.56% 95.16% 95.77% 1599s 1.00x",
        "24.37 0.813 0.1231 70.98% 61.48% 95.12% 95.75% 1138s 1.41x",
        "24.85 0.829 0.1128 71.06% 61.53% 94.92% 95.64% 1036s 1.54x",
        "25.42 0.837 0.1018 71.02% 61.48% 94.98% 95.62% 966s 1.66x",
        "26.01 0.859 0.0953 71.08% 61.57% 95.09% 95.76% 930s 1.72x")),
    "wan2.2-i2v": Setting(
        "WanImageToVideoPipeline", "Wan-AI/Wan2.2-I2V-A14B-Diffusers", 81, 40, dict(guidance_scale=3.5, guidance_scale_2=3.5), 5.0, 16,
        WAN22_NEGATIVE, figures(
        "--    --    --     72.20% 62.21% 96.56% 96.42% 1628s 1.00x",
        "24.79 0.788 0.1022 72.12% 62.08% 96.42% 96.31% 1143s 1.42x",
        "25.31 0.805 0.0984 72.29% 61.62% 96.17% 96.10% 1085s 1.50x",
        "27.38 0.849 0.0706 72.21% 62.15% 96.32% 96.37% 1021s 1.59x",
        "27.76 0.865 0.0665 72.16% 62.18% 96.43% 96.32% 974s 1.67x")),
    "hunyuan-t2v": Setting(
        "HunyuanVideoPipeline", "hunyuanvideo-community/HunyuanVideo", 129, 50, dict(guidance_scale=6.0), None, 24,
        "", figures(
        "--    --    --     66.46% 57.80% 95.74% 96.20% 1801s 1.00x",
        "24.54 0.809 0.1631 66.50% 58.06% 95.61% 96.04% 1197s 1.50x",
        "27.41 0.845 0.1067 65.06% 56.96% 95.48% 95.88% 907s 1.99x",
        "28.08 0.871 0.0971 65.99% 57.58% 95.66% 96.09% 991s 1.82x",
        "28.46 0.878 0.0927 66.55% 57.82% 95.68% 96.11% 904s 1.99x")),
    "hunyuan-i2v": Setting(
        "HunyuanVideoImageToVideoPipeline", "hunyuanvideo-community/HunyuanVideo-I2V", 129, 50, dict(guidance_scale=6.0), None, 24,
        "", figures(
        "--    --    --     72.53% 60.76% 96.99% 96.51% 1783s 1.00x",
        "22.68 0.778 0.1243 72.56% 60.68% 97.03% 96.56% 1154s 1.55x",
        "23.06 0.796 0.1183 72.11% 60.14% 96.91% 96.25% 1029s 1.73x",
        "23.34 0.813 0.1168 72.06% 60.50% 96.94% 96.43% 1091s 1.63x",
        "24.11 0.837 0.0962 72.56% 60.57% 97.04% 96.45% 1022s 1.74x")),
}


class Method(NamedTuple):
    """As the command writes it: scope:rho=0.8+groups=200."""

    label: str  # also its folder
    name: str
    settings: dict[str, Any]
    backend: str  # of dense attention, in diffusers' words

    @property
    def sparse(self) -> bool:
        return self.name != "dense"


def parse_method(text: str, backend: str) -> Method:
    from .. import _functions
    name, _, rest = text.partition(":")
    known = [method.name for method in _functions.methods()]
    if name not in known:
        raise Refused(f'--methods: got "{text}", expected of {", ".join(known)}, with settings as scope:rho=0.8+groups=200')
    settings = dict(item.partition("=")[::2] for item in rest.split("+")) if rest else {}
    names = {setting.name for setting in _functions.settings(name)}
    for setting, value in settings.items():
        if setting not in names or not value:
            raise Refused(f'--methods: "{text}": got "{setting}={value}", expected a setting of docs/reference/settings.md and its value')
    if "/" in text or "profile" in settings:
        raise Refused(f'--methods: got "{text}", whose name is a folder\'s too; a profile is given by --profile')
    if name == "dense" and settings:
        raise Refused(f'--methods: got "{text}": dense is the pipeline\'s own attention, and takes no settings')
    return Method(text, name, settings, backend)


def control(backend: str) -> Method:
    """The dense video again by another kernel: how far apart rounding alone puts two videos."""
    return Method(f"dense:{backend}", "dense", {}, backend)
