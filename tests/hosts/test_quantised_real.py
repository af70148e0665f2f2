"""Quantised weights under enable(): linear layers of torchao and of bitsandbytes, and GGUF's as diffusers loads them."""
from __future__ import annotations

import bitsandbytes
import diffusers
import gguf
import numpy
import pytest
import torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import scope_attn
import tiny_pipelines as tiny

EVERYTHING = dict(target_density=1, min_tokens=0)
BITSANDBYTES = {
    "nf4": lambda *shape: bitsandbytes.nn.Linear4bit(*shape, compute_dtype=torch.float32, quant_type="nf4"),
    "int8": lambda *shape: bitsandbytes.nn.Linear8bitLt(*shape, has_fp16_weights=False),
}


def with_torchao(pipe):
    quantize_(pipe.transformer, Int8WeightOnlyConfig())
    return pipe


def with_bitsandbytes(pipe, make):
    """The linear layers that diffusers would put into the blocks; its own loading refuses to work without a GPU."""
    for block in pipe.transformer.blocks:
        for name, linear in list(block.named_modules()):
            if isinstance(linear, torch.nn.Linear):
                layer = make(linear.in_features, linear.out_features)
                layer.load_state_dict(linear.state_dict())
                block.set_submodule(name, layer.to("cpu"))  # which quantises
    return pipe


def with_gguf(pipe, folder):
    """The pipeline with its transformer from a GGUF file, whose large layers are in Q8_0."""
    path, weights = str(folder / "wan.gguf"), pipe.transformer.state_dict()
    writer = gguf.GGUFWriter(path, "wan")
    for name, weight in weights.items():
        numbers = weight.float().numpy()
        if weight.ndim == 2 and weight.shape[1] % 32 == 0 and "blocks" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, numpy.ascontiguousarray(numbers))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    pipe.transformer.save_config(folder)
    pipe.transformer = diffusers.WanTransformer3DModel.from_single_file(
        path, config=str(folder), quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32),
        torch_dtype=torch.float32)
    return pipe


def check(pipe):
    """Density 1 gives the quantised pipeline's video to rounding, 0.2 another; disabled, its bits."""
    untouched = tiny.make_wan(pipe)
    scope_attn.enable(pipe, **EVERYTHING)
    assert (tiny.make_wan(pipe) - untouched).abs().max() < tiny.ROUNDING
    scope_attn.disable(pipe)
    scope_attn.enable(pipe, target_density=0.2, min_tokens=0)
    assert (tiny.make_wan(pipe) - untouched).abs().max() > 1e-3
    assert any(call.sparse for call in scope_attn.receipt(pipe).calls)
    scope_attn.disable(pipe)
    assert (tiny.make_wan(pipe) == untouched).all()


def test_torchao():
    plain = tiny.make_wan(tiny.wan())
    pipe = with_torchao(tiny.wan())
    assert (tiny.make_wan(pipe) - plain).abs().max() > 1e-4, "it is quantised"
    check(pipe)


@pytest.mark.parametrize("kind", BITSANDBYTES)
def test_bitsandbytes(kind):
    plain = tiny.make_wan(tiny.wan())
    pipe = with_bitsandbytes(tiny.wan(), BITSANDBYTES[kind])
    assert pipe.transformer.blocks[0].attn1.to_q.weight.dtype in (torch.uint8, torch.int8)
    assert (tiny.make_wan(pipe) - plain).abs().max() > 1e-4, "it is quantised"
    check(pipe)


@pytest.mark.parametrize("quantise",
                         [with_torchao, *(lambda pipe, make=make: with_bitsandbytes(pipe, make) for make in BITSANDBYTES.values())],
                         ids=["torchao", *BITSANDBYTES])
def test_after_enable(quantise):
    quantised = tiny.make_wan(quantise(tiny.wan()))
    pipe = tiny.wan()
    scope_attn.enable(pipe, **EVERYTHING)
    assert (tiny.make_wan(quantise(pipe)) - quantised).abs().max() < tiny.ROUNDING
    assert any(call.sparse for call in scope_attn.receipt(pipe).calls)


def test_gguf(tmp_path):
    pipe = tiny.wan()
    plain = tiny.make_wan(pipe)
    pipe = with_gguf(pipe, tmp_path)
    kinds = {type(module).__name__ for module in pipe.transformer.modules()}
    assert "GGUFLinear" in kinds and 1e-4 < (tiny.make_wan(pipe) - plain).abs().max() < 1
    check(pipe)
