"""A selector of the caller's in enable() on tiny random pipelines: what it is given, what becomes of it, and what is refused."""
import json
import re

import pytest
import torch

import scope_attn
from scope_attn import _selector

pytest.importorskip("diffusers")
import diffusers

import tiny_pipelines as tiny
from scope_attn import _functions
from scope_attn.hosts import selected
from scope_attn.hosts.diffusers import families
from scope_attn.hosts.session import Tokens

KINDS = {"wan2.1": (tiny.wan, tiny.make_wan), "wan2.2": (lambda: tiny.wan(experts=2), tiny.make_wan), "vace": (tiny.vace, tiny.make_vace),
         "hunyuan": (tiny.hunyuan, tiny.make_hunyuan), "hunyuan-1.5": (tiny.hunyuan15, tiny.make_hunyuan15),
         "cogvideox": (tiny.cogvideox, tiny.make_cogvideox)}
NEWER = {"MiniMaxH3Transformer3DModel": ("minimax-h3", tiny.minimax, tiny.make_minimax),
         "LTX2VideoTransformer3DModel": ("ltx-2", tiny.ltx2, tiny.make_ltx2),
         "LTXVideoTransformer3DModel": ("ltx", tiny.ltx, tiny.make_ltx),
         "HunyuanVideoFramepackTransformer3DModel": ("framepack", tiny.framepack, tiny.run_loop),
         "Kandinsky5Transformer3DModel": ("kandinsky-5", tiny.kandinsky, tiny.run_loop)}
for name, (of, *made) in NEWER.items():
    if hasattr(diffusers, name):
        KINDS[of] = tuple(made)
WITHOUT_GRID = "minimax-h3", "framepack"  # the pipeline does not say it; there are frames of before beside the grid's
EVERYWHERE = dict(min_tokens=0, dense_steps=0, dense_layers=0)


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def bits(kept):
    """A Selection of booleans [batch, heads, groups, keys], of as many neighbouring queries each, but for the last."""
    batch, heads, groups, tokens = kept.shape
    labels = torch.arange(tokens, dtype=torch.int32, device=kept.device) // -(-tokens // groups)
    return scope_attn.Selection(labels.expand(batch, heads, tokens).contiguous(), scope_attn.pack_bits(kept))


def everything(q, k, grid, place):
    return bits(q.new_ones(*q.shape[:2], 1, k.shape[2], dtype=torch.bool))


