"""The package scope_attn over numpy arrays: its docstrings' examples, layouts, masks, states, threads, and what it refuses.

It needs no PyTorch. ctest runs it with the source tree's package, and run.sh, as all of this folder, with the installed wheel.
"""
import copy
import doctest
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest

import scope_attn
from scope_attn import _c_api, _compare, _functions, _plan

ROPE = (24, 20, 20)
GIVEN = ("q_lengths", "k_lengths", "valid_queries", "valid_keys", "keep", "dense_queries", "report", "stats", "selection", "lse")
rng = np.random.default_rng(1)


def qkv(batch=2, heads=3, tokens=280, dim=64, dtype=np.float32):
    return [rng.standard_normal((batch, heads, tokens, dim)).astype(dtype) for _ in range(3)]


def exact(q, k, v, sees):
    """Attention in float64; sees[b, h, i, j] says which keys a query attends to."""
    logits = np.einsum("bhid,bhjd->bhij", q.astype(float), k.astype(float)) / np.sqrt(q.shape[-1])
    p = np.where(sees, np.exp(logits), 0)
    return np.einsum("bhij,bhjd->bhid", p / np.maximum(p.sum(-1, keepdims=True), 1e-300), v.astype(float))


def refuses(kind, text, call):
    with pytest.raises(kind) as error:
        call()
    assert text in str(error.value), f"expected {text!r} in {error.value!r}"


def test_examples_of_docstrings_hold():
    tried = 0
    for module in (scope_attn, _plan, _functions, _compare):
        result = doctest.testmod(module)
        assert result.failed == 0
        tried += result.attempted
    assert tried > 30, tried


def test_layouts_and_strides_give_the_same_bits():
    """Both layouts and odd strides give the same bits, in memory like q's, without a copy."""
    q, k, v = qkv()
    expected = scope_attn.attention(q, k, v, rope=ROPE, target_density=0.3)
    token_major = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    out = scope_attn.attention(*token_major, rope=ROPE, target_density=0.3, layout="BNHD")
    assert (out.swapaxes(1, 2) == expected).all()
    one = [x[:, :, :1] for x in token_major]  # of one head, whose own stride means nothing
    assert (scope_attn.attention(*one, method="dense", layout="BNHD").swapaxes(1, 2)
            == scope_attn.attention(*(x[:, :1] for x in (q, k, v)), method="dense")).all()
    last = [x[:, :1][:, ::-1] for x in token_major]  # nor does one token's, which may be below 0
    assert (scope_attn.attention(*last, method="dense", layout="BNHD") == last[2]).all()
    views = [x.swapaxes(1, 2) for x in token_major]
    out = scope_attn.attention(*views, rope=ROPE, target_density=0.3)
    assert (out == expected).all() and out.strides == views[0].strides
    fused = np.concatenate([x[..., None, :] for x in token_major], -2)  # [batch, tokens, heads, 3, dim]
    out = scope_attn.attention(*(fused[..., i, :] for i in range(3)), rope=ROPE, target_density=0.3, layout="BNHD")
    assert (out.swapaxes(1, 2) == expected).all()
    shared = np.broadcast_to(k[:1], k.shape)
    assert (scope_attn.attention(q, shared, v, method="dense") == scope_attn.attention(q, shared.copy(), v, method="dense")).all()
    for x in (q, k, v):
        x.flags.writeable = False
    assert (scope_attn.attention(q, k, v, rope=ROPE, target_density=0.3) == expected).all()
    half = scope_attn.attention(*(x.astype(np.float16) for x in (q, k, v)), method="dense")
    assert half.dtype == np.float16 and np.abs(half - exact(q, k, v, True)).max() < 2e-2


