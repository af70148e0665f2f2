"""enable, disable and receipt on tiny random pipelines of diffusers: equal to the untouched pipeline at density 1, and refusals."""
import copy
import gc
import itertools
import json
import pickle
import re
import sys
import threading
import types
import warnings
import weakref
from pathlib import Path

import pytest
import torch

import scope_attn

pytest.importorskip("diffusers")
import diffusers
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

import tiny_pipelines as tiny
from scope_attn.hosts import diffusers as host
from scope_attn.hosts.diffusers import families

KINDS = {
    "wan2.1": (tiny.wan, tiny.make_wan),
    "wan2.2": (lambda: tiny.wan(experts=2), tiny.make_wan),
    "wan2.2-ti2v": (lambda: tiny.wan(expand_timesteps=True), tiny.make_wan),
    "vace": (tiny.vace, tiny.make_vace),
    "hunyuan": (tiny.hunyuan, tiny.make_hunyuan),
    "hunyuan-i2v": (lambda: tiny.hunyuan(image_condition_type="token_replace"), tiny.make_hunyuan),
    "hunyuan-1.5": (tiny.hunyuan15, tiny.make_hunyuan15),
    "cogvideox": (tiny.cogvideox, tiny.make_cogvideox),
    "cogvideox-2b": (lambda: tiny.cogvideox(rotary=False), tiny.make_cogvideox),
    "cogvideox-1.5": (lambda: tiny.cogvideox(patch_size_t=2, patch_bias=False), tiny.make_cogvideox),
}
NEWER = {  # what 0.36 does not have, by the class that tells
    "MiniMaxH3Transformer3DModel": {"minimax-h3": (tiny.minimax, tiny.make_minimax)},
    "LTX2VideoTransformer3DModel": {"ltx-2": (lambda: tiny.ltx2(gated=False, perturbed=False), tiny.make_ltx2),
                                    "ltx-2.3": (tiny.ltx2, tiny.make_ltx2)},
    "WanAnimateTransformer3DModel": {"wan-animate": (tiny.wan_animate, tiny.run_loop)},
    "ChronoEditTransformer3DModel": {"chronoedit": (tiny.chronoedit, tiny.run_loop)},
    "AnyFlowTransformer3DModel": {"anyflow": (tiny.anyflow, tiny.make_anyflow)},
    "SkyReelsV2Transformer3DModel": {"skyreels-v2": (tiny.skyreels, tiny.make_wan)},
    "HunyuanVideoFramepackTransformer3DModel": {"framepack": (tiny.framepack, tiny.run_loop)},
    "Kandinsky5Transformer3DModel": {"kandinsky-5": (tiny.kandinsky, tiny.run_loop)},
    "LTXVideoTransformer3DModel": {"ltx": (tiny.ltx, tiny.make_ltx)},
}
for name, kinds in NEWER.items():
    if hasattr(diffusers, name):
        KINDS.update(kinds)
SPARSE = dict(target_density=0.2, min_tokens=0)


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def self_attentions(pipe):
    for transformer in (pipe.transformer, getattr(pipe, "transformer_2", None)):
        if transformer is not None:
            yield from (module for name, module in transformer.named_modules()
                        if re.fullmatch(r"(single_|vace_|visual_)?(transformer_)?blocks\.\d+\.(attn1?|self_attention)", name))


def test_density_one_and_restored(kind):
    """Every key kept, batch 2: the untouched pipeline to rounding. Disabled: its bits, and its processors."""
    make, run = kind
    pipe = make()
    attributes = {name: set(vars(model)) for name, model in pipe.components.items()
                  if name.startswith("transformer") and model is not None}
    own = [attn.processor for attn in self_attentions(pipe)]
    layers = len(own) // (1 if getattr(pipe, "transformer_2", None) is None else 2)
    assert layers in (3, 5)
    untouched = run(pipe, batch=2)
    scope_attn.enable(pipe, target_density=1, min_tokens=0)
    out = run(pipe, batch=2)
    assert 0 < (out - untouched).abs().max() < tiny.ROUNDING
    calls = scope_attn.receipt(pipe).calls
    branches = {call.branch for call in calls}
    left_out = tiny.STEPS if "uncond_stg" in branches else 0  # by guidance, which skips one block of LTX-2.3
    assert len(calls) == len(branches) * tiny.STEPS * layers - left_out, "layers of one transformer"
    assert all(call.density == 1 for call in calls) and any(call.sparse for call in calls)
    scope_attn.disable(pipe)
    assert all(attn.processor is processor for attn, processor in zip(self_attentions(pipe), own))
    assert {name: set(vars(getattr(pipe, name))) - {"_diffusers_hook"} for name in attributes} == attributes  # cache_context leaves that
    assert (run(pipe, batch=2) == untouched).all()


def test_sparse(kind):
    """It differs, the receipt says so, and the next video is the same."""
    make, run = kind
    pipe = make()
    untouched = run(pipe)
    scope_attn.enable(pipe, **SPARSE)
    out = run(pipe)
    assert (out - untouched).abs().max() > 1e-3
    receipt = scope_attn.receipt(pipe)
    sparse = [call for call in receipt.calls if call.sparse]
    assert all(abs(call.density - 0.2) < 0.03 for call in sparse) and abs(receipt.density - 0.2) < 0.01
    assert "+".join(sorted({call.branch for call in sparse})) in (
        "cond+uncond", "pred_cond+pred_uncond", "cond_uncond", "text 0", "cond_uncond+uncond_modality",
        "cond_uncond+uncond_modality+uncond_stg", "text 0+text 1")
    assert {call.step for call in sparse} | {call.step for call in receipt.calls} == set(range(tiny.STEPS))
    first = {}
    for call in sparse:
        assert call.stats.warm == ((call.expert, call.branch, call.layer) in first)
        first[call.expert, call.branch, call.layer] = call
    assert (run(pipe) == out).all()
    assert scope_attn.receipt(pipe) is not receipt and len(scope_attn.receipt(pipe).calls) == len(receipt.calls)
    other = run(pipe, seed=1)
    assert (run(pipe) == out).all() and (other != out).any()


def test_schedule():
    """A fifth of Wan's steps and layer 0; the prefix rounds down, so that four steps have none."""
    pipe = tiny.wan()
    scope_attn.enable(pipe, **SPARSE)
    for steps, dense in ((4, 0), (5, 1), (9, 1), (10, 2)):
        tiny.make_wan(pipe, steps=steps)
        receipt = scope_attn.receipt(pipe)
        assert {call.step for call in receipt.calls if "dense_steps" in call.why} == set(range(dense))
        assert {call.step for call in receipt.calls} == set(range(steps)) and receipt.settings["steps"] == steps
        assert {call.layer for call in receipt.calls if "dense_layers" in call.why} == {0}
        assert all(call.sparse for call in receipt.calls if call.layer > 0 and call.step >= dense)
    scope_attn.disable(pipe)
    scope_attn.enable(pipe, dense_layers=0, dense_steps=0, dense_last_steps=0.4, **SPARSE)
    tiny.make_wan(pipe)
    assert {call.step for call in scope_attn.receipt(pipe).calls if call.sparse} == {0, 1, 2}


def test_rows():
    """rho and schedule are those of the library's rows."""
    for make, row in ((tiny.wan, "wan2.1-t2v-14b"), (lambda: tiny.wan(experts=2), "wan2.2-a14b"), (tiny.hunyuan, "hunyuanvideo-13b"),
                      (tiny.hunyuan15, "hunyuanvideo-1.5"), (tiny.cogvideox, "cogvideox-5b")):
        pipe = make()
        scope_attn.enable(pipe)
        assert scope_attn.receipt(pipe).settings["model"] == row
    pipe = tiny.wan()
    pipe.transformer = tiny.wan_transformer(in_channels=8)
    scope_attn.enable(pipe)
    assert scope_attn.receipt(pipe).settings["model"] == "wan2.1-i2v-14b"
    pipe = tiny.wan()
    scope_attn.enable(pipe, model="wan2.1-14b-distilled", **SPARSE)
    tiny.make_wan(pipe)
    assert not any("dense_steps" in call.why for call in scope_attn.receipt(pipe).calls)


