"""The ComfyUI node, called as ComfyUI's own code calls it. ComfyUI is not on PyPI: `comfy_api.latest` and `comfy.patcher_extension` are
stand-ins with the names that the node uses, models carry the attributes that it reads, and Sampler and the two functions below it make the calls."""
import asyncio
import copy
import importlib.util
import inspect
import logging
import pathlib
import sys
import types
import uuid

import pytest
import torch

import scope_attn

NODE = pathlib.Path(__file__).parents[2] / "integrations/comfyui/scope_attention.py"
ROPE, DIM, HEADS, TOKENS = (12, 10, 10), 32, 2, 320
WAN_GRID = (1, 4, 5, 16, 16)  # latents: batch, channels, T, H, W, in patches of 1 x 2 x 2
BLOCKS = 3


class Input:
    def __init__(self, id, **options):
        self.id, self.options = id, options


class Output:
    pass


class NodeOutput:
    def __init__(self, *args):
        self.args = args


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """PyTorch's threads would spin beside the library's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def node():
    kinds = {name: types.SimpleNamespace(Input=Input, Output=Output) for name in ("Model", "Combo", "Float", "Int", "Boolean", "String")}
    io = types.SimpleNamespace(ComfyNode=object, Schema=types.SimpleNamespace, NodeOutput=NodeOutput, **kinds)
    patcher_extension = types.ModuleType("comfy.patcher_extension")
    patcher_extension.CallbacksMP = types.SimpleNamespace(ON_PREPARE_STATE="on_prepare_state", ON_CLEANUP="on_cleanup")
    patcher_extension.WrappersMP = types.SimpleNamespace(DIFFUSION_MODEL="diffusion_model")
    modules = {"comfy": types.ModuleType("comfy"), "comfy.patcher_extension": patcher_extension, "comfy_api": types.ModuleType("comfy_api"),
               "comfy_api.latest": types.ModuleType("comfy_api.latest")}
    modules["comfy"].patcher_extension = patcher_extension
    modules["comfy_api.latest"].io, modules["comfy_api.latest"].ComfyExtension = io, object
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        yield load_node()


def load_node():
    spec = importlib.util.spec_from_file_location("scope_attention", NODE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class WanModel:
    model_type, num_heads, dim, patch_size = "t2v", HEADS, HEADS * DIM, (1, 2, 2)

    def __init__(self):
        self.blocks, self.rope_embedder = [None] * BLOCKS, types.SimpleNamespace(axes_dim=list(ROPE))


class VaceWanModel(WanModel):
    pass


class HunyuanVideo:
    num_heads, hidden_size, patch_size = HEADS, HEADS * DIM, [1, 2, 2]

    def __init__(self, axes=ROPE, **block):
        self.params = types.SimpleNamespace(axes_dim=list(axes))
        self.double_blocks, self.single_blocks = [types.SimpleNamespace(**block)] * 2, [None] * 2


class Patcher:
    """ComfyUI's ModelPatcher, as far as the node and the sampler use it."""

    def __init__(self, model, shift=8.0):
        self.model, self.shift = model, shift
        self.model_options, self.callbacks, self.wrappers = {"transformer_options": {}}, {}, {}

    def clone(self):
        other = Patcher(self.model, self.shift)
        other.model_options = copy.deepcopy(self.model_options)
        other.callbacks, other.wrappers = dict(self.callbacks), dict(self.wrappers)
        return other

    def get_model_object(self, name):
        return {"diffusion_model": self.model, "model_sampling": self}[name]

    def percent_to_sigma(self, percent):  # of flow models
        t = min(max(1 - percent, 0.0), 1.0)
        return self.shift * t / (1 + (self.shift - 1) * t)

    def add_callback_with_key(self, kind, key, callback):
        self.callbacks[kind] = callback

    def add_wrapper_with_key(self, kind, key, wrapper):
        self.wrappers[kind] = wrapper

    @property
    def run(self):
        return self.model_options["transformer_options"]["optimized_attention_override"].scope_run


