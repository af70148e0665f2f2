"""scope_attn.compare: its figures against attention in float64 and videos made by hand, in numpy and PyTorch, and what it refuses."""
import json
import math
import re
import statistics
import types
from pathlib import Path

import numpy
import pytest
import torch

import scope_attn
from scope_attn import _compare

ROPE, GRID = (24, 20, 20), (4, 7, 10)
KEYS = {"name", "density", "recall", "error", "seconds", "seconds_interval", "selection_seconds", "speedup", "speedup_interval",
        "all_seconds"}


def odd(q, k, grid, place):
    """Two groups with a list of keys each, keys that everybody sees, and queries that see nothing; in q's kind of array."""
    generator = torch.Generator().manual_seed(0)
    batch, heads, tokens, _ = q.shape
    labels = torch.randint(-1, 2, (batch, heads, tokens), generator=generator, dtype=torch.int32)
    mask = torch.rand(batch, heads, 2, k.shape[2], generator=generator) < 0.3
    keep = torch.rand(batch, k.shape[2], generator=generator) < 0.1
    arrays = labels, scope_attn.pack_bits(mask), scope_attn.pack_bits(keep)
    return scope_attn.Selection(*(x.to(q.device) if isinstance(q, torch.Tensor) else x.numpy() for x in arrays))


def everything(q, k, grid, place):
    labels, mask = torch.zeros(q.shape[:3], dtype=torch.int32), torch.ones(*q.shape[:2], 1, k.shape[2], dtype=torch.bool)
    return scope_attn.Selection(labels.to(q.device), scope_attn.pack_bits(mask.to(q.device)))


def exact(q, k, v, scale=None):
    """Weights and outputs of dense attention in float64."""
    q, k, v = (x.double().cpu() for x in (q, k, v))
    weights = (q @ k.mT * (scale or q.shape[-1]**-0.5)).softmax(-1)
    return weights, weights @ v


def error_of(out, dense):
    """A mean over heads, as the command has it."""
    return ((out - dense).norm(dim=(2, 3)) / dense.norm(dim=(2, 3))).mean().item()


def rows_of(found):
    return {row["name"]: row for row in found.rows}


# ---- tensors

def test_selector_figures(qkv, device):
    """Density, recall and error of a selection, on every query of two batch elements, with the same figures from numpy."""
    q, k, v = qkv
    found = scope_attn.compare(q, k, v, methods=dict(mine=odd), grid=GRID, repeats=1, samples=1000, scale=0.2)
    weights, dense = exact(q, k, v, 0.2)
    chosen = odd(q.cpu(), k.cpu(), None, None)
    keep = scope_attn.unpack_bits(chosen.keep, 280)[:, None, None]
    own = scope_attn.unpack_bits(chosen.mask, 280).take_along_dim(chosen.labels.long().clip(0)[..., None], 2)
    attends = (chosen.labels >= 0)[..., None]
    sees = (own | keep) & attends
    out = (weights * sees / (weights * sees).sum(-1, keepdim=True).clip(1e-300)) @ v.double().cpu()
    row = rows_of(found)["mine"]
    pairs = (own & ~keep & attends).sum((2, 3)) / (attends.sum((2, 3)) * (~keep).sum((2, 3)))
    tolerance = 1e-5 if device.type == "cpu" else 0.02
    assert row["density"] == pytest.approx(pairs.mean().item(), abs=1e-6)
    assert row["recall"] == pytest.approx((weights * sees).sum(-1).mean().item(), abs=1e-9)
    assert row["error"] == pytest.approx(error_of(out, dense), abs=tolerance)
    if device.type == "cpu":
        again = rows_of(scope_attn.compare(*(x.numpy() for x in qkv), methods=dict(mine=odd), repeats=1, samples=1000, scale=0.2))["mine"]
        assert all(again[name] == pytest.approx(row[name], rel=1e-6) for name in ("density", "recall", "error"))


