"""vllm-omni as it is: registry, configuration, attention layer and forward context are the package's own, over stand_ins.py's vLLM."""
from __future__ import annotations

import contextlib
import inspect
import logging

import pytest
import torch

import scope_attn
import stand_ins
import tiny_pipelines as tiny

stand_ins.vllm()
stand_ins.announce("vllm_omni.platform_plugins", "cpu", "cpu_platform:plugin")
CALLS = []


def register():
    """What an entry point of vllm-omni does; it may run more than once."""
    import aenum
    from vllm_omni.diffusion import data
    from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum
    if "DENSE_TEST" not in DiffusionAttentionBackendEnum.__members__:
        aenum.extend_enum(DiffusionAttentionBackendEnum, "DENSE_TEST", f"{__name__}.DenseBackend")
    data.BLOCK_SPARSE_BACKENDS |= {"DENSE_TEST"}


stand_ins.announce("vllm_omni.general_plugins", "dense_test", f"{__name__}:register")
stand_ins.announce("vllm_omni.general_plugins", "scope", "scope_attn.hosts.vllm_omni:register")

from vllm_omni.diffusion import data, forward_context
from vllm_omni.diffusion.attention.backends.abstract import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    VideoTokenLayout,
    VideoTokenSpan,
)
from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum
from vllm_omni.diffusion.attention.layer import Attention
from vllm_omni.diffusion.config import set_current_diffusion_config

HEADS, DIM = 2, 16


class DenseImpl(AttentionImpl):
    """[batch, tokens, heads, channels], whole; the base's forward has no CPU."""

    def __init__(self, num_heads, head_size, softmax_scale, causal=False, num_kv_heads=None, prefix="", qkv_layout=None,
                 backend_kwargs=None, role="self", backend_explicit=False, **extra):
        self.prefix, self.role, self.scale, self.kwargs, self.explicit = prefix, role, softmax_scale, backend_kwargs, backend_explicit
        self.extra = extra

    def forward(self, query, key, value, attn_metadata=None):
        context = forward_context.get_forward_context() if forward_context.is_forward_context_available() else None
        CALLS.append((self, context, attn_metadata))
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=self.scale).transpose(1, 2)


class DenseBackend(AttentionBackend):
    supports_prefix_kv_slicing = True

    @classmethod
    def supports_attention_mask(cls, attention_spec=None):
        return True

    get_name = staticmethod(lambda: "DENSE_TEST")
    get_impl_cls = staticmethod(lambda: DenseImpl)
    get_metadata_cls = staticmethod(lambda: AttentionMetadata)
    get_builder_cls = staticmethod(lambda: None)
    get_supported_head_sizes = staticmethod(list)


@pytest.fixture(autouse=True, scope="module")
def plugins():
    from vllm_omni.plugins import load_omni_general_plugins
    load_omni_general_plugins()
    assert "DENSE_TEST" in DiffusionAttentionBackendEnum.__members__


@pytest.fixture
def settings():
    """As --diffusion-attention-config gives it."""
    return data.OmniDiffusionConfig(model="none", model_class_name="WanPipeline", diffusion_attention_config=data.AttentionConfig(
        per_role={"self": {"backend": "DENSE_TEST", "block_sparse": {"sparsity": 0.7, "start_step": 2, "skip_layers": "0,3-4"}}}))


def layer(config, role="self", **given):
    with set_current_diffusion_config(config):
        return Attention(num_heads=HEADS, head_size=DIM, causal=False, role=role, **{"softmax_scale": DIM**-0.5, **given})


def test_groups():
    from vllm_omni import plugins as host
    assert host.OMNI_DEFAULT_PLUGINS_GROUP == "vllm_omni.general_plugins"
    assert host.OMNI_PLATFORM_PLUGINS_GROUP == "vllm_omni.platform_plugins"
    register()  # again


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match="Unknown diffusion attention backend: 'SCOPE_NO'"):
        DiffusionAttentionBackendEnum["SCOPE_NO"]