def attention(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
    """A dense attention function of ComfyUI, with its signature."""
    if not skip_reshape:
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    if mask is not None:
        mask = {2: lambda: mask[None, None], 3: lambda: mask[:, None], 4: lambda: mask}[mask.ndim]()
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=kwargs.get("scale"))
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def call(options, *args, **kwargs):
    """optimized_attention: what ComfyUI's wrapper around every attention function passes to an override."""
    kwargs.update(transformer_options=options, _inside_attn_wrapper=True)
    override = options.get("optimized_attention_override")
    return attention(*args, **kwargs) if override is None else override(attention, *args, **kwargs)


class Sampler:
    """A sampling run, over models that do nothing but attend; the newer ComfyUI hands model_options to prepare_state."""

    def __init__(self, steps=10, start=0, end=None, branches=2, newer=True, grid=WAN_GRID, seed=0):
        self.newer, self.grid, self.seed = newer, grid, seed
        self.uuids = [uuid.uuid4() for _ in range(branches)]
        self.steps, self.part = steps, slice(start, (steps if end is None else end) + 1)

    def sample(self, patcher, forward):
        options = copy.deepcopy(patcher.model_options)
        sigmas = torch.tensor([patcher.percent_to_sigma(i / self.steps) for i in range(self.steps + 1)])[self.part]
        outputs = []
        try:
            for step, sigma in enumerate(sigmas[:-1]):
                timestep = sigma * torch.ones(1)
                if "on_prepare_state" in patcher.callbacks:
                    patcher.callbacks["on_prepare_state"](patcher, timestep, *[options] * self.newer)
                for branch, name in list(enumerate(self.uuids))[::1 - step % 2 * 2]:  # in any order
                    generator = torch.Generator().manual_seed(1000 * self.seed + 10 * step + branch)
                    transformer_options = {**options["transformer_options"], "cond_or_uncond": [branch], "uuids": [name], "sigmas": timestep,
                                           "sample_sigmas": sigmas}
                    run = lambda x, *args, **kwargs: forward(kwargs["transformer_options"], generator)
                    arguments = torch.empty(self.grid), timestep, None
                    wrapper = patcher.wrappers.get("diffusion_model", lambda executor, *args, **kwargs: executor(*args, **kwargs))
                    outputs += wrapper(run, *arguments, transformer_options=transformer_options)
        finally:
            if "on_cleanup" in patcher.callbacks:
                patcher.callbacks["on_cleanup"](patcher)
        return outputs


def wan(options, generator, twice=False, mask=None, tokens=TOKENS):
    """The attention calls of WanModel, or of VACE, whose second set of blocks attends under the same block_index."""
    options["total_blocks"], options["block_type"] = BLOCKS, "double"
    outputs = []
    for index in range(BLOCKS):
        options["block_index"] = index
        for _ in range(1 + twice):
            q, k, v = torch.randn(3, 1, tokens, HEADS * DIM, generator=generator)
            given = {} if mask is None else dict(mask=mask)
            outputs.append(call(options, q, k, v, heads=HEADS, **given))
        text = torch.randn(2, 1, 12, HEADS * DIM, generator=generator)
        outputs.append(call(options, q, *text, heads=HEADS))
    return outputs


def hunyuan(options, generator, mask=None, tokens=TOKENS, value=None):
    """The attention calls of HunyuanVideo: the text refiner, double blocks, single blocks."""
    refiner = torch.randn(3, 1, HEADS, 24, DIM, generator=generator)
    outputs = [call(options, *refiner, HEADS, mask=torch.zeros(1, 1, 24, 24), skip_reshape=True)]
    for kind in ("double", "single"):
        options["total_blocks"], options["block_type"] = 2, kind
        for index in range(2):
            options["block_index"] = index
            q, k, v = torch.randn(3, 1, HEADS, tokens, DIM, generator=generator)
            outputs.append(call(options, q, k, v if value is None else value, HEADS, skip_reshape=True, mask=mask))
    return outputs


def patched(node, model=None, **given):
    inputs = {**dict(method="scope", target_density=0.3, min_tokens=100), **given}
    return node.ScopeAttention.execute(model or Patcher(WanModel()), **inputs).args[0]


def largest(ours, theirs):
    return max((a - b).abs().max() for a, b in zip(ours, theirs))