def test_our_figures(qkv):
    """Of a warm call, the second: what attention and select say beside it."""
    q, k, v = qkv
    methods = {"mean": "scope-mean", "codes": dict(method="scope", rho=0.8), "fast": "fast", "blocks": "sparge"}
    found = rows_of(scope_attn.compare(q, k, v, methods=methods, density=0.3, rope=ROPE, repeats=2, samples=1000))
    weights, dense = exact(q, k, v)
    for name, given in (("mean", dict(method="scope-mean", target_density=0.3)), ("codes", dict(method="scope", rho=0.8)),
                        ("fast", dict(method="fast")), ("blocks", dict(method="sparge", target_density=0.3))):
        state = scope_attn.State()
        scope_attn.attention(q, k, v, rope=ROPE, state=state, **given)
        saved = state.save() if state.filled else None
        stats = scope_attn.Stats()
        out = scope_attn.attention(q, k, v, rope=ROPE, state=state, stats=stats, **given).double().cpu()
        if saved:
            state.load(saved)
        chosen = scope_attn.select(q, k, v, rope=ROPE, state=state, **given)
        sees = scope_attn.unpack_bits(chosen.mask, 280).take_along_dim(chosen.labels.long()[..., None], 2).cpu()
        row = found[name]
        assert row["density"] == stats.density and set(row) == KEYS
        assert row["error"] == pytest.approx(error_of(out, dense), rel=1e-9)
        assert row["recall"] == pytest.approx((weights * sees).sum(-1).mean().item(), rel=1e-9)
        assert (0 < row["selection_seconds"] < row["seconds"]) if q.is_cpu else row["selection_seconds"] is None
    assert found["fast"]["density"] == pytest.approx(0.12, abs=0.02), "a preset's own"
    assert found["dense"]["density"] == found["dense"]["recall"] == found["dense"]["speedup"] == 1
    assert found["dense"]["error"] < 1e-5 if q.is_cpu else 0.02


def test_sampled_queries(qkv):
    """Fewer queries, one of each stretch: near to all of them, and the same for every method."""
    q, k, v = qkv
    whole, part = (rows_of(scope_attn.compare(q, k, v, methods=dict(mine=odd, all=everything), repeats=1, samples=samples))
                   for samples in (280, 40))
    assert 0 < abs(part["mine"]["recall"] - whole["mine"]["recall"]) < 0.05
    assert part["all"]["error"] < (1e-5 if q.is_cpu else 0.02) and part["all"]["recall"] == pytest.approx(1)


def test_turns(qkv, monkeypatch):
    """One call of each that does not count, then each in turn; speedups are over the dense call of the same turn."""
    order, clock = [], [0.0]
    took = dict(dense=iter([9, 8, 4, 6]), mine=iter([9, 2, 4, 2]), other=iter([9, 4, 1, 6]))
    attention = scope_attn._functions.attention

    def passes(name):
        order.append(name)
        clock[0] += next(took[name])

    def named(name):
        def selector(q, k, grid, place):
            passes(name)
            return everything(q, k, grid, place)
        return selector

    monkeypatch.setattr(_compare._functions, "attention", lambda *given, **more: passes("dense") or attention(*given, **more))
    monkeypatch.setattr(_compare, "now", lambda q: clock[0])
    found = rows_of(scope_attn.compare(*(x.cpu().float() for x in qkv), methods=dict(mine=named("mine"), other=named("other")), repeats=3))
    assert order == ["dense", "mine", "other"] * 4
    assert [found[name]["all_seconds"] for name in found] == [[8, 4, 6], [2, 4, 2], [4, 1, 6]]
    assert found["mine"]["seconds"] == found["mine"]["selection_seconds"] == 2 and found["mine"]["seconds_interval"] == [2, 4]
    assert found["mine"]["speedup"] == 3 and found["mine"]["speedup_interval"] == [1, 4], "of 4, 1, 3"
    assert found["other"]["speedup"] == 2 and found["dense"]["speedup_interval"] == [1, 1]


def test_what_selectors_are_given(qkv):
    q, k, v = qkv
    given = []

    def look(q, k, grid, place):
        given.append((q.shape, k.shape, q.requires_grad and torch.is_grad_enabled(), grid, place))
        return everything(q, k, grid, place)

    q.requires_grad_()
    scope_attn.compare(q, k, v, methods=dict(look=look), grid=GRID, repeats=2)
    assert given == [(q.shape, k.shape, False, GRID, scope_attn.Place(0, 0))] * 3
    given.clear()
    place = scope_attn.Place(3, 4, "cond", steps=10)
    scope_attn.compare(q, k[:, :, :200], v[:, :, :200], methods=dict(look=dict(selector=look)), place=place, repeats=1)
    assert given == [(q.shape, k[:, :, :200].shape, False, None, place)] * 2