def test_dense_steps(kind):
    """Dense calls are the pipeline's own attention, bit by bit, in steps that cluster too."""
    make, run = kind
    pipe = make()
    untouched = run(pipe, batch=2)
    scope_attn.enable(pipe, dense_steps=1, warm_prefix=True, **SPARSE)
    assert (run(pipe, batch=2) == untouched).all()
    receipt = scope_attn.receipt(pipe)
    assert {call.why for call in receipt.calls} == {"the step is within dense_steps", "the layer is below dense_layers"}
    assert receipt.density is None and all(call.stats is None and call.density == 1 for call in receipt.calls)
    run = next(self_attentions(pipe)).processor.run
    assert not run.session.video.states.get("transformer" if len(run.experts) > 1 else ""), "those of the expert that is done are gone"
    (last, states), = run.session.video.states.items()
    assert last == run.experts[-1].name and all(state.filled for state in states.values())
    clustered = {(call.branch, call.layer) for call in receipt.calls
                 if call.expert == last and "dense_steps" in call.why and call.step < tiny.STEPS - 1}
    assert {key[:2] for key in states} <= clustered


@pytest.mark.parametrize("name, given", [("hunyuan", {}), ("wan2.1", dict(warm_prefix=True)),
                                         ("wan2.1", dict(warm_prefix=True, method="scope"))])
def test_warm_prefix(name, given):
    """Where the row or the user says so, dense steps cluster, and the first sparse call is warm."""
    make, run = KINDS[name]
    latents, pipe = [], make()

    def note(pipe, step, timestep, kwargs):
        latents.append(kwargs["latents"].clone())
        return kwargs

    run(pipe, callback_on_step_end=note)
    scope_attn.enable(pipe, dense_steps=0.4, **given, **SPARSE)
    run(pipe, callback_on_step_end=note)
    untouched, ours = latents[:tiny.STEPS], latents[tiny.STEPS:]
    assert [bool((a == b).all()) for a, b in zip(untouched, ours)] == [True, True, False, False, False]
    calls = scope_attn.receipt(pipe).calls
    sparse = [call for call in calls if call.sparse]
    assert {call.step for call in sparse} == {2, 3, 4} and all(call.stats.warm for call in sparse)
    assert {call.why for call in calls if call.step < 2 and call.layer} == {"the step is within dense_steps"}


def test_nothing_to_select():
    """A call whose tokens are all text is dense, so that the pipeline's own attention runs it."""
    pipe = tiny.hunyuan()
    scope_attn.enable(pipe, dense_steps=0, dense_layers=0, **SPARSE)
    tiny.make_hunyuan(pipe, steps=1)
    processor = pipe.transformer.transformer_blocks[1].attn.processor
    processor.expert.text = 32, [32], None
    q, k, v = tiny.randn(3, 1, 32, 2, 24)
    assert (processor.attend(q, k, v, None, None) == dispatch_attention_fn(q, k, v)).all()
    assert scope_attn.receipt(pipe).calls[-1].why == "no query or no key takes part in selection"


def test_experts():
    """Each has its calls, and the states of the one that is done are gone."""
    pipe = tiny.wan(experts=2)
    scope_attn.enable(pipe, **SPARSE)
    held = []

    def look(pipe, step, timestep, kwargs):
        run = pipe.transformer.blocks[0].attn1.processor.run
        held.append([len(run.session.video.states.get(expert.name, ())) for expert in run.experts])
        return kwargs

    tiny.make_wan(pipe, steps=8, callback_on_step_end=look)
    calls = scope_attn.receipt(pipe).calls
    last = max(call.step for call in calls if call.expert == "transformer")
    assert 0 < last < 7 and {call.step for call in calls if call.expert == "transformer_2"} == set(range(last + 1, 8))
    assert held == [[0, 0]] + [[4, 0]] * last + [[0, 4]] * (6 - last) + [[0, 0]], "two layers, two branches; none after the last step"


def test_vace():
    """The schedule takes a VACE block for the block that it stands beside, and both have a state of their own."""
    pipe = tiny.vace()
    scope_attn.enable(pipe, dense_steps=0, **SPARSE)
    tiny.make_vace(pipe)
    receipt = scope_attn.receipt(pipe)
    assert receipt.settings["model"] == "wan2.1-t2v-14b"
    assert {call.layer for call in receipt.calls if "dense_layers" in call.why} == {0, 3}
    assert {call.layer for call in receipt.calls if call.sparse} == {1, 2, 4}
    assert [call.layer for call in receipt.calls][:5] == [3, 4, 0, 1, 2]


def test_branches_without_names():
    """A pipeline that names no branches: they are told apart by their text."""
    pipe = tiny.wan()
    scope_attn.enable(pipe, dense_steps=0, **SPARSE)
    latents, *texts = tiny.randn(1, 4, 4, 16, 16), tiny.randn(1, 6, 16), tiny.randn(1, 6, 16)
    pipe.scheduler.set_timesteps(5, device=tiny.DEVICE)
    with torch.no_grad():
        for timestep in pipe.scheduler.timesteps[:3]:
            for text in texts:
                noise = pipe.transformer(hidden_states=latents, timestep=timestep[None], encoder_hidden_states=text).sample
            latents = pipe.scheduler.step(noise, timestep, latents).prev_sample
    calls = scope_attn.receipt(pipe).calls
    assert [call.branch for call in calls if call.layer == 2] == ["text 0", "text 1"] * 3
    assert [call.stats.warm for call in calls if call.layer == 2] == [False] * 2 + [True] * 4
    with torch.no_grad():
        for _ in range(9):  # texts that never come back do not pile up
            pipe.transformer(hidden_states=latents, timestep=timestep[None], encoder_hidden_states=tiny.randn(1, 6, 16))
    processor = pipe.transformer.blocks[0].attn1.processor
    assert len(processor.expert.branches) == 4
    assert len({branch for branch, *_ in processor.run.session.video.states["transformer"]}) <= 4


def test_an_earlier_step():
    """It begins another video, on the same list of timesteps too: states are new, and so is the receipt."""
    pipe = tiny.wan()
    scope_attn.enable(pipe, dense_steps=0, **SPARSE)
    inputs = tiny.randn(3, 1, 4, 4, 16, 16)
    text = tiny.randn(1, 6, 16)

    def video():
        pipe.scheduler._step_index, out = None, []  # as set_timesteps leaves it
        with torch.no_grad():
            for latents, timestep in zip(inputs, timesteps):
                out.append(pipe.transformer(latents, timestep[None], text).sample)
                pipe.scheduler.step(out[-1], timestep, latents)
        return torch.stack(out), scope_attn.receipt(pipe)

    pipe.scheduler.set_timesteps(3, device=tiny.DEVICE)
    timesteps = pipe.scheduler.timesteps
    first, receipt = video()
    again, other = video()
    assert pipe.scheduler.timesteps is timesteps and other is not receipt and (again == first).all()
    for calls in (receipt.calls, other.calls):
        assert [call.stats.warm for call in calls if call.layer == 1] == [False, True, True]


@pytest.mark.parametrize("method", ["scope-mean", "svg2"])  # branches of svg2 share their states
def test_interrupted(method):
    """What a video that was broken off left behind does not reach the next one."""
    few = dict(groups=8, codes=8) if method == "svg2" else {}

    def fresh():
        pipe = tiny.wan()
        scope_attn.enable(pipe, method=method, **few, **SPARSE)
        return pipe

    def stop(pipe, step, timestep, kwargs):
        if step == 2:
            raise KeyboardInterrupt
        return kwargs

    expected, pipe = tiny.make_wan(fresh(), seed=1), fresh()
    with pytest.raises(KeyboardInterrupt):
        tiny.make_wan(pipe, callback_on_step_end=stop)
    assert pipe.transformer.blocks[1].attn1.processor.run.session.video.states, "it did leave some"
    assert (tiny.make_wan(pipe, seed=1) == expected).all()
    sparse = [call for call in scope_attn.receipt(pipe).calls if call.sparse]
    assert not sparse[0].stats.warm and sparse[-1].stats.warm