def counts(node, monkeypatch, patcher, sampler, forward):
    """The outputs of a run, and what was counted before its cleanup."""
    found = {}
    with monkeypatch.context() as patch:
        patch.setattr(node.Run, "summary", lambda run: str(found.update(run.counts, states=len(run.states))))
        return sampler.sample(patcher, forward), found


def test_schema(node):
    schema = node.ScopeAttention.define_schema()
    assert [x.id for x in schema.inputs] == ["model", "method", "target_density", "min_tokens", "strict", "settings"]
    names = [method.name for method in scope_attn.methods()]
    assert schema.inputs[1].options["options"] == [name for name in names if name != "sol"] and "sol" in names
    assert schema.inputs[1].options["default"] == inspect.signature(scope_attn.enable).parameters["method"].default
    assert asyncio.run(asyncio.run(node.comfy_entrypoint()).get_node_list()) == [node.ScopeAttention]


@pytest.mark.parametrize("newer", [False, True])
def test_wan(node, monkeypatch, caplog, newer):
    plain = Patcher(WanModel())
    sampler = Sampler(newer=newer)
    dense = sampler.sample(plain, wan)
    everything = sampler.sample(patched(node, plain, target_density=1.0), wan)
    assert largest(everything, dense) < 1e-5
    model = patched(node, plain)
    outputs, found = counts(node, monkeypatch, model, sampler, wan)
    # 2 branches: 3 blocks in 10 steps; block 0 and the first 2 steps are dense.
    assert found == {"sparse": 32, "first layers": 20, "first steps": 8, "cross-attention": 60, "states": 4}
    for i, (ours, theirs) in enumerate(zip(outputs, dense)):
        sparse = i >= 2 * 12 and i % 6 in (2, 4)  # 6 outputs in a forward
        assert (largest([ours], [theirs]) > 0.01) == sparse
    with caplog.at_level(logging.INFO):
        again = sampler.sample(model, wan)
    assert largest(again, outputs) == 0, "a new run starts anew"
    assert "32 calls sparse (density 0.3" in caplog.text and "60 cross-attention" in caplog.text
    assert not plain.model_options["transformer_options"] and not model.run.states
    assert largest(Sampler(branches=1).sample(patched(node, method="dense"), wan), Sampler(branches=1).sample(plain, wan)) == 0


def test_states(node):
    """Each block, branch and occurrence has a state of its own: the outputs are those of direct calls with such states."""
    model = patched(node, Patcher(VaceWanModel()), settings="dense_layers=0\ndense_steps=0  # everything\nstate_dtype=f32")
    sampler = Sampler(steps=9)
    ours = sampler.sample(model, lambda *args: wan(*args, twice=True))
    states = {}

    def directly(options, generator):
        outputs = []
        for index in range(BLOCKS):
            for which in range(2):
                q, k, v = (x.unflatten(-1, (HEADS, -1)) for x in torch.randn(3, 1, TOKENS, HEADS * DIM, generator=generator))
                state = states.setdefault((index, which, options["uuids"][0]), scope_attn.State())
                outputs.append(scope_attn.attention(q, k, v, rope=ROPE, layout="BNHD", model="wan2.1-t2v-14b", target_density=0.3,
                                                    dense_layers=0, dense_steps=0, state=state).flatten(2))
            outputs.append(attention(q.flatten(2), *torch.randn(2, 1, 12, HEADS * DIM, generator=generator), heads=HEADS))
        return outputs

    assert largest(ours, sampler.sample(Patcher(WanModel()), directly)) == 0
    assert len(states) == 12


def test_warm_prefix(node, monkeypatch):
    """Dense steps that cluster are ComfyUI's own attention, bit by bit, and the first sparse calls are warm."""
    plain, sampler, warm = Patcher(WanModel()), Sampler(), []
    run = scope_attn.Plan.run

    def noted(plan, *qkv, stats, **more):
        out = run(plan, *qkv, stats=stats, **more)
        warm.append(stats.warm)
        return out

    monkeypatch.setattr(scope_attn.Plan, "run", noted)
    for method in ("scope", "scope-mean"):
        model = patched(node, plain, method=method, settings="warm_prefix=yes")
        outputs, found = counts(node, monkeypatch, model, sampler, wan)
        assert found == {"sparse": 32, "first layers": 20, "first steps": 8, "cross-attention": 60, "states": 4}
        dense = sampler.sample(plain, wan)
        assert largest(outputs[:24], dense[:24]) == 0 and largest(outputs[24:], dense[24:]) > 0.01
        assert warm == [True] * 32
        warm.clear()


