"""Writes tests/data/video/hunyuan_*: small random HunyuanVideo models with samples that diffusers made.

    python tests/data/make_hunyuan_fixtures.py        (PyTorch, diffusers and safetensors; see tools/tiny_video/smoke_test.sh)
"""

import pathlib
import sys

from safetensors.torch import save_file

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tools" / "tiny_video"), str(HERE.parent / "python" / "torch")]

from test_hunyuan import GRID, GUIDANCE, SHIFT, euler, inputs, make, with_exact_waves

SMALL = dict(attention_head_dim=6, rope_axes_dim=(2, 2, 2), in_channels=2, out_channels=2, text_embed_dim=5,
             pooled_projection_dim=4, mlp_ratio=2.0)
CASES: dict[str, dict] = {
    "hunyuan_double_blocks": dict(num_layers=2, num_single_layers=0, in_channels=5, guidance_embeds=False,
                                  image_condition_type="latent_concat"),
    "hunyuan_single_blocks": dict(num_layers=0, num_single_layers=2, num_refiner_layers=2),
    "hunyuan_image_tokens": dict(image_condition_type="token_replace"),
}
STEPS = 2

if __name__ == "__main__":
    for name, config in CASES.items():
        folder, seed = HERE / "video" / name, len(name)
        make(SMALL | config, seed).bfloat16().save_pretrained(folder)
        model = make(SMALL | config, seed).bfloat16().float()  # the numbers of the files
        given = {k: v.half() for k, v in inputs(model, seed).items()}
        sample = euler(with_exact_waves(model), {k: v.float() for k, v in given.items()}, STEPS)[0]
        note = dict(grid="x".join(map(str, GRID)), steps=STEPS, shift=SHIFT, guidance=GUIDANCE if model.config.guidance_embeds else 1.0)
        save_file({k: v.contiguous() for k, v in given.items()} | {"sample": sample.contiguous()}, folder / "case.safetensors",
                  {k: str(v) for k, v in note.items()})
        for path in folder.iterdir():
            path.chmod(0o644)