def test_scale():
    """A layer's own scale of q k reaches sparse and dense calls."""
    for given in (dict(target_density=1, min_tokens=0), dict(min_tokens=1000)):
        pipe = tiny.wan()
        scope_attn.enable(pipe, dense_steps=0, **given)
        tiny.make_wan(pipe)
        ticket = pipe.transformer.blocks[1].attn1.processor.ticket
        q, k, v = tiny.randn(3, 1, 256, 2, 24)
        ours, theirs, usual = (dispatch_attention_fn(q, k, v, **more) for more in (
            dict(scale=0.5, parallel_config=ticket, backend="scope"), dict(scale=0.5), dict()))
        assert scope_attn.receipt(pipe).calls[-1].sparse == ("target_density" in given)
        assert (ours - theirs).abs().max() < tiny.ROUNDING < 0.2 < (theirs - usual).abs().max()


def test_part_of_the_steps():
    """Video to video begins later: its first step is step 0."""
    pipe = tiny.wan()
    scope_attn.enable(pipe, **SPARSE)
    latents, text = tiny.randn(1, 4, 4, 16, 16), tiny.randn(1, 6, 16)
    pipe.scheduler.set_timesteps(8, device=tiny.DEVICE)
    pipe.scheduler.set_begin_index(3)
    with torch.no_grad():
        for timestep in pipe.scheduler.timesteps[3:]:
            noise = pipe.transformer(latents, timestep[None], text).sample  # by position, too
            latents = pipe.scheduler.step(noise, timestep, latents).prev_sample
    receipt = scope_attn.receipt(pipe)
    assert [call.step for call in receipt.calls if call.layer == 1] == [0, 1, 2, 3, 4] and receipt.settings["steps"] == 5
    assert [call.sparse for call in receipt.calls if call.layer == 1] == [False] + [True] * 4


def test_text_mask():
    """Padding text does not matter, and text that is not padding does: every query sees it, and it sees everything."""
    pipe = tiny.hunyuan()
    scope_attn.enable(pipe, **SPARSE)
    text, pooled, latents = tiny.randn(1, 10, 16), tiny.randn(1, 8), tiny.randn(1, 4, 4, 16, 16)
    mask = torch.arange(10, device=tiny.DEVICE)[None] < 7
    make = lambda text: pipe(prompt_embeds=text, pooled_prompt_embeds=pooled, prompt_attention_mask=mask, latents=latents, height=128,
                             width=128, num_frames=13, num_inference_steps=3, output_type="latent").frames
    out = make(text)
    for call in scope_attn.receipt(pipe).calls:
        if call.sparse:
            pairs = 256 * (call.density * 256 + 7) + 7 * (256 + 7)
            assert abs(call.stats.total_density - pairs / (256 + 7) ** 2) < 1e-4
    padding, words = text.clone(), text.clone()
    padding[:, 7:] += 1
    words[:, 6] += 1
    moved = (make(words) - out).abs().max()
    assert (make(padding) - out).abs().max() < min(tiny.ROUNDING, moved / 8)


def test_text_first(monkeypatch):
    """CogVideoX: every query sees the text before the video, and it sees everything."""
    pipe, given = tiny.cogvideox(), {}
    scope_attn.enable(pipe, dense_steps=0, **SPARSE)
    run = scope_attn.Plan.run
    monkeypatch.setattr(scope_attn.Plan, "run", lambda plan, *qkv, **more: given.update(more) or run(plan, *qkv, **more))
    tiny.make_cogvideox(pipe)
    assert (scope_attn.unpack_bits(given["keep"], 262) == (torch.arange(262) < 6)).all() and given["dense_queries"] is given["keep"]
    call = scope_attn.receipt(pipe).calls[-1]
    assert abs(call.stats.total_density - (256 * (call.density * 256 + 6) + 6 * (256 + 6)) / (256 + 6) ** 2) < 1e-4
    pipe.fuse_qkv_projections()
    with pytest.raises(RuntimeError, match="its processor was replaced by a FusedCogVideoXAttnProcessor2_0"):
        tiny.make_cogvideox(pipe)
    pipe = tiny.cogvideox()
    pipe.fuse_qkv_projections()
    scope_attn.enable(pipe, dense_steps=0, target_density=1, min_tokens=0)
    fused = tiny.make_cogvideox(pipe)
    scope_attn.disable(pipe)
    assert (fused - tiny.make_cogvideox(pipe)).abs().max() < tiny.ROUNDING


@pytest.mark.skipif("minimax-h3" not in KINDS, reason="diffusers does not have it")
def test_text_and_audio_among_the_video():
    """MiniMax-H3: every query sees them, they see everything, and `scope` codes the channels that turn along each axis."""
    pipe = tiny.minimax()
    scope_attn.enable(pipe, method="scope", dense_steps=0, **SPARSE)
    tiny.make_minimax(pipe)
    receipt = scope_attn.receipt(pipe)
    call = receipt.calls[-1]
    assert abs(call.stats.total_density - (256 * (call.density * 256 + 16) + 16 * (256 + 16)) / (256 + 16) ** 2) < 1e-4
    text = torch.arange(272)
    expected = scope_attn.pack_bits(((text < 6) | (text >= 100) & (text < 110))[None])
    assert (pipe.transformer.transformer_blocks[0].attn.processor.expert.text[2] == expected).all()
    *axes, rest = receipt.settings["rope"]
    for axis, channels in enumerate(axes):
        _, turned = pipe.transformer.rope(torch.eye(3, device=tiny.DEVICE)[axis:axis + 1])
        assert set(channels) == set(turned[0].nonzero()[:, 0].tolist()), "they turn along this axis alone"
    assert rest == tuple(range(24, 32))


@pytest.mark.skipif("ltx-2" not in KINDS, reason="diffusers does not have it")
def test_ltx2():
    """Codes are refused in words, a mask makes its calls dense, distilled schedules run, and audio is nobody's but diffusers'."""
    pipe = tiny.ltx2()
    for method in ("scope", "scope-paper"):
        with pytest.raises(ValueError, match=f'got "{method}", which codes keys along .* heads of LTX mix these axes; choose scope-mean'):
            scope_attn.enable(pipe, method)
    for method in ("fast", "quality", "scope-mean"):
        scope_attn.enable(pipe, method, min_tokens=0)
        assert scope_attn.receipt(pipe).settings["rope"] is None
        tiny.make_ltx2(pipe, sigmas=[1.0, 0.9, 0.5], steps=3)  # three steps have no dense one
        calls = scope_attn.receipt(pipe).calls
        assert {call.step for call in calls} == {0, 1, 2} == {call.step for call in calls if call.sparse}
        scope_attn.disable(pipe)
    scope_attn.enable(pipe, dense_steps=0, **SPARSE)
    for block in pipe.transformer.transformer_blocks:
        others = block.audio_attn1, block.attn2, block.audio_attn2, block.audio_to_video_attn, block.video_to_audio_attn
        assert not any(isinstance(attn.processor, host.Processor) for attn in others)
    own = type(pipe.transformer).forward
    mask = torch.ones(1, 256, 256, device=tiny.DEVICE, dtype=tiny.DTYPE)
    pipe.transformer.forward = lambda **given: own(pipe.transformer, **given, video_self_attention_mask=mask.expand(
        len(given["hidden_states"]), -1, -1))
    tiny.make_ltx2(pipe)
    assert {call.why for call in scope_attn.receipt(pipe).calls} == {"the call has a mask"}


def test_window():
    """The part of the schedule that may be sparse, as shares of its steps."""
    pipe = tiny.wan()
    scope_attn.enable(pipe, window=(0.2, 0.8), dense_layers=0, **SPARSE)
    tiny.make_wan(pipe, steps=10)
    assert {call.step for call in scope_attn.receipt(pipe).calls if call.sparse} == set(range(2, 8))
    scope_attn.disable(pipe)
    for window, given, told in (((0.5, 0.5), {}, "window: got 0.5 to 0.5"), ((0, 1.5), {}, "0 <= from < to <= 1"),
                                ((0, 1), dict(dense_steps=0.1), "window, dense_steps: both say")):
        with pytest.raises(ValueError, match=told):
            scope_attn.enable(pipe, window=window, **given)