def test_nothing_to_select(node, monkeypatch):
    """A mask that leaves text alone: ComfyUI's own attention runs the call."""
    video = 16 * 18
    mask = (torch.arange(TOKENS) >= video)[None, None, None]
    plain = Patcher(HunyuanVideo(flipped_img_txt=True))
    model = patched(node, plain, settings="dense_layers=0\ndense_steps=0")
    sampler, forward = Sampler(branches=1, grid=(1, 4, 2, 2 * 12, 2 * 12)), lambda *args: hunyuan(*args, mask=mask)
    outputs, found = counts(node, monkeypatch, model, sampler, forward)
    assert found["no key or query takes part"] == 40 and "sparse" not in found
    assert largest(outputs, sampler.sample(plain, forward)) == 0


def test_shared_branches(node, monkeypatch):
    model = patched(node, method="svg2", settings="groups=8\ncodes=8")
    assert counts(node, monkeypatch, model, Sampler(), wan)[1]["states"] == 2, "one per block"


def test_steps(node, monkeypatch):
    """Parts of a schedule count as such; a few steps have no dense start; the GPU is waited for once per forward."""
    def first_steps(patcher, *args, **kwargs):
        return counts(node, monkeypatch, patcher, Sampler(*args, branches=1, **kwargs), wan)[1].get("first steps", 0)

    assert first_steps(patched(node), 20, 0, 10) == 8, "4 of 20 steps, though 10 are run"
    assert first_steps(patched(node), 20, 10) == 0, "the second expert begins after them"
    assert first_steps(patched(node), 20, 2) == 4, "denoise below 1"
    assert first_steps(patched(node), 8) == 0 and first_steps(patched(node, settings="dense_steps=0.5"), 8) == 8
    read = []
    make = node.Forward.__init__
    monkeypatch.setattr(node.Forward, "__init__", lambda *args: (read.append(args), make(*args))[1])
    model = patched(node)
    Sampler(9, branches=1).sample(model, wan)
    assert len(read) == 9
    assert node.whole_run([0.0, 0.5, 1.0], Patcher(WanModel())) == (0, 2), "noise is added"


