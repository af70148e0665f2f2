"""Calls the C ABI from ctypes on [batch, tokens, heads, dim] bf16 arrays, the way a diffusers attention processor holds them."""
import pathlib
import sys
import types

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "python" / "scope_attn"))
import _c_api as api

BATCH, TOKENS, HEADS, DIM, TEXT = 2, 280, 3, 64, 24


def to_bf16(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def to_f32(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def tensor(x):  # strides in elements, straight from the array
    b, t, h, _ = (s // x.itemsize for s in x.strides)
    return api.Tensor(x.ctypes.data, b, h, t)


@pytest.fixture(scope="module")
def libscope(library):
    return api.LibScope(library)


@pytest.fixture
def call(libscope):
    """A plan with a state, its arguments, and the arrays that they are addresses of: video first, then text, right-padded."""
    rng = np.random.default_rng(1)
    q, k, v = (to_bf16(rng.standard_normal((BATCH, TOKENS, HEADS, DIM))) for _ in range(3))
    out = np.zeros_like(q)
    lengths = np.array([TOKENS, TOKENS - 10], np.int64)
    is_text = np.zeros((BATCH, -(-TOKENS // 32) * 32), bool)
    is_text[:, TOKENS - TEXT:TOKENS] = True
    keep = np.packbits(is_text, axis=1, bitorder="little").view(np.uint32)
    plan = libscope.plan("scope", {"rule": "target", "density": 0.3}, threads=2, batch=BATCH, heads=HEADS, q_tokens=TOKENS,
                         k_tokens=TOKENS, dim=DIM, dtype=api.BF16, dense_queries=1, rope=(24, 20, 20))
    info, state = plan.info, plan.state()
    report = np.zeros(info.report_bytes // 16 + 1, np.complex128)  # at a multiple of 16
    labels = np.empty((BATCH, HEADS, TOKENS), np.int32)
    mask = np.empty((BATCH, HEADS, info.selection_groups, info.mask_words), np.uint32)
    args = dict(q=tensor(q), k=tensor(k), v=tensor(v), out=tensor(out), q_lengths=lengths.ctypes.data, k_lengths=lengths.ctypes.data,
                keep=keep.ctypes.data, dense_queries=keep.ctypes.data, layer=3, step=20, steps=50, state=state,
                report=report.ctypes.data, selection=api.Selection(labels=labels.ctypes.data, mask=mask.ctypes.data))
    return types.SimpleNamespace(plan=plan, state=state, args=args, q=q, k=k, v=v, out=out, lengths=lengths, is_text=is_text, keep=keep,
                                 report=report, labels=labels, mask=mask)


@pytest.fixture
def warm(call):
    """The statistics of a second call, which begins with the clusters of the first."""
    for number in range(2):
        stats = call.plan.run(**call.args)
        assert (stats.reason, stats.warm, call.state.filled) == (api.SPARSE, number, True), (stats.reason, stats.warm)
    assert abs(stats.density - 0.3) < 0.01 and stats.total_density > stats.density
    return stats


def test_the_output_is_attention_over_the_selection(call, warm):
    """bf16 with text and padding, against float64."""
    selected = np.unpackbits(call.mask.view(np.uint8), axis=-1, bitorder="little")[..., :TOKENS].astype(bool)
    worst = 0.0
    for b in range(BATCH):
        for h in range(HEADS):
            Q, K, V = (to_f32(x[b, :, h]).astype(np.float64) for x in (call.q, call.k, call.v))
            for i in range(TOKENS):
                if i >= call.lengths[b]:
                    assert call.labels[b, h, i] == -1 and not call.out[b, i, h].any(), "padding gives zeros"
                    continue
                sees = selected[b, h, call.labels[b, h, i]] | call.is_text[b, :TOKENS]
                sees[call.lengths[b]:] = False
                assert i < TOKENS - TEXT or sees[:call.lengths[b]].all(), "text attends to everything valid"
                p = np.exp(K[sees] @ Q[i] / np.sqrt(DIM))
                exact = p @ V[sees] / p.sum()
                worst = max(worst, np.abs(exact - to_f32(call.out[b, i, h])).max())
    assert worst < 0.02, worst


def test_a_report_says_what_the_statistics_of_the_call_do(call, warm):
    later = api.CallStats()
    heads = call.plan.read_report(call.report.ctypes.data, later)
    assert later.density == warm.density and heads[5].k_head > 0 and warm.arithmetic in (b"f32", b"bf16")


def test_a_state_is_saved_and_loaded_elsewhere_and_reset(call, warm):
    saved = call.state.save()
    call.plan.run(**call.args)
    other = call.plan.state()
    other.load(saved)
    call.plan.run(**{**call.args, "state": other})
    again = call.out.copy()
    call.state.load(saved)
    assert call.plan.run(**call.args).warm == 1 and (call.out == again).all()
    call.state.reset()
    assert not call.state.filled and call.plan.run(**call.args).warm == 0


def test_a_place_decides_whether_a_call_is_dense(call):
    plan = call.plan
    assert plan.run(**{**call.args, "layer": 0}).reason == plan.reason(layer=0)[0] == api.DENSE_LAYER, "layer 0 attends densely"
    assert plan.reason(3, 20, 50) == (api.SPARSE, False)
    with pytest.raises(api.ScopeError) as error:
        plan.run(**{**call.args, "step": 50})
    assert error.value.status == 1 and "step" in str(error.value), error.value


def test_tables_list_methods_settings_and_models(libscope):
    assert libscope.methods()[0].name == b"scope" and len(libscope.settings()) > 15
    hunyuan = next(m for m in libscope.models() if m.name == b"hunyuanvideo-13b")
    assert (hunyuan.layers, list(hunyuan.rope), hunyuan.warm_prefix) == (60, [16, 56, 56], 1)
    known = libscope.plan("scope", model="hunyuanvideo-13b", q_tokens=64, k_tokens=64, batch=1, heads=1, dim=128, rope=hunyuan.rope)
    assert known.reason(5, 0, hunyuan.steps) == (api.DENSE_STEP, True) and float(known.setting("rho")) == hunyuan.rho
