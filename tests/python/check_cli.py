"""Hostile inputs to the scope command: the right exit code, a message that names the problem, no output file.

    check_cli.py SCOPE-COMMAND
"""
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

import numpy as np

import tensors

SCOPE = sys.argv[1]
checks = 0


def scope(*arguments):
    return subprocess.run([SCOPE, *arguments], capture_output=True, text=True)


def refuse(code, word, *arguments):
    """The command must exit with `code`, name `word` on stderr, and leave no output behind."""
    global checks
    checks += 1
    for leftover in (OUT,):
        if os.path.exists(leftover):
            os.remove(leftover)
    result = scope(*arguments)
    text = result.stdout + result.stderr
    assert result.returncode == code, f"{arguments}: exit {result.returncode}, expected {code}: {text}"
    assert word.lower() in text.lower(), f"{arguments}: nothing about {word!r} in: {text}"
    assert not os.path.exists(OUT), f"{arguments}: left {OUT} behind"


def accept(*arguments):
    global checks
    checks += 1
    result = scope(*arguments)
    assert result.returncode == 0, f"{arguments}: {result.stdout}{result.stderr}"
    return result.stdout


with tempfile.TemporaryDirectory() as folder:
    OUT = f"{folder}/out.safetensors"
    GOOD, BAD = f"{folder}/good.safetensors", f"{folder}/bad.safetensors"
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 60, 32)).astype(np.float32) for _ in range(3))
    meta = {"grid": "3x4x5", "rope": "12,10,10"}
    tensors.save(GOOD, {"q": q, "k": k, "v": v}, meta)
    base = ("attend", GOOD, "-o", OUT)

    accept(*base)
    accept(*base, "--dump", "--lse", "--layer", "0", "--step", "3", "--steps", "10")
    for name in "qkv":
        np.save(f"{folder}/{name}.npy", {"q": q, "k": k, "v": v}[name])
    # Every JSON says of which build it is.
    version, commit = re.fullmatch(r"(\d+\.\d+\.\d+) \(commit ([0-9a-f]{40}\+?|unknown)\)\n", accept("--version")).groups()
    accept(*base, "--stats", f"{folder}/stats.json")
    accept("compare", GOOD, "--methods", "scope", "--density", "0.5", "--json", f"{folder}/compare.json")
    accept("inspect", GOOD, "-o", f"{folder}/inspect")
    accept("bench", "--grid", "2x4x5", "--rope", "12,10,10", "--heads", "1", "--json", f"{folder}/bench.json")
    for name in ("stats.json", "compare.json", "inspect/inspect.json", "bench.json"):
        data = json.load(open(f"{folder}/{name}"))
        assert (data["version"], data["commit"]) == (version, commit), (name, data["version"], data["commit"])
    npy = ("attend", "--q", f"{folder}/q.npy", "--k", f"{folder}/k.npy", "--v", f"{folder}/v.npy", "--rope", "12,10,10")
    accept(*npy, "-o", f"{folder}/out.npy")
    accept(*npy, "-o", OUT)
    assert np.array_equal(np.load(f"{folder}/out.npy"), tensors.load(OUT)[0]["out"]), ".npy and .safetensors agree"
    state = f"{folder}/state.bin"
    accept(*base, "--state", state)
    accept(*base, "--state", state)
    said, tables = accept("methods"), json.loads(accept("methods", "--json"))
    assert "scope-paper" in said and "first_sample" in [row["name"] for row in tables["settings"]]
    for row in tables["models"]:
        line = next(line for line in said.splitlines() if line.split()[:1] == [row["name"]])
        for words in (("rope", ",".join(map(str, row["rope"])) if any(row["rope"]) else "none"), ("grid", "x".join(map(str, row["grid"])))):
            assert words in list(zip(line.split(), line.split()[1:])), (words, line)
    assert "make-qkv" in accept("--help") and "--dump" in accept("attend", "--help")

    for method in ("svg2", "svg2-ear", "svoo", "sparge:q_block=4+k_block=2", "sparge-cdf:similarity=-1+q_block=4+k_block=2",
                   "sol:q_block=2+k_block=2", "scope:partition=even:2+rule=hybrid"):
        said = accept(*base, "--method", method, "--target-density", "0.3")
        assert abs(float(said.split("density ")[-1].split(",")[0]) - 0.3) < 0.02, said
    assert "nearest to 0.3" in accept(*base, "--method", "sparge:q_block=4+k_block=15", "--target-density", "0.3")
    assert "alpha lowered from 0.1 to 0.05" in accept(*base, "--method", "svg2:target_scope=head", "--target-density", "0.1")

    # bench: the method's own rule, at the density asked for.
    bench = ("bench", "--grid", "4x8x8", "--heads", "1", "--repeat", "1", "--density", "0.3", "--json", f"{folder}/b.json")
    for method, rule in (("scope", "target"), ("scope:rule=top_p", "top_p"), ("svg2:groups=5+codes=90", "clusters"),
                         ("sparge:k_block=4", "blocks_topk")):
        accept(*bench, "--method", method)
        rows = json.load(open(f"{folder}/b.json"))["cases"][0]["rows"]
        assert [row["name"] for row in rows][:2] == ["dense", "warm"] and abs(rows[1]["density"] - 0.3) < 0.02, rows
        assert rows[1]["settings"]["rule"] == rule, rows[1]

    # compare: every method and ablation at the density asked for, as a table, JSON, CSV and SVG.
    specs = ["scope", "scope-exact", "svg2:codes=60", "svg2-ear:codes=60", "svoo:codes=60", "sparge:q_block=4+k_block=2"]
    specs += [f"scope:partition={p}" for p in ("even:1", "even:2", "random:3", "rope", "even:4", "even:8")]
    specs += [f"scope:rule={rule}" for rule in ("top_p", "hybrid", "online")]
    compare = ("compare", GOOD, "--repeat", "1")
    said = accept(*compare, "--samples", "20", "--methods", ",".join(specs), "--density", "0.2,0.5", "--json", f"{folder}/c.json", "--csv",
                  f"{folder}/c.csv", "--plots", f"{folder}/c-")
    assert all(spec in said for spec in specs) and "±" in said, said
    rows = json.load(open(f"{folder}/c.json"))["rows"]
    table = list(csv.DictReader(open(f"{folder}/c.csv")))
    assert len(rows) == len(table) == 1 + 2 * len(specs)
    for row, line in zip(rows, table):
        assert line["method"] == row["method"] and abs(float(line["mass_recall"]) - row["mass_recall"]) < 1e-12
        assert abs(row["density"] - row["target"]) < 0.03, row
        # Every query is sampled one time in three: the share of keys kept there is close to the density.
        assert abs(row["retention"] - row["density"]) < 0.1 and row["density"] - 0.02 < row["mass_recall"] < 1 + 1e-9, row
    for row in rows:  # a warm call's parts, a first call's selection, and what stands in the table
        assert abs(row["speedup"] - row["dense_seconds"] / row["total_seconds"]) < 1e-9, row
        assert row["attend_seconds"] > 0 and row["selection_seconds"] + row["attend_seconds"] < 1.01 * row["total_seconds"], row
        assert (row["selection_seconds"] > 0) == (row["first_selection_seconds"] > 0) == (row["method"] != "dense"), row
        words = f"{1e3 * row['selection_seconds']:.1f}", f"{1e3 * row['attend_seconds']:.1f}", f"{row['speedup']:.2f}x"
        assert [line for line in said.splitlines() if line.startswith(row["method"] + " ")
                and tuple(line.split()[-3:]) == words], (row, said)
    for name in ("recall", "error"):
        lines = xml.etree.ElementTree.parse(f"{folder}/c-{name}.svg").findall("{http://www.w3.org/2000/svg}polyline")
        assert [len(line.get("points").split()) for line in lines] == [2] * len(specs)
    assert "= 3x4x5" in accept(*compare, "--samples", "all", "--methods", "svg2", "--density", "0.3")
    # At a given rho densities are measured; a setting may be every method's.
    said = accept(*compare, "--methods", "scope,svg2:codes=60", "--rho", "0.5,0.9", "--set", "alpha=0", "--json",
                  f"{folder}/c.json", "--csv", f"{folder}/c.csv")
    given = json.load(open(f"{folder}/c.json"))
    both = [("dense", 1), *((method, rho) for method in ("scope", "svg2:codes=60") for rho in (0.5, 0.9))]
    assert [(row["method"], row["rho"]) for row in given["rows"]] == both
    assert given["settings"]["scope"]["alpha"] == "0" and "scope at rho 0.5" in said
    assert open(f"{folder}/c.csv").readline().startswith("method,rho,density")
    assert given["rows"][1]["density"] < given["rows"][2]["density"] and all(row["notes"] == [] for row in given["rows"])
    for met in ("head", "sample"):
        accept(*compare, "--methods", "scope", "--density", "0.4", "--set", f"target_scope={met}", "--json", f"{folder}/c.json")
        (_, row) = json.load(open(f"{folder}/c.json"))["rows"]
        assert abs(row["density"] - 0.4) < 0.01, row

    # A selection of somebody else's, drawn by chance: density, recall and error are those of numpy. The last 4 keys are always seen.
    groups, masks = 5, rng.random((2, 5, 60)) < 0.3
    masks[..., 56:], masks[:, :, 0] = False, True
    labels = rng.integers(0, groups, (2, 60)).astype(np.int32)
    labels[:, 7] = -1  # attends to nothing
    words = lambda bits: np.packbits(np.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, 4)]), axis=-1, bitorder="little").view(np.uint32)
    always = np.arange(60) >= 56
    tensors.save(f"{folder}/mine.safetensors", {"labels": labels, "mask": words(masks), "keep": words(always[None])})
    said = accept(*compare, "--samples", "all", "--methods", "scope", "--density", "0.3", "--selection", f"{folder}/mine.safetensors",
                  "--selection", f"again={folder}/mine.safetensors", "--json", f"{folder}/c.json", "--csv",
                  f"{folder}/c.csv", "--plots", f"{folder}/c-")
    given = json.load(open(f"{folder}/c.json"))
    mine, again = given["rows"][2:]
    assert mine["method"] == "mine" and given["selections"] == {"mine": f"{folder}/mine.safetensors", "again": f"{folder}/mine.safetensors"}
    assert {name: x for name, x in mine.items() if "seconds" not in name and name not in ("method", "speedup", "notes")} == \
        {name: x for name, x in again.items() if "seconds" not in name and name not in ("method", "speedup", "notes")}
    seen = (np.take_along_axis(masks, np.maximum(labels, 0)[..., None], 1) | always) & (labels[..., None] >= 0)
    logits = q.astype(np.float64) @ k.astype(np.float64).transpose(0, 2, 1) / 32**0.5
    weights = np.exp(logits)
    exact, sparse = (w / np.maximum(w.sum(-1, keepdims=True), 1e-300) for w in (weights, weights * seen))
    values = v.astype(np.float64)
    error = np.mean([np.linalg.norm((sparse[h] - exact[h]) @ values[h]) / np.linalg.norm(exact[h] @ values[h]) for h in range(2)])
    counted = np.array([masks[h].sum(-1)[labels[h][labels[h] >= 0]].sum() / (59 * 56) for h in range(2)])
    assert abs(mine["density"] - counted.mean()) < 1e-12, (mine, counted)
    assert abs(mine["mass_recall"] - (exact * seen).sum(-1).mean()) < 1e-6 and abs(mine["error"] - error) < 1e-5 * error, (mine, error)
    assert mine["target"] is None and mine["selection_seconds"] is None and mine["attend_seconds"] > 0
    assert "not timed" in said and "mine: as its file has it" in said
    assert list(csv.DictReader(open(f"{folder}/c.csv")))[2]["method"] == "mine" and "mine" in open(f"{folder}/c-error.svg").read()
    selection = {"labels": labels, "mask": words(masks)}
    tensors.save(BAD, {"mask": selection["mask"]})
    refuse(3, 'no tensor "labels"', *compare, "--selection", BAD)
    for broken, word in (({**selection, "labels": labels[:1]}, "labels: got I32 [1, 60]"),
                         ({**selection, "mask": words(masks)[..., :1]}, "mask: got U32 [2, 5, 1], expected 32-bit integers [1, 2, 5, 2]"),
                         ({**selection, "labels": labels.astype(np.float32)}, "expected 32-bit integers"),
                         ({**selection, "labels": labels + groups}, "selection.labels[0]: got"),
                         ({**selection, "mask": selection["mask"] | np.uint32(1 << 31)}, "bits of keys that are not valid"),
                         ({**selection, "mask": np.zeros((2, 61, 2), np.uint32)}, "mask: got 61 groups, expected 1..60"),
                         ({**selection, "keep": np.zeros((2, 2), np.uint32)}, "keep: got U32 [2, 2]")):
        tensors.save(BAD, broken)
        refuse(3, word, *compare, "--methods", "scope", "--density", "0.3", "--selection", BAD)
    refuse(2, "expected FILE or NAME=FILE", *compare, "--selection", "mine=")
    refuse(3, "cannot open", *compare, "--selection", f"{folder}/absent.safetensors")

    # profile: the fewest keys that hold 95 % of a query's mass, the maximum over the files of one step and layer.
    tensors.save(BAD, {"q": 3 * q, "k": k, "v": v}, meta)
    accept("profile", f"0:1:{GOOD}", f"0:1:{BAD}", f"5:0:{BAD}", "--samples", "all", "-o", f"{folder}/p.csv")

    def density(q):
        logits = np.einsum("hid,hjd->hij", q.astype(np.float64), k.astype(np.float64)) / np.sqrt(32)
        mass = -np.sort(-np.exp(logits - logits.max(-1, keepdims=True)))
        reached = np.cumsum(mass / mass.sum(-1, keepdims=True), -1) >= 0.95
        return (reached.argmax(-1) + 1).mean(-1) / 60

    plain, sharp = density(q), density(3 * q)
    want = {("0", "1", str(h)): max(plain[h], sharp[h]) for h in range(2)} | {("5", "0", str(h)): sharp[h] for h in range(2)}
    rows = list(csv.DictReader(open(f"{folder}/p.csv")))
    assert [(r["step"], r["layer"], r["head"]) for r in rows] == list(want)
    assert all(abs(float(r["density"]) - want[r["step"], r["layer"], r["head"]]) < 1e-5 for r in rows), rows

    # What svoo makes of it: each head's entry within the bounds, and clusters that stay from one step to the next.
    unprofiled = (*base, "--method", "svoo:codes=20", "--layer", "1", "--steps", "9", "--set", "dense_steps=0")
    svoo = (*unprofiled, "--set", f"profile={folder}/p.csv")
    accept(*svoo, "--step", "0", "--stats", f"{folder}/s.json")
    clipped = [min(max(want["0", "1", str(h)], 0.15), 0.2) for h in range(2)]
    assert all(abs(h["alpha"] - x) < 1e-5 for h, x in zip(json.load(open(f"{folder}/s.json"))["heads"], clipped))
    # Under a target over the sample, shares that are too large keep their proportions.
    said = accept(*svoo, "--step", "0", "--stats", f"{folder}/s.json", "--target-density", "0.2", "--set", "target_scope=sample")
    stats = json.load(open(f"{folder}/s.json"))
    assert "scaled to a mean of 0.1" in said and stats["heads"][0]["rho"] == stats["heads"][1]["rho"], said
    assert all(abs(h["alpha"] - 0.1 * x / np.mean(clipped)) < 1e-5 for h, x in zip(stats["heads"], clipped))
    kept = f"{folder}/svoo.bin"
    for step, iterations in ((1, 2), (2, 2), (3, 0)):
        accept(*svoo, "--step", str(step), "--set", "reuse_start=3", "--set", "reuse_steps=0", "--state", kept, "--stats",
               f"{folder}/s.json")
        stats = json.load(open(f"{folder}/s.json"))
        assert stats["iterations"] == iterations and [h["alpha"] for h in stats["heads"]] == [0.1, 0.1], stats
    place = ("--layer", "1", "--step", "3", "--steps", "9")
    said = accept(*compare, "--methods", "svoo:codes=20,svg2:codes=20", "--profile", f"{folder}/p.csv", *place, "--density", "0.3")
    assert "svoo:codes=20" in said
    open(f"{folder}/bad.csv", "w").write("step,layer,head,density\n0,1,0,0.5\n0,1,one,0.5\n")
    refuse(3, "bad.csv line 3", *unprofiled, "--step", "0", "--set", f"profile={folder}/bad.csv")
    refuse(3, "nowhere.csv", *unprofiled, "--step", "0", "--set", f"profile={folder}/nowhere.csv")
    open(f"{folder}/bad.csv", "w").write("step,layer,head,density\n0,1,0,0.5\n")
    refuse(3, "has 1 heads, the shape has 2", *unprofiled, "--step", "0", "--set", f"profile={folder}/bad.csv")
    refuse(2, "none of scope,svg2", *compare, "--methods", "scope,svg2", "--profile", f"{folder}/p.csv", *place)
    refuse(2, "needs --layer", *compare, "--methods", "svoo", "--profile", f"{folder}/p.csv")
    refuse(2, "dense_steps", *compare, "--methods", "svoo", "--step", "0", "--steps", "9")

    # Usage: 2.
    refuse(2, "STEP:LAYER:FILE", "profile", GOOD, "-o", OUT)
    refuse(2, "STEP:LAYER:FILE", "profile", f"1:-2:{GOOD}", "-o", OUT)
    refuse(2, "mass", "profile", f"1:2:{GOOD}", "--mass", "0", "-o", OUT)
    refuse(2, "svg2", *compare, "--methods", "scope,svg3")
    refuse(2, "its own line", *compare, "--methods", "dense")
    refuse(2, "target_density", *compare, "--density", "0.1,2")
    refuse(2, "target_density", *compare, "--density", "0.1,")
    refuse(2, "--rho", *compare, "--density", "0.1", "--rho", "0.9")
    refuse(2, "rule blocks_topk, which compares with none", *compare, "--methods", "sparge", "--rho", "0.9")
    refuse(2, "--samples", *compare, "--samples", "0")
    refuse(2, "setting", *compare, "--methods", "scope:rhoo=1")
    refuse(2, "subcommand")
    refuse(2, "output", "attend", GOOD)
    refuse(2, "rho", *base, "--set", "rho=0")
    refuse(2, "rho", *base, "--set", "rho=1.5")
    refuse(2, "iterations", *base, "--set", "iterations=0")
    refuse(2, "name=value", *base, "--set", "rho")
    refuse(2, "first_sample", *base, "--set", "sample=1")  # the error lists what exists
    refuse(2, "scope-exact", *base, "--method", "svg3")
    refuse(2, "svg2", *base, "--method", "svg3:codes=4")
    refuse(2, "name=value", *base, "--method", "svg2:codes")
    refuse(2, "there is no \"code\"", *base, "--method", "svg2:codes=4+code=3")
    refuse(2, "target_density", *base, "--target-density", "0")
    refuse(2, "target_density", *base, "--target-density", "1.5")
    refuse(2, "dense keeps everything", *base, "--method", "dense", "--target-density", "0.2")
    refuse(2, "one subspace", *base, "--method", "svg2:partition=rope")
    refuse(2, "wan2.1", *base, "--model", "sora")
    # A known model without ranges of RoPE gives none, and a method that needs them says so; one that needs none runs.
    plain = (*npy[:-2], "-o", OUT)
    refuse(2, "partition: rope needs the channel counts", *plain, "--model", "ltx-2")
    accept(*plain, "--model", "ltx-2", "--method", "scope-mean")
    refuse(2, "partition", *base, "--set", "partition=even:0")
    refuse(2, "subspaces", *base, "--subspaces", "[[0,1],[2")
    refuse(2, "subspaces", *base, "--subspaces", "[[0,-1]]")
    refuse(2, "steps", *base, "--step", "3")
    refuse(2, "step", *base, "--step", "9", "--steps", "9")
    refuse(2, "grid", *base, "--grid", "3x4x")
    refuse(2, "dump", *base, "--method", "dense", "--dump")
    refuse(2, "npy", "attend", GOOD, "-o", f"{folder}/o.npy", "--dump")
    refuse(2, "threads", *base, "--threads", "-1")
    refuse(2, "state", *base, "--method", "dense", "--state", f"{folder}/none.bin")
    refuse(2, "steps", *base, "--step", "5", "--steps", "9223372036854775807")
    refuse(2, "--q, --k and --v", "attend", "-o", OUT)
    refuse(2, "grid", "make-qkv", "--grid", "3x4", "-o", OUT)

    # Bad input: 3.
    refuse(3, "nowhere", "profile", f"1:2:{folder}/nowhere.safetensors", "-o", OUT)
    refuse(3, "grid", *compare, "--grid", "3x4x6")
    refuse(3, "the least that sparge keeps here is 1.0", *compare, "--methods", "sparge")
    refuse(3, "the least that sparge keeps here is 1.0", *base, "--method", "sparge", "--target-density", "0.3")
    refuse(3, "nowhere", "attend", f"{folder}/nowhere.safetensors", "-o", OUT)
    refuse(3, "grid", *base, "--grid", "3x4x6")
    refuse(3, "channel 2", *base, "--subspaces", "[[0,1]]")
    refuse(3, "already", *base, "--subspaces", "[[0,1],[1,2]]")
    refuse(3, "rope", *base, "--rope", "12,10,11")
    refuse(3, "text", *base, "--grid", "3x4x5", "--text", "61")
    refuse(3, "instruction_set", *base, "--instruction-set", "mmx")
    refuse(3, "even number", "make-qkv", "--rope", "43,42,42", "-o", OUT)

    def bad(word, arrays, types=None, metadata=meta):
        tensors.save(BAD, arrays, metadata, types)
        refuse(3, word, "attend", BAD, "-o", OUT)

    bad('"v"', {"q": q, "k": k})
    bad("rank", {"q": q, "k": k[None], "v": v[None]})
    bad("q: got shape", {"q": q[0], "k": k[0], "v": v[0]})
    bad("v: got shape", {"q": q, "k": k, "v": v[:, :59]})
    bad("k: got shape", {"q": q, "k": k[:, :, :31], "v": v[:, :, :31]})
    bad("k: got shape", {"q": q, "k": k[:1], "v": v[:1]})
    bad("expected f32", {"q": q.astype(np.int32), "k": k.astype(np.int32), "v": v.astype(np.int32)})
    bad("k: got f16", {"q": q, "k": k.astype(np.float16), "v": v})
    bad("grid", {"q": q, "k": k, "v": v}, metadata={"grid": "3x4x7", "rope": "12,10,10"})
    bad("keep", {"q": q, "k": k, "v": v, "keep": np.zeros((1, 3), np.uint32)})
    bad("k_lengths", {"q": q, "k": k, "v": v, "k_lengths": np.array([61], np.int64)})
    tensors.save(BAD, {"q": q, "k": k, "v": v}, {})
    refuse(2, "rope needs", "attend", BAD, "-o", OUT)
    for broken in ("q", "k"):
        arrays = {"q": q.copy(), "k": k.copy(), "v": v}
        arrays[broken][1, 7, 3] = np.nan
        bad(f"{broken}: NaN", arrays)
    data = open(GOOD, "rb").read()
    for end in (0, 1, 7, 8, 50, len(data) - 1):
        open(BAD, "wb").write(data[:end])
        refuse(3, "bad.safetensors", "attend", BAD, "-o", OUT)
    open(BAD, "wb").write(data + b"x")
    refuse(3, "bad.safetensors", "attend", BAD, "-o", OUT)
    size = os.path.getsize(state)
    open(state, "wb").write(b"x" * size)
    refuse(3, "state.bin", *base, "--state", state)
    open(state, "wb").write(b"short")
    refuse(3, "state", *base, "--state", state)
    refuse(3, "missing", "attend", GOOD, "-o", f"{folder}/missing/out.safetensors")
    np.save(f"{folder}/q.npy", np.array([{}], dtype=object), allow_pickle=True)
    refuse(3, "q.npy", *npy, "-o", OUT)
print(f"{checks} commands behaved")