def test_block_sparse_settings(settings):
    spec = settings.diffusion_attention_config.per_role["self"]
    assert spec.backend_kwargs() == dict(sparsity=0.7, start_step=2, end_step=0, precision="bf16", skip_layers=[0, 3, 4])
    with pytest.raises(ValueError, match="block_sparse is only supported"):
        data.AttentionSpec("TORCH_SDPA", block_sparse={"sparsity": 0.5})
    with pytest.raises(TypeError, match="unexpected keyword argument 'method'"):
        data.AttentionSpec("DENSE_TEST", block_sparse={"method": "scope"})


def test_a_layer_runs(settings):
    CALLS.clear()
    attention = layer(settings, prefix="blocks.3.attn1")
    impl = attention.attention
    assert isinstance(impl, DenseImpl) and impl.prefix == "blocks.3.attn1" and attention.layer_idx == 3 and impl.explicit
    assert impl.kwargs["sparsity"] == 0.7 and impl.role == "self" and not impl.extra
    q, k, v = torch.randn(3, 1, 24, HEADS, DIM)
    layout = VideoTokenLayout(prefix_len=0, latent_grid=(2, 3, 4), used_len=24)
    with forward_context.set_forward_context(omni_diffusion_config=settings):
        forward_context.set_forward_context_denoise_step_idx(4)
        forward_context.set_forward_context_denoise_total_steps(10)
        out = attention(q, k, v, AttentionMetadata(video_layout=layout))
        [(called, context, metadata)] = CALLS
        assert called is impl and metadata.video_layout is layout and metadata.attn_mask is None
        assert (context.denoise_step_idx, context.total_denoise_steps) == (4, 10)
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    assert (out - exact).abs().max() < 1e-6


def test_outside_a_forward_context(settings):
    CALLS.clear()
    layer(settings)(*torch.randn(3, 1, 8, HEADS, DIM))
    [(impl, context, metadata)] = CALLS
    assert context is None and metadata is None and impl.prefix == ""


def test_roles(settings):
    """Cross-attention keeps the platform's backend; the refiner of MiniMax-H3 falls back to the category "self"."""
    assert layer(settings, "cross").attn_backend.get_name() == "SDPA"
    refiner = layer(settings, "minimax_h3.token_refiner", role_category="self", prefix="token_refiner.blocks.1.attn")
    assert refiner.attention.role == "minimax_h3.token_refiner" and refiner.layer_idx == 1


def test_a_mask_reaches_the_backend(settings):
    CALLS.clear()
    mask = torch.arange(8)[None] < 6
    layer(settings)(*torch.randn(3, 1, 8, HEADS, DIM), AttentionMetadata(attn_mask=mask))
    assert CALLS[0][2].attn_mask is mask


def test_wan_records_its_steps_without_a_total():
    class Pipeline(forward_context.DenoiseProgressMixin):
        pass
    with forward_context.set_forward_context():
        context = forward_context.get_forward_context()
        assert context.denoise_step_idx is None and context.total_denoise_steps is None
        Pipeline().record_denoise_step(3, torch.tensor(500.))
        assert context.denoise_step_idx == 3 and context.total_denoise_steps is None


def test_signatures():
    assert list(inspect.signature(AttentionImpl.forward).parameters) == ["self", "query", "key", "value", "attn_metadata"]
    assert {"prefix_len", "latent_grid", "used_len", "video_spans"} == set(VideoTokenLayout.__dataclass_fields__)
    with pytest.raises(NotImplementedError, match="No forward implementation for platform"):
        from vllm_omni.diffusion.attention.backends.sdpa import SDPAImpl
        SDPAImpl(HEADS, DIM, 1.0).forward(*torch.randn(3, 1, 8, HEADS, DIM))


# Our backend, from here on.

GRID = 4, 8, 8
TOKENS = 256


@pytest.fixture
def scope(monkeypatch):
    monkeypatch.setenv("SCOPE_VLLM_OMNI", "min_tokens=0")


def config_of(block_sparse, pipeline="WanPipeline", role="self", **given):
    return data.OmniDiffusionConfig(model="none", model_class_name=pipeline, diffusion_attention_config=data.AttentionConfig(
        per_role={role: {"backend": "SCOPE", "block_sparse": block_sparse}}), **given)


