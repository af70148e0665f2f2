"""The sglang plug-in in sglang as it is: hooks, selector, layers, forward context and whole tiny transformers are the package's own."""
from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import types
import weakref
from pathlib import Path

import pytest
import torch

import stand_ins

stand_ins.torchvision()

from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
from sglang.multimodal_gen.runtime.layers.attention import selector
from sglang.multimodal_gen.runtime.layers.attention.backends.sdpa import SDPAImpl
from sglang.multimodal_gen.runtime.layers.attention.layer import LocalAttention, USPAttention
from sglang.multimodal_gen.runtime.managers.forward_context import DENOISING_LOOP_STATE, set_forward_context
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.ltx_2.denoising import LTX2DenoisingStage
from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum, current_platform
from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, apply_plugin_hooks
from sglang.multimodal_gen.runtime.server_args import ServerArgs, set_global_server_args

import scope_attn
import tiny_pipelines as tiny
from scope_attn.hosts import sglang as plugin

HEADS, DIM, STEPS = 2, 128, 5
SPARSE = dict(min_tokens=0, dense_steps=0, dense_layers=0)  # every call of these small models


@pytest.fixture(scope="module", autouse=True)
def served(tmp_path_factory):
    """A process that has loaded the plug-in and has read its arguments, as a worker before it loads models."""
    stand_ins.announce("sglang.multimodal_gen.plugins", "scope", "scope_attn.hosts.sglang:register")
    apply_plugin_hooks()
    folder = tmp_path_factory.mktemp("wan")
    (folder / "model_index.json").write_text('{"_class_name": "WanPipeline", "_diffusers_version": "0.35.0", '
                                             '"transformer": ["diffusers", "WanTransformer3DModel"]}')
    (folder / "transformer").mkdir()
    (folder / "transformer" / "config.json").write_text("{}")
    settings = ServerArgs.from_kwargs(model_path=str(folder), attention_backend="scope_attn",
                                      attention_backend_config='{"target_density": 0.2, "density_steps": "0.2:0.3,1:0.08"}')
    set_global_server_args(settings)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]), RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    from sglang.multimodal_gen.runtime.distributed.parallel_state import maybe_init_distributed_environment_and_model_parallel
    maybe_init_distributed_environment_and_model_parallel(tp_size=1, sp_size=1)
    USPAttention(HEADS, DIM, prefix="a pipeline's first layer")  # the backend's first choice installs the hooks of the models
    yield settings
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """sglang's plain PyTorch, as it runs on MPS, in the place of the kernels of its CPU package."""
    from sglang.kernels.ops.diffusion.common.fallback_torch import fuse_scale_shift_kernel_native
    from sglang.multimodal_gen.runtime.layers import layernorm
    monkeypatch.setattr(layernorm, "fuse_scale_shift_kernel", fuse_scale_shift_kernel_native)
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        yield


@pytest.fixture
def choose(served, monkeypatch):
    """The command line: a backend and its settings."""
    kind = type(served.attention_backend_config)

    def choose(backend="scope_attn", **given):
        monkeypatch.setattr(served, "attention_backend", backend)
        monkeypatch.setattr(served, "attention_backend_config", kind(given))

    choose(**SPARSE, target_density=0.2)
    return choose


def backend():
    from scope_attn.hosts.sglang import backend
    return backend


def request(steps=STEPS):
    return Req(sampling_params=SamplingParams(num_inference_steps=steps))


def fill(model, std=0.05):
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    for module in model.modules():
        if hasattr(module, "_forward_method"):
            module._forward_method = module.forward_native
    return model.eval()