def tenth(q, k, grid, place):
    """The tenth of the keys that score best against the sum of 32 neighbouring queries."""
    scores = torch.nn.functional.pad(q, (0, 0, 0, -q.shape[2] % 32)).unflatten(2, (-1, 32)).sum(3) @ k.transpose(2, 3)
    best = scores.topk(k.shape[2] // 10, -1).indices
    return bits(torch.zeros_like(scores, dtype=torch.bool).scatter_(3, best, True))


def test_everything(kind):
    """Every key kept, batch 2: the dense video to rounding. Disabled: the pipeline as it was."""
    make, run = kind
    pipe = make()
    untouched = run(pipe, batch=2)
    scope_attn.enable(pipe, selector=everything, min_tokens=0)
    assert 0 < (run(pipe, batch=2) - untouched).abs().max() < tiny.ROUNDING
    calls = scope_attn.receipt(pipe).calls
    assert all(call.density == 1 for call in calls) and any(call.sparse for call in calls)
    scope_attn.disable(pipe)
    assert (run(pipe, batch=2) == untouched).all()


def test_exact(kind, monkeypatch):
    """Every sparse call, batch 2: softmax in float64 over what was chosen and the text, for text over all that is valid."""
    make, run = kind
    pipe, seen, wrong = make(), [], []
    own = selected.Selected.attend

    def attend(calls, q, k, v, place, grid, tokens, scale):
        out, stats = own(calls, q, k, v, place, grid, tokens, scale)
        batch, heads, count, dim = q.shape
        text = torch.zeros(batch, count, dtype=torch.bool, device=q.device)
        if tokens.others:
            text = scope_attn.unpack_bits(tokens.bits, count).to(q.device)
        video = ~text[0]
        chosen = tenth(q[:, :, video], k[:, :, video], grid, place)
        rows = scope_attn.unpack_bits(chosen.mask, int(video.sum())).gather(2, chosen.labels.long()[..., None].expand(
            -1, -1, -1, int(video.sum())))
        sees = torch.ones(batch, heads, count, count, dtype=torch.bool, device=q.device)
        sees[:, :, video.nonzero(), video.nonzero()[:, 0]] = rows
        valid = torch.ones(batch, count, dtype=torch.bool, device=q.device)
        if tokens.lengths is not None:
            valid = (torch.arange(count)[None] < torch.tensor(tokens.lengths)[:, None]).to(q.device)
        logits = (q.double() @ k.double().mT) * (scale or dim**-0.5)
        exact = logits.where(sees & valid[:, None, None], -torch.inf).softmax(-1) @ v.double()
        wrong.append((out - exact * valid[:, None, :, None]).abs().max())
        seen.append((tokens.others, tokens.lengths))
        return out, stats

    monkeypatch.setattr(selected.Selected, "attend", attend)
    scope_attn.enable(pipe, selector=tenth, **EVERYWHERE)
    run(pipe, batch=2)
    assert max(wrong) < (1e-4 if tiny.DEVICE == "cpu" else 0.05)
    if run is tiny.make_hunyuan:
        assert {others for others, _ in seen} == {10} and [263, 260] in [lengths for _, lengths in seen]
    if run is tiny.make_cogvideox:
        assert {others for others, _ in seen} == {6}


def test_share(kind, tmp_path):
    """The receipt has its density and its times, the video differs, and is the same again."""
    make, run = kind
    pipe = make()
    untouched = run(pipe)
    scope_attn.enable(pipe, selector=tenth, **EVERYWHERE)
    out = run(pipe)
    assert (out - untouched).abs().max() > 1e-3
    receipt = scope_attn.receipt(pipe)
    sparse = [call for call in receipt.calls if call.sparse]
    tokens = sparse[0].stats.keys
    assert len(sparse) == len(receipt.calls) and receipt.density == pytest.approx(tokens // 10 / tokens)
    for call in sparse:
        seconds = call.stats.seconds
        assert 0 < seconds["select"] < call.seconds and 0 < seconds["attend"] < call.seconds
        assert call.selection_seconds == seconds["select"] and seconds["select"] + seconds["attend"] <= call.seconds
        assert {head.k_head for head in call.stats.heads} == {tokens // 10} and not call.stats.warm
    assert "selector tenth (dense_layers=0, dense_steps=0, dense_last_steps=0), for " in str(receipt)
    receipt.to_json(tmp_path / "receipt.json")
    saved = json.loads((tmp_path / "receipt.json").read_text())
    assert saved["method"] == "selector tenth" and saved["version"] and len(saved["commit"].rstrip("+")) == 40
    assert saved["calls"][0]["selection_seconds"] == sparse[0].selection_seconds
    receipt.report(tmp_path / "page.html")
    assert (run(pipe) == out).all()


def test_given(kind):
    """The video's tokens alone, their grid, and where the call stands; each layer and branch once a step."""
    make, run = kind
    pipe, found = make(), []

    def look(q, k, grid, place):
        assert q.shape == k.shape and q.shape[1] == 2
        found.append((q.shape[2], grid, place))
        return everything(q, k, grid, place)

    scope_attn.enable(pipe, selector=look, **EVERYWHERE)
    run(pipe)
    calls = scope_attn.receipt(pipe).calls
    assert [(place.expert, place.layer, place.step, place.branch) for _, _, place in found] == [
        (call.expert, call.layer, call.step, call.branch) for call in calls]
    assert {place.steps for *_, place in found} == {tiny.STEPS} and {place.step for *_, place in found} == set(range(tiny.STEPS))
    assert {place.layer for *_, place in found} >= {0, 1, 2}
    name = next(name for name, each in KINDS.items() if each[1] is run and each[0] is make)
    assert {grid for _, grid, _ in found} == {None if name in WITHOUT_GRID else (4, 8, 8)}
    assert name == "framepack" or {tokens for tokens, *_ in found} == {256}


@pytest.mark.parametrize("make, latents, grid", [
    (tiny.wan, (1, 4, 3, 8, 12), (3, 4, 6)), (tiny.hunyuan, (1, 4, 3, 8, 12), (3, 4, 6)), (tiny.cogvideox, (1, 6, 4, 8, 12), (6, 4, 6)),
    (lambda: tiny.cogvideox(patch_size_t=2, patch_bias=False), (1, 6, 4, 8, 12), (3, 4, 6))])
def test_order_of_the_grid(make, latents, grid):
    """Frames, rows and columns, of latents whose sides differ."""
    transformer = make().transformer
    family = families.FAMILIES[type(transformer).__name__]
    assert family.grid(transformer.config, dict(hidden_states=torch.empty(latents))) == grid


def test_schedule():
    """Dense steps, layers and short videos never reach it; the known model's schedule is the default."""
    pipe, found = tiny.wan(), []

    def look(q, k, grid, place):
        found.append((place.layer, place.step))
        return everything(q, k, grid, place)

    scope_attn.enable(pipe, selector=look, min_tokens=0)
    tiny.make_wan(pipe)
    assert set(found) == {(layer, step) for layer in (1, 2) for step in (1, 2, 3, 4)}
    assert scope_attn.receipt(pipe).settings["settings"] == dict(dense_layers="1", dense_steps="0.2", dense_last_steps="0")
    scope_attn.disable(pipe)
    found.clear()
    scope_attn.enable(pipe, selector=look, min_tokens=0, window=(0.4, 0.8), dense_layers=0)
    tiny.make_wan(pipe)
    assert set(found) == {(layer, step) for layer in (0, 1, 2) for step in (2, 3)}
    scope_attn.disable(pipe)
    scope_attn.enable(pipe, selector=look)
    found.clear()
    tiny.make_wan(pipe)
    assert not found and {call.why for call in scope_attn.receipt(pipe).calls} == {"256 tokens, min_tokens is 4,096"}


def test_groups_of_their_own():
    """As many groups as queries, an always-kept key, and queries that attend to nothing."""
    def own(q, k, grid, place):
        batch, heads, tokens, _ = q.shape
        kept = torch.eye(tokens, dtype=torch.bool, device=q.device).expand(batch, heads, -1, -1)
        chosen = bits(kept.contiguous())
        labels = chosen.labels.clone()
        labels[:, :, 100:110] = -1
        keep = scope_attn.pack_bits((torch.arange(tokens, device=q.device) < 3).expand(batch, -1))
        return scope_attn.Selection(labels, chosen.mask, keep)

    for make, run in (KINDS["wan2.1"], KINDS["hunyuan"], KINDS["cogvideox"]):
        pipe = make()
        scope_attn.enable(pipe, selector=own, **EVERYWHERE)
        run(pipe, batch=2)
        # 246 queries attend to themselves, of which the first three are keys that every query sees, and do not count.
        assert scope_attn.receipt(pipe).calls[0].density == pytest.approx(243 / (246 * 253))


def test_densities():
    """Counted bit by bit; bits past the keys, which a GPU could not refuse, do not count."""
    generator = torch.Generator().manual_seed(0)
    for tokens in (64, 77):
        labels = torch.randint(-1, 5, (2, 3, tokens), generator=generator, dtype=torch.int32)
        kept = torch.rand(2, 3, 5, tokens, generator=generator) < 0.3
        keep = torch.rand(2, tokens, generator=generator) < 0.2
        mask = scope_attn.pack_bits(kept)
        if tokens % 32:
            mask[..., -1] |= -1 << tokens % 32
        for keys, keep_bits in ((torch.ones_like(keep), None), (~keep, scope_attn.pack_bits(keep))):
            expected = torch.stack([torch.stack([
                torch.cat([kept[b, h, label, keys[b]] for label in labels[b, h] if label >= 0]).double().mean() for h in range(3)])
                for b in range(2)])
            found = _selector.densities(scope_attn.Selection(labels, mask, keep_bits), tokens)
            assert torch.allclose(found.double(), expected, atol=1e-6)
            arrays = [None if x is None else x.numpy() for x in (labels, mask, keep_bits)]
            assert abs(_selector.densities(scope_attn.Selection(*arrays), tokens) - expected.numpy()).max() < 1e-6


def returns(**changes):
    """A selector that keeps everything, but for these parts of what it returns."""
    def wrong(q, k, grid, place):
        chosen = everything(q, k, grid, place)
        return scope_attn.Selection(**{**dict(labels=chosen.labels, mask=chosen.mask), **{
            name: change(getattr(chosen, name)) for name, change in changes.items()}})
    return wrong


def fails(q, k, grid, place):
    raise KeyError("mine")


FAULTS = [
    (fails, "KeyError: 'mine'"),
    (lambda q, k, grid: None, "TypeError: .*positional arguments"),
    (lambda q, k, grid, place: (q, k), "TypeError: got tuple, expected a scope_attn.Selection"),
    (returns(labels=lambda x: x[:, :, :-1]), r"ValueError: labels: got shape \[1, 2, 255\].* expected \[1, 2, 256\]"),
    (returns(mask=lambda x: x[..., :-1]), r"ValueError: mask: got shape \[1, 2, 1, 7\].* expected \[1, 2, 1, 8\]"),
    (returns(mask=lambda x: x[0]), r"ValueError: mask: got shape \[2, 1, 8\].* expected \[1, 2, 1, 8\]"),
    (returns(keep=lambda x: torch.zeros(8, dtype=torch.int32, device=tiny.DEVICE)), r"ValueError: keep: got shape \[8\].* \[1, 8\]"),
    (returns(mask=lambda x: scope_attn.unpack_bits(x, 256)), r"TypeError: mask: got torch.bool, .*scope_attn.pack_bits makes them"),
    (returns(labels=lambda x: x.long()), "TypeError: labels: got torch.int64, expected 32-bit integers"),
    (returns(labels=lambda x: x.cpu().numpy()), "TypeError: labels: got ndarray, expected a PyTorch tensor"),
    (returns(mask=lambda x: None), "TypeError: mask: got NoneType"),
    (returns(mask=lambda x: x.expand(-1, -1, 2, -1)), "ValueError: mask: got shape .* contiguous"),
]
if tiny.DEVICE == "cpu":  # values on a GPU are not looked at: it would be waited for
    FAULTS += [(returns(labels=lambda x: x + 1), "ValueError: labels: got 1 to 1, expected -1 to 0, the groups of mask"),
               (returns(labels=lambda x: x - 2), "ValueError: labels: got -2 to -2, expected -1 to 0")]


@pytest.mark.parametrize("selector, told", FAULTS)
def test_faults(selector, told):
    """Strict: an error that names the layer and step. Otherwise one warning, the dense video bit by bit, and the receipt says why."""
    pipe = tiny.wan()
    untouched = tiny.make_wan(pipe)
    scope_attn.enable(pipe, selector=selector, min_tokens=0)
    told = f"selector {_selector.name_of(selector)}, layer 1, step 1: {told}"
    with pytest.raises(scope_attn.SelectorError, match=told):
        tiny.make_wan(pipe)
    scope_attn.disable(pipe)
    scope_attn.enable(pipe, selector=selector, min_tokens=0, strict=False)
    with pytest.warns(UserWarning, match=f"own attention runs in the place of sparse calls: {told}") as caught:
        assert (tiny.make_wan(pipe) == untouched).all()
    assert len([warning for warning in caught if "scope_attn" in str(warning.message)]) == 1
    refused = [call.why for call in scope_attn.receipt(pipe).calls if "refused" in call.why]
    assert len(refused) == 2 * 2 * 4 and all(re.match(r"refused: selector .*, layer [12], step [1-4]: ", why) for why in refused)


@pytest.mark.skipif(tiny.DEVICE != "cpu", reason="values on a GPU are not looked at")
@pytest.mark.parametrize("name", ["mask", "keep"])
def test_keys_that_are_not_there(name):
    """Bits past the last key, where 32 does not divide the tokens."""
    def beyond(q, k, grid, place):
        chosen = everything(q, k, grid, place)
        keep = torch.zeros_like(chosen.mask[:, 0, 0])
        found = dict(labels=chosen.labels, mask=chosen.mask.clone(), keep=keep)
        found[name][..., -1] |= 1 << k.shape[2] % 32
        return scope_attn.Selection(**found)

    pipe = tiny.wan()
    scope_attn.enable(pipe, selector=beyond, **EVERYWHERE)
    pipe.scheduler.set_timesteps(1)
    told = f"layer 0, step 0: ValueError: {name}: it has bits of keys from 45"
    with torch.no_grad(), pytest.raises(scope_attn.SelectorError, match=told):
        pipe.transformer(tiny.randn(1, 4, 5, 6, 6), pipe.scheduler.timesteps[:1], tiny.randn(1, 6, 16))


def test_interrupted():
    """Ctrl-C inside a selector is not its author's error."""
    def stop(q, k, grid, place):
        raise KeyboardInterrupt

    pipe = tiny.wan()
    scope_attn.enable(pipe, selector=stop, min_tokens=0, strict=False)
    with pytest.raises(KeyboardInterrupt):
        tiny.make_wan(pipe)


def test_refused_settings():
    """What would do nothing beside a selector, by name; the schedule is not among it."""
    pipe = tiny.wan()
    for given, told in ((dict(method="fast"), "method"), (dict(target_density=0.2), "target_density"),
                        (dict(method="scope", rho=0.9, tail="mean"), "method, rho, tail"), (dict(warm_prefix=True), "warm_prefix"),
                        (dict(densty=0.1), "densty")):
        with pytest.raises(ValueError, match=f"^{told}: it would do nothing beside a selector"):
            scope_attn.enable(pipe, selector=everything, **given)
    with pytest.raises(TypeError, match="selector: got str, expected a function of q, k, the grid and the place"):
        scope_attn.enable(pipe, selector="scope")
    with pytest.raises(scope_attn.ScopeValueError, match="dense_steps"):
        scope_attn.enable(pipe, selector=everything, dense_steps=2)
    scope_attn.enable(pipe, selector=everything, window=(0.2, 1), dense_layers=2, model="wan2.1-14b-distilled", min_tokens=7)
    told = scope_attn.receipt(pipe).settings
    assert told["model"] == "wan2.1-14b-distilled" and told["settings"]["dense_layers"] == "2" and told["min_tokens"] == 7
    assert not told["careful"]


def test_padding():
    """Padding among the video's tokens, and text that lies elsewhere in each sample, are refused in words."""
    q, k, v = tiny.randn(3, 2, 2, 64, 16)
    place, calls = scope_attn.Place(0, 0), selected.Selected(everything)
    text = torch.zeros(2, 64, dtype=torch.bool)
    text[:, 60:] = True
    for tokens, told in (
            (Tokens(lengths=[64, 60]), "some of the video's tokens are padding"),
            (Tokens(valid_keys=scope_attn.pack_bits(~text)), "some of the video's tokens are padding"),
            (Tokens(4, scope_attn.pack_bits(text), [64, 59]), "some of the video's tokens are padding"),
            (Tokens(4, scope_attn.pack_bits(torch.stack([text[0], text[1].flip(0)]))), "text lies elsewhere in each sample")):
        with pytest.raises(ValueError, match=f"selector: {told}"):
            calls.attend(q, k, v, place, None, tokens, None)
    out, stats = calls.attend(q, k, v, place, None, Tokens(4, scope_attn.pack_bits(text), [64, 61]), None)
    exact = torch.nn.functional.scaled_dot_product_attention(q[1:, :, :61], k[1:, :, :61], v[1:, :, :61])
    assert (out[1:, :, :61] - exact).abs().max() < tiny.ROUNDING and not out[1:, :, 61:].any() and stats.density == 1


def test_scale():
    """A layer's own scale of q k reaches attend."""
    q, k, v = tiny.randn(3, 1, 2, 64, 16)
    out, _ = selected.Selected(everything).attend(q, k, v, scope_attn.Place(0, 0), None, Tokens(), 0.7)
    assert (out - torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.7)).abs().max() < tiny.ROUNDING


def test_layouts_are_made_once(monkeypatch):
    """Making one waits for a GPU: once for each branch's prompt, not for each call."""
    made = []
    own = selected.Layout.__init__
    monkeypatch.setattr(selected.Layout, "__init__", lambda layout, *given: made.append(given[1]) or own(layout, *given))
    pipe = tiny.hunyuan()
    scope_attn.enable(pipe, selector=everything, **EVERYWHERE)
    tiny.make_hunyuan(pipe, batch=2)
    assert sorted(made) == [[260, 263], [263, 260]]


def test_compiled():
    """Compiled blocks call it as eager ones do."""
    pipe = tiny.wan()
    scope_attn.enable(pipe, selector=tenth, **EVERYWHERE)
    eager = tiny.make_wan(pipe)
    scope_attn.disable(pipe)
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    scope_attn.enable(pipe, selector=tenth, **EVERYWHERE)
    assert (tiny.make_wan(pipe) - eager).abs().max() < tiny.ROUNDING
    assert all(call.sparse for call in scope_attn.receipt(pipe).calls)


def test_plans_are_few():
    """A selector whose groups differ from call to call makes a plan for each count, of which 64 are kept."""
    _functions.kept_plan.cache_clear()

    def grows(q, k, grid, place):
        return bits(q.new_ones(1, 2, 1 + place.step, k.shape[2], dtype=torch.bool))

    pipe = tiny.wan()
    untouched = tiny.make_wan(pipe)
    scope_attn.enable(pipe, selector=grows, **EVERYWHERE)
    assert (tiny.make_wan(pipe) - untouched).abs().max() < tiny.ROUNDING
    assert _functions.kept_plan.cache_info().currsize == tiny.STEPS + 1