def receipt():
    from scope_attn.hosts.vllm_omni import backend
    return backend.receipt()


def random_qkv(tokens=TOKENS, seed=0):
    return torch.randn(3, 1, tokens, HEADS, DIM, generator=torch.Generator().manual_seed(seed)) * 2


def dense(q, k, v, used=None):
    q, k, v = (x.transpose(1, 2) for x in (q, k[:, :used], v[:, :used]))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def wan(mask=None):
    return AttentionMetadata(attn_mask=mask, video_layout=VideoTokenLayout(prefix_len=0, latent_grid=GRID, used_len=TOKENS))


@contextlib.contextmanager
def video(config):
    """What request mode does: one context for a video; the function begins a step."""
    with forward_context.set_forward_context(omni_diffusion_config=config):
        def begin(step, total=None):
            forward_context.set_forward_context_denoise_step_idx(step)
            forward_context.set_forward_context_denoise_total_steps(total)
        yield begin


def whys():
    return [call.why for call in receipt().calls]


def test_the_entry_point_registers_once():
    from scope_attn.hosts.vllm_omni import register as ours
    ours()
    ours()
    assert DiffusionAttentionBackendEnum["SCOPE"].get_class().get_name() == "SCOPE" and "SCOPE" in data.BLOCK_SPARSE_BACKENDS


def test_density_1_is_dense(scope):
    config = config_of({"sparsity": 0.0})
    attention, (q, k, v) = layer(config, prefix="blocks.0.attn1"), random_qkv()
    with video(config) as begin:
        begin(0)
        out = attention(q, k, v, wan())
    assert whys() == [""] and receipt().density == 1
    assert (out - dense(q, k, v)).abs().max() < 1e-5


def test_sparse_differs_and_the_receipt_says_so(scope):
    config = config_of({"sparsity": 0.7})
    attention, (q, k, v) = layer(config, prefix="blocks.0.attn1"), random_qkv()
    with video(config) as begin:
        begin(0)
        error = (attention(q, k, v, wan()) - dense(q, k, v)).norm() / dense(q, k, v).norm()
    [call] = receipt().calls
    assert call.sparse and abs(call.density - 0.3) < 0.03 and 1e-3 < error < 0.9
    assert receipt().settings["model"].startswith("wan") and "steps, 1 self-attention" in str(receipt())


def test_the_schedule(scope):
    config = config_of({"sparsity": 0.5, "start_step": 2, "end_step": 1, "skip_layers": "0"}, "MiniMaxH3Pipeline")
    layers, (q, k, v) = [layer(config, prefix=f"blocks.{number}.attn") for number in range(2)], random_qkv()
    with video(config) as begin:
        for step in range(5):
            begin(step, 5)
            outs = [attention(q, k, v, wan()) for attention in layers]
            assert torch.equal(outs[0], dense(q, k, v)) and torch.equal(outs[1], dense(q, k, v)) == (step in (0, 1, 4))
    skipped, first, last = ("the layer is one of skip_layers", "the step is within the first 2 (start_step)",
                            "the step is within the last 1 (end_step)")
    assert whys() == [skipped, first] * 2 + [skipped, ""] * 2 + [skipped, last] and receipt().settings["steps"] == 5


def test_end_step_needs_the_number_of_steps(scope):
    config = config_of({"sparsity": 0.5, "end_step": 1})
    attention = layer(config, prefix="blocks.0.attn1")
    with video(config) as begin:
        begin(0)
        with pytest.raises(ValueError, match="end_step: it needs the number of steps, which this model does not tell"):
            attention(*random_qkv(), wan())


@pytest.mark.parametrize("variable, steps, dense_ones", [
    ("", 4, 0), ("", 5, 1), ("", 10, 2), (",dense_steps=0", 10, 0), (",dense_steps=0.5", 5, 2), (",method=fast", 10, 0),
    (",model=hunyuanvideo-13b", 10, 1)])