def inputs(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Wan:
    """The video alone: [1, 192 tokens]."""

    tokens, others, padding, layers = 192, 0, 0, 2

    def build(self):
        from sglang.multimodal_gen.configs.models.dits.wanvideo import WanVideoArchConfig, WanVideoConfig
        from sglang.multimodal_gen.runtime.models.dits.wanvideo import WanTransformer3DModel
        shape = WanVideoArchConfig(num_attention_heads=HEADS, attention_head_dim=DIM, in_channels=16, out_channels=16, text_dim=32,
                                   freq_dim=32, ffn_dim=64, num_layers=2)
        return fill(WanTransformer3DModel(WanVideoConfig(arch_config=shape), hf_config={}))

    def impls(self, model):
        return [block.attn1.attn_impl for block in model.blocks]

    def run(self, model, batch, step=0, seed=0):
        with set_forward_context(current_timestep=step, attn_metadata=None, forward_batch=batch):
            return model(hidden_states=inputs(seed, 1, 16, 3, 16, 16), encoder_hidden_states=inputs(seed + 1, 1, 7, 32),
                         timestep=torch.tensor([500.]))


class HunyuanVideo:
    """Text behind the video, half of it padding, which sglang's model does not mask."""

    tokens, others, padding, layers = 199, 7, 0, 3

    def build(self):
        from sglang.multimodal_gen.configs.models.dits.hunyuanvideo import HunyuanVideoArchConfig, HunyuanVideoConfig
        from sglang.multimodal_gen.runtime.models.dits.hunyuanvideo import HunyuanVideoTransformer3DModel
        shape = HunyuanVideoArchConfig(num_attention_heads=HEADS, attention_head_dim=DIM, in_channels=4, out_channels=4, num_layers=1,
                                       num_single_layers=2, num_refiner_layers=1, text_embed_dim=32, pooled_projection_dim=24,
                                       mlp_ratio=1.0)
        return fill(HunyuanVideoTransformer3DModel(HunyuanVideoConfig(arch_config=shape), hf_config={}))

    def impls(self, model):
        return [block.attn.attn_impl for block in (*model.double_blocks, *model.single_blocks)]

    def run(self, model, batch, step=0, seed=0):
        batch.prompt_attention_mask = [torch.tensor([[1, 1, 1, 0, 0, 0, 0]])]
        with set_forward_context(current_timestep=step, attn_metadata=None, forward_batch=batch):
            return model(hidden_states=inputs(seed, 1, 4, 3, 16, 16), timestep=torch.tensor([500.]),
                         encoder_hidden_states=[inputs(seed + 1, 1, 7, 32), inputs(seed + 2, 1, 24)])


class LTX2:
    """Prompt and negative prompt in one batch; audio beside the video; the pass names no request."""

    tokens, others, padding, layers = 192, 0, 0, 2

    def build(self):
        from sglang.multimodal_gen.configs.models.dits.ltx_2 import LTX2ArchConfig, LTX2Config
        from sglang.multimodal_gen.runtime.models.dits.ltx_2 import LTX2VideoTransformer3DModel
        shape = LTX2ArchConfig(num_layers=2, num_attention_heads=HEADS, attention_head_dim=DIM, in_channels=16, out_channels=16,
                               cross_attention_dim=256, caption_channels=64, audio_num_attention_heads=HEADS,
                               audio_attention_head_dim=64, audio_in_channels=16, audio_out_channels=16, audio_cross_attention_dim=128,
                               cross_attention_adaln=True, apply_gated_attention=True)
        shape.ltx_variant = "ltx_2_3"
        return fill(LTX2VideoTransformer3DModel(LTX2Config(arch_config=shape), hf_config={}))

    def impls(self, model):
        from sglang.multimodal_gen.runtime.models.dits.ltx_2 import LTX2TransformerBlock
        return [module.attn1.attn.attn_impl for module in model.modules() if isinstance(module, LTX2TransformerBlock)]

    def begin_step(self, batch, step):
        """As the denoising loop begins it."""
        from scope_attn.hosts.sglang import backend
        stage = object.__new__(LTX2DenoisingStage)
        vars(stage).update(attn_backend=backend.ScopeBackend, server_args=None, pipeline=None)
        stage._prepare_step_attn_metadata(None, batch, None, step, 500, torch.zeros(request_steps(batch)))

    def run(self, model, batch, step=0, seed=0, begin=True):
        if begin:
            self.begin_step(batch, step)
        time = torch.full((2, 1), 600.)
        with set_forward_context(step, None):
            return model(
                hidden_states=inputs(seed, 2, 192, 16), audio_hidden_states=inputs(seed + 1, 2, 5, 16),
                encoder_hidden_states=inputs(seed + 2, 2, 6, 64), audio_encoder_hidden_states=inputs(seed + 3, 2, 6, 64),
                prompt_timestep=time[:, 0], audio_prompt_timestep=time[:, 0], num_frames=3, height=8, width=8, audio_num_frames=5,
                return_latents=False, timestep=time, audio_timestep=time)[0]


class MiniMaxH3:
    """Text, audio, video and padding, packed."""

    tokens, others, padding, layers = 209, 17, 47, 2

    def build(self):
        from sglang.multimodal_gen.configs.models.dits.minimax_h3 import MiniMaxH3DiTArchConfig, MiniMaxH3DiTConfig
        from sglang.multimodal_gen.runtime.models.dits.minimax_h3 import MiniMaxH3DiTModel
        shape = MiniMaxH3DiTArchConfig(num_layers=2, token_refiner_num_layers=1, hidden_size=256, num_attention_heads=HEADS,
                                       ffn_hidden_size=64, text_dim=32, time_embed_hidden_size=64, time_embed_dim=32,
                                       adaln_out_features=18 * 256, final_adaln_out_features=2 * 256)
        return fill(MiniMaxH3DiTModel(MiniMaxH3DiTConfig(arch_config=shape), hf_config={}), std=0.2)

    def impls(self, model):
        model._resolve_attention_backend_once()
        return [block.attn._attention_impl for block in model.blocks]

    def run(self, model, batch, step=0, seed=0):
        from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.minimax_h3 import denoise_loop, packed_sequence
        packed = packed_sequence.minimax_h3_packed_sequence(text_len=7, latent_t=3, latent_h=16, latent_w=16, audio_t=5,
                                                            include_keyframe_cond=False)
        assert packed["cu_seqlens"].tolist() == [0, 209, 256]
        branch = denoise_loop.MiniMaxH3DenoiseBranch(packed=packed, text_embeddings=inputs(seed + 2, 7, 32).bfloat16(),
                                                     token_tags=packed["token_tags"], device=torch.device("cpu"))
        times = branch._expand_step_timesteps(t_video=0.5, t_audio=0.5, imgvid_cond_timestep=0.999, audio_ref_cond_timestep=1.0,
                                              inverse_indices_by_pattern={}, block_combined_by_pattern={})
        call = branch.forward_kwargs(video_rows=inputs(seed, 192, 96), audio_rows=inputs(seed + 1, 10, 32), step_timesteps=times)
        with set_forward_context(current_timestep=step, attn_metadata=None, forward_batch=batch):
            return torch.cat([rows.flatten() for rows in model(**call)])


def request_steps(batch):
    return batch.num_inference_steps


FAMILIES = [Wan(), HunyuanVideo(), LTX2(), MiniMaxH3()]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: type(family).__name__)