@pytest.mark.parametrize("enough", [0, 2])
def test_out_of_memory(monkeypatch, enough):
    """Where a state finds no memory the error reaches the caller, no state is kept, and a smaller video runs."""
    pipe = tiny.wan()
    scope_attn.enable(pipe, **SPARSE)
    bind, made = scope_attn.State._bind, itertools.count()

    def fail(state, plan):
        if next(made) >= enough:
            raise torch.OutOfMemoryError("CUDA out of memory")
        bind(state, plan)

    monkeypatch.setattr(scope_attn.State, "_bind", fail)
    with pytest.raises(torch.OutOfMemoryError):
        tiny.make_wan(pipe)
    assert not any(pipe.transformer.blocks[1].attn1.processor.run.session.video.states.values())
    monkeypatch.setattr(scope_attn.State, "_bind", bind)
    out = tiny.make_wan(pipe)
    other = tiny.wan()
    scope_attn.enable(other, **SPARSE)
    assert (tiny.make_wan(other) == out).all()


def test_another_length():
    """A video longer than the one before, and one that grows on its way: states are those of its own length."""
    pipe, other = tiny.wan(), tiny.wan()
    for each in (pipe, other):
        scope_attn.enable(each, dense_steps=0, **SPARSE)
    tiny.make_wan(pipe)
    assert (tiny.make_wan(pipe, side=192) == tiny.make_wan(other, side=192)).all()
    text, pipe.scheduler = tiny.randn(1, 6, 16), diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipe.scheduler.set_timesteps(4, device=tiny.DEVICE)
    with torch.no_grad():
        for timestep, side in zip(pipe.scheduler.timesteps, (16, 16, 24, 24)):
            latents = tiny.randn(1, 4, 4, side, side)
            pipe.scheduler.step(pipe.transformer(latents, timestep[None], text).sample, timestep, latents)
    assert [call.stats.warm for call in scope_attn.receipt(pipe).calls if call.layer == 1] == [False, True, False, True]


def test_unknown_versions(monkeypatch):
    """A diffusers that we have not seen is refused in words, at import, at enable() and in a pass."""
    with monkeypatch.context() as patch:
        for name in [name for name in sys.modules if name.startswith("scope_attn.hosts.diffusers")]:
            patch.delitem(sys.modules, name)
        patch.delattr(scope_attn.hosts, "diffusers")
        patch.delattr(diffusers.models.attention_dispatch, "_AttentionBackendRegistry")
        for _ in range(2):
            with pytest.raises(ImportError, match="not here as 0.36 to 0.42 have it: .*_AttentionBackendRegistry.*; install one of these"):
                scope_attn.enable(None)
    pipe, own = tiny.wan(), tiny.wan()
    scope_attn.enable(pipe, **SPARSE)
    pipe.scheduler.set_timesteps(3)
    with pytest.raises(RuntimeError, match="WanTransformer3DModel: it is not as .* have it: 'encoder_hidden_states'; install"):
        pipe.transformer(tiny.randn(1, 4, 4, 16, 16), tiny.randn(1), text=tiny.randn(1, 6, 16))
    del own.transformer.blocks
    with pytest.raises(RuntimeError, match="WanTransformer3DModel: it is not as diffusers 0.36 to 0.42 have it: .*'blocks'"):
        scope_attn.enable(own)


def test_two_pipelines():
    """In one process, in turns: each has its own states."""
    first, second = tiny.wan(), tiny.hunyuan()
    scope_attn.enable(first, **SPARSE)
    scope_attn.enable(second, **SPARSE)
    expected = tiny.make_wan(first), tiny.make_hunyuan(second)
    found = []

    def between(pipe, step, timestep, kwargs):
        if step == 2:
            found.append(tiny.make_hunyuan(second))
        return kwargs

    out = tiny.make_wan(first, callback_on_step_end=between)
    assert (out == expected[0]).all() and (found[0] == expected[1]).all()


def test_steps_of_a_part():
    """A scheduler that counts no steps, in a pipeline that runs a part of them."""
    pipe = tiny.cogvideox()
    scope_attn.enable(pipe, **SPARSE)
    text = tiny.randn(2, 6, 16)
    pipe.scheduler.set_timesteps(8)
    pipe._num_timesteps = 5
    with torch.no_grad():
        for timestep in pipe.scheduler.timesteps[3:]:
            rotation = pipe._prepare_rotary_positional_embeddings(128, 128, 4, tiny.DEVICE)
            pipe.transformer(tiny.randn(2, 4, 4, 16, 16), text, timestep.expand(2).to(tiny.DEVICE), image_rotary_emb=rotation)
    receipt = scope_attn.receipt(pipe)
    assert [call.step for call in receipt.calls if call.layer == 1] == [0, 1, 2, 3, 4] and receipt.settings["steps"] == 5
    assert [call.sparse for call in receipt.calls if call.layer == 1] == [False] + [True] * 4


def test_text_and_image():
    """HunyuanVideo 1.5: text and an image behind the video, without what is padding; an image of zeros is none."""
    pipe = tiny.hunyuan15()
    scope_attn.enable(pipe, dense_steps=0, **SPARSE)
    given = dict(hidden_states=tiny.randn(1, 9, 4, 16, 16), timestep=tiny.randn(1), encoder_hidden_states=tiny.randn(1, 10, 16),
                 encoder_attention_mask=torch.arange(10, device=tiny.DEVICE)[None] < 7, encoder_hidden_states_2=tiny.randn(1, 6, 12),
                 encoder_attention_mask_2=torch.arange(6, device=tiny.DEVICE)[None] > 2)
    pipe.scheduler.set_timesteps(3)
    for image, valid in ((torch.zeros_like(tiny.randn(1, 5, 8)), 7 + 3), (tiny.randn(1, 5, 8), 7 + 3 + 5)):
        with torch.no_grad():
            pipe.transformer(**given, image_embeds=image)
        call = scope_attn.receipt(pipe).calls[-1]
        pairs = 256 * (call.density * 256 + valid) + valid * (256 + valid)
        assert call.sparse and abs(call.stats.total_density - pairs / (256 + valid) ** 2) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_long_texts(dtype):
    """Pipelines give their masks in the transformer's type, in which sums round: 257 and 301 are not bf16's."""
    def mask(tokens, valid):
        return (torch.arange(tokens, device=tiny.DEVICE) < valid)[None]

    def run(pipe, valid, **given):
        pipe(**given, height=128, width=128, num_frames=13, num_inference_steps=1, output_type="latent")
        calls = scope_attn.receipt(pipe).calls
        assert len(calls) == 3
        for call in calls:
            pairs = 256 * (call.density * 256 + valid) + valid * (256 + valid)
            assert abs(call.stats.total_density - pairs / (256 + valid) ** 2) < 5e-5, "one token more or less is 2e-4"

    everywhere = dict(dense_steps=0, dense_layers=0, **SPARSE)
    pipe = tiny.hunyuan()
    pipe.transformer.to(dtype)
    scope_attn.enable(pipe, **everywhere)
    for valid in (257, 301, 512):
        run(pipe, valid, prompt_embeds=tiny.randn(1, 512, 16), pooled_prompt_embeds=tiny.randn(1, 8),
            prompt_attention_mask=mask(512, valid))
    pipe = tiny.hunyuan15()
    pipe.transformer.to(dtype)
    pipe.guider = diffusers.ClassifierFreeGuidance(guidance_scale=1.0)
    scope_attn.enable(pipe, **everywhere)
    for first, second in ((257, 0), (1, 256), (257, 44), (211, 301), (256, 256)):
        run(pipe, first + second, prompt_embeds=tiny.randn(1, 300, 16), prompt_embeds_mask=mask(300, first),
            prompt_embeds_2=tiny.randn(1, 310, 12), prompt_embeds_mask_2=mask(310, second))