def test_the_first_steps_are_the_known_models_share(monkeypatch, variable, steps, dense_ones):
    """Rounded down, as in every host, where the model tells its number of steps and no start_step is said."""
    monkeypatch.setenv("SCOPE_VLLM_OMNI", f"min_tokens=0{variable}")
    config = config_of({"sparsity": 0.5}, "MiniMaxH3Pipeline")
    attention, (q, k, v) = layer(config, prefix="blocks.0.attn"), random_qkv()
    with video(config) as begin:
        for step in range(steps):
            begin(step, steps)
            assert torch.equal(attention(q, k, v, wan()), dense(q, k, v)) == (step < dense_ones)
    assert whys() == ["the step is within dense_steps"] * dense_ones + [""] * (steps - dense_ones)


def test_without_the_number_of_steps_no_first_step_is_dense(scope, monkeypatch, caplog):
    """Of Wan: the log says so once, and a share of the steps is refused."""
    from scope_attn.hosts.vllm_omni import logger
    said = "no first steps are dense: this model does not tell how many steps there are, so give their number by start_step"

    def run(block_sparse):
        config = config_of(block_sparse)
        attention = layer(config, prefix="blocks.0.attn1")
        caplog.clear()
        logger.addHandler(caplog.handler)
        try:
            with caplog.at_level(logging.INFO, logger.name), video(config) as begin:
                for step in range(3):
                    begin(step)
                    attention(*random_qkv(), wan())
        finally:
            logger.removeHandler(caplog.handler)
        return caplog.text.count(said)

    monkeypatch.setattr(logging.getLogger("vllm_omni"), "propagate", False)  # caplog would see it twice
    assert run({"sparsity": 0.5}) == 1 and whys() == [""] * 3
    assert run({"sparsity": 0.5, "start_step": 1}) == 0 and whys()[1:] == [""] * 2
    for variable in "dense_steps=0", "method=fast":
        monkeypatch.setenv("SCOPE_VLLM_OMNI", f"min_tokens=0,{variable}")
        assert run({"sparsity": 0.5}) == 0 and whys() == [""] * 3
    monkeypatch.setenv("SCOPE_VLLM_OMNI", "min_tokens=0,dense_steps=0.2")
    with pytest.raises(ValueError, match="dense_steps: it needs the number of steps, which this model does not tell"):
        run({"sparsity": 0.5})
    with pytest.raises(ValueError, match="dense_steps: start_step of block_sparse says it too; give one of them"):
        run({"sparsity": 0.5, "start_step": 1})


@pytest.mark.parametrize("sparsity", [0.0, 0.6])
@pytest.mark.parametrize("step", [0, 1])
def test_prefix_and_used_length(scope, step, sparsity):
    """Of MiniMax-H3: text first, padding last, which no mask hides; in dense calls (step 0) too."""
    prefix, padding = 40, 24
    tokens, used = prefix + TOKENS + padding, prefix + TOKENS
    config = config_of({"sparsity": sparsity, "start_step": 1}, "MiniMaxH3Pipeline")
    attention, (q, k, v) = layer(config, prefix="blocks.0.attn"), random_qkv(tokens)
    k[:, used:] = 100  # what is padding must not be seen
    metadata = AttentionMetadata(extra={"valid_kv_length": used}, video_layout=VideoTokenLayout(prefix_len=prefix, latent_grid=GRID))
    with video(config) as begin:
        begin(step, 5)
        out = attention(q, k, v, metadata)
        begin(step, 5)
        del metadata.extra["valid_kv_length"]
        again = attention(q, k, v, metadata)
    exact = dense(q, k, v, used)[:, :used]
    assert [bool(why) for why in whys()] == [step == 0] * 2
    assert (out[:, :prefix] - exact[:, :prefix]).abs().max() < 1e-4  # the text is dense
    assert ((out[:, :used] - exact).abs().max() < 1e-4) == (step == 0 or sparsity == 0)
    assert torch.equal(out[:, :used], again[:, :used])