def test_masks_agree_with_float64():
    """Lengths, padding in the middle, always-kept keys and dense queries, as booleans and packed, against float64."""
    q, k, v = qkv()
    batch, heads, tokens, _ = q.shape
    text = np.zeros((batch, tokens), bool)
    text[:, -24:] = True
    valid = np.ones((batch, tokens), bool)
    valid[1, 250:258] = False
    given = dict(q_lengths=[tokens, tokens - 10], k_lengths=np.array([tokens, tokens - 10]), valid_queries=valid,
                 valid_keys=scope_attn.pack_bits(valid), keep=text, dense_queries=scope_attn.pack_bits(text))
    stats = scope_attn.Stats()
    out = scope_attn.attention(q, k, v, rope=ROPE, target_density=0.3, stats=stats, **given)
    selection = scope_attn.select(q, k, rope=ROPE, target_density=0.3, **given)
    assert abs(stats.density - 0.3) < 0.02 and stats.total_density > stats.density and len(stats.heads) == batch * heads
    assert stats.arithmetic == "f32" and stats.seconds["total"] > 0 and stats.heads[5].k_head > 0
    valid[1, -10:] = False
    rows = scope_attn.unpack_bits(selection.mask, tokens)
    sees = np.take_along_axis(rows, np.maximum(selection.labels, 0)[..., None], 2) | (text & valid)[:, None, None]
    assert (selection.labels[1][:, ~valid[1]] == -1).all() and sees[0, :, -24:].all()
    sees &= valid[:, None, None] & valid[:, None, :, None]
    assert np.abs(out - exact(q, k, v, sees)).max() < 1e-5
    assert not out[1][:, ~valid[1]].any(), "padding gives zeros"
    padding = {name: x for name, x in given.items() if "keep" not in name and "dense" not in name}
    assert (scope_attn.attend_selected(q, k, v, selection, **padding) == out).all()
    assert not any(getattr(_functions.kept_plan(q.shape, k.shape, 0, -1, False, True, "scope", None, ROPE, ("target_density=0.3",))
                           ._arguments, name) for name in GIVEN), "a call leaves no addresses behind"


def test_select_with_a_tail_that_looks_at_v():
    """The rows of the selection are those that the call keeps."""
    q, k, v = qkv()
    stats = scope_attn.Stats()
    scope_attn.attention(q, k, v, method="scope-mean", target_density=0.3, stats=stats)
    selection = scope_attn.select(q, k, v, method="scope-mean", target_density=0.3)
    kept = np.take_along_axis(selection.counts, selection.labels, 2).mean() / k.shape[2]
    assert abs(kept - stats.density) < 1e-6 and abs(kept - 0.3) < 0.02
    refuses(scope_attn.ScopeValueError, "needs v and out", lambda: scope_attn.select(q, k, method="scope-mean"))


def test_log_sum_exp_agrees_with_float64():
    """The log-sum-exp of dense and of all-keeping calls against float64, and of a query that sees nothing."""
    q, k, v = qkv()
    logits = np.einsum("bhid,bhjd->bhij", q.astype(float), k.astype(float)) / 8
    expected = np.log(np.exp(logits).sum(-1))
    for given in (dict(method="dense"), dict(rope=ROPE, rho=1), dict(rope=ROPE, method="scope-mean", target_density=1)):
        out, lse = scope_attn.attention(q, k, v, return_lse=True, **given)
        assert lse.dtype == np.float32 and lse.shape == q.shape[:3] and np.abs(lse - expected).max() < 1e-5
        assert (out == scope_attn.attention(q, k, v, **given)).all()
        token_major = [x.swapaxes(1, 2) for x in (q, k, v)]
        assert (scope_attn.attention(*token_major, layout="BNHD", return_lse=True, **given)[1] == lse).all()
    sparse = scope_attn.attention(q, k, v, rope=ROPE, target_density=0.3, return_lse=True)[1]
    assert (sparse < expected).all(), "fewer keys"
    plan = scope_attn.Plan(batch=2, heads=3, q_tokens=280, k_tokens=280, dim=64, method="dense")
    assert (plan.run(*token_major, layout="BNHD", return_lse=True)[1] == plan.run(q, k, v, return_lse=True)[1]).all()
    out, lse = plan.run(q, k, v, k_lengths=[0, 280], return_lse=True)
    assert (lse[0] == -np.inf).all() and not out[0].any() and np.abs(lse[1] - expected[1]).max() < 1e-5