def test_lengths_are_those_of_the_masks():
    """They are read once for each mask, also where a branch goes on with another."""
    expert, read = host.Expert("transformer"), []
    expert.branch_now = "cond"

    def lengths(*masks):
        expert.begin_text(families.Text(8, masks, lambda *masks: read.append(masks) or families.count_valid(*masks)), 1)
        return expert.text[1]

    three, five = torch.arange(8)[None] < 3, torch.arange(8)[None] < 5
    assert [lengths(three), lengths(three), lengths(five), lengths(three, five)] == [[3], [3], [5], [8]] and len(read) == 3


def test_min_tokens():
    pipe = tiny.wan()
    untouched = tiny.make_wan(pipe)
    scope_attn.enable(pipe, target_density=0.2)
    assert (tiny.make_wan(pipe) == untouched).all()
    receipt = scope_attn.receipt(pipe)
    assert {call.why for call in receipt.calls} == {"256 tokens, min_tokens is 4,096"} and receipt.density is None
    scope_attn.disable(pipe)
    scope_attn.enable(pipe, target_density=0.2, min_tokens=256)
    assert (tiny.make_wan(pipe) != untouched).any()


def test_receipt(tmp_path):
    pipe = tiny.wan()
    scope_attn.enable(pipe, **SPARSE)
    assert "no calls yet" in str(scope_attn.receipt(pipe))
    tiny.make_wan(pipe)
    receipt = scope_attn.receipt(pipe)
    text = str(receipt)
    assert "30 self-attention calls" in text and re.search(r"16 calls +\d+\.\d\d s  sparse, mean density 0\.2", text), text
    assert re.search(r"4 calls .* dense: the step is within dense_steps", text) and "target_density=0.2" in text
    receipt.to_json(tmp_path / "receipt.json")
    saved = json.loads((tmp_path / "receipt.json").read_text())
    assert saved["method"] == "scope-mean" and saved["rope"] == [8, 8, 8] and len(saved["calls"]) == 30
    assert all(0 < call["seconds"] < 5 for call in saved["calls"]) and sum(call["warm"] for call in saved["calls"]) == 12
    assert [(call["layer"], call["step"]) for call in saved["calls"]] == [(layer, step) for step in range(5) for _ in range(2)
                                                                         for layer in range(3)]
    sparse = [call["density"] for call in saved["calls"] if call["sparse"]]
    assert saved["density"] == receipt.density == sum(sparse) / 16, "of sparse calls alone"
    assert saved["milliseconds"] == receipt.milliseconds and all(0 < ms < 5000 for ms in saved["milliseconds"].values())
    assert text.splitlines()[-1] == receipt.pace() != ""


def test_careful_default():
    """Without a word of how many keys to keep it is 0.2, and the receipt says so; any such word is taken instead."""
    says = "target_density=0.2 is the default"
    for given, careful, density in ((dict(), True, 0.2), (dict(dense_last_steps=0.2), True, 0.2), (dict(target_density=0.3), False, 0.3),
                                    (dict(density_steps="1:0.4"), False, 0.4), (dict(rho=0.999), False, None),
                                    (dict(rule="fixed", density=0.5), False, 0.5), (dict(method="scope-exact"), False, None)):
        pipe = tiny.wan()
        scope_attn.enable(pipe, min_tokens=0, **given)
        assert (says in str(scope_attn.receipt(pipe))) == careful
        tiny.make_wan(pipe)
        receipt = scope_attn.receipt(pipe)
        assert (says in str(receipt)) == careful == receipt.to_dict()["careful"]
        assert receipt.density == pytest.approx(density, abs=0.02) if density else receipt.density > 0.3


def test_idle_products():
    """8-bit products that gain nothing are named in the receipt: those of narrow heads."""
    from scope_attn.hosts.session import Session
    for dim, products, idle in ((64, "qk8", True), (64, "qkv8", True), (64, "bf16", False), (128, "qk8", False)):
        receipt = Session(family="wan", layers=30, heads=12, dim=dim, rope=None, settings=dict(products=products)).begin(4).receipt
        assert (f"products={products}: for heads of up to 64 channels" in str(receipt)) == idle == receipt.to_dict()["idle_products"]


def receipt_of(*calls):
    """Of (dense or not, began, clustered, ended)."""
    from scope_attn._receipt import Call, Receipt
    receipt = Receipt(method="scope-mean", model="wan2.1-t2v-14b", settings={}, careful=False, idle_products=False, ranks=1,
                      steps=2)
    stats = type("Stats", (), dict(density=0.2, warm=True))
    receipt.calls = [Call("transformer", 0, 0, "cond", "dense" if dense else "", None if dense else stats, times)
                     for dense, *times in calls]
    return receipt


def test_pace():
    """Medians of dense and sparse calls, their ratio, and in words which was slower; clustering beside a dense call is not its time."""
    dense = [(True, 0.0, 0.5, 0.508), (True, 1.0, 1.0, 1.012), (True, 2.0, 2.0, 9.0)]
    receipt = receipt_of(*dense, (False, 0.0, 0.0, 0.9), (False, 1.0, 1.0, 1.004), (False, 2.0, 2.0, 2.004))
    assert receipt.milliseconds == pytest.approx(dict(dense=12, sparse=4))
    assert receipt.pace() == "median call: dense 12.00 ms, sparse 4.00 ms, 3.00 times as fast" == str(receipt).splitlines()[-1]
    assert "(mean density 0.200; median call: dense 12.00 ms" in receipt.line() and receipt.calls[0].seconds == 0.508
    slower = receipt_of(*dense, (False, 0.0, 0.0, 0.024))
    assert "0.50 times as fast: SLOWER than dense here; lower the density" in str(slower)
    alone = receipt_of((False, 0.0, 0.0, 0.004))
    assert alone.milliseconds["dense"] is None and "none was dense; python -m scope_attn.doctor --measure" in str(alone)
    assert receipt_of(*dense).pace() == "" and "median" not in str(receipt_of(*dense))


def test_preset():
    """A preset has a density of its own, which another one overrides, no dense step and no dense layer; the receipt says it."""
    for given, density in ((dict(), 0.12), (dict(target_density=0.3), 0.3)):
        pipe = tiny.wan()
        scope_attn.enable(pipe, "fast", min_tokens=0, **given)
        tiny.make_wan(pipe)
        receipt = scope_attn.receipt(pipe)
        assert f"target_density={density}" in str(receipt) and len(receipt.calls) == 30
        assert all(call.sparse and abs(call.density - density) < 0.02 for call in receipt.calls)


def test_report(tmp_path):
    """The page of `scope report`, with the clip and without one."""
    pipe = tiny.wan()
    scope_attn.enable(pipe, **SPARSE)
    with pytest.raises(ValueError, match="no calls yet"):
        scope_attn.receipt(pipe).report(tmp_path / "page.html")
    tiny.make_wan(pipe)
    receipt = scope_attn.receipt(pipe)
    receipt.report(tmp_path / "plain.html")
    receipt.report(tmp_path / "clip.html", frames=torch.rand(3, 16, 24, 3).numpy(), fps=8)
    plain, clip = (json.loads(re.search(r'id="data">(.*?)</script>', (tmp_path / name).read_text(), re.DOTALL)[1])
                   for name in ("plain.html", "clip.html"))
    run = plain["runs"][0]["run"]
    assert plain["frames"] == 0 and [len(step) for step in run["layers"]] == [6] * 5
    assert [cell["dense"] for cell in run["layers"][1]] == [True, False, False] * 2 and len(run["layers"][1][1]["k_head"]) == 2
    assert run["layers"][0][4]["name"] == "uncond, layer 1" and run["layers"][0][4]["why"] == "dense: the step is within dense_steps"
    seconds = run["seconds"]
    assert seconds["total"] > 0 and all(value >= 0 for value in seconds.values())
    assert abs(seconds["total"] - sum(value for name, value in seconds.items() if name != "total")) < 1e-6
    assert abs(seconds["dense_prefix"] - sum(call.seconds for call in receipt.calls if not call.sparse)) < 1e-6
    assert (clip["frames"], clip["height"], clip["width"], clip["columns"], len(clip["runs"][0]["sheets"])) == (3, 16, 24, 3, 1)
    with pytest.raises(ValueError, match="pass one video"):
        receipt.report(tmp_path / "clip.html", frames=torch.rand(1, 3, 16, 24, 3).numpy())