def test_spans_between_other_tokens(scope):
    """Of MiniMax-H3 with a reference: what is none of the spans attends densely."""
    layout = VideoTokenLayout(used_len=360, video_spans=(VideoTokenSpan(10, (1, 8, 8), "reference"), VideoTokenSpan(100, GRID, "target")))
    config = config_of({"sparsity": 0.6}, "MiniMaxH3Pipeline")
    attention, (q, k, v) = layer(config, prefix="blocks.0.attn"), random_qkv(384)
    with video(config) as begin:
        begin(1, 5)
        out, exact = attention(q, k, v, AttentionMetadata(video_layout=layout)), dense(q, k, v, 360)
    others = [*range(10), *range(74, 100), *range(356, 360)]
    assert whys() == [""] and (out - exact)[:, others].abs().max() < 1e-4
    assert (out - exact)[:, 100:356].abs().max() > 1e-2 and (out - exact)[:, 10:74].abs().max() > 1e-2


def test_two_branches_have_states_of_their_own(scope):
    """Guidance's second call in a step gives what it gives alone."""
    def run(seeds):
        config = config_of({"sparsity": 0.6})
        attention, outs = layer(config, prefix="blocks.0.attn1"), []
        with video(config) as begin:
            for step in range(3):
                begin(step)
                outs.append([attention(*random_qkv(seed=seed), wan()) for seed in seeds])
        return outs, {call.branch for call in receipt().calls}

    both, branches = run([1, 2])
    alone, one = run([2])
    assert branches == {"call 0", "call 1"} and one == {"call 0"}
    assert all(torch.equal(two[1], single[0]) for two, single in zip(both, alone))


def test_a_second_video_starts_anew(scope):
    """By a step that falls, and by another context in the same step, whether the one before is still there or not."""
    config, outs, receipts, contexts = config_of({"sparsity": 0.6}), [], [], []
    attention = layer(config, prefix="blocks.0.attn1")
    for steps in (2, 1, 1, 1):
        with video(config) as begin:
            contexts += [forward_context.get_forward_context()] if len(receipts) == 2 else []
            for step in range(steps):
                begin(step)
                out = attention(*random_qkv(seed=step), wan())
                if step == 0:
                    outs.append(out)
        receipts.append(receipt())
    assert len({id(one) for one in receipts}) == 4 and [len(one.calls) for one in receipts] == [2, 1, 1, 1]
    assert all(torch.equal(outs[0], out) for out in outs[1:])


def test_states_go_with_the_last_step(scope):
    """The VAE comes next, and needs their memory."""
    from scope_attn.hosts.vllm_omni import backend
    config = config_of({"sparsity": 0.6})
    layers = [layer(config, prefix=f"blocks.{number}.attn1") for number in range(2)]
    with video(config) as begin:
        for step in range(3):
            begin(step, 3)
            for attention in layers:
                attention(*random_qkv(), wan())
            assert len(backend._runs[-1].session.video.states["transformer"]) == (2 if step < 2 else 0)


def test_scale(scope):
    config = config_of({"sparsity": 0.0})
    attention, (q, k, v) = layer(config, prefix="blocks.0.attn1", softmax_scale=0.1), random_qkv()
    with video(config) as begin:
        begin(0)
        out = attention(q, k, v, wan())
    exact = dense(0.1 * DIM**0.5 * q, k, v)
    assert whys() == [""] and (out - exact).abs().max() < 1e-5 < (exact - dense(q, k, v)).abs().max()


def test_layers_are_skipped_by_the_number_of_their_block(scope):
    """VACE's own blocks are counted apart."""
    config = config_of({"sparsity": 0.6, "skip_layers": "1"})
    with video(config) as begin:
        layers = [layer(config, prefix=prefix) for prefix in ("blocks.0.attn1", "vace_blocks.0.attn1", "blocks.1.attn1")]
        begin(0)
        for attention in layers:
            attention(*random_qkv(), wan())
    assert whys() == ["", "", "the layer is one of skip_layers"]


def test_a_context_for_each_step_is_one_video(scope):
    """As with step_execution."""
    config = config_of({"sparsity": 0.6})
    attention = layer(config, prefix="blocks.0.attn1")
    for step in range(3):
        with video(config) as begin:
            begin(step)
            attention(*random_qkv(), wan())
    assert [call.step for call in receipt().calls] == [0, 1, 2]


