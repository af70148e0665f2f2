"""Re-derives what `scope inspect` reports and draws from `scope attend --dump`, in numpy float64, and tries bad input."""
import base64
import json
import math
import types
import xml.etree.ElementTree

import numpy as np
import pytest

import pngs
import tensors

GRID, HEAD, QUERY = (5, 6, 8), 1, (3, 2, 7)
N = math.prod(GRID)
TOKEN = (QUERY[0] * GRID[1] + QUERY[1]) * GRID[2] + QUERY[2]
METHODS = ["sparge:q_block=8+k_block=16", "svg2:groups=20+codes=30", "scope:codes=9", "scope-exact"]
SVG = "{http://www.w3.org/2000/svg}"


def pictures(path):
    images = xml.etree.ElementTree.parse(path).findall(f"{SVG}image")
    return [pngs.read(base64.b64decode(image.get("href").split(",")[1], validate=True)) for image in images]


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


@pytest.fixture(scope="module")
def qkv(scope, tmp_path_factory):
    """Three heads in a file, and each in a file of its own."""
    folder = tmp_path_factory.mktemp("t")
    file = folder / "qkv.safetensors"
    scope.accept("make-qkv", "--grid", "x".join(map(str, GRID)), "--heads", 3, "--rope", "16,8,8", "-o", file)
    arrays, metadata = tensors.load(file)
    heads = [folder / f"head{h}.safetensors" for h in range(3)]
    for h, path in enumerate(heads):
        tensors.save(path, {x: arrays[x][h:h + 1] for x in "qkv"}, metadata)
    return types.SimpleNamespace(file=file, heads=heads, arrays=arrays, metadata=metadata, **arrays)


@pytest.fixture(scope="module")
def selection(scope, qkv, tmp_path_factory):
    """selection(method, head): what a first call of the method selects for one head, and the score of every key for every group."""
    path = tmp_path_factory.mktemp("t") / "dump.safetensors"

    def select(method, head):
        scope.accept("attend", qkv.heads[head], "--method", method, "--dump", "-o", path)
        arrays, metadata = tensors.load(path)
        arrays = {name: x[0, 0] for name, x in arrays.items() if name != "out"}
        centroids = arrays["q_centroids"].astype(np.float64)
        scores = np.zeros((len(centroids), N))
        for m, channels in enumerate(json.loads(metadata.get("subspaces", "[]"))):
            table = centroids[:, channels] @ arrays[f"codebook.{m}"].astype(np.float64).T
            scores += table[:, arrays[f"codes.{m}"]]
        if "codes.0" not in arrays:
            scores = centroids @ qkv.k[head].astype(np.float64).T
        return arrays, scores / math.sqrt(qkv.q.shape[2])

    return select


def oracle_of(qkv, token):
    logits = qkv.q[HEAD, token].astype(np.float64) @ qkv.k[HEAD].astype(np.float64).T
    return logits >= np.sort(logits)[::-1][math.ceil(N / 10) - 1]


@pytest.fixture(scope="module")
def inspect(qkv):
    """The command that the tests of figures look at."""
    return ("inspect", qkv.file, "--head", HEAD, "--query", ",".join(map(str, QUERY)), "--scoring", ",".join(METHODS), "--samples", 7,
            "--repeat", 1, "--method", "scope:groups=12+codes=11")


@pytest.fixture(scope="module")
def look(scope, inspect, tmp_path_factory):
    """The folder that it makes, its report, and what it said."""
    folder = tmp_path_factory.mktemp("t") / "a" / "look"
    said = scope.accept(*inspect, "-o", folder)
    return types.SimpleNamespace(folder=folder, said=said, report=json.load(open(folder / "inspect.json")))


