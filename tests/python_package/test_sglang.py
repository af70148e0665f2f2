"""The sglang-diffusion plug-in, with sglang's hook registry, metadata and forward context as stand-ins of the same names and signatures."""
import importlib.metadata
import inspect
import sys
import types

import pytest
import torch

import scope_attn
from scope_attn import sglang

HEADS, DIM, FRAMES, FRAME, TEXT = 2, 128, 5, 64, 24


@pytest.fixture(autouse=True)
def one_thread():
    """PyTorch's threads would spin beside the library's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class SparseVideoGen2AttentionImpl:
    """What the hooks replace."""

    def __init__(self, num_heads, head_size, causal, softmax_scale, num_kv_heads=None, prefix="", **extra_impl_args):
        raise ImportError("svg")

    def forward(self, query, key, value, attn_metadata):
        raise NotImplementedError


class Cache:
    pass


@pytest.fixture
def host(monkeypatch):
    """sglang in a process that has loaded the plug-in: its forward context."""
    hooks, context = {}, types.SimpleNamespace(forward_batch=types.SimpleNamespace(is_cfg_negative=False))
    registry = types.SimpleNamespace(register=lambda target, hook, kind: hooks.update({target: (hook, kind)}))
    modules = {"sglang.multimodal_gen.plugins": dict(HookRegistry=registry),
               "sglang.srt.plugins.hook_registry": dict(HookType=types.SimpleNamespace(REPLACE="replace")),
               "sglang.multimodal_gen.runtime.managers.forward_context": dict(get_forward_context=lambda: context)}
    for name, attributes in modules.items():
        for depth in range(name.count(".") + 1):
            parent = ".".join(name.split(".")[:depth + 1])
            if parent not in modules:
                monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("SCOPE_SGLANG", raising=False)
    sglang.register()
    assert not hooks, "nothing unless it is asked for"
    monkeypatch.setenv("SCOPE_SGLANG", "target_density=0.3, seed=3")
    sglang.register()
    assert {kind for _, kind in hooks.values()} == {"replace"}
    *methods, resolver = hooks
    for target in methods:
        monkeypatch.setattr(SparseVideoGen2AttentionImpl, target.rpartition(".")[2], hooks[target][0])
    assert hooks[resolver][0](None, None).endswith(".SparseVideoGen2AttentionBackend")
    return context


def implementation(prefix="blocks.1.attn1.impl", **given):
    """As the attention layers of sglang make it."""
    return SparseVideoGen2AttentionImpl(**{**dict(num_heads=HEADS, head_size=DIM, causal=False, softmax_scale=DIM**-0.5, num_kv_heads=HEADS,
                                                  prefix=prefix), **given})


def metadata(cache, timestep=500, text=0, prompt=None, **given):
    return types.SimpleNamespace(**{**dict(current_timestep=timestep, first_layers_fp=1, first_times_fp=900.0, context_length=text,
                                           prompt_length=prompt, num_frame=FRAMES, frame_size=FRAME, zero_step_kmeans_init=False,
                                           cache=cache), **given})


def inputs(seed, text=0):
    return torch.randn(3, 1, FRAMES * FRAME + text, HEADS, DIM, generator=torch.Generator().manual_seed(seed))


def dense(q, k, v, scale=None):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)


def test_entry_point():
    try:
        found = importlib.metadata.distribution("scope-attn").entry_points
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is not installed")
    [point] = [point for point in found if point.group == "sglang.multimodal_gen.plugins"]
    assert point.load() is sglang.register


def test_states(host):
    """A layer, branch and video has its own state: the outputs are those of direct calls."""
    layers = [implementation(f"blocks.{i}.attn1.impl") for i in (1, 1, 2)]  # two of them of two experts
    for video in range(2):
        cache, states = Cache(), {}
        for step in range(2):
            for negative in (False, True):
                host.forward_batch.is_cfg_negative = negative
                for which, layer in enumerate(layers):
                    qkv = inputs(100 * video + 10 * step + 3 * negative + which)
                    state = states.setdefault((which, negative), scope_attn.State())
                    direct = scope_attn.attention(*qkv, rope=(44, 42, 42), layout="BNHD", method="scope-mean", model="wan2.1-t2v-14b",
                                                  dense_steps=0, dense_layers=0, target_density=0.3, seed=3, state=state, scale=DIM**-0.5)
                    assert (layer.forward(*qkv, metadata(cache)) == direct).all()
        assert len(vars(cache)["scope_states"]) == 6


def test_schedule(host):
    qkv, cache = inputs(1), Cache()
    exact = dense(*qkv)
    assert (implementation("blocks.0.attn1.impl").forward(*qkv, metadata(cache)) - exact).abs().max() < 1e-5
    layer = implementation()
    assert (layer.forward(*qkv, metadata(Cache(), timestep=900.0)) - exact).abs().max() > 0.01, "the bound itself is sparse"
    plain = layer.forward(*qkv, metadata(cache, timestep=950))
    assert (plain - exact).abs().max() < 1e-5
    state = vars(cache)["scope_states"][layer, False, tuple(qkv[0].shape)]
    assert not state.filled
    clustered = layer.forward(*qkv, metadata(cache, timestep=950, zero_step_kmeans_init=True))
    assert (clustered == plain).all() and state.filled, "clusters, and attends as it would have"
    assert (layer.forward(*qkv, metadata(cache)) - exact).abs().max() > 0.01


def test_clustered_dense_steps(host):
    """They leave in the state what a dense call of the library leaves there, with text and padding too."""
    qkv, cache, layer = inputs(2, TEXT), Cache(), implementation("Hunyuan.single_blocks.21.attn.impl")
    at = dict(text=TEXT, prompt=15)
    layer.forward(*qkv, metadata(cache, timestep=950, zero_step_kmeans_init=True, **at))
    text = (torch.arange(FRAMES * FRAME + TEXT) >= FRAMES * FRAME)[None]
    state = scope_attn.State()
    call = dict(rope=(16, 56, 56), layout="BNHD", method="scope-mean", model="hunyuanvideo-13b", dense_layers=0,
                target_density=0.3, seed=3, state=state, scale=DIM**-0.5, k_lengths=[FRAMES * FRAME + 15], keep=text,
                dense_queries=text)
    scope_attn.attention(*qkv, step=0, steps=1, dense_steps=1, warm_prefix=True, **call)
    assert vars(cache)["scope_states"][layer, False, tuple(qkv[0].shape)].save() == state.save()
    direct = scope_attn.attention(*qkv, dense_steps=0, warm_prefix=False, **call)
    assert (layer.forward(*qkv, metadata(cache, **at)) == direct).all()


def test_text(host, monkeypatch):
    """HunyuanVideo: [video | text | padding]; text sees everything, padding is seen by none."""
    qkv, prompt = inputs(2, TEXT), 15
    length = FRAMES * FRAME + prompt
    exact = dense(qkv[0], *(x[:, :length] for x in qkv[1:]))
    for given in (metadata(Cache(), text=TEXT, prompt=prompt), metadata(Cache(), timestep=950, text=TEXT, prompt=prompt)):
        out = implementation("Hunyuan.single_blocks.21.attn.impl").forward(*qkv, given)
        assert (out[:, FRAMES * FRAME:length] - exact[:, FRAMES * FRAME:length]).abs().max() < 1e-5
    monkeypatch.setenv("SCOPE_SGLANG", "target_density=0.01")
    text = (torch.arange(len(qkv[0][0])) >= FRAMES * FRAME).float()[None, :, None, None].repeat(1, 1, HEADS, DIM)
    out = implementation("Hunyuan.double_blocks.3.attn.impl").forward(qkv[0], qkv[1], text, metadata(Cache(), text=TEXT, prompt=prompt))
    assert out.min() > 0, "every query sees some text"
    monkeypatch.setenv("SCOPE_SGLANG", "target_density=1")
    out = implementation("Hunyuan.double_blocks.3.attn.impl").forward(*qkv, metadata(Cache(), text=TEXT, prompt=prompt))
    assert (out[:, :length] - exact[:, :length]).abs().max() < 1e-5


def test_scale(host, monkeypatch):
    """A layer's own scale reaches sparse and dense calls."""
    monkeypatch.setenv("SCOPE_SGLANG", "target_density=1")
    qkv, layer = inputs(1), implementation(softmax_scale=0.25)
    assert (dense(*qkv, scale=0.25) - dense(*qkv)).abs().max() > 0.2
    for timestep in (500, 950):
        out = layer.forward(*qkv, metadata(Cache(), timestep=timestep))
        assert (out - dense(*qkv, scale=0.25)).abs().max() < 1e-5