def test_experts_and_vace_blocks(scope):
    config = config_of({"sparsity": 0.6})
    layers = [layer(config, prefix=prefix) for prefix in ("blocks.0.attn1", "vace_blocks.0.attn1", "blocks.0.attn1")]
    with video(config) as begin:
        begin(0)
        for attention in layers:
            attention(*random_qkv(), wan())
    assert [(call.expert, call.layer, call.branch) for call in receipt().calls] == [
        ("transformer", 0, "call 0"), ("transformer", 1, "call 0"), ("transformer_2", 0, "call 0")]


def test_dense_layers_are_not_ours(scope):
    """MiniMax-H3's refiner by its role, with its padding cut; cross-attention; calls outside a video."""
    config = config_of({"sparsity": 0.6}, "MiniMaxH3Pipeline")
    q, k, v = random_qkv(64)
    refiner = layer(config, "minimax_h3.token_refiner", role_category="self", prefix="token_refiner.blocks.1.attn")
    assert refiner.attn_backend.get_name() == "SCOPE" and layer(config, "cross").attn_backend.get_name() == "SDPA"
    with video(config) as begin:
        begin(0, 5)
        assert torch.equal(refiner(q, k, v, AttentionMetadata(extra={"valid_kv_length": 50})), dense(q, k, v, 50))
    assert torch.equal(layer(config, prefix="blocks.0.attn")(q, k, v), dense(q, k, v))


def test_masks(scope):
    """With a layout a mask of keys is its padding; any other mask makes a dense call, by the mask."""
    config = config_of({"sparsity": 0.0})
    attention, (q, k, v) = layer(config, prefix="blocks.0.attn1"), random_qkv(TOKENS + 8)
    mask = torch.arange(TOKENS + 8)[None] < TOKENS
    with video(config) as begin:
        begin(0)
        padded = attention(q, k, v, wan(mask))
        holes = torch.rand(1, 1, 1, TOKENS + 8, generator=torch.Generator().manual_seed(0)) < 0.5
        holed = attention(q, k, v, wan(holes))
        bare = attention(q, k, v, AttentionMetadata(attn_mask=mask))
    exact = dense(q, k, v, TOKENS)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    assert (padded - exact)[:, :TOKENS].abs().max() < 1e-5 and (bare - exact).abs().max() < 1e-5
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=holes).transpose(1, 2)
    assert (holed - expected).abs().max() < 1e-5
    assert whys() == ["", "the call has a mask", "the call does not say where the video's tokens are"]


def test_a_few_tokens_are_dense(monkeypatch):
    monkeypatch.delenv("SCOPE_VLLM_OMNI", raising=False)
    config = config_of({"sparsity": 0.6})
    attention, (q, k, v) = layer(config, prefix="blocks.0.attn1"), random_qkv()
    with video(config) as begin:
        begin(0)
        assert torch.equal(attention(q, k, v, wan()), dense(q, k, v))
    assert whys() == ["256 tokens, min_tokens is 4,096"]


@pytest.mark.parametrize("text", ["method=fast,min_tokens=0,tail=mean", '{"method": "fast", "min_tokens": 0, "tail": "mean"}'])
def test_the_variable(monkeypatch, text):
    monkeypatch.setenv("SCOPE_VLLM_OMNI", text)
    config = config_of({"sparsity": 0.5})
    attention = layer(config, prefix="blocks.0.attn1")
    with video(config) as begin:
        begin(0)
        attention(*random_qkv(), wan())
    assert receipt().settings["method"] == "fast" and receipt().settings["settings"]["tail"] == "mean" and whys() == [""]