def test_place_of_ours(qkv, tmp_path):
    """A profile has its densities by layer and step; where the schedule is dense there is nothing to compare."""
    q, k, v = qkv
    profile, heads = tmp_path / "profile.csv", q.shape[1]
    profile.write_text("step,layer,head,density\n" + "".join(f"{step},{layer},{head},{0.1 + 0.8 * layer}\n" for step in range(2)
                                                            for layer in range(2) for head in range(heads)))
    svoo = dict(method="svoo", profile=profile, layers=2, groups=8, codes=40, rho=0.05, profile_high=1, dense_layers=0, dense_steps=0)
    first, second = (rows_of(scope_attn.compare(q, k, v, methods=dict(svoo=svoo), place=scope_attn.Place(layer, 1, steps=2), repeats=1,
                                                samples=280))["svoo"] for layer in (0, 1))
    assert second["density"] > first["density"] + 0.3 and second["recall"] > first["recall"] + 0.3
    with pytest.raises(ValueError, match=r"Place\(layer=0, .*: a call of ours is dense there: the step is within"):
        scope_attn.compare(q, k, v, methods=dict(ours=dict(method="scope-mean", model="wan2.1-t2v-14b", dense_layers=0)),
                           place=scope_attn.Place(0, 0, steps=50))


def test_shown(qkv, tmp_path, capfd):
    """The table, its notes, the JSON and the progress."""
    told = []
    found = scope_attn.compare(*qkv, methods=dict(mine=odd, ours="scope-mean"), density=0.2, grid=GRID, progress=told.append)
    lines = str(found).splitlines()
    assert re.match(r"6 heads x 280 tokens x 64, (float32|bfloat16), .+", lines[0])
    assert [line.split("|")[1].strip() for line in lines[2:7]] == ["", "-" * 7, "dense", "mine", "ours"]
    assert lines[2].split("|")[2:-1] == [cell for cell in lines[2].split("|")[2:-1] if cell.strip()] and len({*map(len, lines[2:7])}) == 1
    mine = rows_of(found)["mine"]
    low, high = mine["seconds_interval"]
    assert f"{1e3 * mine['seconds']:.4g} ({1e3 * low:.4g} to {1e3 * high:.4g})" in lines[5] and f" {mine['density']:.4f} " in lines[5]
    assert lines[4].rstrip("| ").endswith("–") and "7 warm calls, in brackets their 95 % interval" in str(found)
    assert "in brackets the least and the greatest" in str(scope_attn.compare(*qkv, methods=dict(mine=odd), repeats=5))
    assert repr(found) == "<Comparison of dense, mine, ours; print it>"
    found.to_json(tmp_path / "found.json")
    saved = json.loads((tmp_path / "found.json").read_text())
    assert saved["rows"] == found.rows and saved["version"] and len(saved["commit"].rstrip("+")) == 40
    assert saved["methods"] == dict(mine=dict(selector="odd"), ours=dict(method="scope-mean", target_density="0.2"))
    assert saved["shape"] == [2, 3, 280, 64] and saved["grid"] == list(GRID) and saved["density"] == 0.2 and saved["repeats"] == 7
    assert len(told) == 3 + 7 + 6 and told[0].startswith("compare: 1 of 16: first call of dense; about 0:00:")
    assert "16 of 16: error and recall of head 6; about 0:00:00 left" in told[-1]
    assert "compare:" not in "".join(capfd.readouterr()), "standard error is no terminal here"


def test_refused_methods(qkv):
    both, nothing = dict(method="scope", selector=odd), dict(rho=0.9)
    for methods, told in ((None, "methods: got NoneType"), ({}, "methods: got dict, expected a dict with at least one"),
                          ([odd], "methods: got list"), (dict(mine=3), r"methods\['mine'\]: got 3, expected the name of a method"),
                          (dict(mine=both), r"methods\['mine'\]: got <function odd"), (dict(mine=nothing), r"methods\['mine'\]: got None"),
                          (dict(mine=dict(selector=odd, rho=1)), r"methods\['mine'\]: got rho beside a selector")):
        with pytest.raises(TypeError, match=told):
            scope_attn.compare(*qkv, methods=methods)
    for methods, told in ((dict(dense=odd), "dense is what the others are compared with"), (dict(x="dense"), r"methods\['x'\]: dense is"),
                          (dict(x="sol"), "Morton"), (dict(x="scpe"), "scpe"), (dict(x=dict(method="scope", densty=1)), "densty"),
                          (dict(x=dict(method="scope-mean", target_density=2)), "target_density")):
        with pytest.raises(ValueError, match=told):
            scope_attn.compare(*qkv, methods=methods)


