"""What users put beside enable(), all at once: torchao's float8 linear layers, compiled blocks, caches and few steps, in any order.

A rounding of e4m3 jumps, so density 1, which rounds otherwise than the pipeline's own attention, is compared loosely. What is
compared to the bit: enable() with every call dense against no enable(), and one order of the parts against another.
"""
from __future__ import annotations

import itertools
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import cache_dit
import diffusers
import pytest
import torch
from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, Float8Tensor, PerRow, quant_api, quantize_
from torchao.quantization.quantize_.workflows.float8.float8_tensor import QuantizeTensorToFloat8Kwargs

import scope_attn
import tiny_pipelines as tiny
from scope_attn.hosts import session
from scope_attn.hosts.diffusers import processors_of

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import diffusers_steps
import fp8_linear

CONFIG = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
DENSE, SPARSE, EVERYTHING = dict(dense_steps=1), *(dict(target_density=d, dense_steps=0, dense_layers=0) for d in (0.2, 1))
BLOCKS = "blocks", "transformer_blocks", "single_transformer_blocks"
KINDS = {"wan": (tiny.wan, tiny.make_wan), "hunyuan": (tiny.hunyuan, tiny.make_hunyuan)}


def blocks_of(pipe):
    return [block for name in BLOCKS for block in getattr(pipe.transformer, name, ())]


def quantise(pipe):
    """What quantize_(…, CONFIG) puts into the blocks; it refuses a machine without a GPU, and weights that are not bf16."""
    for block in blocks_of(pipe):
        for module in block.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight = torch.nn.Parameter(as_config(module.weight.detach()), requires_grad=False)


def as_config(weight):
    kwargs = QuantizeTensorToFloat8Kwargs(CONFIG.activation_dtype, PerRow(), kernel_preference=CONFIG.kernel_preference)
    return Float8Tensor.from_hp(weight, float8_dtype=CONFIG.weight_dtype, granularity=PerRow(), mm_config=CONFIG.mm_config,
                                kernel_preference=CONFIG.kernel_preference, act_quant_kwargs=kwargs)


def enable(**settings):
    return lambda pipe: scope_attn.enable(pipe, min_tokens=0, **settings)


def compiled(pipe):
    torch._dynamo.reset()
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")


def first_block_cache(pipe):
    pipe.transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.5))


def mag_cache(pipe):
    pipe.transformer.enable_cache(diffusers.MagCacheConfig(threshold=0.5, num_inference_steps=tiny.STEPS, retention_ratio=0.2,
                                                           mag_ratios=torch.linspace(1, 0.9, tiny.STEPS)))


def cache_dit_cache(pipe):
    cache_dit.enable_cache(pipe, cache_config=cache_dit.DBCacheConfig(
        Fn_compute_blocks=1, Bn_compute_blocks=0, max_warmup_steps=2, residual_diff_threshold=0.5, num_inference_steps=tiny.STEPS))


CACHES = [first_block_cache, mag_cache, cache_dit_cache]


def made(*parts, kind="wan", **options):
    """The video of a pipeline to which these were done, in this order, and its calls if one was enable()."""
    make, run = KINDS[kind]
    pipe = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchao's and diffusers' own code
        for part in parts:
            part(pipe)
        video = run(pipe, **options)
    return video, scope_attn.receipt(pipe).calls if processors_of(pipe) else None


def far(a, b):
    return ((a - b).norm() / b.norm()).item()


def linear_in(dtype):
    torch.manual_seed(0)
    return torch.nn.Linear(64, 48, dtype=dtype), torch.randn(2, 7, 64, dtype=dtype)


@torch.no_grad()
def test_the_layers_are_those_of_quantize(monkeypatch):
    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularity: None)
    (linear, x), (by_hand, _) = linear_in(torch.bfloat16), linear_in(torch.bfloat16)
    by_hand.weight = torch.nn.Parameter(as_config(by_hand.weight.detach()), requires_grad=False)
    quantize_(linear, CONFIG)
    assert isinstance(linear.weight, Float8Tensor) and torch.equal(linear(x), by_hand(x))


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 0), (torch.bfloat16, 0.02)])
@torch.no_grad()
def test_the_layers_are_those_of_bench(dtype, bound):
    """bench/fp8_linear.py, with which videos and passes are measured. Of bf16 numbers torchao's eager code has scales in bf16."""
    linear, x = linear_in(dtype)
    ours = fp8_linear.Fp8Linear(linear, "scaled_mm")(x)
    linear.weight = torch.nn.Parameter(as_config(linear.weight.detach()), requires_grad=False)
    assert far(ours.float(), linear(x).float()) <= bound


@torch.no_grad()
def test_torchao_in_bench(monkeypatch):
    """What bench/diffusers_steps.py times as `--linear torchao`, and the layer that torchao leaves out without a word."""
    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularity: None)
    block = torch.nn.ModuleDict(dict(good=torch.nn.Linear(32, 16), odd=torch.nn.Linear(24, 16))).bfloat16()
    bench = SimpleNamespace(transformer=SimpleNamespace(blocks=[block]), kind=SimpleNamespace(blocks=["blocks"]))
    assert diffusers_steps.Bench.quantise(bench, "torchao") == (1, ["blocks.0.odd"])
    assert isinstance(block["good"].weight, Float8Tensor) and type(block["odd"].weight) is torch.nn.Parameter