def test_states_are_saved_loaded_and_reset():
    q, k, v = qkv(batch=1)
    plan = scope_attn.Plan(batch=1, heads=3, q_tokens=280, k_tokens=280, dim=64, rope=ROPE, dense_layers=1, dense_steps=0.5,
                           warm_prefix=True)
    refuses(ValueError, "got 0, 0, 4, where no dense call clusters",
            lambda: plan.cluster(q, k, state=scope_attn.State(layer=3), layer=0, step=0, steps=4))
    call = lambda state, **more: scope_attn.attention(q, k, v, rope=ROPE, target_density=0.3, state=state, **more)
    state = scope_attn.State()
    assert not state.filled
    refuses(ValueError, "no call has used it", state.save)
    first, second = call(state), call(state)
    assert state.filled and (first != second).any()
    saved = state.save()
    third = call(state)
    plan = scope_attn.Plan(batch=1, heads=3, q_tokens=280, k_tokens=280, dim=64, rope=ROPE, target_density=0.3)
    other = plan.state()
    other.load(saved)
    assert (plan.run(q, k, v, state=other) == third).all()
    refuses(ValueError, "no saved state", lambda: other.load(b"short"))
    state.reset()
    assert not state.filled and (call(state) == first).all()
    refuses(ValueError, "belongs to another plan", lambda: scope_attn.attention(q[:, :2], k[:, :2], v[:, :2], rope=ROPE, state=state))
    refuses(TypeError, "expected a State", lambda: call(plan))
    assert (scope_attn.attention(q, k, v, method="dense", state=state) == scope_attn.attention(q, k, v, method="dense")).all()
    for handle in (state, plan, plan.context):
        refuses(TypeError, "make a new one", lambda: copy.deepcopy(handle))
        refuses(TypeError, "make a new one", lambda: pickle.dumps(handle))


def test_model_fit_gives_a_row_and_why():
    """model_fit gives the library's row and its sentence."""
    fit = _functions.model_fit
    row, why = fit("wan", layers=40, heads=40, dim=128, rope=(44, 42, 42))
    assert row in scope_attn.models() and row.name == "wan2.1-t2v-14b" and why.startswith("wan2.1-t2v-14b: 40 layers x 40 heads"), why
    assert fit("wan", layers=40, heads=40, from_image=True, experts=2)[0].name == "wan2.2-i2v-a14b"
    assert fit(None, layers=50, heads=56, dim=128)[0].name == "minimax-h3" and fit("ltx-2")[0].rope == (0, 0, 0)
    row, why = fit("wan", layers=2, heads=4)
    assert (row.name, why) == ("wan2.1-t2v-14b", 'no known model of family "wan" has 2 layers x 4 heads; wan2.1-t2v-14b is the most alike')
    assert fit("wan", layers=2, heads=4, nearest=False)[0] is None and fit("sora")[0] is None
    refuses(ValueError, "experts: got 3", lambda: fit("wan", experts=3))
    # A row without ranges names none: a method by RoPE's ranges is refused, any other partition runs.
    shape = dict(batch=1, heads=56, q_tokens=64, k_tokens=64, dim=128, rope=fit("minimax-h3")[0].rope, model="minimax-h3")
    refuses(ValueError, "partition: rope needs the channel counts", lambda: scope_attn.Plan(**shape))
    assert scope_attn.Plan(**shape, partition="even:4").setting("dense_steps") == "0.2"


def test_places_decide_what_is_dense():
    q, k, v = qkv(batch=1)
    stats = scope_attn.Stats()
    refuses(ValueError, "no call", lambda: stats.density)
    scope_attn.attention(q, k, v, rope=ROPE, model="wan2.1-t2v-14b", layer=3, step=2, steps=50, stats=stats)
    assert stats.reason is scope_attn.Reason.DENSE_STEP and stats.density == 1
    state = scope_attn.State(layer=0)
    scope_attn.attention(q, k, v, rope=ROPE, state=state, stats=stats)
    assert stats.reason is scope_attn.Reason.DENSE_LAYER
    state.layer, state.step, state.steps = 1, 49, 50
    scope_attn.attention(q, k, v, rope=ROPE, state=state, stats=stats, dense_last_steps=0.1)
    assert stats.reason is scope_attn.Reason.DENSE_LAST_STEP
    scope_attn.attention(q, k, v, rope=ROPE, state=state, stats=stats, dense_last_steps=0.1, step=20, steps=50)
    assert stats.reason is scope_attn.Reason.SPARSE
    plan = scope_attn.Plan(batch=1, heads=3, q_tokens=280, k_tokens=280, dim=64, rope=ROPE, model="hunyuanvideo-13b", warm_prefix=True)
    assert plan.reason(5, 0, 50) is scope_attn.Reason.DENSE_STEP and plan.clusters(5, 0, 50)
    assert plan.setting("warm_prefix") == "yes" and plan.state_bytes > 0 and plan.workspace_bytes > 0 and plan.kernel
    assert scope_attn.Reason(77) is scope_attn.Reason.DENSE_OTHER
    by_sets = scope_attn.Plan(batch=1, heads=3, q_tokens=280, k_tokens=280, dim=64, target_density=0.3,
                              subspaces=[range(24), range(24, 44), range(44, 64)])
    assert (by_sets.run(q, k, v) == scope_attn.attention(q, k, v, rope=ROPE, target_density=0.3)).all()
    doubled = scope_attn.attention(q * 2, k, v, method="dense")
    assert np.abs(scope_attn.attention(q, k, v, method="dense", scale=0.25) - doubled).max() < 1e-5
    assert _functions.kept_plan.cache_info().hits > 0 and _functions.kept_plan.cache_info().maxsize == 64