def test_refusals(host, monkeypatch):
    for given, words in ((dict(prefix="proj_out"), "expected one of the blocks"), (dict(causal=True), "causal"),
                         (dict(head_size=64), "64 channels"), (dict(num_kv_heads=1), "1 heads of keys")):
        with pytest.raises(ValueError, match=words):
            implementation(**given)
    with pytest.raises(ValueError, match="attn_metadata is missing"):
        implementation().forward(*inputs(1), None)
    with pytest.raises(ValueError, match="got 320 queries and 320 keys, expected 344"):
        implementation().forward(*inputs(1), metadata(Cache(), text=TEXT))
    for text, words in (("rho", "expected name=value"), ("densty=1", 'no setting "densty"'), ("method=scop", 'no method "scop"'),
                        ("dense_steps=0.1", "sglang's to say"),
                        ("method=sol", 'got "sol", .* Morton order, .* `scope generate --method sol`')):
        monkeypatch.setenv("SCOPE_SGLANG", text)
        with pytest.raises(ValueError, match=words):
            sglang.register()


def test_default_method(monkeypatch):
    """What enable() takes for diffusers."""
    monkeypatch.setenv("SCOPE_SGLANG", "target_density=0.2")
    assert sglang.read_settings()[0] == inspect.signature(scope_attn.enable).parameters["method"].default


def test_a_comma_before_a_digit_belongs_to_the_value(monkeypatch):
    monkeypatch.setenv("SCOPE_SGLANG", "method=scope-mean, density_steps=0.2:0.3,1:0.08, seed=3")
    assert sglang.read_settings() == ("scope-mean", {"density_steps": "0.2:0.3,1:0.08", "seed": "3"})
