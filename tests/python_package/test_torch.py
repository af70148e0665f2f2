"""scope_attn over PyTorch tensors: the same bits as numpy's, the operator under torch.compile, states as side effects, refusals."""
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

import scope_attn
from scope_attn import _torch

ROPE = (24, 20, 20)
SETTINGS = dict(rope=ROPE, target_density=0.3)


def dense(q, k, v, scale=None):
    return torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=scale)


def test_is_attention(qkv, dtype):
    exact = dense(*qkv)
    for out in (scope_attn.attention(*qkv, method="dense"), scope_attn.attention(*qkv, rope=ROPE, rho=1)):
        assert out.dtype == dtype and out.device == qkv[0].device
        assert (out - exact).abs().max() < (1e-5 if dtype == torch.float32 else 0.02)
    assert (scope_attn.attention(*qkv, method="dense", scale=0.5) - dense(*qkv, scale=0.5)).abs().max() < 0.03
    sparse = scope_attn.attention(*qkv, **SETTINGS)
    assert 0.01 < (sparse - exact).abs().max() < 2


def test_same_as_numpy(qkv):
    if qkv[0].is_cuda:
        pytest.skip("numpy arrays are the CPU's")
    ours = scope_attn.attention(*(x.numpy() for x in qkv), **SETTINGS)
    assert (scope_attn.attention(*qkv, **SETTINGS).numpy() == ours).all()
    half = [x.bfloat16() for x in qkv]
    assert (scope_attn.attention(*half, method="dense") - dense(*half)).abs().max() < 0.02


def test_break_even():
    """The density at which dense takes as long, between two that were measured; all or none of them faster is said."""
    from scope_attn import _measure
    sparse = [(0.1, 2.0), (0.2, 3.0), (0.4, 5.0)]
    assert _measure.break_even(4.0, sparse) == pytest.approx(0.3) and _measure.break_even(2.5, sparse) == pytest.approx(0.15)
    assert _measure.verdict(4.0, sparse) == "Sparse attention pays here below density 0.30."
    assert _measure.verdict(2.0, sparse) == "Sparse attention does not pay at this length: dense is as fast as density 0.1."
    assert _measure.verdict(6.0, sparse) == "Sparse attention pays here at every density up to 0.4."


def test_doctor_measures(device):
    where = "cpu" if device.type == "cpu" else "cuda:0"
    doctor = lambda *more: subprocess.run([sys.executable, "-m", "scope_attn.doctor", "--measure", "1024", *more],
                                          capture_output=True, text=True)
    done = doctor("--heads", "2", "--dim", "64", "--device", where)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert f"1,024 tokens, 2 heads of 64 channels, {'float32' if where == 'cpu' else 'bfloat16'}, {where}" in said
    assert "Sparse attention" in said
    rows = [line.split() for line in said.splitlines() if line.startswith("density")]
    dense = next(float(line.split()[1]) for line in said.splitlines() if line.startswith("dense "))
    assert [row[1] for row in rows] == ["0.05", "0.1", "0.2", "0.3", "0.5"]
    assert all(float(row[4]) == pytest.approx(dense / float(row[2]), abs=0.02, rel=0.02) for row in rows)
    for more, told, status in ((("--device", "cuda:77"), 'got "cuda:77", expected', 1),
                               (("--dim", "1000"), "dim: got 1000, expected 1..256", 1),
                               (("--heads", "0"), "--heads: got 0, expected 1 or more", 2)):
        done = doctor(*more)
        assert done.returncode == status and told in done.stdout + done.stderr and "Traceback" not in done.stderr


def test_layouts(qkv):
    expected = scope_attn.attention(*qkv, **SETTINGS)
    token_major = [x.transpose(1, 2).contiguous() for x in qkv]
    out = scope_attn.attention(*token_major, layout="BNHD", **SETTINGS)
    assert out.is_contiguous() and (out.transpose(1, 2) == expected).all()
    views = [x.transpose(1, 2) for x in token_major]
    out = scope_attn.attention(*views, **SETTINGS)
    assert out.stride() == views[0].stride() and (out == expected).all()
    fused = torch.stack(token_major, 3)  # [batch, tokens, heads, 3, dim], as fused projections are
    assert (scope_attn.attention(*fused.unbind(3), layout="BNHD", **SETTINGS).transpose(1, 2) == expected).all()
    one = [x[:1].as_strided((1, 3, 280, 64), (7, 280 * 64, 64, 1)) for x in qkv]  # the stride of a single sample means nothing
    assert (scope_attn.attention(*one, **SETTINGS) == expected[:1]).all()