ORDERS = pytest.mark.parametrize("enabled_first", [True, False])


def keeping_all(change, enabled_first):
    """A pipeline that was changed before or after enable(), whose sparse calls keep every key: they round, and nothing else."""
    pipe = tiny.wan()
    steps = change, lambda pipe: scope_attn.enable(pipe, target_density=1, min_tokens=0, dense_layers=0, dense_steps=0)
    for step in reversed(steps) if enabled_first else steps:
        step(pipe)
    return pipe


CACHES = {
    "FirstBlockCache": lambda pipe: diffusers.FirstBlockCacheConfig(threshold=0.5),
    "MagCache": lambda pipe: diffusers.MagCacheConfig(threshold=0.5, num_inference_steps=tiny.STEPS, retention_ratio=0.2,
                                                      mag_ratios=torch.linspace(1, 0.9, tiny.STEPS)),
    "PyramidAttentionBroadcast": lambda pipe: diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(0, 1000),
        spatial_attention_block_identifiers=("blocks",), current_timestep_callback=lambda: pipe.current_timestep),
}


@ORDERS
@pytest.mark.parametrize("name", CACHES)
def test_caches(name, enabled_first):
    """The layers that a cache skips make no calls, and at density 1 nothing else changes."""
    if not hasattr(diffusers, f"{name}Config"):
        pytest.skip("newer diffusers have it")

    def cache(pipe):
        pipe.transformer.enable_cache(CACHES[name](pipe))

    plain, other = tiny.make_wan(tiny.wan()), tiny.wan()
    cache(other)
    cached = tiny.make_wan(other)
    assert (cached != plain).any()
    pipe = keeping_all(cache, enabled_first)
    assert (tiny.make_wan(pipe) - cached).abs().max() < tiny.ROUNDING
    calls = scope_attn.receipt(pipe).calls
    assert any(call.sparse for call in calls) and len(calls) < 2 * 3 * tiny.STEPS
    scope_attn.disable(pipe)
    assert (tiny.make_wan(pipe) == cached).all()
    pipe.transformer.disable_cache()
    assert (tiny.make_wan(pipe) == plain).all()


@pytest.mark.skipif(diffusers.__version__.startswith("0.36") and tiny.DEVICE == "cpu", reason="its offloading needs an accelerator")
@ORDERS
def test_offloading_and_casting(enabled_first):
    """Weights that come and go, and weights in 8 bits between their uses: at density 1 nothing else changes."""
    def prepare(pipe):
        pipe.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=tiny.DTYPE)
        pipe.transformer.enable_group_offload(onload_device=torch.device(tiny.DEVICE), offload_device=torch.device("cpu"),
                                              offload_type="leaf_level")
        return pipe

    plain, expected = tiny.make_wan(tiny.wan()), tiny.make_wan(prepare(tiny.wan()))
    assert (expected != plain).any(), "8 bits round"
    pipe = keeping_all(prepare, enabled_first)
    assert (tiny.make_wan(pipe) - expected).abs().max() < tiny.ROUNDING
    assert any(call.sparse for call in scope_attn.receipt(pipe).calls)


@ORDERS
def test_lora(enabled_first):
    pytest.importorskip("peft")
    from peft import LoraConfig

    def add(pipe):
        torch.manual_seed(0)  # of its weights
        pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False))
        return pipe

    plain, untouched = tiny.make_wan(tiny.wan()), tiny.make_wan(add(tiny.wan()))
    assert (untouched != plain).any()
    pipe = keeping_all(add, enabled_first)
    assert (tiny.make_wan(pipe) - untouched).abs().max() < tiny.ROUNDING
    assert any(call.sparse for call in scope_attn.receipt(pipe).calls)
    pipe.transformer.disable_adapters()
    assert (tiny.make_wan(pipe) - plain).abs().max() < tiny.ROUNDING


@ORDERS
def test_fused_projections(enabled_first):
    pipe = keeping_all(lambda pipe: pipe.transformer.fuse_qkv_projections(), enabled_first)
    assert (tiny.make_wan(pipe) - tiny.make_wan(tiny.wan())).abs().max() < tiny.ROUNDING
    assert any(call.sparse for call in scope_attn.receipt(pipe).calls)