def calls():
    return backend().last_receipt.calls


@every_family
def test_against_sglangs_own_attention(family, choose):
    """Density 1 is the model with sglang's own backend, to rounding; 0.2 is not, and the receipt says so."""
    choose("torch_sdpa")
    own = family.build()
    assert {type(impl) for impl in family.impls(own)} == {SDPAImpl}
    exact = family.run(own, request())

    def error(out):
        return ((out - exact).norm() / exact.norm()).item()

    def run(**given):
        choose(**given)
        model = family.build()
        model.load_state_dict(own.state_dict())
        return family.run(model, request()), backend().last_receipt

    out, receipt = run(**SPARSE, target_density=1)
    rounding = error(out)
    assert rounding < (5e-3 if family.padding else 1e-6), "density 1; MiniMax-H3 computes in bf16"
    assert [(call.layer, call.sparse) for call in receipt.calls] == [(layer, True) for layer in range(family.layers)]
    assert receipt.density == 1
    out, receipt = run(**SPARSE, target_density=0.2)
    assert 2 * max(rounding, 1e-3) < error(out) < 0.5, "sparse, and no noise"
    # Text and audio are always kept and attend to all, which adds to the density.
    share = family.others / family.tokens
    assert 0.15 < receipt.density < 0.3 + 2 * share and receipt.settings["model"].startswith(backend().FAMILIES[
        FAMILIES.index(family)].rows)
    out, receipt = run(method="dense", min_tokens=0)
    assert (out - exact).abs().max() == 0 and not any(call.sparse for call in receipt.calls), "dense calls are sglang's own attention"


@every_family
def test_schedule(family, choose):
    """The step is sglang's, and so are the steps."""
    choose(min_tokens=0, target_density=0.2, dense_steps=0.4, dense_last_steps=0.2, dense_layers=1)
    model, batch = family.build(), request()
    for step in range(STEPS):
        family.run(model, batch, step)
    found = {(call.step, call.layer): call.sparse for call in calls()}
    assert found == {(step, layer): step in (2, 3) and layer > 0 for step in range(STEPS) for layer in range(family.layers)}
    assert {call.why for call in calls() if not call.sparse} == {
        "the layer is below dense_layers", "the step is within dense_steps", "the step is within dense_last_steps"}
    assert backend().last_receipt.settings["steps"] == STEPS


def test_distilled(choose, served, monkeypatch):
    """Distilled models have their steps in the pipeline's configuration; the request still has its default."""
    monkeypatch.setattr(served.pipeline_config, "dmd_denoising_steps", [1000, 757, 522])
    choose(min_tokens=0, target_density=0.2, dense_steps=0.34, dense_layers=0)
    family, batch = Wan(), request(50)
    model = family.build()
    for step in range(3):
        family.run(model, batch, step)
    assert [call.sparse for call in calls() if call.layer == 0] == [False, True, True]
    assert backend().last_receipt.settings["steps"] == 3 and not any(batch.extra[DENOISING_LOOP_STATE]["scope_attn"].states.values())