def test_matched_recall_is_that_of_the_dumped_selection(look, qkv, selection):
    """Of the query, and of seven."""
    report = look.report
    assert report["grid"] == list(GRID) and report["head"] == HEAD and report["matched_recall"]["query"] == list(QUERY)
    for row, method in zip(report["matched_recall"]["methods"], METHODS, strict=True):
        dump, scores = selection(method, HEAD)
        kept, recall, even = match(scores[dump["labels"][TOKEN]], oracle_of(qkv, TOKEN), 0.958)
        got = row["of_query"]
        assert row["method"] == method and got["kept"] == kept.sum(), (row, kept.sum())
        assert abs(got["oracle_recall"] - recall) < 1e-12 and abs(got["even_retention"] - even / N) < 1e-9, (got, recall, even)
        for at in row["of_queries"]:
            samples = [sampled_token(i, 7) for i in range(7)]
            want = [match(scores[dump["labels"][t]], oracle_of(qkv, t), at["recall"]) for t in samples]
            assert abs(at["mean_retention"] - np.mean([w[2] for w in want]) / N) < 1e-9, (method, at)
            assert abs(at["mean_whole_retention"] - np.mean([w[0].sum() for w in want]) / N) < 1e-9, (method, at)
            assert abs(at["mean_oracle_recall"] - np.mean([w[1] for w in want])) < 1e-9, (method, at)
        assert method in look.said and f"{100 * got['retention']:.1f} %" in look.said


def test_masks_are_drawn_as_they_are(look, qkv, selection):
    """All five frames, after as many score maps. Yellow, grey, red, dark."""
    masks = []
    for method in METHODS:
        dump, scores = selection(method, HEAD)
        masks.append(match(scores[dump["labels"][TOKEN]], oracle_of(qkv, TOKEN), 0.958)[0])
    drawn = pictures(look.folder / "matched_recall.svg")
    colours = {(True, True): (250, 208, 90), (True, False): (150, 160, 172), (False, True): (222, 60, 75), (False, False): (28, 30, 38)}
    oracle = oracle_of(qkv, TOKEN)
    assert len(drawn) == 2 * GRID[0] * 5
    for t in range(GRID[0]):
        for i, kept in enumerate([oracle, *masks]):
            image = drawn[GRID[0] * 5 + t * 5 + i]
            assert image.shape == (60, 80, 3), image.shape
            for y in range(GRID[1]):
                for x in range(GRID[2]):
                    j = (t * GRID[1] + y) * GRID[2] + x
                    assert tuple(image[10 * y + 3, 10 * x + 6]) == colours[bool(kept[j]), bool(oracle[j])], (t, i, y, x)


def test_a_cluster_is_a_colour(look, selection):
    """The same over the frames of a row."""
    dump, _ = selection("scope-paper:codes=10+groups=1", HEAD)
    clusters = look.report["clusters"]
    drawn = pictures(look.folder / "clusters.svg")
    assert len(drawn) == 15 and [s["name"] for s in clusters["subspaces"]] == ["T", "H", "W"]
    for m in range(3):
        labels = dump[f"codes.{m}"].reshape(GRID)
        colour = {}
        for t, y, x in np.ndindex(*GRID):
            seen = tuple(drawn[m * 5 + t][10 * y + 5, 10 * x + 5])
            assert colour.setdefault(labels[t, y, x], seen) == seen
        assert len(set(colour.values())) == len(colour)
        assert clusters["subspaces"][m]["sizes"] == np.bincount(labels.ravel(), minlength=10).tolist()


def test_groups_and_costs_of_every_head_add_up(look):
    report = look.report
    assert len(report["by_head"]) == 3
    for row in report["by_head"]:
        assert sum(row["group_sizes"]) == N and len(row["group_sizes"]) == 12
        density = np.dot(row["group_sizes"], row["counts"]) / N**2
        assert abs(density - row["density"]) < 1e-9 and min(row["counts"]) >= row["k_head"]
        cost = row["cost"]
        assert cost["table_macs"] == 12 * 11 * 32 and cost["direct_macs"] == 12 * N * 32 and cost["lookups"] == 12 * N * 3
        assert cost["code_space"] == 11**3 and cost["code_space_gain"] == 121 and cost["centroid_scalars"] == 11 * 32
        assert abs(cost["mac_reduction"] - N / 11) < 1e-12 and 1 < cost["distinct_codes"] <= N
    bars = xml.etree.ElementTree.parse(look.folder / "histograms.svg")
    assert sum(text.text.startswith("head ") for text in bars.findall(f"{SVG}text")) == 3
    assert set(report["seconds"]) == {"first", "warm", "warm_scored_directly"}
    lines = xml.etree.ElementTree.parse(look.folder / "retention.svg").findall(f"{SVG}polyline")
    assert [len(line.get("points").split()) for line in lines] == [8] * 4