def test_tokens(qkv, device):
    text = torch.zeros(2, 280, dtype=torch.bool)
    text[:, -24:] = True
    given = dict(q_lengths=[280, 270], k_lengths=torch.tensor([280, 270]), keep=text, dense_queries=scope_attn.pack_bits(text))
    out = scope_attn.attention(*qkv, **SETTINGS, **given)
    assert not out[1, :, 270:].any() and out[1, :, 269].any()
    exact = dense(qkv[0][:1], qkv[1][:1], qkv[2][:1])[:, :, -24:]
    assert (out[:1, :, -24:] - exact).abs().max() < 0.02, "text attends to everything"
    selection = scope_attn.select(*qkv[:2], **SETTINGS, **given)
    assert selection.labels.device == qkv[0].device
    assert (scope_attn.attend_selected(*qkv, selection, q_lengths=given["q_lengths"], k_lengths=given["k_lengths"]) == out).all()
    kept = scope_attn.unpack_bits(selection.mask, 280)
    assert (kept.sum(-1) == selection.counts).all() and (scope_attn.pack_bits(kept) == selection.mask).all()
    as_numpy = scope_attn.pack_bits(text.numpy())
    assert (scope_attn.pack_bits(text).numpy().view(np.uint32) == as_numpy).all()
    with_numpy = scope_attn.attention(*qkv, **SETTINGS, **{**given, "k_lengths": np.array([280, 270]), "keep": text.numpy()})
    assert (with_numpy == out).all()


def test_states_and_stats(qkv):
    state, stats = scope_attn.State(), scope_attn.Stats()
    first = scope_attn.attention(*qkv, state=state, **SETTINGS)
    second = scope_attn.attention(*qkv, state=state, stats=stats, **SETTINGS)
    assert stats.warm and stats.reason is scope_attn.Reason.SPARSE and abs(stats.density - 0.3) < 0.02 and len(stats.heads) == 6
    assert (first != second).any()
    saved = state.save()
    third = scope_attn.attention(*qkv, state=state, **SETTINGS)
    state.load(saved)
    assert (scope_attn.attention(*qkv, state=state, **SETTINGS) == third).all()
    state.reset()
    assert (scope_attn.attention(*qkv, state=state, **SETTINGS) == first).all()


def test_compile(qkv):
    def attend(q, k, v):
        return scope_attn.attention(q * 1.0, k, v, **SETTINGS) + 1

    compiled = torch.compile(attend, fullgraph=True)
    with torch.no_grad():
        assert (compiled(*qkv) == attend(*qkv)).all()
        assert (compiled(*(x[:, :, :200] for x in qkv)) == attend(*(x[:, :, :200] for x in qkv))).all()
        views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv]
        assert (compiled(*views) == attend(*qkv)).all()


def test_lse(qkv):
    """The log-sum-exp of a density-1 call against float64, eager and compiled, with and without a state."""
    q, k, _ = qkv
    exact = torch.logsumexp(q.double() @ k.double().transpose(2, 3) / 8, -1)
    state, settings = scope_attn.State(), dict(rope=ROPE, rho=1, return_lse=True)
    token_major = [x.transpose(1, 2).contiguous() for x in qkv]
    ways = {"eager": lambda q, k, v: scope_attn.attention(q, k, v, **settings),
            "with a state": lambda q, k, v: scope_attn.attention(q, k, v, state=state, **settings)}
    with torch.no_grad():
        for name, way in ways.items():
            for call in (way, torch.compile(way, fullgraph=True)):
                out, lse = call(*qkv)
                assert lse.dtype == torch.float32 and lse.device == q.device, name
                assert (lse - exact).abs().max() < (1e-5 if q.dtype == torch.float32 else 0.02), name
        # A state groups queries otherwise, and on a GPU their tiles add up in another order.
        assert (out - scope_attn.attention(*qkv, rope=ROPE, rho=1)).abs().max() <= (0 if q.device.type == "cpu" else 0.02)
        compiled = torch.compile(lambda q, k, v: scope_attn.attention(q, k, v, layout="BNHD", **settings), fullgraph=True)
        out, again = compiled(*token_major)
        assert again.shape == (2, 3, 280) and (again == scope_attn.attention(*qkv, **settings)[1]).all()