def test_compiled():
    """compile_repeated_blocks(fullgraph=True): one graph for twelve layers, the bits of eager ones, and disabled again."""
    from torch._dynamo.testing import CompileCounterWithBackend
    torch._dynamo.reset()
    pipe = tiny.wan()
    pipe.transformer = tiny.wan_transformer(layers=12)
    untouched = tiny.make_wan(pipe)
    scope_attn.enable(pipe, **SPARSE)
    eager = tiny.make_wan(pipe)
    graphs = CompileCounterWithBackend("aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of diffusers' own code
        pipe.transformer.compile_repeated_blocks(fullgraph=True, backend=graphs)
        assert (tiny.make_wan(pipe) == eager).all()
        assert graphs.frame_count == 1
        assert len(scope_attn.receipt(pipe).calls) == 2 * 12 * tiny.STEPS
        assert (tiny.make_wan(pipe) == eager).all()
        scope_attn.disable(pipe)
        assert (tiny.make_wan(pipe) == untouched).all()


@pytest.mark.parametrize("name, count", [("hunyuan-1.5", 1), ("cogvideox", 2)])
def test_compiled_processors(name, count):
    """Ours in the place of diffusers' own: one graph for all blocks, or two where the first gets views, and the same bits."""
    from torch._dynamo.testing import CompileCounterWithBackend
    torch._dynamo.reset()
    make, run = KINDS[name]
    pipe = make()
    scope_attn.enable(pipe, **SPARSE)
    eager, graphs = run(pipe), CompileCounterWithBackend("aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in pipe.transformer.transformer_blocks:
            block.compile(fullgraph=True, backend=graphs)
        assert (run(pipe) == eager).all() and graphs.frame_count == count


@pytest.mark.skipif(tiny.DEVICE == "cpu", reason="minutes of C++ compilation; the operator itself is compiled in test_torch.py")
def test_inductor(kind):
    """Blocks compiled as users do: at density 1 the untouched pipeline to rounding."""
    torch._dynamo.reset()
    make, run = kind
    pipe = make()
    untouched = run(pipe)
    scope_attn.enable(pipe, target_density=1, min_tokens=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("transformer", "transformer_2"):
            for blocks in ("blocks", "vace_blocks", "transformer_blocks", "single_transformer_blocks"):
                for block in getattr(getattr(pipe, name, None), blocks, ()):
                    block.compile(fullgraph=True)
        assert (run(pipe) - untouched).abs().max() < tiny.ROUNDING
    assert any(call.sparse for call in scope_attn.receipt(pipe).calls)


def test_backends_of_dense_calls():
    """Dense calls go where the pipeline sends its attention, during and after."""
    pipe = tiny.wan()
    scope_attn.enable(pipe, **SPARSE)
    native = tiny.make_wan(pipe)
    pipe.transformer.blocks[0].attn1.processor._attention_backend = AttentionBackendName("_native_math")
    assert (tiny.make_wan(pipe) != native).any()
    pipe.transformer.set_attention_backend("_native_math")
    try:
        tiny.make_wan(pipe)
        scope_attn.disable(pipe)
        assert pipe.transformer.blocks[1].attn1.processor._attention_backend.value == "_native_math"
        scope_attn.enable(pipe, **SPARSE)
        pipe.transformer.set_attention_backend("scope")
        with pytest.raises(RuntimeError, match='the attention backend "scope" is for layers that'):
            tiny.make_wan(pipe)
    finally:
        pipe.transformer.set_attention_backend("native")
    scope_attn.disable(pipe)
    assert pipe.transformer.blocks[1].attn1.processor._attention_backend.value == "native"


def test_save_and_load(tmp_path):
    pipe = tiny.wan()
    untouched = tiny.make_wan(pipe)
    scope_attn.enable(pipe, **SPARSE)
    tiny.make_wan(pipe)
    pipe.save_pretrained(tmp_path)
    loaded = diffusers.WanPipeline.from_pretrained(tmp_path, tokenizer=None, text_encoder=None, vae=None, transformer_2=None)
    loaded.set_progress_bar_config(disable=True)
    loaded.to(tiny.DEVICE, tiny.DTYPE)
    assert all((weight == pipe.transformer.state_dict()[name]).all() for name, weight in loaded.transformer.state_dict().items())
    assert (tiny.make_wan(loaded) - untouched).abs().max() < tiny.ROUNDING  # its weights lie at other addresses, and sums depend on that
    scope_attn.enable(loaded, target_density=1, min_tokens=0)
    assert (tiny.make_wan(loaded) - untouched).abs().max() < tiny.ROUNDING


def test_copies():
    pipe = tiny.wan()
    scope_attn.enable(pipe, **SPARSE)
    out = tiny.make_wan(pipe)
    for copied in (lambda: copy.deepcopy(pipe.transformer), lambda: pickle.dumps(pipe.transformer)):
        with pytest.raises(TypeError, match=r"disable\(pipe\), copy or pickle it"):
            copied()
    scope_attn.disable(pipe)
    second = copy.deepcopy(pipe)
    scope_attn.enable(second, **SPARSE)
    assert (tiny.make_wan(second) == out).all()


def test_shared_transformer():
    """Another pipeline around the same transformer is enabled with it, and outlives the first."""
    pipe = tiny.wan()
    scope_attn.enable(pipe, **SPARSE)
    out = tiny.make_wan(pipe)
    second = diffusers.WanPipeline(**pipe.components)
    second.set_progress_bar_config(disable=True)
    with pytest.raises(RuntimeError, match="enabled already"):
        scope_attn.enable(second)
    del pipe
    gc.collect()
    assert (tiny.make_wan(second) == out).all()
    scope_attn.disable(second)
    assert (tiny.make_wan(second) != out).any()


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("make", [tiny.wan_scheduler, lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)])
def test_shared_transformer_with_another_scheduler(make, ran):
    """Its passes are not those of the enabled pipeline, whose scheduler stands still: refused, or dense with a warning."""
    for strict in (True, False):
        pipe = tiny.wan()
        pipe.scheduler = make()
        second = diffusers.WanPipeline(**{**pipe.components, "scheduler": tiny.wan_scheduler()})
        second.set_progress_bar_config(disable=True)
        dense = tiny.make_wan(second)
        scope_attn.enable(pipe, strict=strict, **SPARSE)
        out = tiny.make_wan(pipe) if ran else None
        if strict:
            with pytest.raises(RuntimeError, match="share the scheduler"):
                tiny.make_wan(second)
        else:
            with pytest.warns(UserWarning, match="share the scheduler"):
                assert (tiny.make_wan(second) == dense).all()
        assert not ran or (tiny.make_wan(pipe) == out).all()
        scope_attn.disable(second)
        scope_attn.enable(second, **SPARSE)
        tiny.make_wan(second)
        assert {call.step for call in scope_attn.receipt(second).calls} == set(range(tiny.STEPS))


def test_mistyped_names():
    pipe = tiny.wan()
    for given, meant in ((dict(min_token=1), "min_tokens"), (dict(windw=(0, 1)), "window"), (dict(strct=False), "strict"),
                         (dict(target_densty=0.2), "target_density"), (dict(dense_step=0.1), "dense_steps")):
        with pytest.raises(ValueError, match=f'did you mean "{meant}"'):
            scope_attn.enable(pipe, **given)


@pytest.mark.skipif(tiny.DEVICE != "cpu", reason="what the CPU lacks")
def test_what_the_device_decides():
    """Products and kernels are refused in the first call, where the device is known; names and values in enable()."""
    pipe = tiny.wan()
    for given, told in ((dict(products="qk9"), 'did you mean "qk8"'), (dict(kernel="wgma"), 'did you mean "wgmma"')):
        with pytest.raises(ValueError, match=told):
            scope_attn.enable(pipe, **given)
    for given, told in ((dict(products="qk8"), "cpu has no qk8 for f32 inputs"), (dict(kernel="wgmma"), "wgmma is a CUDA kernel")):
        scope_attn.enable(pipe, **SPARSE, **given)
        with pytest.raises(RuntimeError, match=told):
            tiny.make_wan(pipe)
        scope_attn.disable(pipe)
    q = torch.zeros(1, 1, 64, 16, dtype=torch.bfloat16)
    try:
        scope_attn.attention(q, q, q, method="dense", products="qk8")
    except scope_attn.ScopeError:
        pytest.skip("this CPU has no 8-bit products")
    pipe.transformer.to(torch.bfloat16)
    scope_attn.enable(pipe, **SPARSE, products="qk8")
    tiny.make_wan(pipe)
    assert {call.stats.arithmetic for call in scope_attn.receipt(pipe).calls if call.sparse} == {"s8+bf16"}


def test_another_scheduler():
    pipe = tiny.wan()
    scope_attn.enable(pipe, **SPARSE)
    tiny.make_wan(pipe)
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    tiny.make_wan(pipe, steps=6)
    assert {call.step for call in scope_attn.receipt(pipe).calls} == set(range(6))


def test_memory_is_given_back():
    """No cycle of ours keeps a pipeline alive."""
    pipe = tiny.wan()
    weight = weakref.ref(pipe.transformer.proj_out.weight)
    scope_attn.enable(pipe, **SPARSE)
    gc.collect()
    gc.disable()
    try:
        del pipe
        assert weight() is None
    finally:
        gc.enable()


def test_thread():
    pipe = tiny.wan()
    scope_attn.enable(pipe, **SPARSE)
    expected, found = tiny.make_wan(pipe), []
    worker = threading.Thread(target=lambda: found.append(tiny.make_wan(pipe)))
    worker.start()
    worker.join()
    assert (found[0] == expected).all()


def test_refusals():
    pipe = tiny.wan()
    for wrong, message in ((pipe.transformer, "got WanTransformer3DModel, expected a diffusers pipeline"), (None, "got NoneType"),
                           (types.SimpleNamespace(transformer=torch.nn.Linear(1, 1), scheduler=None), "got Linear, expected one of WanTr")):
        with pytest.raises(TypeError, match=message):
            scope_attn.enable(wrong)
    causal = types.SimpleNamespace(scheduler=pipe.scheduler, transformer=diffusers.SkyReelsV2Transformer3DModel(
        num_attention_heads=1, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8, freq_dim=8, ffn_dim=8, num_layers=1,
        num_frame_per_block=2))
    with pytest.raises(TypeError, match="SkyReelsV2Transformer3DModel: it is causal here"):
        scope_attn.enable(causal)
    forcing = type("SkyReelsV2DiffusionForcingPipeline", (types.SimpleNamespace,), {})
    with pytest.raises(TypeError, match="DiffusionForcingPipeline, whose frames are at different steps"):
        scope_attn.enable(forcing(scheduler=pipe.scheduler, transformer=pipe.transformer))
    with pytest.raises(scope_attn.ScopeValueError, match="densty"):
        scope_attn.enable(pipe, densty=0.2)
    with pytest.raises(scope_attn.ScopeValueError, match='target_density: got "2"'):
        scope_attn.enable(pipe, target_density=2)
    with pytest.raises(scope_attn.ScopeValueError, match="wan9"):
        scope_attn.enable(pipe, model="wan9")
    with pytest.raises(ValueError, match='got "sol", whose blocks .* Morton order, .* `scope generate --method sol`'):
        scope_attn.enable(pipe, method="sol", strict=False)
    with pytest.raises(ValueError, match="min_tokens: got -1"):
        scope_attn.enable(pipe, min_tokens=-1)
    for ask in (scope_attn.disable, scope_attn.receipt):
        with pytest.raises(RuntimeError, match="it is not enabled"):
            ask(pipe)
    own = pipe.transformer.blocks[1].attn1.processor
    pipe.transformer.blocks[1].attn1.processor = lambda *args: None
    with pytest.raises(TypeError, match="layer 1 has a function, expected a processor that attends through"):
        scope_attn.enable(pipe)
    pipe.transformer.blocks[1].attn1.processor = own
    other = tiny.hunyuan15()
    other.transformer.transformer_blocks[2].attn.processor = own
    with pytest.raises(TypeError, match="layer 2 has a WanAttnProcessor, expected a HunyuanVideo15AttnProcessor2_0"):
        scope_attn.enable(other)
    own._parallel_config = parallel(ring_degree=2)
    with pytest.raises(RuntimeError, match="pipe.transformer: context parallelism: got ring_degree=2, expected ulysses_degree alone"):
        scope_attn.enable(pipe)
    own._parallel_config = None
    assert not hasattr(pipe.transformer.blocks[0].attn1.processor, "run"), "nothing was changed"
    scope_attn.enable(pipe, **SPARSE)
    with pytest.raises(RuntimeError, match=r"enabled already; call scope_attn.disable\(pipe\)"):
        scope_attn.enable(pipe)
    pipe.transformer.blocks[1].attn1.set_processor(own)
    with pytest.raises(RuntimeError, match="layer 1 of transformer: its processor was replaced by a WanAttnProcessor"):
        tiny.make_wan(pipe)


class Whole(torch.nn.Module):
    """What a tool leaves that quantises a whole layer at once."""

    def __init__(self, inner):
        super().__init__()
        self.call = inner.forward

    def forward(self, *args, **kwargs):
        return self.call(*args, **kwargs)


def test_layers_that_hide_their_attention():
    """A quantised attention or block that we cannot see into is refused in words, before enable() and after it."""
    pipe = tiny.wan()
    pipe.transformer.blocks[1].attn1 = Whole(pipe.transformer.blocks[1].attn1)
    untouched = tiny.make_wan(pipe)
    with pytest.raises(TypeError, match="pipe.transformer: layer 1 is a Whole, which hides the attention .* linear layers alone"):
        scope_attn.enable(pipe)
    assert (tiny.make_wan(pipe) == untouched).all() and (untouched == tiny.make_wan(tiny.wan())).all()
    pipe = tiny.wan()
    pipe.transformer.blocks[2] = Whole(pipe.transformer.blocks[2])
    with pytest.raises(RuntimeError, match="'Whole' object has no attribute 'attn1'; .* quantise linear layers alone"):
        scope_attn.enable(pipe)
    pipe = tiny.wan()
    scope_attn.enable(pipe, **SPARSE)
    pipe.transformer.blocks[1].attn1 = Whole(tiny.wan().transformer.blocks[1].attn1)
    with pytest.raises(RuntimeError, match="layer 1 of transformer: its processor was replaced by a Whole since enable"):
        tiny.make_wan(pipe)
    pipe.transformer.blocks[1] = Whole(tiny.wan().transformer.blocks[1])
    with pytest.raises(RuntimeError, match="'Whole' object has no attribute 'attn1'; .* quantise linear layers alone"):
        tiny.make_wan(pipe)


def test_parallel_hunyuan():
    """diffusers has no plan for it, whoever sets the configuration."""
    pipe = tiny.hunyuan()
    own = pipe.transformer.transformer_blocks[0].attn.processor
    own._parallel_config = parallel(ulysses_degree=2)
    with pytest.raises(RuntimeError, match="pipe.transformer: context parallelism: it is for Wan.s plain"):
        scope_attn.enable(pipe)
    own._parallel_config = None
    scope_attn.enable(pipe, **SPARSE)
    pipe.transformer.transformer_blocks[0].attn.processor._parallel_config = parallel(ulysses_degree=2)
    with pytest.raises(RuntimeError, match="context parallelism: it is for Wan.s plain"):
        tiny.make_hunyuan(pipe)


def parallel(ring_degree=1, ulysses_degree=1):
    """What enable_parallelism gives to processors, where nothing gets as far as its ranks."""
    return types.SimpleNamespace(context_parallel_config=types.SimpleNamespace(ring_degree=ring_degree, ulysses_degree=ulysses_degree,
                                                                               _ulysses_local_rank=0))


def test_refused_calls():
    pipe = tiny.wan()
    pipe.scheduler.set_timesteps(3)
    scope_attn.enable(pipe, dense_steps=0, **SPARSE)
    inputs = dict(hidden_states=tiny.randn(1, 4, 4, 16, 16), timestep=tiny.randn(1), encoder_hidden_states=tiny.randn(1, 6, 16))
    with pytest.raises(RuntimeError, match="q, k, v: they require gradients"):
        pipe.transformer(**inputs)
    pipe.transformer.blocks[1].attn1.processor._parallel_config = parallel(ring_degree=2)
    with torch.no_grad(), pytest.raises(RuntimeError, match="context parallelism: got ring_degree=2"):
        pipe.transformer(**inputs)
    pipe.transformer.blocks[1].attn1.processor._parallel_config = None
    layer = pipe.transformer.blocks[1].attn1
    with pytest.raises(ValueError, match="is_causal, dropout_p: got True"):
        dispatch_attention_fn(*tiny.randn(3, 1, 256, 2, 24), parallel_config=layer.processor.ticket, is_causal=True, backend="scope")
    with torch.no_grad(), pytest.raises(ValueError, match="attention_mask: layer 1 got one"):
        layer(tiny.randn(1, 256, 48), attention_mask=torch.ones(256, 256, dtype=torch.bool, device=tiny.DEVICE))


def test_lenient():
    """What cannot run sparse raises; without `strict` it warns once, runs dense, and the receipt says why."""
    def make(strict):
        pipe = tiny.wan()
        pipe.transformer.double()
        scope_attn.enable(pipe, strict=strict, **SPARSE)
        return tiny.make_wan(pipe), scope_attn.receipt(pipe)

    with pytest.raises(TypeError, match="q: got torch.float64"):
        make(strict=True)
    with pytest.warns(UserWarning, match="own attention runs in the place of sparse calls: q: got torch.float64") as caught:
        out, receipt = make(strict=False)
    assert len([warning for warning in caught if "scope_attn" in str(warning.message)]) == 1
    assert not any(call.sparse for call in receipt.calls)
    assert all(call.why.startswith("refused: q: got torch.float64") for call in receipt.calls)
    pipe = tiny.wan()
    pipe.transformer.double()
    assert (out == tiny.make_wan(pipe)).all()


def test_quick_start(monkeypatch, tmp_path, capsys):
    """The lines of docs/guide/diffusers.md as they stand, with a tiny pipeline in the place of the download."""
    page = (Path(__file__).parents[2] / "docs" / "guide" / "diffusers.md").read_text()
    code, = re.findall(r"```python\n(.*?)```", page, re.DOTALL)

    class Tiny:
        def __init__(self):
            self.pipe = tiny.wan()

        def __getattr__(self, name):
            return getattr(self.pipe, name)

        def to(self, device):
            return self

        def __call__(self, prompt, height, width, num_frames):
            return types.SimpleNamespace(frames=tiny.make_wan(self.pipe, side=512))  # 4,096 tokens

    monkeypatch.setattr(diffusers.WanPipeline, "from_pretrained", lambda name, torch_dtype: Tiny())
    monkeypatch.setattr("diffusers.utils.export_to_video", lambda frames, path, fps: None)
    exec(code, {})
    said = capsys.readouterr().out
    assert re.search(r"16 calls .* sparse, mean density 0\.2", said), said
    for line in ("self-attention calls", "dense: the layer is below dense_layers", "dense: the step is within dense_steps"):
        assert line in said and line in page, "the page shows what is printed"