@pytest.mark.parametrize("text, error", [
    ("sparsty=1", 'there is no setting "sparsty"; there are method, model, min_tokens, strict, group'),
    ("method", 'got "method", expected name=value'),
    ("{bad", "it begins like JSON and is none"),
    ("target_density=0.1", "target_density is said by sparsity in block_sparse"),
    ("dense_last_steps=0.1", "dense_last_steps is said by end_step in block_sparse"),
    ("dense_steps=7", "dense_steps: got"),
    ("min_tokens=many", "expected a whole number"),
    ("strict=perhaps", "expected yes or no"),
    ("method=sol", "Morton"),
    ("rho=7", "rho"),
])
def test_a_bad_variable(monkeypatch, text, error):
    from vllm_omni.diffusion.attention import selector
    selector._cached_get_backend_cls.cache_clear()
    monkeypatch.setenv("SCOPE_VLLM_OMNI", text)
    with pytest.raises(ValueError, match=error):
        layer(config_of({"sparsity": 0.5}), prefix="blocks.0.attn1")


@pytest.mark.parametrize("change, error", [
    (dict(pipeline="LTX2Pipeline"), "LTX2Pipeline does not tell its attention the step"),
    (dict(pipeline="HunyuanVideo15Pipeline"), "expected Wan2.2 or MiniMax-H3"),
    (dict(pipeline="WanS2VPipeline"), "WanS2VPipeline does not tell"),
    (dict(block_sparse={"sparsity": 1.0}), "sparsity: got 1.0, expected less than 1"),
    (dict(block_sparse={"sparsity": 0.5, "precision": "fp8"}), "precision: got fp8, expected bf16"),
    (dict(step_execution=True, max_num_seqs=2), "max_num_seqs: got 2 with step_execution"),
])
def test_refusals(scope, change, error):
    with pytest.raises(ValueError, match=error):
        layer(config_of(**{"block_sparse": {"sparsity": 0.5}, **change}), prefix="blocks.0.attn1")


def test_without_block_sparse_vllm_omni_says_its_default(scope):
    config = config_of(None)
    attention = layer(config, prefix="blocks.0.attn1")
    with video(config) as begin:
        begin(0)
        attention(*random_qkv(), wan())
    assert abs(receipt().density - 0.2) < 0.03
    with set_current_diffusion_config(config_of(None)), pytest.raises(ValueError, match="block_sparse is missing"):
        attention.attn_impl_cls(num_heads=HEADS, head_size=DIM, softmax_scale=1.0, prefix="blocks.0.attn1")


@pytest.mark.parametrize("name", ["ring_degree", "allgather_degree"])
def test_parallelism_that_splits_keys_is_refused(scope, name):
    config = config_of({"sparsity": 0.5})
    setattr(config.parallel_config, name, 2)  # its own check asks for as many GPUs
    with pytest.raises(ValueError, match=f"{name}: got 2, expected 1"):
        layer(config, prefix="blocks.0.attn1")


