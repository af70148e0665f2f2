"""Calls the C ABI from ctypes on [batch, tokens, heads, dim] bf16 arrays, the way a diffusers attention processor holds them.

    check_ctypes.py LIBSCOPE.SO
"""
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "python" / "scope_attn"))
import _c_api as api


def to_bf16(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def to_f32(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


batch, tokens, heads, dim, text = 2, 280, 3, 64, 24
rng = np.random.default_rng(1)
q, k, v = (to_bf16(rng.standard_normal((batch, tokens, heads, dim))) for _ in range(3))
out = np.zeros_like(q)
lengths = np.array([tokens, tokens - 10], np.int64)  # video first, then text, right-padded
is_text = np.zeros((batch, -(-tokens // 32) * 32), bool)
is_text[:, tokens - text:tokens] = True
keep = np.packbits(is_text, axis=1, bitorder="little").view(np.uint32)

libscope = api.LibScope(sys.argv[1])
plan = libscope.plan("scope", {"rule": "target", "density": 0.3}, threads=2, batch=batch, heads=heads, q_tokens=tokens,
                     k_tokens=tokens, dim=dim, dtype=api.BF16, dense_queries=1, rope=(24, 20, 20))
info = plan.info
state = plan.state()
report = np.zeros(info.report_bytes // 16 + 1, np.complex128)  # at a multiple of 16
labels = np.empty((batch, heads, tokens), np.int32)
mask = np.empty((batch, heads, info.selection_groups, info.mask_words), np.uint32)


def tensor(x):  # strides in elements, straight from the array
    b, t, h, _ = (s // x.itemsize for s in x.strides)
    return api.Tensor(x.ctypes.data, b, h, t)


args = dict(q=tensor(q), k=tensor(k), v=tensor(v), out=tensor(out), q_lengths=lengths.ctypes.data, k_lengths=lengths.ctypes.data,
            keep=keep.ctypes.data, dense_queries=keep.ctypes.data, layer=3, step=20, steps=50, state=state,
            report=report.ctypes.data, selection=api.Selection(labels=labels.ctypes.data, mask=mask.ctypes.data))
for call in range(2):
    stats = plan.run(**args)
    assert (stats.reason, stats.warm, state.filled) == (api.SPARSE, call, True), (stats.reason, stats.warm)
assert abs(stats.density - 0.3) < 0.01 and stats.total_density > stats.density

selected = np.unpackbits(mask.view(np.uint8), axis=-1, bitorder="little")[..., :tokens].astype(bool)
worst = 0.0
for b in range(batch):
    for h in range(heads):
        Q, K, V = (to_f32(x[b, :, h]).astype(np.float64) for x in (q, k, v))
        for i in range(tokens):
            if i >= lengths[b]:
                assert labels[b, h, i] == -1 and not out[b, i, h].any(), "padding gives zeros"
                continue
            sees = selected[b, h, labels[b, h, i]] | is_text[b, :tokens]
            sees[lengths[b]:] = False
            assert i < tokens - text or sees[:lengths[b]].all(), "text attends to everything valid"
            p = np.exp(K[sees] @ Q[i] / np.sqrt(dim))
            exact = p @ V[sees] / p.sum()
            worst = max(worst, np.abs(exact - to_f32(out[b, i, h])).max())
assert worst < 0.02, worst
# A report says what the call's own statistics do; a state can be saved, loaded elsewhere and reset.
later = api.CallStats()
heads_now = plan.read_report(report.ctypes.data, later)
assert later.density == stats.density and heads_now[5].k_head > 0 and stats.arithmetic in (b"f32", b"bf16")
saved = state.save()
plan.run(**args)
other = plan.state()
other.load(saved)
plan.run(**{**args, "state": other})
again = out.copy()
state.load(saved)
assert plan.run(**args).warm == 1 and (out == again).all()
state.reset()
assert not state.filled and plan.run(**args).warm == 0

assert plan.run(**{**args, "layer": 0}).reason == plan.reason(layer=0)[0] == api.DENSE_LAYER, "layer 0 attends densely"
assert plan.reason(3, 20, 50) == (api.SPARSE, False)
assert libscope.methods()[0].name == b"scope" and len(libscope.settings()) > 15
hunyuan = next(m for m in libscope.models() if m.name == b"hunyuanvideo-13b")
assert (hunyuan.layers, list(hunyuan.rope), hunyuan.warm_prefix) == (60, [16, 56, 56], 1)
known = libscope.plan("scope", model="hunyuanvideo-13b", q_tokens=64, k_tokens=64, batch=1, heads=1, dim=128, rope=hunyuan.rope)
assert known.reason(5, 0, hunyuan.steps) == (api.DENSE_STEP, True) and float(known.setting("rho")) == hunyuan.rho
try:
    plan.run(**{**args, "step": 50})
    raise SystemExit("step 50 of 50 was accepted")
except api.ScopeError as error:
    assert error.status == 1 and "step" in str(error), error
print(f"bf16 [batch, tokens, heads, dim] with text and padding: largest difference from float64 {worst:.4f}")
