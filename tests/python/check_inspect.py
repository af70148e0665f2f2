"""Re-derives what `scope inspect` reports and draws from `scope attend --dump`, in numpy float64, and tries bad input.

    check_inspect.py SCOPE-COMMAND
"""
import base64
import json
import math
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

import numpy as np

import pngs
import tensors

SCOPE = sys.argv[1]
GRID, HEAD, QUERY = (5, 6, 8), 1, (3, 2, 7)
N = math.prod(GRID)
SVG = "{http://www.w3.org/2000/svg}"


def scope(*arguments):
    return subprocess.run([SCOPE, *arguments], capture_output=True, text=True)


def accept(*arguments):
    result = scope(*arguments)
    assert result.returncode == 0, f"{arguments}: {result.stdout}{result.stderr}"
    return result.stdout


def refuse(code, words, *arguments):
    """The command must exit with `code`, say all of `words`, and leave no folder behind."""
    result = scope(*arguments, "-o", f"{folder}/never")
    assert result.returncode == code, f"{arguments}: exit {result.returncode}, expected {code}: {result.stderr}"
    for word in words:
        assert word in result.stderr, f"{arguments}: nothing about {word!r} in: {result.stderr}"
    assert not os.path.exists(f"{folder}/never")


def pictures(path):
    images = xml.etree.ElementTree.parse(path).findall(f"{SVG}image")
    return [pngs.read(base64.b64decode(image.get("href").split(",")[1], validate=True)) for image in images]


def selection(method, head):
    """What a first call of `method` selects for one head: labels and the score of every key for every group."""
    path = f"{folder}/dump.safetensors"
    accept("attend", f"{folder}/head{head}.safetensors", "--method", method, "--dump", "-o", path)
    arrays, metadata = tensors.load(path)
    arrays = {name: x[0, 0] for name, x in arrays.items() if name != "out"}
    centroids = arrays["q_centroids"].astype(np.float64)
    scores = np.zeros((len(centroids), N))
    for m, channels in enumerate(json.loads(metadata.get("subspaces", "[]"))):
        table = centroids[:, channels] @ arrays[f"codebook.{m}"].astype(np.float64).T
        scores += table[:, arrays[f"codes.{m}"]]
    if "codes.0" not in arrays:
        scores = centroids @ k[head].astype(np.float64).T
    return arrays, scores / math.sqrt(q.shape[2])


def match(scores, oracle, recall):
    """The highest threshold that recalls enough: keys kept, recall, and keys when the last are kept in part."""
    before, hits_before = 0, 0
    for threshold in np.unique(np.round(scores, 9))[::-1]:
        kept = np.round(scores, 9) >= threshold
        hits = (kept & oracle).sum()
        if hits >= recall * oracle.sum() - 1e-9:
            part = (recall * oracle.sum() - hits_before) / (hits - hits_before)
            return kept, hits / oracle.sum(), before + part * (kept.sum() - before)
        before, hits_before = kept.sum(), hits
    raise AssertionError


def sampled_token(i, samples):
    """The one that src/measure/recall.h draws from stretch i."""
    mask = 2**64 - 1
    x = (i + 1) * 0x9E3779B97F4A7C15 & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    begin, end = i * N // samples, (i + 1) * N // samples
    return begin + (x ^ x >> 31) % (end - begin)


def oracle_of(token):
    logits = q[HEAD, token].astype(np.float64) @ k[HEAD].astype(np.float64).T
    return logits >= np.sort(logits)[::-1][math.ceil(N / 10) - 1]