@every_family
def test_states(family, choose):
    """A layer has a state from call to call; a request has its own, which goes after the last step."""
    choose(**SPARSE, target_density=0.2)
    model, first, second = family.build(), request(), request()
    start = [family.run(model, first, 0), family.run(model, second, 0)]
    assert (start[0] == start[1]).all(), "no request sees the states of another"
    videos = [batch.extra[DENOISING_LOOP_STATE]["scope_attn"] for batch in (first, second)]
    assert videos[0] is not videos[1]
    [states] = videos[0].states.values()
    assert len(states) == family.layers
    for step in range(1, STEPS):
        family.run(model, first, step)
    warm = [call.stats.warm for call in videos[0].receipt.calls]
    assert warm == family.layers * [False] + (STEPS - 1) * family.layers * [True]
    assert not any(videos[0].states.values()), "dropped at the last step, before the VAE runs"
    assert any(videos[1].states.values())
    again = family.run(model, first, 0)
    assert (again == start[0]).all() and first.extra[DENOISING_LOOP_STATE]["scope_attn"] is not videos[0], "a step that falls"


def test_end_of_a_video(choose, served, caplog):
    """sglang's denoising loop drops the video, which then tells what it did; nothing else holds its states."""
    from sglang.multimodal_gen.runtime.pipelines_core.stages.denoising import DenoisingStage
    family, batch = Wan(), request()
    model = family.build()
    family.run(model, batch)
    gone = weakref.ref(batch.extra[DENOISING_LOOP_STATE]["scope_attn"])
    stage = object.__new__(DenoisingStage)
    vars(stage).update(attn_backend=backend().ScopeBackend, server_args=served, pipeline=None)
    assert stage._build_attn_metadata(0, batch, served) is None
    batch.extra["kept"] = 1
    latents = torch.randn(1, 16, 3, 8, 8)
    batch.raw_latent_shape = latents.shape
    with caplog.at_level(logging.INFO, "scope_attn.hosts.sglang"):
        stage._post_denoising_loop(batch, latents, [], [], served)
        gc.collect()
    assert gone() is None and batch.extra == {"kept": 1}
    assert "scope_attn: scope-mean for wan2.1-t2v-14b, 2 calls sparse (mean density 0." in caplog.text


def test_end_of_an_h3_video(choose):
    """MiniMax-H3's stage leaves the loop's state behind; our hook after it does not."""
    from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.minimax_h3.stages.denoising import (
        MiniMaxH3DenoisingStage,
    )
    assert f"{MiniMaxH3DenoisingStage.__module__}.MiniMaxH3DenoisingStage.forward" in HookRegistry._patched
    batch = request()
    batch.extra[DENOISING_LOOP_STATE] = {"scope_attn": 1, "another": 2}
    backend().end_video(None, None, batch)
    assert batch.extra[DENOISING_LOOP_STATE] == {"another": 2}


def test_branches(choose):
    """Prompt and negative prompt have states of their own, but for a method that shares them."""
    family = Wan()
    model, batch = family.build(), request()
    for step in range(2):
        for negative in (False, True):
            batch.is_cfg_negative = negative
            family.run(model, batch, step)
    assert [(call.branch, call.stats.warm) for call in calls() if call.layer == 0] == [
        ("positive", False), ("negative", False), ("positive", True), ("negative", True)]
    shared = next((row.name for row in scope_attn.methods() if row.shares_branches), None)
    assert shared
    choose(**SPARSE, method=shared)
    model, batch = family.build(), request()
    for negative in (False, True):
        batch.is_cfg_negative = negative
        family.run(model, batch)
    assert len(next(iter(batch.extra[DENOISING_LOOP_STATE]["scope_attn"].states.values()))) == family.layers


def test_passes_of_ltx(choose):
    """LTX-2 does not say which pass runs: they come in the same order in each step."""
    family = LTX2()
    model, batch = family.build(), request()
    for step in range(2):
        family.run(model, batch, step)
        family.run(model, batch, step, seed=5, begin=False)
    assert [(call.branch, call.stats.warm) for call in calls() if call.layer == 1] == [
        ("pass 0", False), ("pass 1", False), ("pass 0", True), ("pass 1", True)]


def test_experts(choose):
    """The layers of Wan 2.2's two transformers have the same names; the states of the first go when the second begins."""
    family = Wan()
    experts, batch = [family.build(), family.build()], request()
    for step, model in enumerate((experts[0], experts[0], experts[1], experts[1])):
        family.run(model, batch, step)
    names = [call.expert for call in calls() if call.layer == 0]
    assert names[0] == names[1] != names[2] == names[3]
    assert [call.stats.warm for call in calls() if call.layer == 0] == [False, True, False, True]
    assert list(batch.extra[DENOISING_LOOP_STATE]["scope_attn"].states) == [names[2]]