def test_accepted_before():
    """A plan that accepted arrays refuses what differs from them, and the next call with the first ones is right."""
    q, k, v = arrays = qkv(batch=1)
    plan = scope_attn.Plan(batch=1, heads=3, q_tokens=280, k_tokens=280, dim=64, rope=ROPE, target_density=0.3)
    expected = plan.run(q, k, v)
    strided = [x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in arrays]
    packed = np.zeros(q.shape, dtype=[("x", np.float32), ("y", np.int8)])  # strides of 5 bytes
    wrong = [lambda x: x[:, :, :279], lambda x: x[0], lambda x: x.astype(np.float16), lambda x: x.astype(">f4"), lambda x: packed["x"],
             lambda x: x.swapaxes(2, 3).copy().swapaxes(2, 3), lambda x: x.tolist(), lambda x: None]
    for place, name in enumerate("qkv"):
        for change in wrong:
            with pytest.raises((ValueError, TypeError), match=f"^{name}: "):
                plan.run(*(change(x) if i == place else strided[i] for i, x in enumerate(arrays)))
            assert (plan.run(q, k, v) == expected).all(), name
        mixed = [strided[i] if i == place else x for i, x in enumerate(arrays)]
        assert (plan.run(*mixed) == expected).all() and (plan.run(q, k, v) == expected).all()


def test_what_does_not_fit_is_refused():
    q, k, v = qkv(batch=1)
    attend = lambda *x, **more: scope_attn.attention(*x, **{"rope": ROPE, **more})
    refuses(TypeError, "q: got list", lambda: attend([1], k, v))
    refuses(TypeError, "k: got list, expected a numpy array", lambda: attend(q, [1], v))
    refuses(TypeError, "v: got list, expected a numpy array", lambda: attend(q, k, [1]))
    refuses(TypeError, "float64", lambda: attend(q.astype(float), k, v))
    refuses(TypeError, "v: got float16", lambda: attend(q, k, v.astype(np.float16)))
    refuses(ValueError, "v: got shape", lambda: attend(q, k, v[:, :, 1:]))
    refuses(ValueError, "k: got shape", lambda: attend(q, k[:, :2], v[:, :2]))
    refuses(ValueError, "four dimensions", lambda: attend(q[0], k[0], v[0]))
    refuses(ValueError, "stride 280", lambda: attend(np.ascontiguousarray(q.swapaxes(2, 3)).swapaxes(2, 3), k, v))
    refuses(scope_attn.ScopeValueError, "head_stride -", lambda: attend(q[:, ::-1], k, v))
    packed = np.zeros((1, 3, 280, 64), np.dtype({"names": ["x"], "formats": [np.float32], "itemsize": 6}))
    refuses(ValueError, "multiples of its elements", lambda: attend(packed["x"], k, v))
    refuses(ValueError, "layout", lambda: attend(q, k, v, layout="NBHD"))
    refuses(ValueError, "rope", lambda: attend(q, k, v, rope=(24, 40)))
    refuses(scope_attn.ScopeValueError, "rope", lambda: attend(q, k, v, rope=(24, 20, 10)))
    refuses(scope_attn.ScopeValueError, "scop", lambda: attend(q, k, v, method="scop"))
    refuses(scope_attn.ScopeValueError, "densty", lambda: attend(q, k, v, densty=0.2))
    refuses(scope_attn.ScopeValueError, "step", lambda: attend(q, k, v, step=50, steps=50))
    refuses(ValueError, "one per sample", lambda: attend(q, k, v, k_lengths=[1, 2]))
    refuses(ValueError, "keep: got shape", lambda: attend(q, k, v, keep=np.zeros((1, 279), bool)))
    refuses(TypeError, "keep: got float", lambda: attend(q, k, v, keep=np.zeros((1, 9))))
    refuses(ValueError, "device", lambda: scope_attn.Context("tpu"))
    refuses(ValueError, "base_counts", lambda: scope_attn.head_budget([1], [1, 2]))
    bad = q.copy()
    bad[0, 1, 7, 3] = np.nan
    refuses(scope_attn.ScopeValueError, "q", lambda: attend(bad, k, v))
    labels, mask = np.zeros((1, 3, 280), np.int32), np.ones((1, 3, 2, 9), np.uint32)
    refuses(ValueError, "selection.mask", lambda: scope_attn.attend_selected(q, k, v, scope_attn.Selection(labels, mask[..., 1:])))
    refuses(TypeError, "selection.labels", lambda: scope_attn.attend_selected(q, k, v, scope_attn.Selection(labels * 1.0, mask)))
    refuses(scope_attn.ScopeValueError, "labels", lambda: scope_attn.attend_selected(q, k, v, scope_attn.Selection(labels + 2, mask)))
    if not scope_attn.supports("cuda", "bfloat16", 128):
        refuses(scope_attn.ScopeRuntimeError, "", lambda: scope_attn.Context("cuda"))