def test_any_number_of_threads_gives_the_same_bits(scope, inspect, look, tmp_path):
    """Apart from what says how long it took and on what."""
    scope.accept(*inspect, "--threads", 1, "-o", tmp_path / "b")
    again = json.load(open(tmp_path / "b" / "inspect.json"))
    assert all(again[name] == look.report[name] for name in look.report if name not in ("machine", "seconds"))


def test_text_at_the_end_is_not_part_of_the_maps(scope, qkv, tmp_path):
    """A method that keeps whole codes has no direct form."""
    scope.accept("inspect", qkv.file, "--grid", "5x6x7", "--text", 30, "--method", "svg2:groups=9+codes=12", "--samples", 3, "-o",
                 tmp_path / "text", "--scoring", "scope,svg2", "--frames", "4,0", "--clusters", 5)
    report = json.load(open(tmp_path / "text" / "inspect.json"))
    assert sum(report["by_head"][0]["group_sizes"]) == 210 and report["by_head"][0]["cost"]["subspaces"] == 1
    assert set(report["seconds"]) == {"first", "warm"} and len(pictures(tmp_path / "text" / "clusters.svg")) == 2


@pytest.mark.parametrize("code,words,flags", (
    (2, ["--head", "got 3", "0..2"], ["--head", "3"]),
    (2, ["--head", "got -1"], ["--head", "-1"]),
    (2, ["--query", "5,0,0", "5,6,8"], ["--query", "5,0,0"]),
    (2, ["frame,row,column"], ["--query", "1,2"]),
    (2, ["--query", "indices"], ["--query", "1,2,-3"]),
    (2, ["--frames", "got 5", "0..4"], ["--frames", "0,5"]),
    (2, ["--clusters", "got 1", "2..20"], ["--clusters", "1"]),
    (2, ["--samples"], ["--samples", "none"]),
    (2, ["svg2"], ["--scoring", "scope,nothing"]),
    (2, ["dense"], ["--scoring", "dense"]),
    (2, ["dense"], ["--method", "dense"]),
    (3, ["5x6x9", "270", "240"], ["--grid", "5x6x9"]),
    (2, ["TxHxW"], ["--grid", "30x8"])), ids=lambda value: "=".join(value) if str(value).startswith("['--") else "")
def test_bad_options_are_refused(scope, qkv, tmp_path, code, words, flags):
    scope.refuse(code, words, "inspect", qkv.file, *flags, "-o", tmp_path / "never")


def test_bad_tensors_are_refused(scope, qkv, tmp_path):
    q, k, v, arrays = qkv.q, qkv.k, qkv.v, qkv.arrays
    path = lambda name: tmp_path / f"{name}.safetensors"
    never = ("-o", tmp_path / "never")
    tensors.save(path("plain"), arrays, {"rope": "16,8,8"})
    scope.refuse(2, ["--grid", "240 tokens"], "inspect", path("plain"), *never)
    tiny = {x: arrays[x][:, :6] for x in "qkv"}
    tensors.save(path("tiny"), tiny, {"rope": "16,8,8", "grid": "1x2x3"})
    scope.refuse(2, ["--clusters", "got 10", "2..6", "6 video tokens"], "inspect", path("tiny"), *never)
    scope.accept("inspect", path("tiny"), "--clusters", 3, "-o", tmp_path / "tiny")
    tensors.save(path("cross"), {"q": q, "k": k[:, :200], "v": v[:, :200]}, qkv.metadata)
    scope.refuse(3, ["200", "240"], "inspect", path("cross"), *never)
    tensors.save(path("padded"), arrays | {"k_lengths": np.array([200], np.int64)}, qkv.metadata)
    scope.refuse(2, "padded", "inspect", path("padded"), *never)
    tensors.save(path("kept"), arrays | {"keep": np.ones((1, 8), np.uint32)}, qkv.metadata)
    scope.refuse(3, "--text", "inspect", path("kept"), *never)


def test_a_folder_inside_a_file_is_refused(scope, qkv):
    scope.refuse(3, ["cannot write into", qkv.file.name], "inspect", qkv.file, "--samples", 1, "-o", qkv.file / "in_a_file")
