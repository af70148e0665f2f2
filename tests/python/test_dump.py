"""Re-derives codebooks, counts, exact key sets and the output from `scope attend --dump`, in numpy float64."""
import json
import math

import numpy as np
import pytest

import tensors


def bits(mask, count):
    """Rows of little-endian 32-bit words -> boolean rows."""
    return np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), axis=-1, bitorder="little")[..., :count].astype(bool)


def expect_means(points, labels, centroids, what):
    for c in range(len(centroids)):
        members = points[labels == c]
        if len(members):  # an empty cluster keeps an older centroid, which the dump cannot vouch for
            assert np.allclose(members.mean(0), centroids[c], atol=2e-5), f"{what} {c} is not the mean of its members"


def top_p(scores, rho):
    p = np.sort(np.exp(scores - scores.max()))[::-1]
    return len(scores) if rho >= 1 else int(np.searchsorted(np.cumsum(p) / p.sum(), rho) + 1)


def expect_head(head, q, k, v, settings, subspaces):
    tokens, dim = q.shape
    groups = len(head["sizes"])
    assert np.array_equal(np.bincount(head["labels"], minlength=groups), head["sizes"])
    expect_means(q, head["labels"], head["q_centroids"], "query centroid")
    scores = np.zeros((groups, tokens))
    for m, channels in enumerate(subspaces):
        expect_means(k[:, channels], head[f"codes.{m}"], head[f"codebook.{m}"], f"codebook {m} entry")
        table = head["q_centroids"][:, channels].astype(np.float64) @ head[f"codebook.{m}"].astype(np.float64).T
        scores += table[:, head[f"codes.{m}"]]
    scores /= math.sqrt(dim)

    mask = bits(head["mask"], tokens)
    assert np.array_equal(mask.sum(1), head["counts"]), "popcount of a row is its count"
    n, used = head["sizes"], head["sizes"] > 0
    rho, alpha, rule = float(settings["rho_used"]), float(settings["alpha_used"]), settings["rule"]
    if rule == "fixed":
        expected = np.where(used, max(1, math.ceil(round(float(settings["density"]) * 1e6) * tokens / 1e6)), 0)
        assert np.array_equal(head["counts"], expected)
    else:
        floor = -(-round(alpha * 1e6) * tokens // 1000000)
        low, high = (np.array([top_p(row, r) for row in scores]) for r in (rho - 1e-5, min(1.0, rho + 1e-5)))
        if rule != "top_p":
            low, high = np.maximum(low, floor), np.maximum(high, floor)
        if rule in ("online", "target"):
            budget = [-(-int((n * b).sum()) // int(n.sum())) for b in (low, high)]
            assert budget[0] <= settings["k_head"] <= budget[1], "k_head"
            low, high = np.maximum(low, settings["k_head"]), np.maximum(high, settings["k_head"])
        for c in np.flatnonzero(used):
            assert low[c] <= head["counts"][c] <= high[c], f"count of group {c}: {head['counts'][c]} not in {low[c]}..{high[c]}"
    for c in np.flatnonzero(used):
        kept, dropped = scores[c][mask[c]], scores[c][~mask[c]]
        assert not len(dropped) or dropped.max() <= kept.min() + 1e-5, f"group {c} dropped a better key"
    assert not mask[~used].any()

    out = np.zeros_like(q, dtype=np.float64)
    for c in np.flatnonzero(used):
        rows = head["labels"] == c
        logits = q[rows].astype(np.float64) @ k[mask[c]].astype(np.float64).T / math.sqrt(dim)
        p = np.exp(logits - logits.max(1, keepdims=True))
        out[rows] = p @ v[mask[c]] / p.sum(1, keepdims=True)
    error = np.linalg.norm(out - head["out"]) / np.linalg.norm(out)
    assert error < 2e-6, f"output error {error}"
    return (n * head["counts"]).sum() / tokens**2


def sets(*settings):
    return [word for setting in settings for word in ("--set", setting)]


HALVES = [[*range(20), *range(60, 80)], [*range(20, 60)], [*range(80, 128)]]


@pytest.fixture(scope="module")
def qkv(scope, tmp_path_factory):
    path = tmp_path_factory.mktemp("t") / "qkv.safetensors"
    scope.accept("make-qkv", "--grid", "5x12x14", "--heads", "3", "--seed", "3", "-o", path)
    return path


@pytest.mark.parametrize("flags", (
    pytest.param(sets("rho=0.9", "alpha=0.1"), id="online"),
    pytest.param(sets("rho=0.5", "alpha=0.02", "groups=7", "codes=21"), id="online, few"),
    pytest.param(sets("rule=top_p", "rho=0.8"), id="top_p"),
    pytest.param(sets("rule=hybrid", "rho=0.7", "alpha=0.05"), id="hybrid"),
    pytest.param(sets("rule=fixed", "density=0.13"), id="fixed"),
    pytest.param(sets("rule=target", "density=0.2"), id="target"),
    pytest.param(sets("rule=target", "density=0.05"), id="target, low"),
    pytest.param(sets("rule=target", "density=0.2", "target_scope=head"), id="target in each head"),
    pytest.param(sets("rule=target", "density=0.05", "target_scope=head"), id="target in each head, low"),
    pytest.param(sets("partition=even:8"), id="even:8"),
    pytest.param(sets("partition=random:3", "seed=9"), id="random:3"),
    pytest.param(["--subspaces", json.dumps(HALVES)], id="split halves"),
    pytest.param(["--method", "scope-paper"], id="scope-paper")))
def test_a_dump_is_what_its_rule_says(scope, qkv, tmp_path, flags):
    out, stats = tmp_path / "out.safetensors", tmp_path / "stats.json"
    scope.accept("attend", qkv, "-o", out, "--dump", "--stats", stats, *flags)
    dump, metadata = tensors.load(out)
    inputs, _ = tensors.load(qkv)
    report = json.load(open(stats))
    assert report["ran"] == "sparse"
    subspaces = json.loads(metadata["subspaces"])
    covered = sorted(channel for each in subspaces for channel in each)
    assert covered == list(range(inputs["q"].shape[-1])), "the subspaces cover every channel once"
    densities = []
    for h in range(inputs["q"].shape[0]):
        head = {key: value[0, h] for key, value in dump.items() if key != "out"}
        head["out"] = dump["out"][h]
        stat = report["heads"][h]
        settings = dict(report["settings"], rho_used=stat["rho"], alpha_used=stat["alpha"], k_head=stat["k_head"])
        densities.append(expect_head(head, inputs["q"][h], inputs["k"][h], inputs["v"][h], settings, subspaces))
    if settings["rule"] == "target":
        met = densities if settings["target_scope"] == "head" else [np.mean(densities)]
        assert all(abs(x - float(settings["density"])) < 0.005 for x in met), densities
        assert settings["target_scope"] == "head" or len({head["rho"] for head in report["heads"]}) == 1, "one rho for all heads"