def test_a_row_of_zeros():
    """torchao 0.18 makes NaN of it, and enable() says where: sparse attention never runs on in silence."""
    def with_zeros(pipe):
        with torch.no_grad():
            pipe.transformer.blocks[1].attn1.to_q.weight[3] = 0

    assert made(with_zeros, quantise)[0].isnan().any()
    with pytest.raises(ValueError, match="q: NaN, Inf"):
        made(with_zeros, quantise, enable(**SPARSE))


@pytest.mark.parametrize("kind", KINDS)
def test_float8(kind):
    plain, fp8 = (made(*parts, kind=kind)[0] for parts in ((), (quantise,)))
    assert far(fp8, plain) > 3e-3, "it is quantised"
    for settings in (DENSE, SPARSE, EVERYTHING):
        one, other = (made(*parts, kind=kind)[0] for parts in itertools.permutations((quantise, enable(**settings))))
        assert torch.equal(one, other)
        if settings is DENSE:
            assert torch.equal(one, fp8)
        elif settings is SPARSE:
            assert 3e-3 < far(one, fp8) < 0.5
        else:
            assert far(one, fp8) < 0.5 * far(fp8, plain)


@pytest.mark.parametrize("order", itertools.permutations(("quantise", "enable", "compile")), ids="-".join)
def test_compiled(order):
    """One graph for all blocks, and the bits of eager ones."""
    parts = {"quantise": quantise, "enable": enable(**SPARSE), "compile": compiled}
    expected, _ = made(quantise, parts["enable"])
    video, calls = made(*(parts[name] for name in order))
    assert torch.equal(video, expected) and any(call.sparse for call in calls)


def test_compiled_hunyuan():
    expected, _ = made(quantise, enable(**SPARSE), kind="hunyuan")
    assert torch.equal(made(quantise, enable(**SPARSE), compiled, kind="hunyuan")[0], expected)


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: cache.__name__)
def test_caches(cache):
    """Calls are left out, and the order of the parts changes no bit."""
    without, cached = made(quantise)[0], made(quantise, cache)[0]
    assert far(cached, without) > 1e-4, "blocks are skipped"
    videos = []
    for parts in itertools.permutations((quantise, cache, enable(**SPARSE))):
        video, calls = made(*parts)
        videos.append(video)
        assert any(call.sparse for call in calls) and len(calls) < 2 * 3 * tiny.STEPS
    assert all(torch.equal(video, videos[0]) for video in videos) and far(videos[0], cached) > 0.01
    assert torch.equal(made(quantise, cache, enable(**DENSE))[0], cached)


@pytest.mark.parametrize("steps", [4, 8])
def test_few_steps(steps):
    """fp8 layers, compiled blocks and `fast`: every call of every step is sparse, and nothing else is another than in eager blocks."""
    everything = quantise, enable(method="fast"), compiled
    video, calls = made(*everything, steps=steps)
    assert torch.equal(video, made(*everything[:2], steps=steps)[0])
    assert len(calls) == 2 * 3 * steps and all(call.sparse for call in calls) and {call.step for call in calls} == set(range(steps))
    assert all(call.density == pytest.approx(0.12, rel=0.03) for call in calls)
    assert far(video, made(quantise, steps=steps)[0]) < 0.5
    assert torch.equal(made(quantise, enable(**DENSE), compiled, steps=steps)[0], made(quantise, steps=steps)[0])


@pytest.mark.parametrize("steps", [4, 8])
def test_few_steps_with_a_cache(steps):
    cache = first_block_cache
    expected, calls = made(quantise, cache, enable(method="fast"), steps=steps)
    video, _ = made(enable(method="fast"), cache, quantise, steps=steps)
    assert torch.equal(video, expected) and all(call.sparse for call in calls) and 0 < len(calls) < 2 * 3 * steps


GUIDE = Path(__file__).parents[2] / "docs/guide/together.md"
WISHES = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
DONE = [("scope-mean", 0.2, "bf16", False), ("fast", 0.12, "bf16", False), ("fast", 0.12, "qk8", True)]  # method, density, products, fp8


@pytest.mark.parametrize("number", range(3))
def test_the_guide(number, monkeypatch):
    """Its code blocks, on a small pipeline in bf16: torchao is told that there is a GPU, and graphs run without a compiler."""
    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularity: None)
    monkeypatch.setitem(session.MIN_TOKENS, "cpu", 0)
    own = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, *args, **options: own(self, *args, backend="aot_eager", **options))
    method, density, products, fp8 = DONE[number]
    code = WISHES[number]
    assert len(WISHES) == 3 and (products == "qk8") == ('products="qk8"' in code)
    if "avx512_vnni" not in Path("/proc/cpuinfo").read_text():
        code = code.replace(', products="qk8"', "")
    torch._dynamo.reset()
    pipe = tiny.wan()
    pipe.transformer.bfloat16()
    exec(code, {"pipe": pipe})
    assert tiny.make_wan(pipe).isfinite().all()
    receipt = scope_attn.receipt(pipe)
    assert receipt.settings["method"] == method and receipt.density == pytest.approx(density, rel=0.03)
    assert isinstance(pipe.transformer.blocks[0].ffn.net[2].weight, Float8Tensor) == fp8
    assert all(block._compiled_call_impl is not None for block in pipe.transformer.blocks)