class Layer(torch.nn.Module):
    def __init__(self, index, text):
        super().__init__()
        self.state, self.text = scope_attn.State(layer=index), text

    def forward(self, q, k, v, step):
        q = -q.transpose(1, 2)  # exact, so that both ways keep the same keys
        out = scope_attn.attention(q, k.transpose(1, 2), v.transpose(1, 2), state=self.state, step=step, steps=100, layout="BNHD",
                                   keep=self.text, k_lengths=[280, 270], **SETTINGS)
        return out.transpose(1, 2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_compile_with_states(qkv, mode):
    """States change once per call, in order, for each of twelve layers that share one graph, and results nobody uses still count."""
    if mode is torch.inference_mode and torch.__version__.startswith("2.6."):
        pytest.skip("its compiler loses track of inference tensors that an operator changes")
    text = torch.zeros(2, 280, dtype=torch.bool)
    text[:, :20] = True
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._inductor.compile(graph, inputs)

    torch._dynamo.reset()

    def step(layers, run, q, k, v, at):
        for layer in layers:
            run(layer, q, k, v, at)  # its output is dropped
            q = run(layer, q, k, v, at)
        return q

    eager, compiled = ([Layer(index, text) for index in range(12)] for _ in range(2))
    run = torch.compile(lambda layer, *arguments: layer(*arguments), fullgraph=True, backend=backend)
    with mode():
        inputs = [x.clone() for x in qkv]  # inference tensors from the start, where they are
        for at in (60, 61, 62):
            expected = step(eager, lambda layer, *arguments: layer(*arguments), *inputs, at)
            out = step(compiled, run, *inputs, at)
            assert (out == expected).all()
            assert [layer.state.filled for layer in compiled] == [False] + [True] * 11, "layer 0 attends densely"
    assert len(graphs) <= 2, "twelve layers share a graph, and the step is symbolic from its second value on"


def test_states_in_order(qkv):
    """In one graph: a first and a warm call on one state, the first one's result dropped."""
    def twice(state, q, k, v):
        scope_attn.attention(q, k, v, state=state, **SETTINGS)
        return scope_attn.attention(q, k, v, state=state, **SETTINGS)

    with torch.no_grad():
        expected = twice(scope_attn.State(), *qkv)
        assert (expected != scope_attn.attention(*qkv, **SETTINGS)).any()
        state = scope_attn.State()
        assert (torch.compile(twice, fullgraph=True)(state, *qkv) == expected).all()
        assert state.filled


def test_operators(qkv):
    text = torch.zeros(2, 280, dtype=torch.bool)
    text[:, :20] = True
    tokens = dict(k_lengths=torch.tensor([280, 270]), keep=text)
    what = [_torch.pack_what("scope", ["target_density=0.3"], False, names) for names in ((), tokens)]
    arguments = what[0], None, list(ROPE), 0.0, -1, -1, 0, []
    with_tokens = what[1], None, list(ROPE), 0.125, 3, 5, 50, list(tokens.values())
    assert _torch.unpack_what(what[1]) == ("scope", ["target_density=0.3"], False, ["k_lengths", "keep"])
    for operator in (torch.ops.scope_attn.attention.default, torch.ops.scope_attn.attention_and_lse.default):
        torch.library.opcheck(operator, (*qkv, *arguments))
        torch.library.opcheck(operator, (*qkv, *with_tokens))
    out = torch.ops.scope_attn.attention.default(*qkv, *with_tokens)
    assert (out == scope_attn.attention(*qkv, **SETTINGS, **tokens, layer=3, step=5, steps=50)).all()
    state = scope_attn.State()
    scope_attn.attention(*qkv, state=state, **SETTINGS)
    operator = torch.ops.scope_attn.attention_with_state.default
    for given in (arguments, with_tokens):
        torch.library.opcheck(operator, (*qkv, state.ticket, *given), test_utils=("test_schema", "test_faketensor"))
    ticket = state.ticket
    del state
    with pytest.raises(RuntimeError, match="its State is gone"):
        operator(*qkv, ticket, *arguments)


@pytest.mark.parametrize("given, error", [
    (dict(rope=()), r"rope: got \[\]"), (dict(rope=(24, 20)), r"rope: got \[24, 20\]"), (dict(rope="123"), "integer|fake tensor"),
    (dict(rope=(24.5, 19.5, 20)), "integer|fake tensor"), (dict(model=""), 'model: there is no ""'),
    (dict(method=""), 'method: there is no ""'), (dict(layout="BDNH"), 'layout: got "BDNH"'), (dict(densty=0.3), "densty"),
    (dict(target_density=None, rho=7), "rho: got"), (dict(k_lengths=[280]), "k_lengths: got 1 of them"),
    (dict(keep=torch.zeros(2, 7, dtype=torch.bool)), r"keep: got shape \[2, 7\]"),
])
def test_compiled_refusals(given, error, qkv):
    """A compiled call refuses what an eager one does."""
    torch._dynamo.reset()
    for call in (scope_attn.attention, torch.compile(scope_attn.attention, fullgraph=True, backend="eager")):
        with pytest.raises(Exception, match=f"{error}|exception"), torch.no_grad():  # older versions say only that there was one
            call(*qkv, **{**SETTINGS, **given})


def test_compile_settings(qkv):
    """One compiled function with other methods, scales, ropes and tokens from call to call."""
    torch._dynamo.reset()
    compiled = torch.compile(scope_attn.attention, fullgraph=True)
    text = torch.arange(280) < 20
    with torch.no_grad():
        for given in (dict(), dict(rope=(20, 24, 20), scale=0.25), dict(rope=(16, 24, 24), scale=0.5), dict(k_lengths=[280, 270]),
                      dict(keep=text.expand(2, 280), k_lengths=torch.tensor([280, 260])),
                      dict(model="wan2.1-t2v-14b", step=3, steps=50), dict(method="dense", rope=None, target_density=None)):
            given = {**SETTINGS, **given}
            assert (compiled(*qkv, **given) == scope_attn.attention(*qkv, **given)).all(), given


def test_torch_after_package():
    """The package before PyTorch, a state before both are needed, and the first call under torch.compile."""
    code = ("import scope_attn; state = scope_attn.State(); import torch\n"
            "f = torch.compile(lambda q, k, v: scope_attn.attention(q, k, v, rope=(8, 12, 12), state=state), fullgraph=True)\n"
            "with torch.no_grad(): f(*torch.randn(3, 1, 1, 256, 32))\n"
            "assert state.filled")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_refusals(qkv):
    q, k, v = qkv
    with pytest.raises(RuntimeError, match="gradients"):
        scope_attn.attention(q.clone().requires_grad_(), k, v, **SETTINGS)
    with pytest.raises(RuntimeError, match="gradients"):
        scope_attn.attention(q, k, v.clone().requires_grad_(), stats=scope_attn.Stats(), **SETTINGS)
    with torch.no_grad():
        scope_attn.attention(q.clone().requires_grad_(), k, v, **SETTINGS)
    with pytest.raises(TypeError, match="q: got torch.float64"):
        scope_attn.attention(q.double(), k, v, **SETTINGS)
    with pytest.raises(TypeError, match="v: got torch.float16"):
        scope_attn.attention(q, k, v.half(), **SETTINGS)
    with pytest.raises(ValueError, match="last dimension has stride 280"):
        scope_attn.attention(q.transpose(2, 3).contiguous().transpose(2, 3), k, v, **SETTINGS)
    with pytest.raises(ValueError, match="meta"):
        scope_attn.Plan(batch=2, heads=3, q_tokens=280, k_tokens=280, dim=64, dtype=str(q.dtype).removeprefix("torch."),
                        rope=ROPE, device=q.device).run(*(x.to("meta") for x in qkv))
    with pytest.raises(scope_attn.ScopeValueError, match="densty"):
        scope_attn.attention(q, k, v, densty=0.3)
    with pytest.raises(TypeError, match="k: got ndarray, expected a PyTorch tensor"):
        scope_attn.attention(q, np.zeros(k.shape), v, **SETTINGS)
    with pytest.raises(Exception, match="gradients|exception"):  # older versions say only that there was one
        torch.compile(lambda *x: scope_attn.attention(*x, **SETTINGS), fullgraph=True, backend="eager")(q.clone().requires_grad_(), k, v)
    with pytest.raises(Exception, match="stats|exception"):
        torch.compile(lambda *x: scope_attn.attention(*x, stats=scope_attn.Stats(), **SETTINGS), fullgraph=True, backend="eager")(*qkv)


def test_accepted_before(qkv):
    """A plan that accepted arrays refuses what differs from them, and the next call with the first ones is right."""
    q, k, v = qkv
    plan = scope_attn.Plan(batch=2, heads=3, q_tokens=280, k_tokens=280, dim=64, dtype=str(q.dtype).removeprefix("torch."), device=q.device,
                           **SETTINGS)
    with pytest.raises(ValueError, match="v: got null"):
        plan.run(q, k, None)
    expected = plan.run(q, k, v)
    assert (expected == scope_attn.attention(q, k, v, **SETTINGS)).all()
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv]
    by_channel = lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)
    other_type = torch.bfloat16 if q.dtype is torch.float16 else torch.float16
    wrong: dict = {
        "got shape": [lambda x: x[:, :, :279], lambda x: x[:1], lambda x: x[0]], "stride 280": [by_channel], f"got {other_type}": [
            lambda x: x.to(other_type)], "meta": [lambda x: x.to("meta")], "requires gradients": [lambda x: x.clone().requires_grad_()],
        "expected": [lambda x: np.zeros(x.shape), lambda x: x.tolist(), lambda x: None]}
    for place, name in enumerate("qkv"):
        for message, change in [(message, change) for message, changes in wrong.items() for change in changes]:
            with pytest.raises((ValueError, TypeError, RuntimeError), match=f"^{name}: .*{message}"):
                plan.run(*(change(x) if i == place else strided[i] for i, x in enumerate(qkv)))
            assert (plan.run(q, k, v) == expected).all(), (name, message)
    for given in ([strided[0], k, v], [q, strided[1], v], [q, k, strided[2]], [x.clone() for x in qkv]):
        assert (plan.run(*given) == expected).all()
        assert (plan.run(q, k, v) == expected).all()
    assert (plan.run(*(x.transpose(1, 2) for x in strided), layout="BNHD").transpose(1, 2) == expected).all()
    selection = plan.select(q, k)
    assert (plan.run(q, k, v) == expected).all() and (plan.select(q, k, v).mask == selection.mask).all()
    with torch.no_grad():
        grown = [x.clone().requires_grad_() for x in qkv]
        assert (plan.run(*grown) == expected).all()
    with pytest.raises(RuntimeError, match="gradients"):
        plan.run(*grown)


