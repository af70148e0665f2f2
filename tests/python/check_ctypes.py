"""Calls the C ABI from ctypes on [batch, tokens, heads, dim] bf16 arrays, the way a diffusers attention processor holds them.

    check_ctypes.py LIBSCOPE.SO
"""
import ctypes as c
import sys

import numpy as np

lib = c.CDLL(sys.argv[1])
lib.scope_last_error.restype = c.c_char_p
SCOPE_BF16 = 2


class Shape(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("batch", c.c_int64), ("heads", c.c_int64), ("q_tokens", c.c_int64),
                ("k_tokens", c.c_int64), ("dim", c.c_int64), ("dtype", c.c_int), ("dense_queries", c.c_int32),
                ("rope", c.c_int64 * 3), ("subspaces", c.c_int64), ("subspace_sizes", c.c_void_p), ("subspace_channels", c.c_void_p)]


class Info(c.Structure):
    _fields_ = [("struct_size", c.c_size_t)] + [(name, c.c_int64) for name in (
        "workspace_bytes", "state_bytes", "groups", "codes", "subspaces", "selection_groups", "mask_words")]


class Tensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("batch_stride", c.c_int64), ("head_stride", c.c_int64), ("token_stride", c.c_int64)]


class Selection(c.Structure):
    _fields_ = [(name, c.c_void_p) for name in ("labels", "sizes", "counts", "mask", "keep", "centroids", "codebooks", "codes")]


class Stats(c.Structure):
    _fields_ = [("reason", c.c_int), ("warm", c.c_int32), ("iterations", c.c_int32), ("bf16_dots", c.c_int32)] + [
        (name, c.c_double) for name in ("density", "total_density", "check", "group", "encode", "score", "select", "attend", "total")]


class Args(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("q", Tensor), ("k", Tensor), ("v", Tensor), ("out", Tensor)] + [
        (name, c.c_void_p) for name in ("lse", "q_lengths", "k_lengths", "keep", "dense_queries")] + [
        (name, c.c_int64) for name in ("layer", "step", "steps")] + [("state", c.c_void_p), ("workspace", c.c_void_p),
        ("workspace_bytes", c.c_int64), ("selection", Selection), ("stats", c.c_void_p), ("head_stats", c.c_void_p)]


def check(status):
    if status:
        raise RuntimeError(f"{status}: {lib.scope_last_error().decode()}")


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

context, method, plan = c.c_void_p(), c.c_void_p(), c.c_void_p()
check(lib.scope_context_create(2, None, c.byref(context)))
check(lib.scope_method_create(b"scope", c.byref(method)))
for name, value in {"rule": "target", "density": "0.3"}.items():
    check(lib.scope_method_set(method, name.encode(), value.encode()))
shape = Shape(c.sizeof(Shape), batch, heads, tokens, tokens, dim, SCOPE_BF16, 1, (c.c_int64 * 3)(24, 20, 20), 0, None, None)
check(lib.scope_plan_create(context, method, c.byref(shape), c.byref(plan)))
info = Info(c.sizeof(Info))
check(lib.scope_plan_get_info(plan, c.byref(info)))
workspace = np.empty(info.workspace_bytes, np.uint8)
state = np.empty(info.state_bytes // 16 + 1, np.complex128)  # 16-byte aligned
check(lib.scope_state_init(plan, state.ctypes.data_as(c.c_void_p)))
labels = np.empty((batch, heads, tokens), np.int32)
mask = np.empty((batch, heads, info.selection_groups, info.mask_words), np.uint32)
stats = Stats()


def tensor(x):  # strides in elements, straight from the array
    b, t, h, _ = (s // x.itemsize for s in x.strides)
    return Tensor(x.ctypes.data, b, h, t)


args = Args(struct_size=c.sizeof(Args), q=tensor(q), k=tensor(k), v=tensor(v), out=tensor(out), q_lengths=lengths.ctypes.data,
            k_lengths=lengths.ctypes.data, keep=keep.ctypes.data, dense_queries=keep.ctypes.data, layer=3, step=20, steps=50,
            state=state.ctypes.data, workspace=workspace.ctypes.data, workspace_bytes=info.workspace_bytes,
            selection=Selection(labels=labels.ctypes.data, mask=mask.ctypes.data), stats=c.addressof(stats))
for call in range(2):
    check(lib.scope_run(plan, c.byref(args)))
    assert (stats.reason, stats.warm) == (0, call), (stats.reason, stats.warm)
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
args.layer = 0
check(lib.scope_run(plan, c.byref(args)))
assert stats.reason == 2, "layer 0 attends densely"
args.step = 50
assert lib.scope_run(plan, c.byref(args)) == 1 and b"step" in lib.scope_last_error(), lib.scope_last_error()
lib.scope_plan_destroy(plan)
lib.scope_method_destroy(method)
lib.scope_context_destroy(context)
print(f"bf16 [batch, tokens, heads, dim] with text and padding: largest difference from float64 {worst:.4f}")
