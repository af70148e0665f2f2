"""The ComfyUI node and its adapter, called as ComfyUI's own code calls them.

ComfyUI is not on PyPI: `comfy_api.latest` and `comfy.patcher_extension` are stand-ins with the names that the node uses, models
carry the attributes that it reads, and Sampler and the functions below it make the calls. tools/run_in_comfyui.py runs Wan,
VACE, HunyuanVideo, 1.5 and LTX-Video in the real code. The stand-ins of MiniMax-H3, LTX-AV, the allocation graph and preferred
attention follow what core 0.38 does, and were not run against the real core.
"""
import asyncio
import collections
import contextlib
import copy
import functools
import importlib.util
import inspect
import json
import logging
import pathlib
import re
import sys
import tomllib
import types
import uuid
import weakref

import pytest
import torch

import scope_attn
from scope_attn import _functions
from scope_attn.hosts import comfyui, session

FOLDER = pathlib.Path(__file__).parents[2] / "integrations/comfyui"
LAYER, STEP, LAST_STEP, NOTHING = (session.WHY_DENSE[scope_attn.Reason[f"DENSE_{name}"]]
                                   for name in ("LAYER", "STEP", "LAST_STEP", "NOTHING"))
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


def load_node(path=FOLDER / "scope_attention.py"):
    """A file, or a folder by its __init__.py, as ComfyUI loads what is in custom_nodes."""
    spec = importlib.util.spec_from_file_location("custom_nodes_scope_attention", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:
        for name in [name for name in sys.modules if name.startswith(spec.name)]:
            del sys.modules[name]
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
        other.callbacks = {kind: {key: list(found) for key, found in keyed.items()} for kind, keyed in self.callbacks.items()}
        other.wrappers = dict(self.wrappers)
        return other

    def get_model_object(self, name):
        return {"diffusion_model": self.model, "model_sampling": self}[name]

    def percent_to_sigma(self, percent):  # of flow models
        t = min(max(1 - percent, 0.0), 1.0)
        return self.shift * t / (1 + (self.shift - 1) * t)

    def add_callback_with_key(self, kind, key, callback):
        self.callbacks.setdefault(kind, {}).setdefault(key, []).append(callback)

    def get_callbacks(self, kind, key):
        return self.callbacks.get(kind, {}).get(key, [])

    def call(self, kind, *args):
        for found in self.callbacks.get(kind, {}).values():
            for callback in found:
                callback(self, *args)

    def set_model_patch_replace(self, patch, name, block_name, number):
        replaced = self.model_options["transformer_options"].setdefault("patches_replace", {}).setdefault(name, {})
        replaced[block_name, number] = patch

    def add_wrapper_with_key(self, kind, key, wrapper):
        self.wrappers[kind] = wrapper

    @property
    def run(self):
        return self.callbacks["on_cleanup"]["scope_attention"][0].__self__


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

    def __init__(self, steps=10, start=0, end=None, branches=2, newer=True, grid=WAN_GRID, seed=0, **given):
        self.newer, self.grid, self.seed, self.given = newer, grid, seed, given
        self.uuids = [uuid.uuid4() for _ in range(branches)]
        self.steps, self.part = steps, slice(start, (steps if end is None else end) + 1)

    def sample(self, patcher, forward):
        options = copy.deepcopy(patcher.model_options)
        sigmas = torch.tensor([patcher.percent_to_sigma(i / self.steps) for i in range(self.steps + 1)])[self.part]
        outputs = []
        try:
            for step, sigma in enumerate(sigmas[:-1]):
                timestep = sigma * torch.ones(1)
                patcher.call("on_prepare_state", timestep, *[options] * self.newer)
                for branch, name in list(enumerate(self.uuids))[::1 - step % 2 * 2]:  # in any order
                    generator = torch.Generator().manual_seed(1000 * self.seed + 10 * step + branch)
                    transformer_options = {**options["transformer_options"], "cond_or_uncond": [branch], "uuids": [name],
                                           "sigmas": timestep, "sample_sigmas": sigmas}
                    run = lambda x, *args, **kwargs: forward(kwargs["transformer_options"], generator)
                    audio_too = isinstance(self.grid[0], tuple)
                    arguments = [torch.empty(grid) for grid in self.grid] if audio_too else torch.empty(self.grid), timestep, None
                    wrapper = patcher.wrappers.get("diffusion_model", lambda executor, *args, **kwargs: executor(*args, **kwargs))
                    outputs += wrapper(run, *arguments, transformer_options=transformer_options, **self.given)
        finally:
            patcher.call("on_cleanup")
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


def counts(monkeypatch, patcher, sampler, forward):
    """The outputs of a run, and what its receipt had before its cleanup."""
    found, summary = collections.Counter(), comfyui.Run.summary

    def noted(run):
        found.update(run.left)
        if run.session.video:
            found.update(call.why or "sparse" for call in run.receipt.calls)
            found["states"] = sum(map(len, run.session.video.states.values()))
        return summary(run)

    with monkeypatch.context() as patch:
        patch.setattr(comfyui.Run, "summary", noted)
        return sampler.sample(patcher, forward), dict(found)


def test_schema(node):
    inputs = {x.id: x for x in node.ScopeAttention.define_schema().inputs}
    assert list(inputs) == ["model", "method", "target_density", "min_tokens", "strict", "settings", "density", "sparse_from", "sparse_to"]
    names = [method.name for method in scope_attn.methods()]
    assert inputs["method"].options["options"] == [name for name in names if name != "sol"] and "sol" in names
    assert inputs["method"].options["default"] == "scope-mean"  # which enable(pipe) takes too
    assert inputs["density"].options["default"] == "preset"
    least = session.MIN_TOKENS
    assert all(f"{least[device]:,} on a {device_name}" in inputs["min_tokens"].options["tooltip"]
               for device, device_name in (("cuda", "GPU"), ("cpu", "CPU")))
    assert asyncio.run(asyncio.run(node.comfy_entrypoint()).get_node_list()) == [node.ScopeAttention]
    # What patch() takes by default is what the inputs have by default.
    parameters = inspect.signature(comfyui.patch).parameters
    assert {name: x.options["default"] for name, x in inputs.items() if name != "model"} == {
        name: parameter.default for name, parameter in parameters.items() if name != "model"}


def test_folder(node):
    """The folder loads as the file does, and its workflow, where ComfyUI looks for templates, fits the node's inputs."""
    assert asyncio.run(asyncio.run(load_node(FOLDER / "__init__.py").comfy_entrypoint()).get_node_list())[0].__name__ == "ScopeAttention"
    workflow = json.loads((FOLDER / "example_workflows/wan_2.1_t2v.json").read_text())
    nodes, links = {found["id"]: found for found in workflow["nodes"]}, {link[0]: link for link in workflow["links"]}
    assert workflow["last_node_id"] == max(nodes) and workflow["last_link_id"] == max(links)
    for number, source, output, target, place, kind in workflow["links"]:
        assert number in nodes[source]["outputs"][output]["links"] and nodes[source]["outputs"][output]["type"] == kind
        assert nodes[target]["inputs"][place]["link"] == number and nodes[target]["inputs"][place]["type"] == kind
    wired = [link for found in nodes.values() for x in found.get("inputs", []) if (link := x["link"]) is not None]
    assert sorted(wired) == sorted(links)
    ours, = (found for found in nodes.values() if found["type"] == "ScopeAttention")
    schema = node.ScopeAttention.define_schema()
    assert ours["widgets_values"] == [x.options["default"] for x in schema.inputs[1:]]
    users = {nodes[links[link][3]]["type"] for link in ours["outputs"][0]["links"]}
    assert users <= {"KSampler", "ModelSamplingSD3"} and users


def test_registry(node):
    """What the Comfy Registry asks of pyproject.toml, and that the node, the package and the changelog are of one version."""
    about = tomllib.loads((FOLDER / "pyproject.toml").read_text())
    project, comfy = about["project"], about["tool"]["comfy"]
    assert re.fullmatch(r"[A-Za-z]([-_.]?[A-Za-z0-9])*", project["name"]) and len(project["name"]) < 100
    assert "comfyui" not in project["name"].lower()
    changelog = (FOLDER.parents[1] / "CHANGELOG.md").read_text()
    assert project["version"] == re.search(r"^## (\d+\.\d+\.\d+)", changelog, re.M)[1]
    assert project["dependencies"] == [f"scope-attn>={project['version']}"]
    major_minor = project["version"].rpartition(".")[0]
    assert f"scope_attn, {major_minor} or newer" in (FOLDER / "scope_attention.py").read_text()
    assert project["license"] == {"text": "Apache-2.0"} and project["requires-python"] and project["description"]
    assert "Operating System :: POSIX :: Linux" in project["classifiers"] and "Repository" in project["urls"]
    assert set(comfy) == {"PublisherId", "DisplayName", "requires-comfyui"} and comfy["requires-comfyui"] == ">=0.7.0"
    assert comfy["DisplayName"] == node.ScopeAttention.define_schema().display_name


@pytest.mark.parametrize("newer", [False, True])
def test_wan(node, monkeypatch, caplog, newer):
    plain = Patcher(WanModel())
    sampler = Sampler(newer=newer)
    dense = sampler.sample(plain, wan)
    everything = sampler.sample(patched(node, plain, target_density=1.0), wan)
    assert largest(everything, dense) < 1e-5
    model = patched(node, plain)
    outputs, found = counts(monkeypatch, model, sampler, wan)
    # 2 branches: 3 blocks in 10 steps; block 0 and the first 2 steps are dense.
    assert found == {"sparse": 32, LAYER: 20, STEP: 8, "cross-attention": 60, "states": 4}
    for i, (ours, theirs) in enumerate(zip(outputs, dense)):
        sparse = i >= 2 * 12 and i % 6 in (2, 4)  # 6 outputs in a forward
        assert (largest([ours], [theirs]) > 0.01) == sparse
    with caplog.at_level(logging.INFO):
        again = sampler.sample(model, wan)
    assert largest(again, outputs) == 0, "a new run starts anew"
    assert "32 calls sparse (mean density 0.3" in caplog.text and "left to ComfyUI: 60 cross-attention" in caplog.text
    assert f"dense: 20 ({LAYER}), 8 ({STEP})" in caplog.text
    assert not plain.model_options["transformer_options"] and model.run.session.video is None
    assert [call.branch for call in model.run.receipt.calls[:6]] == ["conditioning 0"] * 3 + ["conditioning 1"] * 3
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
        outputs, found = counts(monkeypatch, model, sampler, wan)
        assert found == {"sparse": 32, LAYER: 20, STEP: 8, "cross-attention": 60, "states": 4}
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
    outputs, found = counts(monkeypatch, model, sampler, forward)
    assert found[NOTHING] == 40 and "sparse" not in found
    assert largest(outputs, sampler.sample(plain, forward)) == 0


def test_shared_branches(node, monkeypatch):
    model = patched(node, method="svg2", settings="groups=8\ncodes=8")
    assert counts(monkeypatch, model, Sampler(), wan)[1]["states"] == 2, "one per block"


def test_steps(node, monkeypatch):
    """Parts of a schedule count as such; the share of dense steps is rounded down; the GPU is waited for once per forward."""
    def first_steps(patcher, *args, **kwargs):
        return counts(monkeypatch, patcher, Sampler(*args, branches=1, **kwargs), wan)[1].get(STEP, 0)

    assert first_steps(patched(node), 20, 0, 10) == 8, "4 of 20 steps, though 10 are run"
    assert first_steps(patched(node), 20, 10) == 0, "the second expert begins after them"
    assert first_steps(patched(node), 20, 2) == 4, "denoise below 1"
    assert [first_steps(patched(node), steps) for steps in (4, 5, 8, 9, 10)] == [0, 2, 2, 2, 4], "of 2 layers"
    assert first_steps(patched(node, settings="dense_steps=0.5"), 8) == 8
    read = []
    make = comfyui.Evaluation.__init__
    monkeypatch.setattr(comfyui.Evaluation, "__init__", lambda *args: (read.append(args), make(*args))[1])
    model = patched(node)
    Sampler(9, branches=1).sample(model, wan)
    assert len(read) == 9
    assert comfyui.whole_run([0.0, 0.5, 1.0], Patcher(WanModel())) == (0, 2), "noise is added"


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
    everything, found = counts(monkeypatch, patched(node, target_density=1.0, strict=True, settings="dense_layers=0\ndense_steps=0"),
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


def test_a_mask_is_let_go(node):
    """One that the model makes in an evaluation is freed with it, as ComfyUI's allocation graph expects; it is read once."""
    seen = []

    def forward(options, generator):
        assert not seen or seen[-1]() is None
        mask = HOLES[None, None, None].clone()
        seen.append(weakref.ref(mask))
        return wan(options, generator, mask=mask)

    with pytest.MonkeyPatch.context() as patch:
        read, valid_keys = [], comfyui.valid_keys
        patch.setattr(comfyui, "valid_keys", lambda *args: (read.append(1), valid_keys(*args))[1])
        Sampler(steps=3, branches=1).sample(patched(node, settings="dense_layers=0\ndense_steps=0"), forward)
    assert len(seen) == len(read) == 3


@pytest.mark.parametrize("mask, words", [
    (torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(), "a row for each query"),
    (torch.ones(1, HEADS, 1, TOKENS, dtype=torch.bool), "a row for each head"),
    (torch.full((1, 1, TOKENS), -0.5), "other than 0 and -inf"),
    (torch.zeros(1, TOKENS, dtype=torch.bool), "without keys"),
    (torch.ones(1, 1, TOKENS - 1, dtype=torch.bool), r"expected a value for each of 320 keys"),
])
def test_refused_masks(node, monkeypatch, caplog, mask, words):
    sampler = Sampler(branches=1)
    with pytest.raises(comfyui.Refused, match=words):
        sampler.sample(patched(node, settings="dense_layers=0\ndense_steps=0"), lambda *args: wan(*args, mask=mask))
    monkeypatch.setattr(sys.modules[__name__], "attention", lambda q, *args, **kwargs: q)
    model = patched(node, strict=False, settings="dense_layers=0\ndense_steps=0")
    sampler.sample(model, lambda *args: wan(*args, mask=mask))
    assert caplog.text.count("the host's own attention runs") == 1 and "30 (refused: mask" in caplog.text


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
    outputs, found = counts(monkeypatch, patched(node, model, min_tokens=1), sampler, forward)
    assert found == {"outside the blocks": 10, LAYER: 10, STEP: 3, "sparse": 27, "states": 3}
    is_text = torch.zeros(TOKENS, dtype=torch.bool)
    is_text[:text] = True
    is_text = is_text if text_first else is_text.flip(0)
    assert largest([x[:, is_text] for x in outputs[1::5]], [x[:, is_text] for x in dense[1::5]]) < 1e-5
    last, exact = outputs[-1], dense[-1]
    assert (last[:, is_text] - exact[:, is_text]).abs().max() < 1e-5 and (last[:, ~is_text] - exact[:, ~is_text]).abs().max() > 0.01
    few = patched(node, model, target_density=0.01, min_tokens=1)
    value = is_text.float()[:, None].repeat(1, DIM).expand(1, HEADS, -1, -1)
    seen = sampler.sample(few, lambda *args: hunyuan(*args, mask=mask, value=value))
    assert seen[-1].min() > 0, "every query sees some text"
    with pytest.raises(comfyui.Refused, match="tell text from video"):
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
    _, found = counts(monkeypatch, model, Sampler(branches=1), wan)
    assert found["sparse"] == 16 and len(before) == 44, "dense calls go on to the earlier override"
    replaced = model.clone()
    replaced.model_options["transformer_options"]["optimized_attention_override"] = later
    _, found = counts(monkeypatch, replaced, Sampler(branches=1), wan)
    assert found["sparse"] == 16 and len(after) == 44, "the node is back on top"
    Sampler(branches=1, newer=False).sample(replaced, wan)
    assert "no attention call reached the node" in caplog.text
    chained = model.clone()
    ours = model.model_options["transformer_options"]["optimized_attention_override"]
    chained.model_options["transformer_options"]["optimized_attention_override"] = lambda func, *args, **kwargs: ours(func, *args, **kwargs)
    for newer in (True, False):
        _, found = counts(monkeypatch, chained, Sampler(branches=1, newer=newer), wan)
        assert sum(found.values()) - found["states"] == 60, "each call is counted once"


def test_failed_run(node):
    model = patched(node)

    def fail(options, generator):
        wan(options, generator)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Sampler().sample(model, fail)
    assert model.run.session.video is None and not model.run.left and not model.run.evaluations


def test_refusals(node):
    class CausalWanModel(WanModel):
        pass

    class FluxModel:
        pass

    for model, words in ((FluxModel(), "got FluxModel, expected Wan 2.1"), (CausalWanModel(), "causal"),
                         (HunyuanVideo(axes=(16, 16)), "rotates 2 axes")):
        with pytest.raises(comfyui.Refused, match=words):
            patched(node, Patcher(model))
    with pytest.raises(ValueError, match='got "sol", whose blocks .* Morton order, .* `scope generate --method sol`'):
        patched(node, method="sol")  # of a saved workflow
    with pytest.raises(comfyui.Refused, match="already"):
        patched(node, patched(node))
    with pytest.raises(ValueError, match="target_density"):
        patched(node, target_density=1.5)
    for settings, words in (("rho", "expected name=value"), ("target_density=0.1", "an input of the node"), ("densty=1", 'no "densty"'),
                            ("rho=7", "rho: got")):
        with pytest.raises(ValueError, match=words):
            patched(node, settings=settings)
    sampler = Sampler(branches=1)
    with pytest.raises(comfyui.Refused, match="sample_sigmas is missing"):
        sampler.sample(patched(node), lambda options, generator: wan({**options, "sample_sigmas": None}, generator))
    with pytest.raises(TypeError, match="float64"):
        sampler.sample(patched(node), lambda options, generator: call({**options, "block_index": 1},
                                                                      *torch.zeros(3, 1, TOKENS, 64).double(), heads=HEADS))


# ---- what newer cores do. These stand-ins were not run against the real core.


class Container:
    """What q, k and v come in."""

    def __init__(self, tensor):
        self.tensor = tensor

    def take(self):
        tensor, self.tensor = self.tensor, None
        return tensor


def newer_call(options, *args, preferred_attention=None, **kwargs):
    """optimized_attention of core 0.38: it unpacks containers, and forgets the preferred attention where there is an override."""
    q, k, v, *args = args
    args = (*(Container(x) for x in (q, k, v)), *args)
    args = (*(x.take() for x in args[:3]), *args[3:])
    override = options.get("optimized_attention_override")
    kwargs.update(transformer_options=options, _inside_attn_wrapper=True)
    if override is not None:
        return override(attention, *args, **kwargs)
    return ((preferred_attention and preferred_attention.function) or attention)(*args, **kwargs)


class MiniMaxH3Model:
    def __init__(self, inv_freq=5):
        self.blocks = [types.SimpleNamespace(attn=types.SimpleNamespace(heads=HEADS, head_dim=DIM))] * BLOCKS
        self.rope = types.SimpleNamespace(inv_freq=torch.zeros(inv_freq))


H3_SEGMENTS = [(0, 12, "text"), (12, 18, "cond"), (18, 22, "cond_audio"), (22, 28, "ref_img"), (28, 32, "ref_audio"), (32, 40, "audio"),
               (40, TOKENS, "video")]


def minimax_h3(options, generator, value=None, segments=H3_SEGMENTS):
    """The attention calls of MiniMax-H3: the text refiner, then blocks that say their index and no type."""
    if segments:
        options["minimax_h3_layout"] = types.SimpleNamespace(seq_len=TOKENS, segments=segments)
    outputs = [newer_call(options, *torch.randn(3, 1, HEADS, 20, DIM, generator=generator), HEADS, skip_reshape=True)]
    for index in range(BLOCKS):
        options["block_index"] = index
        q, k, v = torch.randn(3, 1, HEADS, TOKENS, DIM, generator=generator)
        outputs.append(newer_call(options, q, k, v if value is None else value, HEADS, skip_reshape=True))
    return outputs


def test_minimax_h3(node, monkeypatch):
    """Text, audio, conditions and references are always seen, and see everything. x is a list of the video and its audio."""
    sampler, plain = Sampler(branches=1, grid=((1, 24, 5, 14, 16), (1, 32, 10))), Patcher(MiniMaxH3Model())
    assert comfyui.recognise(plain.model).rope == ((*range(5), *range(15, 20)), (*range(5, 10), *range(20, 25)),
                                                   (*range(10, 15), *range(25, 30)), (30, 31))
    dense = sampler.sample(plain, minimax_h3)
    everything = sampler.sample(patched(node, plain, target_density=1.0), minimax_h3)
    assert largest(everything, dense) < 1e-5
    outputs, found = counts(monkeypatch, patched(node, plain, target_density=0.2), sampler, minimax_h3)
    assert found == {"outside the blocks": 10, LAYER: 10, STEP: 4, "sparse": 16, "states": 2}
    assert largest([outputs[-1][:, :40]], [dense[-1][:, :40]]) < 1e-5 < 0.01 < largest([outputs[-1][:, 40:]], [dense[-1][:, 40:]])
    for start, stop, kind in H3_SEGMENTS[:-1]:
        value = torch.zeros(1, HEADS, TOKENS, DIM)
        value[:, :, start:stop] = 1
        few = patched(node, plain, target_density=0.01, min_tokens=1)
        assert sampler.sample(few, lambda *args: minimax_h3(*args, value=value))[-1].min() > 0, kind
    _, found = counts(monkeypatch, patched(node, plain, min_tokens=281), sampler, minimax_h3)
    assert found["280 tokens, min_tokens is 281"] == 30, "the video's tokens count"
    with pytest.raises(comfyui.Refused, match="minimax_h3_layout is missing"):
        sampler.sample(patched(node, plain), lambda *args: minimax_h3(*args, segments=None))
    for segments, words in (([(0, 40), (40, TOKENS)], "is not as we know it: not enough values"), ([(0, 40, "text")], r"a video at \(\)"),
                            ([(0, TOKENS + 1, "video")], "expected some of 320 tokens")):
        with pytest.raises(comfyui.Refused, match=f"minimax_h3_layout.*{words}"):
            sampler.sample(patched(node, plain), lambda *args: minimax_h3(*args, segments=segments))

    def other_class(options, generator):
        options["minimax_h3_layout"] = object()
        return minimax_h3(options, generator, segments=None)

    with pytest.raises(comfyui.Refused, match="no attribute 'segments'"):
        sampler.sample(patched(node, plain), other_class)


class LTXVModel:
    def __init__(self):
        self.transformer_blocks = [types.SimpleNamespace(attn1=types.SimpleNamespace(heads=HEADS, dim_head=DIM))] * BLOCKS


class LTXAVModel(LTXVModel):
    pass


def ltx_av(options, generator, mask=None, split=None):
    """The attention calls of LTX-AV: its blocks say nothing of themselves unless they are replaced. split: guides' queries."""
    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    def block(args):
        now, outputs = args["transformer_options"], []
        q, k, v = randn(3, 1, TOKENS, HEADS * DIM)
        for part in (q[:, :split], q[:, split:]) if split else (q,):
            outputs.append(newer_call(now, part, k, v, HEADS, mask=mask))  # the video's own
        outputs.append(newer_call(now, q, *randn(2, 1, 12, HEADS * DIM), HEADS))  # text
        outputs.append(newer_call(now, *randn(3, 1, 150, HEADS * 16), HEADS))  # audio's own
        outputs.append(newer_call(now, randn(1, TOKENS, HEADS * 16), *randn(2, 1, 150, HEADS * 16), HEADS))  # audio to video
        return {"img": args["img"] + outputs}

    outputs, replaced = [], options.get("patches_replace", {}).get("dit", {})
    for index in range(BLOCKS):
        args = {"img": outputs, "transformer_options": options}
        run = replaced.get(("double_block", index))
        outputs = (run(args, {"original_block": block}) if run else block(args))["img"]
    assert "block_index" not in options
    return outputs


def test_ltx_av(node, monkeypatch):
    sampler, plain = Sampler(branches=1), Patcher(LTXAVModel())
    dense = sampler.sample(plain, ltx_av)
    assert largest(sampler.sample(patched(node, plain, method="scope-mean", target_density=1.0), ltx_av), dense) < 1e-5
    seen = []
    plain.set_model_patch_replace(lambda args, more: (seen.append(args), more["original_block"](args))[1], "dit", "double_block", 1)
    model = patched(node, plain, method="scope-mean")
    assert model.run.session.model == "ltx-2"
    outputs, found = counts(monkeypatch, model, sampler, ltx_av)
    assert found == {LAYER: 10, STEP: 4, "sparse": 16, "cross-attention": 60, f"of {HEADS} heads of 16 channels": 30, "states": 2}
    assert largest(outputs, dense) > 0.01 and len(seen) == 10, "an earlier patch of the block runs too"
    for mask, split, what in ((torch.zeros(1, 1, TOKENS, TOKENS), None, "the call has a mask"), (None, 300, "cross-attention")):
        outputs, found = counts(monkeypatch, model, sampler, lambda *args: ltx_av(*args, mask=mask, split=split))
        assert "sparse" not in found and found[what] >= 30
    for method in ("scope", "scope-paper"):
        with pytest.raises(ValueError, match="the heads of LTX mix these axes"):
            patched(node, plain, method=method)
    assert patched(node, Patcher(LTXVModel()), method="fast").run.known.family == "ltx"


def test_allocation_graph(node, monkeypatch):
    """States, and what the receipt keeps of sparse calls, are made while ComfyUI does not record allocations."""
    paused, made, kept, model_prefetch = [], [], [], types.ModuleType("comfy.model_prefetch")

    @contextlib.contextmanager
    def pause_malloc_graph():
        paused.append(True)
        yield
        paused.pop()

    make, take = session.State, scope_attn.Stats._take
    monkeypatch.setattr(session, "State", lambda *args: (made.append(bool(paused)), make(*args))[1])
    monkeypatch.setattr(scope_attn.Stats, "_take", lambda *args: (kept.append(bool(paused)), take(*args))[1])
    sampler = Sampler(branches=1)
    sampler.sample(patched(node), wan)
    assert made == [False] * 2, "older versions have no graph"
    monkeypatch.setitem(sys.modules, "comfy.model_prefetch", model_prefetch)
    monkeypatch.setattr(sys.modules["comfy"], "model_prefetch", model_prefetch, raising=False)
    sampler.sample(patched(node), wan)  # a version with prefetching and without a graph
    model_prefetch.pause_malloc_graph = pause_malloc_graph
    sampler.sample(patched(node), wan)
    assert made == [False] * 4 + [True] * 2 and kept == [False] * 32 + [True] * 16 and not paused


class Attends(torch.nn.Module):
    """A module that owns the preference of its checkpoint, and attends with it."""

    def __init__(self, function):
        super().__init__()
        self.comfy_attention = torch.nn.Module()
        self.comfy_attention.function = function

    def forward(self, options, *args, **kwargs):
        return newer_call(options, *args, preferred_attention=self.comfy_attention, **kwargs)


def test_preferred_attention(node, monkeypatch):
    """Dense calls are what they would be without the node: the attention that the checkpoint prefers, where it prefers one."""
    def preferred(*args, **kwargs):
        asked.append(kwargs["_inside_attn_wrapper"])
        return attention(*args, **kwargs)

    class Wan(torch.nn.Module, WanModel):
        def __init__(self):
            super().__init__()
            WanModel.__init__(self)
            self.self_attn, self.cross_attn = Attends(preferred), Attends(None)

    Wan.__name__ = "WanModel"

    def forward(options, generator):
        options["block_type"], outputs = "double", []
        for index in range(BLOCKS):
            options["block_index"] = index
            q, k, v = torch.randn(3, 1, TOKENS, HEADS * DIM, generator=generator)
            outputs.append(model.self_attn(options, q, k, v, HEADS))
            outputs.append(model.cross_attn(options, q, *torch.randn(2, 1, 12, HEADS * DIM, generator=generator), HEADS))
        return outputs

    asked, model, sampler = [], Wan(), Sampler(branches=1)
    dense = sampler.sample(Patcher(model), forward)
    assert len(asked) == 30
    asked.clear()
    outputs, found = counts(monkeypatch, patched(node, Patcher(model)), sampler, forward)
    assert found == {"sparse": 16, LAYER: 10, STEP: 4, "cross-attention": 30, "states": 2} and asked == [True] * 14
    assert largest(outputs[:12], dense[:12]) == 0
    assert not model.self_attn._forward_hooks and not model.self_attn._forward_pre_hooks, "the model is left as it was"

    def fail(options, generator):
        forward(options, generator)
        raise KeyboardInterrupt

    broken = patched(node, Patcher(model))
    with pytest.raises(KeyboardInterrupt):
        sampler.sample(broken, fail)
    assert not model.self_attn._forward_hooks and not broken.run.thread.owners
    asked.clear()
    earlier = Patcher(model)
    earlier.model_options["transformer_options"]["optimized_attention_override"] = lambda func, *args, **kwargs: func(*args, **kwargs)
    sampler.sample(patched(node, earlier), forward)
    assert not asked, "an override of another node comes before it, as in ComfyUI"


def sparse_node_of_another(previous):
    """A sparse override as core's own: it takes some calls, and hands others to the override that it found."""
    def override(func, q, *args, **kwargs):
        override.calls += 1
        return func(q, *args, **kwargs) if previous is None else previous(func, q, *args, **kwargs)

    override.calls = 0
    return override


def test_another_sparse_node(node, monkeypatch, caplog):
    sampler, plain = Sampler(branches=1), Patcher(WanModel())
    below = sparse_node_of_another(None)
    plain.model_options["transformer_options"]["optimized_attention_override"] = below
    model = patched(node, plain)
    with caplog.at_level(logging.INFO):
        _, found = counts(monkeypatch, model, sampler, wan)
    assert found["sparse"] == 16 and below.calls == 44
    assert f"dense calls ran in the override of {__name__}" in caplog.text
    above = sparse_node_of_another(model.model_options["transformer_options"]["optimized_attention_override"])
    model.model_options["transformer_options"]["optimized_attention_override"] = above
    with pytest.raises(comfyui.Refused, match="already"):
        patched(node, model)  # ours is below another's
    for newer in (True, False):  # above ours, or below it by the time of the first step
        _, found = counts(monkeypatch, model, Sampler(branches=1, newer=newer), wan)
        assert found["sparse"] == 16 and sum(found.values()) - found["states"] == 60, "each call is counted once"


# ---- inputs


def test_presets_keep_their_density(node):
    def density(**given):
        model = patched(node, **given)
        return model.run.session.settings.get("target_density")

    own = {row.name: row.default for row in _functions.settings("fast")}["target_density"]
    assert density(method="fast") == own and density(method="quality") not in (own, 0.3)
    assert density(method="fast", density="target_density") == 0.3
    assert density(method="scope-mean") == density(method="scope-mean", density="target_density") == 0.3
    assert density(method="scope-mean", target_density=0.0) == 0.2, "the careful default"
    assert density(method="scope-mean", target_density=0.0, settings="rho=0.8") is None, "what the rule gives"
    assert density(method="scope-exact", target_density=0.0) is None and density(method="dense") is None
    assert comfyui.patch(Patcher(WanModel())).run.session.settings["target_density"] == 0.2


def test_min_tokens_by_device(node, monkeypatch):
    _, found = counts(monkeypatch, patched(node, min_tokens=0), Sampler(branches=1), wan)
    assert found["320 tokens, min_tokens is 4,096"] == 30


def test_window(node, monkeypatch):
    def dense(**given):
        found = counts(monkeypatch, patched(node, settings="dense_layers=0", **given), Sampler(branches=1), wan)[1]
        return found.get(STEP, 0) // BLOCKS, found.get(LAST_STEP, 0) // BLOCKS

    assert dense() == (2, 0), "the known model's"
    assert dense(sparse_from=0.0) == (0, 0)
    assert dense(sparse_from=0.5, sparse_to=0.9) == (5, 1)
    assert dense(sparse_to=0.7) == (2, 3)
    with pytest.raises(ValueError, match="window: got 0.9 to 0.5"):
        patched(node, sparse_from=0.9, sparse_to=0.5)
    with pytest.raises(ValueError, match="window, dense_steps: both say"):
        patched(node, sparse_from=0.5, settings="dense_steps=0.1")


def test_model_by_name(node):
    assert patched(node, settings="model=wan2.1-14b-distilled").run.session.model == "wan2.1-14b-distilled"
    with pytest.raises(ValueError, match="wan9"):
        patched(node, settings="model=wan9")


def test_reference_image(node, monkeypatch):
    """HunyuanVideo may have an image before its video: it is always seen, and its queries see everything."""
    model = Patcher(HunyuanVideo(flipped_img_txt=True))
    sampler = Sampler(branches=1, grid=(1, 4, 1, 2 * 12, 2 * 12), ref_latent=torch.zeros(1, 4, 1, 2 * 12, 2 * 12))
    image, video = slice(0, 144), slice(144, 288)  # and 32 of text
    dense = sampler.sample(model, hunyuan)
    outputs, found = counts(monkeypatch, patched(node, model, target_density=0.2), sampler, hunyuan)
    assert found["sparse"] == 27
    assert largest([outputs[-1][:, image]], [dense[-1][:, image]]) < 1e-5 < 0.01 < largest([outputs[-1][:, video]], [dense[-1][:, video]])
    assert largest([outputs[-1][:, 288:]], [dense[-1][:, 288:]]) < 1e-5


def test_beside_diffusers(node):
    """Two hosts in one process: a whole video of diffusers between two steps of ComfyUI changes neither."""
    pytest.importorskip("diffusers")
    import tiny_pipelines as tiny
    if tiny.DEVICE != "cpu":
        pytest.skip("these calls are the CPU's")
    pipe, model, others = tiny.wan(), patched(node), []
    scope_attn.enable(pipe, target_density=0.2, min_tokens=0)
    expected, theirs = Sampler().sample(model, wan), tiny.make_wan(pipe)

    def between(options, generator):
        others.append(tiny.make_wan(pipe))
        return wan(options, generator)

    assert largest(Sampler().sample(model, between), expected) == 0
    assert len(others) == 20 and all((other == theirs).all() for other in others)


def test_two_nodes_of_one_model(node):
    """Two branches of a workflow share a checkpoint, and one samples between the other's steps: each gives what it gives alone."""
    plain, sampler = Patcher(WanModel()), Sampler(branches=1)
    first, second = (patched(node, plain, target_density=density) for density in (0.2, 0.4))
    alone, others = sampler.sample(first, wan), sampler.sample(second, wan)
    assert largest(alone, others) > 0.01
    found = []

    def between(options, generator):
        found.append(sampler.sample(second, wan))
        return wan(options, generator)

    assert largest(sampler.sample(first, between), alone) == 0
    assert found and all(largest(each, others) == 0 for each in found)


def test_a_longer_video(node):
    """After a shorter one, by the same node."""
    batch, channels, frames, *sides = WAN_GRID
    longer = Sampler(branches=1, grid=(batch, channels, 2 * frames, *sides))
    forward = functools.partial(wan, tokens=2 * TOKENS)
    model = patched(node)
    Sampler(branches=1).sample(model, wan)
    assert largest(longer.sample(model, forward), longer.sample(patched(node), forward)) == 0


def test_out_of_memory(node, monkeypatch, caplog):
    """While states are made: an error in words, or dense calls; the next run is as if nothing had been."""
    sampler, model = Sampler(branches=1), patched(node)
    lenient = patched(node, strict=False)
    good, plain = sampler.sample(model, wan), sampler.sample(Patcher(WanModel()), wan)

    def fail(*args):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(session, "State", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            sampler.sample(model, wan)
        assert largest(sampler.sample(lenient, wan), plain) == 0
    assert "16 (refused: out of memory" in caplog.text
    assert model.run.session.video is None and largest(sampler.sample(model, wan), good) == 0


def test_unknown_versions(node, monkeypatch):
    """A ComfyUI that is not as we know it is refused in words."""
    strange = WanModel()
    del strange.rope_embedder
    with pytest.raises(comfyui.Refused, match="WanModel of this version of ComfyUI is not as we know it: .*rope_embedder"):
        patched(node, Patcher(strange))
    monkeypatch.delattr(sys.modules["comfy.patcher_extension"].CallbacksMP, "ON_PREPARE_STATE")
    with pytest.raises(comfyui.Refused, match="this version lacks what the node needs .*ON_PREPARE_STATE"):
        patched(node)


def test_old_comfyui(node, monkeypatch):
    monkeypatch.setitem(sys.modules, "comfy_api.latest", None)
    with pytest.raises(ImportError, match="needs ComfyUI 0.7.0 or newer"):
        load_node()


def test_missing_package(node, monkeypatch):
    monkeypatch.setitem(sys.modules, "scope_attn", None)
    with pytest.raises(ImportError, match="-m pip install"):
        load_node()
