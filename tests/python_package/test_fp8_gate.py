"""bench/fp8_linear.py against float64, and bench/fp8_gate.py: its `fast` is enable()'s, and it goes on where it was stopped."""
import json
import pathlib
import subprocess
import sys
import types

import pytest
import torch

diffusers = pytest.importorskip("diffusers")
import tiny_pipelines as tiny

if tiny.DEVICE != "cpu":
    pytest.skip("the tiny shapes are the CPU's", allow_module_level=True)

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tools/tiny_video")]
import fp8_gate
import fp8_linear
import sample
import scope_attn
import video

GRID, STEPS = (3, 6, 8), 3


def rounded(x):
    """To the nearest e4m3 number after scaling each row, in float64, without PyTorch's type."""
    x = x.double()
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / 448
    x = (x.float() / scale).double()
    step = torch.exp2(torch.floor(torch.log2(x.abs().clamp_min(2.0**-6))) - 3)  # 3 bits after the first, down to 2^-9
    return torch.round(x / step) * step * scale.double()


@pytest.mark.parametrize("products, dtype, bound", [("exact", torch.float32, 1e-6), ("scaled_mm", torch.float32, 1e-6),
                                                    ("exact", torch.bfloat16, 6e-3), ("scaled_mm", torch.bfloat16, 6e-3)])
@torch.no_grad()
def test_linear(products, dtype, bound):
    """Tokens 1e-30 to 1e30 times as large as others, a token of zeros, and a row of zeros among the weights."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 48).to(dtype)
    linear.weight[5] = 0
    x = torch.randn(2, 7, 64, dtype=dtype)
    x[0, 1] *= 1e30
    x[0, 2] *= 1e-8
    x[0, 3] = 0
    truth = rounded(x) @ rounded(linear.weight).T + linear.bias.double()
    ours = fp8_linear.Fp8Linear(linear, products)(x)
    assert ours.dtype == dtype and ours.shape == (2, 7, 48) and torch.isfinite(ours).all()
    assert ((ours - truth).norm(dim=-1) <= bound * truth.norm(dim=-1)).all()
    exact = torch.nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    assert 0.01 < (truth - exact)[0, 0].norm() / exact[0, 0].norm() < 0.06, "it is rounded to e4m3"


def test_layers_that_stay():
    block = torch.nn.ModuleDict(dict(good=torch.nn.Linear(32, 16), odd=torch.nn.Linear(24, 16), norm=torch.nn.LayerNorm(16)))
    assert fp8_linear.quantise([block], "exact") == (1, ["blocks.0.odd"])
    assert isinstance(block["good"], fp8_linear.Fp8Linear) and isinstance(block["odd"], torch.nn.Linear)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(bad):
    block = torch.nn.ModuleDict(dict(one=torch.nn.Linear(32, 16)))
    with torch.no_grad():
        block["one"].weight[3, 4] = bad
    with pytest.raises(ValueError, match="blocks.0.one: its weights hold a NaN or an infinity"):
        fp8_linear.quantise([block], "exact")


@pytest.fixture
def gate():
    return gate_of(STEPS)


def gate_of(steps):
    return fp8_gate.Gate(types.SimpleNamespace(model=str(ROOT / "models/tiny-wan"), device="cpu", grid=GRID, steps=steps, seeds=1,
                                               frames=[], products="exact"))


class Pipeline:
    pass


@torch.no_grad()
def enabled(gate, steps):
    """The video of diffusers' transformer with enable(pipe, "fast")."""
    transformer = diffusers.WanTransformer3DModel.from_pretrained(ROOT / "models/tiny-wan", torch_dtype=torch.float32)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipe = Pipeline()
    pipe.transformer, pipe.scheduler = transformer, scheduler
    scope_attn.enable(pipe, "fast", min_tokens=0)
    latent, tokens = gate.clip(0)
    x, fixed, levels = sample.noise_for([0], latent.shape[1:], "cpu"), video.image_condition(latent), sample.noise_levels(steps)
    scheduler.set_timesteps(steps)
    for step in range(steps):
        scheduler.set_begin_index(0)
        scheduler._step_index = step
        with transformer.cache_context("cond"):
            velocity = transformer(torch.cat([x, fixed], 1), torch.tensor([levels[step] * 1000]), tokens).sample
        x = x + (levels[step + 1] - levels[step]) * velocity
    assert all(call.sparse for call in scope_attn.receipt(pipe).calls)
    return (video.to_rgb(x)[0] * 255).round().to(torch.uint8).permute(1, 2, 3, 0)


@pytest.mark.parametrize("steps, ahead", [(1, 6), (STEPS, 2)])
def test_fast_is_what_enable_gives(steps, ahead):
    """Both nets round differently. In a clip of 144 tokens, of whose keys a mean sees 18, that changes what is kept, and so the video."""
    gate = gate_of(steps)
    (fast, density, _), (dense, one, _) = gate.make(0, "fast", False), gate.make(0, "dense", False)
    assert density == pytest.approx(0.12, rel=0.02) and one == 1
    near, far = (fp8_gate.quality.means(list(zip(fast, other)), torch.device("cpu"))["psnr"] for other in (enabled(gate, steps), dense))
    assert (near or 100) > far + ahead and far < 35


def test_fp8_is_in_every_linear_layer_of_the_blocks_alone(gate):
    kinds = {name: type(module) for name, module in gate.nets[True].named_modules()
             if name.endswith((".to_q", ".proj", "time_proj", "net.2"))}
    assert gate.left == [] and gate.fp8_layers == 60
    assert {kind for name, kind in kinds.items() if name.startswith("blocks.")} == {fp8_linear.Fp8Linear}
    assert kinds["condition_embedder.time_proj"] is torch.nn.Linear
    assert not any(isinstance(module, fp8_linear.Fp8Linear) for module in gate.nets[False].modules())


def run(*options):
    return subprocess.run([sys.executable, ROOT / "bench/fp8_gate.py", "--grid", "x".join(map(str, GRID)), "--steps", str(STEPS), *options],
                          capture_output=True, text=True)


def test_goes_on(tmp_path):
    path = tmp_path / "gate.json"
    for seeds, told in ((1, "1 of 5"), (2, "5 of 5: fast, fp8, seed 1"), (2, "")):
        before = json.loads(path.read_text()) if path.exists() else None
        done = run("--seeds", str(seeds), "--commit", "c", "--json", path)
        assert done.returncode == 0, done.stderr
        assert (told in done.stderr) if told else not done.stderr
        data = json.loads(path.read_text())
        assert data["finished"] and data["seeds"] == seeds and data["clips"] == seeds
        if before:
            assert all(row["psnr"][:len(old["psnr"])] == old["psnr"] for row, old in zip(data["rows"], before["rows"]))
    rows = {row["variant"]: row for row in data["rows"]}
    assert all(len(row[key]) == 2 for row in rows.values() for key in ("psnr", "ssim", "density", "seconds"))
    assert min(rows["dense, fp8"]["psnr"]) > 30 > max(rows["fast, fp8"]["psnr"]) and rows["fast"]["psnr"] != rows["fast, fp8"]["psnr"]
    assert all(x is None or x > 50 for x in rows["control"]["psnr"])
    done = run("--seeds", "1", "--commit", "another", "--json", path)
    assert json.loads(path.read_text())["seeds"] == 1 and "1 of 5" in done.stderr


def test_refuses_a_model_with_other_latents(tmp_path):
    (tmp_path / "scope.json").write_text('{"shift": 3.0}')
    done = run("--model", tmp_path)
    assert done.returncode == 1 and "are not frames" in done.stderr and "Traceback" not in done.stderr