def test_text_is_kept(choose):
    """HunyuanVideo's text, padding too, is seen by every query and sees every key, as in sglang's own attention."""
    choose(**SPARSE, target_density=0.01, tail_follow=0)  # no query is more than a mean of values
    family = HunyuanVideo()
    model, batch = family.build(), request()
    family.run(model, batch)
    impl = family.impls(model)[1]
    q, k, v = torch.randn(3, 1, family.tokens, HEADS, DIM)
    with set_forward_context(current_timestep=0, attn_metadata=None, forward_batch=batch):
        out = impl.forward(q, k, v, None)
        text = torch.zeros_like(v)
        text[:, 192:] = 1
        assert impl.forward(q, k, text, None).min() > 0, "every query sees some text"
    exact = impl.dense.forward(q, k, v, None)
    assert (out[:, 192:] - exact[:, 192:]).abs().max() < 1e-5 and (out - exact)[:, :192].abs().max() > 0.01


def test_text_of_ranks():
    """With Ulysses each rank brings its share of the video and then its share of the text."""
    bits = backend().hunyuan_text(1, 63, 5, 2)
    where = "".join(f"{word & 0xffffffff:032b}"[::-1] for word in torch.as_tensor(bits).view(torch.int32).flatten().tolist())
    assert [place for place, bit in enumerate(where) if bit == "1"] == [29, 30, 31, 61, 62]


def test_h3_layout(choose):
    """Audio and text are seen by every query and see every key; padding is cut, and its rows are zero."""
    choose(**SPARSE, target_density=0.01, tail_follow=0)  # as above
    family = MiniMaxH3()
    model, batch = family.build(), request()
    family.run(model, batch)
    impl = family.impls(model)[1]
    branch = backend().now.h3
    q, k, v = torch.randn(3, 256, HEADS, DIM)
    at = dict(cu_seqlens=torch.tensor([0, 209, 256], dtype=torch.int32), max_seqlen=209)
    from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.minimax_h3 import denoise_loop, packed_sequence
    packed = packed_sequence.minimax_h3_packed_sequence(text_len=7, latent_t=3, latent_h=16, latent_w=16, audio_t=5,
                                                        include_keyframe_cond=False)
    with set_forward_context(current_timestep=0, attn_metadata=None, forward_batch=batch):
        if branch() is None:  # the loop's branch went with the pass
            with pytest.raises(ValueError, match="denoise branch was not seen"):
                impl.forward_varlen(q, k, v, **at)
        kept = denoise_loop.MiniMaxH3DenoiseBranch(packed=packed, text_embeddings=torch.randn(7, 32).bfloat16(),
                                                   token_tags=packed["token_tags"], device=torch.device("cpu"))
        backend().note_branch(kept)
        out = impl.forward_varlen(q, k, v, **at)
        others = torch.zeros_like(v)
        others[:17] = 1
        assert impl.forward_varlen(q, k, others, cu_seqlens_host=(0, 209, 256), **at)[:209].min() > 0
    exact = impl.dense.forward_varlen(q, k, v, **at)
    assert (out[:17] - exact[:17]).abs().max() < 1e-5 and (out - exact)[17:209].abs().max() > 0.01 and (out[209:] == 0).all()
    choose(**SPARSE, target_density=1)
    impl = family.impls(family.build())[1]
    with set_forward_context(current_timestep=0, attn_metadata=None, forward_batch=request()):
        assert (impl.forward_varlen(q, k, v, **at) - exact)[:209].abs().max() < 1e-5
    assert calls()[-1].sparse


def test_layers_that_stay_dense(choose):
    """Refiners, text encoders, audio, and cross-attention, which does not reach us at all."""
    for family, count in ((HunyuanVideo(), 3), (LTX2(), 2), (MiniMaxH3(), 2)):
        model, batch = family.build(), request()
        family.run(model, batch)
        assert len(calls()) == count, "the video's layers alone are in the receipt"
    cross = USPAttention(HEADS, DIM, prefix="blocks.3.attn2", is_cross_attention=True)
    assert str(cross.backend) == "torch_sdpa"
    q, k, v = torch.randn(3, 1, 32, HEADS, DIM)
    encoder = LocalAttention(HEADS, DIM, num_kv_heads=1, causal=True)
    with set_forward_context(current_timestep=0, attn_metadata=None):
        out = encoder(q, k[:, :, :1], v[:, :, :1])
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k[:, :, :1], v[:, :, :1])),
                                                             is_causal=True, enable_gqa=True)
    assert (out - exact.transpose(1, 2)).abs().max() < 1e-5


def test_scale(choose):
    """A layer's own scale is ours too."""
    choose(**SPARSE, target_density=1)
    q, k, v = inputs(0, 3, 1, 192, HEADS, DIM)
    layer = USPAttention(HEADS, DIM, prefix="blocks.0.attn1", softmax_scale=0.7)
    with set_forward_context(current_timestep=0, attn_metadata=None, forward_batch=request()):
        out = layer(q, k, v)
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), scale=0.7).transpose(1, 2)
    assert calls()[-1].sparse and (out - exact).abs().max() < 1e-5