def test_refused_inputs(qkv):
    q, k, v = qkv
    good = dict(methods=dict(mine=everything))
    for inputs, given, kind, told in (
            ((), good, TypeError, "compare: got 0 inputs, expected q, k and v, or a pipeline"), ((q, k), good, TypeError, "got 2 inputs"),
            ((q.tolist(), k, v), good, TypeError, "q: got list"), ((q[0], k, v), good, ValueError, "q: got shape .* four dimensions"),
            ((q.double(), k, v), good, TypeError, "q: got torch.float64"), ((q, k, v[:, :, :9]), good, ValueError, r"v: got shape"),
            ((q, k.cpu().float().numpy(), v), good, TypeError, "k: got ndarray, expected a PyTorch tensor"),
            ((q, k, v), dict(good, grid=(4, 7, 9)), ValueError, "grid: got 4x7x9, which is 252 tokens, expected the 280 of q"),
            ((q, k, v), dict(good, repeats=0), ValueError, "repeats: got 0, expected 1 or more"),
            ((q, k, v), dict(good, samples=1.5), ValueError, "samples: got 1.5"),
            ((q, k, v), dict(good, seeds=[0]), TypeError, r"compare_tensors\(\) got an unexpected keyword argument 'seeds'")):
        with pytest.raises(kind, match=told):
            scope_attn.compare(*inputs, **given)
    with pytest.raises(scope_attn.SelectorError, match="selector <lambda>, layer 0, step 0: TypeError: got int, expected"):
        scope_attn.compare(*qkv, methods=dict(mine=lambda *given: 3))


# ---- figures

def test_intervals():
    """Of medians by the binomial distribution, of means by Student's."""
    for count, left_out in ((1, None), (2, 0), (5, 0), (6, 0), (8, 0), (9, 1), (11, 1), (12, 2), (25, 7), (100, 39)):
        values = list(range(count))[::-1]
        found = _compare.medians("x", values)
        assert found == dict(x=statistics.median(values), x_interval=None if left_out is None else [left_out, count - 1 - left_out])
        if count >= 6:  # the chance that the true median lies outside
            outside = [2 * sum(math.comb(count, i) for i in range(out + 1)) / 2**count for out in (left_out, left_out + 1)]
            assert outside[0] <= 0.05 < outside[1]
    assert _compare.means("x", [3.0]) == dict(x=3, x_interval=None)
    for count, quantile in ((2, 12.706), (5, 2.776), (11, 2.228), (12, 2.201), (31, 2.042), (121, 1.980)):
        values = [math.sin(i) for i in range(count)]
        found, half = _compare.means("x", values), quantile * statistics.stdev(values) / math.sqrt(count)
        assert found["x_interval"] == pytest.approx([found["x"] - half, found["x"] + half], abs=1e-3 * half)


# ---- whole videos

diffusers = pytest.importorskip("diffusers")
import tiny_pipelines as tiny
from scope_attn.reproduce import quality

SCHEDULE = dict(min_tokens=0, dense_steps=0)


@pytest.fixture(scope="module")
def pipe():
    """Wan with a VAE, so that its videos are frames."""
    vace, pipe = tiny.vace(), tiny.wan()
    pipe.register_modules(vae=vace.vae)
    for name in ("vae_scale_factor_temporal", "vae_scale_factor_spatial"):
        setattr(pipe, name, getattr(vace, name))
    return pipe


@pytest.fixture(scope="module")
def call():
    generator = torch.Generator().manual_seed(0)
    text, negative = tiny.randn(2, 1, 6, 16, generator=generator)
    return dict(prompt_embeds=text, negative_prompt_embeds=negative, height=128, width=128, num_frames=5, num_inference_steps=3)