with tempfile.TemporaryDirectory() as folder:
    file = f"{folder}/qkv.safetensors"
    accept("make-qkv", "--grid", "x".join(map(str, GRID)), "--heads", "3", "--rope", "16,8,8", "-o", file)
    arrays, metadata = tensors.load(file)
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    for h in range(3):
        tensors.save(f"{folder}/head{h}.safetensors", {x: arrays[x][h:h + 1] for x in "qkv"}, metadata)

    methods = ["sparge:q_block=8+k_block=16", "svg2:groups=20+codes=30", "scope:codes=9", "scope-exact"]
    inspect = ("inspect", file, "--head", str(HEAD), "--query", ",".join(map(str, QUERY)), "--scoring", ",".join(methods),
               "--samples", "7", "--repeat", "1", "--method", "scope:groups=12+codes=11")
    said = accept(*inspect, "-o", f"{folder}/a/look")
    report = json.load(open(f"{folder}/a/look/inspect.json"))
    token = (QUERY[0] * GRID[1] + QUERY[1]) * GRID[2] + QUERY[2]
    assert report["grid"] == list(GRID) and report["head"] == HEAD and report["matched_recall"]["query"] == list(QUERY)

    # Matched recall, of the query and of seven, against the dumped selection.
    masks = []
    for row, method in zip(report["matched_recall"]["methods"], methods, strict=True):
        dump, scores = selection(method, HEAD)
        kept, recall, even = match(scores[dump["labels"][token]], oracle_of(token), 0.958)
        masks.append(kept)
        got = row["of_query"]
        assert row["method"] == method and got["kept"] == kept.sum(), (row, kept.sum())
        assert abs(got["oracle_recall"] - recall) < 1e-12 and abs(got["even_retention"] - even / N) < 1e-9, (got, recall, even)
        for at in row["of_queries"]:
            samples = [sampled_token(i, 7) for i in range(7)]
            want = [match(scores[dump["labels"][t]], oracle_of(t), at["recall"]) for t in samples]
            assert abs(at["mean_retention"] - np.mean([w[2] for w in want]) / N) < 1e-9, (method, at)
            assert abs(at["mean_whole_retention"] - np.mean([w[0].sum() for w in want]) / N) < 1e-9, (method, at)
            assert abs(at["mean_oracle_recall"] - np.mean([w[1] for w in want])) < 1e-9, (method, at)
        assert method in said and f"{100 * got['retention']:.1f} %" in said

    # Its masks: all five frames are drawn, after as many score maps. Yellow, grey, red, dark.
    drawn = pictures(f"{folder}/a/look/matched_recall.svg")
    colours = {(True, True): (250, 208, 90), (True, False): (150, 160, 172), (False, True): (222, 60, 75), (False, False): (28, 30, 38)}
    oracle = oracle_of(token)
    assert len(drawn) == 2 * GRID[0] * 5
    for t in range(GRID[0]):
        for i, kept in enumerate([oracle, *masks]):
            image = drawn[GRID[0] * 5 + t * 5 + i]
            assert image.shape == (60, 80, 3), image.shape
            for y in range(GRID[1]):
                for x in range(GRID[2]):
                    j = (t * GRID[1] + y) * GRID[2] + x
                    assert tuple(image[10 * y + 3, 10 * x + 6]) == colours[bool(kept[j]), bool(oracle[j])], (t, i, y, x)

    # Cluster maps: a cluster is a colour, the same over the frames of a row.
    dump, _ = selection("scope-paper:codes=10+groups=1", HEAD)
    drawn = pictures(f"{folder}/a/look/clusters.svg")
    assert len(drawn) == 15 and [s["name"] for s in report["clusters"]["subspaces"]] == ["T", "H", "W"]
    for m in range(3):
        labels = dump[f"codes.{m}"].reshape(GRID)
        colour = {}
        for t, y, x in np.ndindex(*GRID):
            seen = tuple(drawn[m * 5 + t][10 * y + 5, 10 * x + 5])
            assert colour.setdefault(labels[t, y, x], seen) == seen
        assert len(set(colour.values())) == len(colour)
        assert report["clusters"]["subspaces"][m]["sizes"] == np.bincount(labels.ravel(), minlength=10).tolist()

    # Groups and the account of every head.
    assert len(report["by_head"]) == 3
    for row in report["by_head"]:
        assert sum(row["group_sizes"]) == N and len(row["group_sizes"]) == 12
        density = np.dot(row["group_sizes"], row["counts"]) / N**2
        assert abs(density - row["density"]) < 1e-9 and min(row["counts"]) >= row["k_head"]
        cost = row["cost"]
        assert cost["table_macs"] == 12 * 11 * 32 and cost["direct_macs"] == 12 * N * 32 and cost["lookups"] == 12 * N * 3
        assert cost["code_space"] == 11**3 and cost["code_space_gain"] == 121 and cost["centroid_scalars"] == 11 * 32
        assert abs(cost["mac_reduction"] - N / 11) < 1e-12 and 1 < cost["distinct_codes"] <= N
    bars = xml.etree.ElementTree.parse(f"{folder}/a/look/histograms.svg")
    assert sum(text.text.startswith("head ") for text in bars.findall(f"{SVG}text")) == 3
    assert set(report["seconds"]) == {"first", "warm", "warm_scored_directly"}
    lines = xml.etree.ElementTree.parse(f"{folder}/a/look/retention.svg").findall(f"{SVG}polyline")
    assert [len(line.get("points").split()) for line in lines] == [8] * 4

    # The same bits for any number of threads, apart from what says how long it took and on what.
    accept(*inspect, "--threads", "1", "-o", f"{folder}/b")
    again = json.load(open(f"{folder}/b/inspect.json"))
    assert all(again[name] == report[name] for name in report if name not in ("machine", "seconds"))

    # Text at the end is not part of the maps; a method that keeps whole codes has no direct form; padding is refused.
    said = accept("inspect", file, "--grid", "5x6x7", "--text", "30", "--method", "svg2:groups=9+codes=12", "--samples", "3", "-o",
                  f"{folder}/text", "--scoring", "scope,svg2", "--frames", "4,0", "--clusters", "5")
    report = json.load(open(f"{folder}/text/inspect.json"))
    assert sum(report["by_head"][0]["group_sizes"]) == 210 and report["by_head"][0]["cost"]["subspaces"] == 1
    assert set(report["seconds"]) == {"first", "warm"} and len(pictures(f"{folder}/text/clusters.svg")) == 2

    base = ("inspect", file)
    refuse(2, ["--head", "got 3", "0..2"], *base, "--head", "3")
    refuse(2, ["--head", "got -1"], *base, "--head", "-1")
    refuse(2, ["--query", "5,0,0", "5,6,8"], *base, "--query", "5,0,0")
    refuse(2, ["frame,row,column"], *base, "--query", "1,2")
    refuse(2, ["--query", "indices"], *base, "--query", "1,2,-3")
    refuse(2, ["--frames", "got 5", "0..4"], *base, "--frames", "0,5")
    refuse(2, ["--clusters", "got 1", "2..20"], *base, "--clusters", "1")
    refuse(2, ["--samples"], *base, "--samples", "none")
    refuse(2, ["svg2"], *base, "--scoring", "scope,nothing")
    refuse(2, ["dense"], *base, "--scoring", "dense")
    refuse(2, ["dense"], *base, "--method", "dense")
    refuse(3, ["5x6x9", "270", "240"], *base, "--grid", "5x6x9")
    refuse(2, ["TxHxW"], *base, "--grid", "30x8")
    tensors.save(f"{folder}/plain.safetensors", arrays, {"rope": "16,8,8"})
    refuse(2, ["--grid", "240 tokens"], "inspect", f"{folder}/plain.safetensors")
    tiny = {x: arrays[x][:, :6] for x in "qkv"}
    tensors.save(f"{folder}/tiny.safetensors", tiny, {"rope": "16,8,8", "grid": "1x2x3"})
    refuse(2, ["--clusters", "got 10", "2..6", "6 video tokens"], "inspect", f"{folder}/tiny.safetensors")
    accept("inspect", f"{folder}/tiny.safetensors", "--clusters", "3", "-o", f"{folder}/tiny")
    tensors.save(f"{folder}/cross.safetensors", {"q": q, "k": k[:, :200], "v": v[:, :200]}, metadata)
    refuse(3, ["200", "240"], "inspect", f"{folder}/cross.safetensors")
    tensors.save(f"{folder}/padded.safetensors", arrays | {"k_lengths": np.array([200], np.int64)}, metadata)
    refuse(2, ["padded"], "inspect", f"{folder}/padded.safetensors")
    tensors.save(f"{folder}/kept.safetensors", arrays | {"keep": np.ones((1, 8), np.uint32)}, metadata)
    refuse(3, ["--text"], "inspect", f"{folder}/kept.safetensors")
    result = scope(*base, "--samples", "1", "-o", f"{file}/in_a_file")
    assert result.returncode == 3 and "cannot write into" in result.stderr and file in result.stderr, result.stderr
print("inspect: numbers and pictures agree with the dumps")