def test_calls_that_are_refused(choose, caplog):
    """What is not understood stops, or with strict=false is warned of once and runs dense."""
    q, k, v = torch.randn(3, 1, 32, HEADS, DIM)
    layer, batch = USPAttention(HEADS, DIM, prefix="blocks.0.attn1"), request()
    with set_forward_context(current_timestep=0, attn_metadata=None), pytest.raises(ValueError, match="names no request"):
        layer(q, k, v)
    with set_forward_context(current_timestep=0, attn_metadata=None, forward_batch=batch):
        with pytest.raises(ValueError, match="32 queries and 16 keys"):
            layer(q, k[:, :16], v[:, :16])
        with pytest.raises(ValueError, match="sequences from .* expected one video"):
            layer.attn_impl.forward_varlen(q[0], k[0], v[0], cu_seqlens=torch.tensor([0, 16, 32]), max_seqlen=16)
        choose(**SPARSE, target_density=0.2, strict=False)
        lenient = USPAttention(HEADS, DIM, prefix="blocks.0.attn1")
        out = lenient(q, k[:, :16], v[:, :16])
    assert (out - lenient.attn_impl.dense.forward(q, k[:, :16], v[:, :16], None)).abs().max() == 0
    assert caplog.text.count("32 queries and 16 keys") == 1


def test_a_model_that_is_not_known(choose, monkeypatch):
    monkeypatch.setattr(backend(), "sessions", {})
    layer = USPAttention(HEADS, DIM, prefix="transformer_blocks.0.attn")
    q, k, v = torch.randn(3, 1, 32, HEADS, DIM)
    with set_forward_context(current_timestep=0, attn_metadata=None):
        layer(q, k, v)  # outside a request: a text encoder's
    with (set_forward_context(current_timestep=0, attn_metadata=None, forward_batch=request()),
          pytest.raises(ValueError, match='a layer named "transformer_blocks.0.attn.impl" and none of Wan')):
        layer(q, k, v)


@pytest.mark.parametrize("given, words", [
    (dict(densty=1), 'no setting "densty"; there are method, target_density, '), (dict(method="scop"), 'no method "scop"; there are '),
    (dict(strict="no"), 'strict: got "no"'), (dict(window="0.2"), 'window: got "0.2", expected'), (dict(window=[0.9, 0.1]), "0.9 to 0.1"),
    (dict(window=[0.1, 0.9], dense_steps=0.2), "both say which steps are dense"), (dict(target_density=2), "target_density"),
    (dict(method="sol"), "Morton order"), (dict(min_tokens=-1), "min_tokens: got -1")])
def test_settings_that_are_refused(given, words, choose):
    choose(**given)
    with pytest.raises((ValueError, RuntimeError), match=words):
        USPAttention(HEADS, DIM, prefix="blocks.3.attn1")


def test_settings(choose):
    choose(window="0.2:0.8", min_tokens=0, target_density=0.2)
    family, batch = Wan(), request(10)
    model = family.build()
    for step in range(10):
        family.run(model, batch, step)
    assert {call.step for call in calls() if call.sparse} == set(range(2, 8))
    choose(target_density=0.2, density_steps="0.2:0.3,1:0.08")
    assert backend().read_settings() == dict(target_density=0.2, settings={"density_steps": "0.2:0.3,1:0.08"})
    choose(target_density=0.2)
    small = Wan().build()
    Wan().run(small, batch := request())
    assert {call.why for call in calls()} == {"192 tokens, min_tokens is 4,096"}
    assert batch.extra[DENOISING_LOOP_STATE]["scope_attn"].receipt.settings["method"] == "scope-mean"
    with pytest.raises(ValueError, match="LTX mix these axes"):
        choose(**SPARSE, method="scope", target_density=0.2)
        LTX2().build()


def test_the_old_variable(choose, monkeypatch, caplog):
    monkeypatch.setenv("SCOPE_SGLANG", "target_density=0.2")
    plugin.register()
    assert "SCOPE_SGLANG is set and has no effect: use --attention-backend scope_attn" in caplog.text
    with pytest.raises(ValueError, match="use --attention-backend scope_attn --attention-backend-config"):
        USPAttention(HEADS, DIM, prefix="blocks.3.attn1")