def tenth(q, k, grid, place):
    scores = q.unflatten(2, (-1, 32)).sum(3) @ k.mT
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(3, scores.topk(k.shape[2] // 10, -1).indices, True)
    labels = (torch.arange(q.shape[2], device=q.device) // 32).int().expand(q.shape[:3]).contiguous()
    return scope_attn.Selection(labels, scope_attn.pack_bits(kept))


def by_hand(pipe, call, seed):
    frames = pipe(generator=torch.Generator().manual_seed(seed), output_type="np", **call).frames[0]
    return torch.from_numpy((frames * 255).round().astype("uint8"))


def test_videos(pipe, call, tmp_path):
    """Every figure, by videos that are made by hand; the pipeline is as it was afterwards."""
    seeds, told = [3, 4, 5], []
    methods = {"mine": tenth, "ours": "scope-mean", "fewer": dict(selector=tenth, dense_steps=0.5)}
    found = scope_attn.compare(pipe, methods=methods, density=0.3, seeds=seeds, settings=SCHEDULE, progress=told.append, skip=1, **call)
    assert not tiny_enabled(pipe)
    rows, dense = rows_of(found), [by_hand(pipe, call, seed) for seed in seeds]
    for name, given in (("mine", dict(selector=tenth, **SCHEDULE)), ("fewer", dict(selector=tenth, min_tokens=0, dense_steps=0.5)),
                        ("ours", dict(target_density=0.3, **SCHEDULE))):
        scope_attn.enable(pipe, **given)
        expected = []
        for seed, reference in zip(seeds, dense):
            video = by_hand(pipe, call, seed)
            expected.append(dict(quality.means(list(zip(reference, video))[1:], torch.device(tiny.DEVICE)),
                                 density=scope_attn.receipt(pipe).density))
        scope_attn.disable(pipe)
        row = rows[name]
        assert [video["seed"] for video in row["videos"]] == seeds
        for what in ("psnr", "ssim", "density"):
            assert [video[what] for video in row["videos"]] == pytest.approx([each[what] for each in expected], abs=1e-6)
            assert row[what] == pytest.approx(statistics.fmean(each[what] for each in expected), abs=1e-6)
        assert row["psnr_interval"] == _compare.means("x", [video["psnr"] for video in row["videos"]])["x_interval"]
        seconds = [video["seconds"] for video in row["videos"]]
        assert row["seconds"] == statistics.median(seconds) and row["seconds_interval"] == [min(seconds), max(seconds)]
        ratios = [one["seconds"] / video["seconds"] for one, video in zip(rows["dense"]["videos"], row["videos"])]
        assert row["speedup"] == statistics.median(ratios)
        assert (0 < row["selection_seconds"] < row["seconds"]) if name != "ours" or tiny.DEVICE == "cpu" else True
    assert rows["dense"]["psnr"] is None and rows["dense"]["density"] == 1 and rows["fewer"]["psnr"] > rows["mine"]["psnr"]
    assert len(told) == 12 and told[3].startswith("compare: 4 of 12: mine, seed 3: ")
    lines = str(found).splitlines()
    assert lines[0].startswith("WanPipeline as wan2.1-t2v-14b: 3 videos of 5 frames, 128x128, on ")
    low, high = rows["mine"]["psnr_interval"]
    assert f" {rows['mine']['psnr']:.2f} ({low:.2f} to {high:.2f}) |" in lines[5] and "| dense |" in lines[4]
    found.to_json(tmp_path / "found.json")
    saved = json.loads((tmp_path / "found.json").read_text())
    assert saved["rows"] == found.rows and saved["kind"] == "videos" and saved["commit"] and saved["skip"] == 1
    assert saved["call"]["prompt_embeds"] == "Tensor [1, 6, 16]" and saved["settings"] == dict(min_tokens="0", dense_steps="0")
    assert saved["methods"]["fewer"] == dict(selector="tenth", dense_steps="0.5")


def tiny_enabled(pipe):
    try:
        scope_attn.receipt(pipe)
    except RuntimeError:
        return False
    return True


def frames_of(latents):
    """A video of latents [1, channels, frames, height, width]."""
    return latents[0, :3].permute(1, 2, 3, 0).float().sigmoid().cpu().numpy()


def test_made_by_a_function():
    """Any model and any call; images serve too; an equal video is called equal, and dense calls say why."""
    from PIL import Image
    pipe, seeds = tiny.hunyuan(), []

    def make(seed):
        seeds.append(seed)
        frames = frames_of(tiny.make_hunyuan(pipe, seed=seed, steps=2))
        return [Image.fromarray((frame * 255).round().astype("uint8")) for frame in frames]

    found = scope_attn.compare(pipe, methods=dict(mine=dict(selector=tenth, **SCHEDULE), short="fast"), seeds=range(2), make=make)
    assert seeds == [0, 1] * 3
    rows = rows_of(found)
    assert rows["mine"]["density"] == pytest.approx(25 / 256) and 5 < rows["mine"]["psnr"] < 60
    assert rows["short"]["psnr"] == "equal" and rows["short"]["ssim"] == 1 and rows["short"]["density"] is None
    assert found.notes[0] == "short: no call of a video was sparse: 256 tokens, min_tokens is " + (
        "4,096" if tiny.DEVICE == "cpu" else "12,288")
    assert re.search(r"\| short \| +equal \|", str(found)) and "in brackets the least and the greatest" in str(found)
    one = scope_attn.compare(pipe, methods=dict(mine=dict(selector=tenth, **SCHEDULE)), seeds=[1], make=make)
    assert one.rows[1]["psnr_interval"] is None and one.rows[1]["psnr"] == rows["mine"]["videos"][1]["psnr"]


def test_choosing():
    """Seconds of all calls together; unknown where one of them does not say it."""
    calls = [types.SimpleNamespace(selection_seconds=seconds, why="") for seconds in (1, 2, 4)]
    receipt = types.SimpleNamespace(calls=calls, density=0.1)
    assert _compare.of_receipt(receipt) == dict(density=0.1, selection_seconds=7, why=[])
    calls[1].selection_seconds = None
    assert _compare.of_receipt(receipt)["selection_seconds"] is None


def test_a_selector_that_fails(pipe, call):
    """Strict: its error, and the pipeline is as it was. Otherwise a note says how many calls ran densely, and why."""
    def fails(q, k, grid, place):
        if place.layer == 2:
            raise KeyError("mine")
        return tenth(q, k, grid, place)

    given = dict(methods=dict(mine=fails), seeds=[0], **call)
    with pytest.raises(scope_attn.SelectorError, match="selector fails, layer 2, step 0: KeyError: 'mine'"):
        scope_attn.compare(pipe, settings=SCHEDULE, **given)
    assert not tiny_enabled(pipe)
    with pytest.warns(UserWarning, match="own attention runs in the place of sparse calls"):
        found = scope_attn.compare(pipe, settings=dict(strict=False, **SCHEDULE), **given)
    assert found.notes[0] == "mine: 2 calls ran densely: refused: selector fails, layer 2, step 0: KeyError: 'mine'"
    assert found.rows[1]["density"] == pytest.approx(12 / 128)


def test_refused_videos(pipe, call):
    """Before any video is made."""
    made = []

    def make(seed):
        made.append(seed)
        return numpy.zeros((2, 16, 16, 3))

    good = dict(methods=dict(mine=tenth), seeds=[0], make=make)
    for given, kind, told in (
            (dict(good, seeds=[]), ValueError, r"seeds: got \[\], expected one or more, each once"),
            (dict(good, seeds=[1, 1]), ValueError, r"seeds: got \[1, 1\]"), (dict(good, prompt="a"), TypeError, "prompt: nothing takes it"),
            (dict(methods=dict(mine=tenth), seeds=[0], generator=None), TypeError, "generator: leave it out; each seed makes one"),
            (dict(methods=dict(mine=tenth)), TypeError, "'seeds'"), (dict(good, methods=dict(x="scpe")), ValueError, "scpe"),
            (dict(good, methods=dict(a=tenth, b=dict(selector=tenth, rho=1))), ValueError, "rho: it would do nothing beside a selector"),
            (dict(good, settings=dict(densty=1)), ValueError, "densty")):
        with pytest.raises(kind, match=told):
            scope_attn.compare(pipe, **given)
        assert not made and not tiny_enabled(pipe)
    with pytest.raises(TypeError, match="pipe: got int, expected a diffusers pipeline"):
        scope_attn.compare(3, **good)
    scope_attn.enable(pipe)
    with pytest.raises(RuntimeError, match=r"enabled already; call scope_attn.disable\(pipe\) first"):
        scope_attn.compare(pipe, **good)
    scope_attn.disable(pipe)
    assert not made


def test_videos_that_are_none(pipe, call):
    """Latents, frames too small for SSIM, a video that the pipeline had no part in, and one of another shape."""
    good = dict(methods=dict(mine=tenth), seeds=[0], settings=SCHEDULE)
    with pytest.raises(ValueError, match=r"frames: got shape .*, expected \[frames, height, width, 3\]"):
        scope_attn.compare(pipe, output_type="latent", **good, **call)
    for shape, skip in (((2, 16, 8, 3), 0), ((2, 16, 16, 3), 2)):
        with pytest.raises(ValueError, match=f"expected more than skip={skip} of at least 11x11 pixels"):
            scope_attn.compare(pipe, make=lambda seed: numpy.zeros(shape), skip=skip, **good)
    with pytest.raises(ValueError, match="make: it returned a video, and the pipeline made none"):
        scope_attn.compare(pipe, make=lambda seed: numpy.zeros((2, 16, 16, 3)), **good)
    shapes = iter([(2, 16, 16, 3), (3, 16, 16, 3)])
    with pytest.raises(ValueError, match=r"seed 0: the video of mine has shape \[3, 16, 16, 3\], and the dense one \[2, 16, 16, 3\]"):
        scope_attn.compare(pipe, make=lambda seed: numpy.zeros(next(shapes)), **good)
    assert not tiny_enabled(pipe)


def test_guide(tmp_path, monkeypatch, capsys):
    """The lines of docs/guide/selector.md as they stand, with synthetic tensors and a tiny pipeline in the place of the download."""
    safetensors = pytest.importorskip("safetensors.torch")
    page = (Path(__file__).parents[2] / "docs" / "guide" / "selector.md").read_text()
    function, tensors, videos, one, file = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(function.splitlines()) <= 20 and len(file.splitlines()) <= 20

    class Tiny:
        def __init__(self):
            self.pipe = tiny.wan()

        def __getattr__(self, name):
            return getattr(self.pipe, name)

        def to(self, device):
            return self

        def __call__(self, prompt, height, width, num_frames, generator=None, output_type="np"):
            seed = 0 if generator is None else generator.initial_seed()
            return types.SimpleNamespace(frames=[frames_of(tiny.make_wan(self.pipe, side=512, seed=seed, steps=5))])  # 4,096 tokens

    monkeypatch.setattr(diffusers.WanPipeline, "from_pretrained", lambda name, torch_dtype: Tiny())
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    safetensors.save_file({name: torch.randn(2, 1600, 64, generator=generator) for name in "qkv"}, "qkv.safetensors")
    names = {}
    exec(function, names)
    exec(tensors, names)
    said = capsys.readouterr().out
    rows = rows_of(names["found"])
    assert list(rows) == ["dense", "mine", "scope-mean", "svg2", "fewer codes"] and rows["mine"]["density"] == pytest.approx(0.1)
    assert json.loads(Path("call.json").read_text())["kind"] == "tensors"
    lines = [line.strip() for line in page.splitlines()]
    headings = [cell.strip() for cell in said.splitlines()[2].split("|")]
    assert headings in [[cell.strip() for cell in line.split("|")] for line in lines], "the page shows what is printed"
    assert all(line in lines for line in said.splitlines()[-2:]) or tiny.DEVICE != "cpu"
    exec(videos.replace("range(6)", "range(2)"), names)
    rows = rows_of(names["found"])
    assert list(rows) == ["dense", "mine", "scope-mean"] and rows["mine"]["density"] == pytest.approx(409 / 4096)
    assert all(5 < rows[name]["psnr"] < 60 for name in ("mine", "scope-mean")) and Path("videos.json").exists()
    exec(one, names)
    assert re.search(r"selector mine .*\n.*\n.*\n.*\n +transformer +16 calls .* sparse, mean density 0\.100", capsys.readouterr().out)
    exec(file, {})
    written, chosen = safetensors.load_file("mine.safetensors"), names["mine"](*(names["call"][name][None] for name in "qk"), None, None)
    kept = [scope_attn.unpack_bits(words, 1600) for words in (written["mask"], chosen.mask[0])]
    assert (written["labels"] == chosen.labels[0]).all() and (kept[0] != kept[1]).float().mean() < 1e-4, "ties aside"