HOLES = torch.ones(TOKENS, dtype=torch.bool)
HOLES[40:47] = HOLES[200:203] = HOLES[-5:] = False
MASKS = {
    "boolean": HOLES[None, None, None],
    "boolean per sample": HOLES[None],
    "lowest": ((HOLES.float() - 1) * torch.finfo(torch.float32).max)[None, None],
    "infinite, spread over queries": torch.where(HOLES, 0.0, -torch.inf)[None, None, None].expand(1, HEADS, TOKENS, TOKENS),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(node, monkeypatch, name):
    sampler, mask = Sampler(branches=1), MASKS[name]
    forward = lambda *args: wan(*args, mask=mask)
    whole = mask if mask.ndim > 2 else mask[:, None, None]
    dense = sampler.sample(Patcher(WanModel()), lambda *args: wan(*args, mask=whole))
    everything, found = counts(node, monkeypatch, patched(node, target_density=1.0, strict=True, settings="dense_layers=0\ndense_steps=0"),
                               sampler, forward)
    assert found["sparse"] == 30 and largest(everything, dense) < 1e-5
    far = sampler.sample(patched(node, target_density=1.0), wan)
    assert largest(far, dense) > 0.01, "the mask matters"


def test_a_mask_is_of_its_call_alone(node):
    sampler = Sampler(branches=1)
    mask = torch.where(torch.arange(TOKENS) < 200, 0.0, -torch.inf)[None, None]
    forward = lambda *args: wan(*args, mask=mask) + wan(*args)
    everywhere = patched(node, target_density=1.0, settings="dense_layers=0\ndense_steps=0")
    assert largest(sampler.sample(everywhere, forward), sampler.sample(Patcher(WanModel()), forward)) < 1e-5


@pytest.mark.parametrize("mask, words", [
    (torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(), "a row for each query"),
    (torch.ones(1, HEADS, 1, TOKENS, dtype=torch.bool), "a row for each head"),
    (torch.full((1, 1, TOKENS), -0.5), "other than 0 and -inf"),
    (torch.zeros(1, TOKENS, dtype=torch.bool), "without keys"),
    (torch.ones(1, 1, TOKENS - 1, dtype=torch.bool), r"expected a value for each of 320 keys"),
])
def test_refused_masks(node, monkeypatch, caplog, mask, words):
    sampler = Sampler(branches=1)
    with pytest.raises(node.Refused, match=words):
        sampler.sample(patched(node, settings="dense_layers=0\ndense_steps=0"), lambda *args: wan(*args, mask=mask))
    monkeypatch.setattr(sys.modules[__name__], "attention", lambda q, *args, **kwargs: q)
    model = patched(node, strict=False, settings="dense_layers=0\ndense_steps=0")
    sampler.sample(model, lambda *args: wan(*args, mask=mask))
    assert caplog.text.count("the call runs dense") == 1 and "30 refused (mask" in caplog.text


@pytest.mark.parametrize("text_first", [False, True])
def test_hunyuan(node, monkeypatch, text_first):
    """Text is joined to the video before or after it, with padding inside; its queries see every key, its keys are always kept."""
    video, text = 16 * 18, TOKENS - 16 * 18
    valid = torch.ones(TOKENS, dtype=torch.bool)
    valid[text - 9:text] = False  # padding between text and video, or within the video's end
    mask = torch.where(valid, 0.0, -torch.finfo(torch.float32).max)[None, None]
    if not text_first:
        mask = mask.flip(-1)
    model = Patcher(HunyuanVideo(**({} if text_first else {"flipped_img_txt": True})))
    sampler = Sampler(branches=1, grid=(1, 4, 2, 2 * 12, 2 * 12))
    assert video == 2 * 12 * 12
    forward = lambda *args: hunyuan(*args, mask=mask)
    dense = sampler.sample(model, forward)
    everything = sampler.sample(patched(node, model, target_density=1.0), forward)
    assert largest(everything, dense) < 1e-5
    outputs, found = counts(node, monkeypatch, patched(node, model, min_tokens=0), sampler, forward)
    assert found == {"outside the blocks": 10, "first layers": 10, "first steps": 3, "sparse": 27, "states": 3}
    is_text = torch.zeros(TOKENS, dtype=torch.bool)
    is_text[:text] = True
    is_text = is_text if text_first else is_text.flip(0)
    assert largest([x[:, is_text] for x in outputs[1::5]], [x[:, is_text] for x in dense[1::5]]) < 1e-5
    last, exact = outputs[-1], dense[-1]
    assert (last[:, is_text] - exact[:, is_text]).abs().max() < 1e-5 and (last[:, ~is_text] - exact[:, ~is_text]).abs().max() > 0.01
    few = patched(node, model, target_density=0.01)
    value = is_text.float()[:, None].repeat(1, DIM).expand(1, HEADS, -1, -1)
    seen = sampler.sample(few, lambda *args: hunyuan(*args, mask=mask, value=value))
    assert seen[-1].min() > 0, "every query sees some text"
    with pytest.raises(node.Refused, match="tell text from video"):
        without = patched(node, model)
        without.wrappers.clear()
        sampler.sample(without, forward)


@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
def test_layouts(node, skip_reshape, skip_output_reshape):
    def forward(options, generator):
        options.update(block_index=1, block_type="double")
        shape = (2, HEADS, TOKENS, DIM) if skip_reshape else (2, TOKENS, HEADS * DIM)
        return [call(options, *torch.randn(3, *shape, generator=generator), HEADS, skip_reshape=skip_reshape,
                     skip_output_reshape=skip_output_reshape)]

    sampler = Sampler(branches=1)
    ours, theirs = (sampler.sample(model, forward) for model in (patched(node, target_density=1.0), Patcher(WanModel())))
    assert ours[-1].shape == theirs[-1].shape and largest(ours, theirs) < 1e-5


def test_scale(node):
    """A scale of the model's own reaches sparse and dense calls."""
    def forward(options, generator, **given):
        options.update(block_index=1, block_type="double")
        return [call(options, *torch.randn(3, 1, TOKENS, HEADS * DIM, generator=generator), HEADS, **given)]

    scaled, sampler = (lambda *args: forward(*args, scale=0.5)), Sampler(branches=1)
    dense = sampler.sample(Patcher(WanModel()), scaled)
    assert largest(dense, sampler.sample(Patcher(WanModel()), forward)) > 0.2
    assert largest(sampler.sample(patched(node, target_density=1.0), scaled), dense) < 1e-5


def test_other_overrides(node, monkeypatch, caplog):
    before, after = [], []

    def earlier(func, *args, **kwargs):
        before.append(args)
        return func(*args, **kwargs)

    def later(func, *args, **kwargs):
        after.append(args)
        return func(*args, **kwargs)

    model = Patcher(WanModel())
    model.model_options["transformer_options"]["optimized_attention_override"] = earlier
    model = patched(node, model)
    _, found = counts(node, monkeypatch, model, Sampler(branches=1), wan)
    assert found["sparse"] == 16 and len(before) == 44, "dense calls go on to the earlier override"
    replaced = model.clone()
    replaced.model_options["transformer_options"]["optimized_attention_override"] = later
    _, found = counts(node, monkeypatch, replaced, Sampler(branches=1), wan)
    assert found["sparse"] == 16 and len(after) == 44, "the node is back on top"
    Sampler(branches=1, newer=False).sample(replaced, wan)
    assert "no attention call reached the node" in caplog.text
    chained = model.clone()
    ours = model.model_options["transformer_options"]["optimized_attention_override"]
    chained.model_options["transformer_options"]["optimized_attention_override"] = lambda func, *args, **kwargs: ours(func, *args, **kwargs)
    for newer in (True, False):
        _, found = counts(node, monkeypatch, chained, Sampler(branches=1, newer=newer), wan)
        assert sum(found.values()) - found["states"] == 60, "each call is counted once"


def test_failed_run(node):
    model = patched(node)

    def fail(options, generator):
        wan(options, generator)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Sampler().sample(model, fail)
    assert not model.run.counts and not model.run.states and not model.run.forwards


def test_refusals(node):
    class CausalWanModel(WanModel):
        pass

    class FluxModel:
        pass

    for model, words in ((FluxModel(), "got FluxModel, expected Wan 2.1"), (CausalWanModel(), "causal"),
                         (HunyuanVideo(axes=(16, 16)), "rotates 2 axes")):
        with pytest.raises(node.Refused, match=words):
            patched(node, Patcher(model))
    with pytest.raises(node.Refused, match='got "sol", whose blocks .* Morton order, .* `scope generate --method sol`'):
        patched(node, method="sol")  # of a saved workflow
    with pytest.raises(node.Refused, match="already"):
        patched(node, patched(node))
    strange = WanModel()
    strange.dim, strange.rope_embedder.axes_dim = HEADS * 128, [16, 56, 56]
    with pytest.raises(node.Refused, match=r"rotates \[16, 56, 56\]"):
        patched(node, Patcher(strange))
    for settings, words in (("rho", "expected name=value"), ("target_density=0.1", "an input of the node"), ("densty=1", 'no "densty"'),
                            ("rho=7", "rho: got")):
        with pytest.raises(ValueError, match=words):
            patched(node, settings=settings)
    sampler = Sampler(branches=1)
    with pytest.raises(node.Refused, match="sample_sigmas is missing"):
        sampler.sample(patched(node), lambda options, generator: wan({**options, "sample_sigmas": None}, generator))
    with pytest.raises(TypeError, match="float64"):
        sampler.sample(patched(node), lambda options, generator: call({**options, "block_index": 1}, *torch.zeros(3, 1, TOKENS, 64).double(),
                                                                      heads=HEADS))


def test_missing_package(node, monkeypatch):
    monkeypatch.setitem(sys.modules, "scope_attn", None)
    with pytest.raises(ImportError, match="-m pip install"):
        load_node()