def test_threads(qkv):
    expected = {density: scope_attn.attention(*qkv, rope=ROPE, target_density=density) for density in (0.2, 0.3)}
    failures = []

    def work(density):
        for _ in range(20):
            out = scope_attn.attention(*qkv, rope=ROPE, target_density=density)
            if not (out == expected[density]).all():
                failures.append(density)

    workers = [threading.Thread(target=work, args=[density]) for density in (0.2, 0.3, 0.2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


@pytest.mark.parametrize("method", ["scope", "scope-mean", "svg2", "svg2-ear", "svoo", "sparge"])
def test_cluster(method, qkv, device, dtype):
    """cluster() leaves in a state the bits that a dense call leaves there, and the sparse call after it is warm."""
    few = {} if method == "sparge" else dict(groups=8) if method.startswith("scope") else dict(groups=8, codes=8)
    plan = scope_attn.Plan(batch=2, heads=3, q_tokens=280, k_tokens=280, dim=64, rope=ROPE, device=device,
                           dtype=str(dtype).split(".")[1], method=method, dense_queries=True, dense_steps=0.5, warm_prefix=True, **few)
    text = torch.zeros(2, 280, dtype=torch.bool)
    text[:, -24:] = True
    tokens = dict(q_lengths=[280, 270], k_lengths=[280, 270], keep=text, dense_queries=text)
    attended, clustered = plan.state(), plan.state()
    plan.run(*qkv, state=attended, step=0, steps=4, **tokens)
    assert plan.cluster(*qkv[:2], state=clustered, step=0, steps=4, **tokens) is None
    assert clustered.filled and clustered.save() == attended.save()
    stats = scope_attn.Stats()
    second = [x.flip(2) for x in qkv]
    out = plan.run(*second, state=clustered, step=2, steps=4, stats=stats, **tokens)
    assert stats.reason is scope_attn.Reason.SPARSE and stats.warm == (method != "sparge")
    assert (out == plan.run(*second, state=attended, step=2, steps=4, **tokens)).all()
    with pytest.raises(ValueError, match="got -1, 2, 4, where no dense call clusters"):
        plan.cluster(*qkv[:2], state=clustered, step=2, steps=4)