def test_ranks_are_in_the_receipt(scope, monkeypatch):
    """Heads are split among ranks, and the known model is that of all of them."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    config = config_of({"sparsity": 0.5}, "MiniMaxH3Pipeline")
    config.parallel_config.tensor_parallel_size, config.parallel_config.ulysses_degree = 2, 4
    with set_current_diffusion_config(config):
        impl = DiffusionAttentionBackendEnum["SCOPE"].get_class().get_impl_cls()(
            num_heads=28, head_size=128, softmax_scale=128**-0.5, prefix="blocks.0.attn", backend_kwargs={"sparsity": 0.5})
    with video(config) as begin:
        begin(0, 5)
        impl.forward(*torch.randn(3, 1, TOKENS, 7, 128), wan())
    about = receipt().settings
    assert (about["ranks"], about["rank"], about["model"]) == (8, 3, "minimax-h3") and "50 layers x 56 heads" in about["why_model"]
    assert "rank 3 of 8" in str(receipt())


def test_a_layout_that_does_not_fit_is_refused_or_dense(monkeypatch):
    layout = VideoTokenLayout(prefix_len=0, latent_grid=(9, 9, 9), used_len=TOKENS)
    for strict in ("yes", "no"):
        monkeypatch.setenv("SCOPE_VLLM_OMNI", f"min_tokens=0,strict={strict}")
        config = config_of({"sparsity": 0.5})
        attention, (q, k, v) = layer(config, prefix="blocks.0.attn1"), random_qkv()
        with video(config) as begin:
            begin(0)
            if strict == "yes":
                with pytest.raises(ValueError, match="video_layout: got spans"):
                    attention(q, k, v, AttentionMetadata(video_layout=layout))
            else:
                assert torch.equal(attention(q, k, v, AttentionMetadata(video_layout=layout)), dense(q, k, v))
                assert whys()[0].startswith("refused: video_layout")


def test_out_of_memory(monkeypatch):
    """Where a state finds no memory the error reaches the server, or the call is dense; the next video is as if nothing had been."""
    def fail(state, plan):
        raise torch.OutOfMemoryError("CUDA out of memory")

    for strict in ("yes", "no"):
        monkeypatch.setenv("SCOPE_VLLM_OMNI", f"min_tokens=0,strict={strict}")
        config = config_of({"sparsity": 0.6})
        attention, (q, k, v) = layer(config, prefix="blocks.0.attn1"), random_qkv()

        def run():
            with video(config) as begin:
                begin(0)
                return attention(q, k, v, wan())

        good = run()
        with monkeypatch.context() as patch:
            patch.setattr(scope_attn.State, "_bind", fail)
            if strict == "yes":
                with pytest.raises(torch.OutOfMemoryError):
                    run()
            else:
                assert torch.equal(run(), dense(q, k, v)) and whys() == ["refused: CUDA out of memory"]
            assert not any(attention.attention.run.session.video.states.values())
        assert torch.equal(run(), good) and whys() == [""]


def test_a_longer_video(scope):
    """A layer that meets more tokens than its state has gets another state."""
    config, outs = config_of({"sparsity": 0.6}), []
    attention = layer(config, prefix="blocks.0.attn1")
    longer = AttentionMetadata(video_layout=VideoTokenLayout(prefix_len=0, latent_grid=(8, 8, 8), used_len=512))
    with video(config) as begin:
        for step, (tokens, metadata) in enumerate([(TOKENS, wan()), (512, longer)] * 2):
            begin(step)
            outs.append(attention(*random_qkv(tokens, seed=step), metadata))
    assert [call.stats.warm for call in receipt().calls] == [False, False, True, True]
    with video(config) as begin:
        begin(1)
        assert torch.equal(attention(*random_qkv(512, seed=1), longer), outs[1])


def test_beside_diffusers(scope):
    """Two hosts in one process, their steps by turns: each gives what it gives alone."""
    pipe, config = tiny.wan(), config_of({"sparsity": 0.6})
    scope_attn.enable(pipe, target_density=0.2, min_tokens=0, dense_steps=0, dense_layers=0)
    attention = layer(config, prefix="blocks.0.attn1")

    def run(begin, step):
        begin(step)
        return attention(*random_qkv(seed=step), wan())

    with video(config) as begin:
        alone = [run(begin, step) for step in range(3)], tiny.make_wan(pipe)
    together = []
    with video(config) as begin:
        def between(pipe, step, timestep, kwargs):
            if step < 3:
                together.append(run(begin, step))
            return kwargs

        out = tiny.make_wan(pipe, callback_on_step_end=between)
    assert len(together) == 3 and all(torch.equal(ours, theirs) for ours, theirs in zip(together, alone[0]))
    assert torch.equal(out, alone[1]) and whys() == [""] * 3 and any(call.sparse for call in scope_attn.receipt(pipe).calls)


def test_a_version_that_lacks_something(monkeypatch, caplog):
    from scope_attn.hosts import vllm_omni as ours
    monkeypatch.setitem(ours.NEEDED, "vllm_omni.diffusion.forward_context", {"ForwardContext": ("step_of_tomorrow",)})
    with caplog.at_level(logging.WARNING, "vllm_omni.scope_attn"):
        logging.getLogger("vllm_omni").propagate = True
        ours.logger.addHandler(caplog.handler)
        ours.register()
        ours.logger.removeHandler(caplog.handler)
    assert "ForwardContext has no step_of_tomorrow" in caplog.text
    monkeypatch.setitem(ours.NEEDED, "vllm_omni.no_such", {"Name": ()})
    monkeypatch.delitem(ours.NEEDED, "vllm_omni.diffusion.forward_context")
    assert "vllm_omni.no_such" in ours.missing()