def test_calls_from_many_threads_wait_for_each_other():
    """Calls from many threads wait for each other, with and without a plan in common, and none is BUSY."""
    q, k, v = qkv(batch=1)
    densities = [0.2, 0.3, 0.2, 0.4]
    expected = [scope_attn.attention(q, k, v, rope=ROPE, target_density=x) for x in densities]
    state, failures = scope_attn.State(), []

    def work(i):
        try:
            for _ in range(20):
                assert (scope_attn.attention(q, k, v, rope=ROPE, target_density=densities[i]) == expected[i]).all()
                scope_attn.attention(q, k, v, rope=ROPE, target_density=0.25, state=state)
                assert state.filled
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=[i]) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures


def in_child(q, k, v, expected, plan, answer):
    out = scope_attn.attention(q, k, v, rope=ROPE, target_density=0.3)
    try:
        plan.run(q, k, v)
        answer.put("the parent's plan was taken")
    except scope_attn.ScopeRuntimeError as error:
        answer.put("fork" in str(error) and bool((out == expected).all()))


def test_a_forked_child_makes_its_own_plans():
    """A forked child makes its own plans, even while a thread of the parent is in a call; the parent's are refused there."""
    q, k, v = qkv(batch=1)
    plan = scope_attn.Plan(batch=1, heads=3, q_tokens=280, k_tokens=280, dim=64, rope=ROPE)
    expected = scope_attn.attention(q, k, v, rope=ROPE, target_density=0.3)
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    with plan.context.lock:
        child = context.Process(target=in_child, args=(q, k, v, expected, plan, answer))
        child.start()
    assert answer.get(timeout=60) is True
    child.join()


def load(path):
    code = "import scope_attn; scope_attn.methods()"
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, "SCOPE_LIBRARY": str(path)}, capture_output=True, text=True)


def test_the_library_that_is_named_is_loaded():
    assert load(_c_api.library().path).returncode == 0


def test_what_is_no_library_is_refused(tmp_path):
    missing = load(tmp_path / "libscope.so")
    assert "ImportError" in missing.stderr and "pip install ." in missing.stderr, missing.stderr
    (tmp_path / "text.so").write_text("no library")
    assert "cannot be loaded" in load(tmp_path / "text.so").stderr


@pytest.mark.parametrize("code,says", (('const char* scope_version(void) { return "0.3.0"; }', "reinstall scope-attn"),
                                       ('const char* scope_version(void) { return "0.2.0"; }', "older than this package"),
                                       ("int x;", "is not libscope")))
def test_another_library_is_refused(compiler, tmp_path, code, says):
    source, other = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text(code)
    subprocess.run([compiler, "-shared", "-o", other, source], check=True)
    assert says in load(other).stderr, load(other).stderr


def test_neither_numpy_nor_pytorch_is_needed():
    code = ("import sys; sys.modules['numpy'] = sys.modules['torch'] = None\n"
            "import scope_attn; print(len(scope_attn.methods()), scope_attn.head_budget([1], [3]))")
    without = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert without.returncode == 0, without.stderr


def test_doctor_passes():
    doctor = subprocess.run([sys.executable, "-m", "scope_attn.doctor"], capture_output=True, text=True)
    assert doctor.returncode == 0 and "cpu passed" in doctor.stdout, doctor.stdout + doctor.stderr