def test_the_older_module_path(choose, monkeypatch):
    """Where the registry of hooks lies elsewhere, as before 0.5.23, it is found there."""
    older = types.ModuleType("sglang.multimodal_gen.plugins")
    older.HookRegistry = type("Older", (HookRegistry,), {"registered": [], "register": classmethod(
        lambda cls, target, hook, kind: cls.registered.append(target))})
    monkeypatch.setitem(sys.modules, "sglang.multimodal_gen.runtime.platforms.plugins", None)
    monkeypatch.setitem(sys.modules, older.__name__, older)
    plugin.register()
    assert older.HookRegistry.registered == [f"{plugin.RUNTIME}.platforms.{platform}.get_attn_backend_cls_str"
                                             for platform in plugin.PLATFORMS]


def test_another_sglang(choose, monkeypatch, caplog):
    """What is missing is said in one line, by name."""
    names = "sglang.multimodal_gen.runtime.platforms.plugins", "sglang.multimodal_gen.plugins"
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)
    plugin.register()
    [line] = caplog.records
    assert line.levelno == logging.ERROR and line.exc_info is None
    assert "there is no --attention-backend scope_attn: sglang 0.5" in line.getMessage() and names[1] in line.getMessage()
    caplog.clear()
    monkeypatch.undo()
    choose(**SPARSE, target_density=0.2)
    missing = backend().Family(r"ltx9\.(\d+)\.impl", "ltx-2", lambda dim: None,
                               hooks=(("AFTER", "sglang.srt.environ.Nobody.forward", print),))
    monkeypatch.setattr(backend(), "FAMILIES", (missing,))
    monkeypatch.setattr(backend(), "missing", {})
    backend().install_hooks.__wrapped__()
    assert "Nobody" in backend().missing["ltx-2"] and "is not as 0.5.23" in backend().missing["ltx-2"]
    impl = USPAttention(HEADS, DIM, prefix="ltx9.0").attn_impl
    with pytest.raises(ValueError, match="sglang 0.5.* is not as 0.5.23, .*Nobody"):  # at the first step, and of this family alone
        impl.forward(*torch.randn(3, 1, 32, HEADS, DIM), None)
    monkeypatch.setitem(sys.modules, "scope_attn.hosts.sglang.backend", None)
    monkeypatch.delattr(plugin, "backend", raising=False)
    with pytest.raises(ValueError, match="scope_attn: sglang 0.5.* is not as 0.5.23"):
        plugin.choose(lambda *args: "dense", "platform", AttentionBackendEnum["SCOPE_ATTN"], DIM, torch.float16)


def test_out_of_memory(choose, monkeypatch):
    """Where a state finds no memory the request ends with the error and keeps no state, and the next one is as if nothing had been."""
    family = Wan()
    model, bind, broken = family.build(), scope_attn.State._bind, request()
    good = family.run(model, request())

    def fail(state, plan):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(scope_attn.State, "_bind", fail)
        with pytest.raises(torch.OutOfMemoryError):
            family.run(model, broken)
        assert not any(broken.extra[DENOISING_LOOP_STATE]["scope_attn"].states.values())
        choose(**SPARSE, target_density=0.2, strict=False)
        lenient = family.build()
        family.run(lenient, request())
        assert {call.why for call in calls()} == {"refused: CUDA out of memory"}
    assert scope_attn.State._bind is bind and (family.run(model, request()) == good).all()


def test_a_longer_video(choose):
    """A layer that meets more tokens than its state has gets another state, also within a request."""
    layer, batch = USPAttention(HEADS, DIM, prefix="blocks.0.attn1"), request()

    def run(tokens, step, batch):
        with set_forward_context(current_timestep=step, attn_metadata=None, forward_batch=batch):
            return layer(*inputs(step, 3, 1, tokens, HEADS, DIM))

    both = [run(tokens, step, batch) for step, tokens in enumerate((192, 384, 192, 384))]
    assert [call.stats.warm for call in calls()] == [False, False, True, True]
    longer = request()
    assert (run(384, 1, longer) == both[1]).all()


def test_beside_diffusers(choose):
    """Two hosts in one process, their steps by turns: each gives what it gives alone."""
    family = Wan()
    model, pipe = family.build(), tiny.wan()
    scope_attn.enable(pipe, target_density=0.2, min_tokens=0, dense_steps=0, dense_layers=0)
    batch = request()
    alone = [family.run(model, batch, step) for step in range(3)], tiny.make_wan(pipe)
    batch, together = request(), []

    def between(pipe, step, timestep, kwargs):
        if step < 3:
            together.append(family.run(model, batch, step))
        return kwargs

    video = tiny.make_wan(pipe, callback_on_step_end=between)
    assert len(together) == 3 and all((ours == theirs).all() for ours, theirs in zip(together, alone[0]))
    assert (video == alone[1]).all() and any(call.sparse for call in scope_attn.receipt(pipe).calls)
    assert len(calls()) == 3 * family.layers and all(call.sparse for call in calls())


def test_a_shared_transformer(choose):
    """Two pipelines around one transformer, their steps by turns: states belong to requests."""
    family = Wan()
    model, batch = family.build(), request()
    alone = [family.run(model, batch, step, seed=step) for step in range(3)]
    first, second = request(), request()
    by_turns = [(family.run(model, first, step, seed=step), family.run(model, second, step, seed=9)) for step in range(3)]
    assert all((ours == theirs).all() for (ours, _), theirs in zip(by_turns, alone))


def test_masks(choose, monkeypatch):
    """A masked call never reaches us: sglang attends densely, by the mask."""
    reached = []
    monkeypatch.setattr(backend().ScopeImpl, "attend", lambda *args: reached.append(1))
    q, k, v = torch.randn(3, 1, 32, HEADS, DIM)
    mask = torch.arange(32)[None] < 20
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k[:, :20], v[:, :20]))).transpose(1, 2)
    for layer in (LocalAttention(HEADS, DIM, prefix="blocks.0.attn1"), USPAttention(HEADS, DIM, prefix="blocks.0.attn1")):
        with set_forward_context(current_timestep=0, attn_metadata=None, forward_batch=request()):
            out = layer(q, k, v, attn_mask=mask)
        assert (out - exact)[:, :20].abs().max() < 1e-5 and not reached


def test_parallelism_that_splits_keys(choose, served, monkeypatch):
    """sglang refuses ring attention and an explicit K/V gather, since the backend counts as sparse. One of its choice is Ulysses."""
    from sglang.multimodal_gen.runtime.layers.attention import layer
    with monkeypatch.context() as patch:
        patch.setattr(layer, "get_ring_parallel_world_size", lambda: 2)
        with pytest.raises(RuntimeError, match="SCOPE_ATTN does not declare support"):
            USPAttention(HEADS, DIM, prefix="blocks.0.attn1")
    monkeypatch.setattr(served, "kv_gather_degree", 2)
    monkeypatch.setattr(served, "sp_split_auto", False)
    with pytest.raises(NotImplementedError, match="does not support sparse attention backends"):
        USPAttention(HEADS, DIM, prefix="blocks.0.attn1")
    monkeypatch.setattr(served, "sp_split_auto", True)
    assert USPAttention(HEADS, DIM, prefix="blocks.0.attn1").sp_attention_mode == "ulysses"


def test_registered_once(choose):
    before = len(AttentionBackendEnum), AttentionBackendEnum["SCOPE_ATTN"]
    plugin.register()
    assert before == (len(AttentionBackendEnum), AttentionBackendEnum["SCOPE_ATTN"])
    member = AttentionBackendEnum["SCOPE_ATTN"]
    assert member.is_sparse and AttentionBackendEnum(member.value) is member and str(member) == "scope_attn"
    assert not AttentionBackendEnum.TORCH_SDPA.is_sparse and AttentionBackendEnum.SOL_ATTN.is_sparse
    assert current_platform.is_cpu() and not backend().ScopeBackend.supports_ring_rotation()
    assert backend().ScopeBackend.supports_packed_varlen()
    for platform in plugin.PLATFORMS:
        assert f"{plugin.RUNTIME}.platforms.{platform}.get_attn_backend_cls_str" in HookRegistry._patched
    assert selector.get_attn_backend(DIM, torch.float32) is backend().ScopeBackend


def test_dense_backend(choose, monkeypatch):
    """Dense calls are those of the backend that sglang's platform takes by itself, whichever it is."""
    asked = []

    def original(cls, selected_backend, head_size, dtype):
        asked.append((cls, selected_backend, head_size, dtype))
        return "sglang.multimodal_gen.runtime.layers.attention.backends.sdpa.CudnnSDPABackend"

    monkeypatch.setattr(plugin, "dense_backends", dict(plugin.dense_backends))
    monkeypatch.setattr(backend(), "dense_backends", plugin.dense_backends)
    chosen = plugin.choose(original, "platform", AttentionBackendEnum["SCOPE_ATTN"], DIM, torch.float16)
    assert chosen == "scope_attn.hosts.sglang.backend.ScopeBackend" and asked == [("platform", None, DIM, torch.float16)]
    impl = USPAttention(HEADS, DIM, prefix="blocks.0.attn1").attn_impl
    assert type(impl.dense).__name__ == "CudnnSDPAImpl"
    plugin.choose(original, "platform", AttentionBackendEnum.TORCH_SDPA, DIM, torch.float16)
    assert asked[-1] == ("platform", AttentionBackendEnum.TORCH_SDPA, DIM, torch.float16), "other names are sglang's to answer"


def test_entry_point():
    """What the package announces is what this file tests."""
    import tomllib
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["sglang.multimodal_gen.plugins"] == {"scope": f"{plugin.__name__}:{plugin.register.__name__}"}
