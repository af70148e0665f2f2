"""`scope ablate` from outside: its figures against `scope generate` and `scope evaluate`, its statistics, and hostile input.

    check_ablate.py SCOPE-COMMAND
"""
import csv
import glob
import json
import os
import re
import subprocess
import sys
import tempfile

import numpy as np

import tensors

SCOPE = sys.argv[1]
checks = 0


def scope(*arguments):
    return subprocess.run([SCOPE, *map(str, arguments)], capture_output=True, text=True)


def accept(*arguments):
    global checks
    checks += 1
    result = scope(*arguments)
    assert result.returncode == 0, f"{arguments}: {result.stdout}{result.stderr}"
    return result


def refuse(code, word, *arguments):
    """The command must exit with `code`, name `word`, and write nothing."""
    global checks
    checks += 1
    before = sorted(os.listdir(FOLDER))
    result = scope("ablate", "-o", f"{FOLDER}/refused.json", *arguments)
    text = result.stdout + result.stderr
    assert result.returncode == code, f"{arguments}: exit {result.returncode}, expected {code}: {text}"
    assert word.lower() in text.lower(), f"{arguments}: nothing about {word!r} in: {text}"
    assert sorted(os.listdir(FOLDER)) == before, f"{arguments}: left {set(os.listdir(FOLDER)) - set(before)} behind"


def near(a, b, tolerance=1e-9):
    return np.allclose(a, b, rtol=tolerance, atol=tolerance)


with tempfile.TemporaryDirectory() as FOLDER:
    random = np.random.default_rng(1)
    clips = f"{FOLDER}/clips.safetensors"
    tensors.save(clips, {"prompt_embeds": random.normal(0, 0.3, (2, 8, 32)).astype(np.float32),
                         "truth": random.integers(0, 256, (2, 1, 16, 24, 3), dtype=np.uint8)})
    small = ("--grid", "5x4x6", "--condition", clips, "--steps", 5)
    variants, densities = ["scope", "scope:partition=even:8", "svg2"], [0.15, 0.3]
    result = accept("ablate", *small, "--seeds", 3, "--variants", ",".join(variants), "--density", "0.15,0.3",
                    "-o", f"{FOLDER}/a.json", "--csv", f"{FOLDER}/a.csv", "--plot", f"{FOLDER}/a.svg", "--commit", "abc")
    assert re.search(r"24 videos; the first dense one took [0-9.]+ s", result.stderr), result.stderr
    data = json.load(open(f"{FOLDER}/a.json"))
    assert data["grid"] == [5, 4, 6] and data["seeds"] == 3 and data["clips"] == 2 and data["commit"] == "abc" and data["skipped"] == []
    rows = {(r["variant"], r["target"]): r for r in data["rows"]}
    assert set(rows) == {("dense in bf16", 1)} | {(v, d) for v in variants for d in densities}, set(rows)
    # Rounding moves a video far less than leaving keys out.
    assert rows["dense in bf16", 1]["control"] and min(rows["dense in bf16", 1]["psnr"]) > 40 > rows["scope", 0.15]["psnr"][0]

    # Every figure is what the other commands give for the seed: noise s, clip s modulo 2, frame 0 left out.
    for seed in range(3):
        common = (*small, "--seed", seed, "--example", seed % 2)
        accept("generate", *common, "-o", f"{FOLDER}/dense", "--method", "dense")
        accept("generate", *common, "-o", f"{FOLDER}/bf16", "--method", "dense", "--compute", "bf16")
        pairs = [("bf16", rows["dense in bf16", 1])]
        for i, (variant, density) in enumerate((v, d) for v in variants for d in densities):
            accept("generate", *common, "-o", f"{FOLDER}/run{i}", "--method", variant, "--target-density", density)
            pairs.append((f"run{i}", rows[variant, density]))
        for name, row in pairs:
            accept("evaluate", f"{FOLDER}/dense", f"{FOLDER}/{name}", "--skip", 1, "--json", f"{FOLDER}/q.json")
            quality, run = json.load(open(f"{FOLDER}/q.json")), json.load(open(f"{FOLDER}/{name}/run.json"))
            for key in ("psnr", "pooled_psnr", "ssim"):
                assert near(quality[key], row[key][seed]), (name, row["variant"], seed, key, quality[key], row[key][seed])
            assert near(quality["frames"][quality["worst_frame"]]["psnr"], row["worst_psnr"][seed])
            assert near(run["density"], row["density"][seed]), (row["variant"], seed)
            assert run["settings"] == row["settings"], row["variant"]

    # Times add up, and the table is what the seeds say.
    for row in [data["dense"], *data["rows"]]:
        s = row["seconds"]
        assert near(s["total"], np.sum([s[k] for k in ("dense_calls", "sparse_attention", "selection", "rest")], axis=0))
    for row in data["rows"]:
        ran_sparse = not row["control"]
        assert (min(row["seconds"]["selection"]) > 0) == ran_sparse and (min(row["same_calls_dense_seconds"]) > 0) == ran_sparse
        assert row["calls"] == ({"dense": 10, "sparse": 20} if ran_sparse else {"dense": 30, "sparse": 0}), row["calls"]
        # 4 of 5 steps and 5 of 6 layers run sparse: the rest of the self-attention is elsewhere.
        assert np.all(np.array(row["same_calls_dense_seconds"]) < data["dense"]["seconds"]["dense_calls"])
    (table,) = data["tables"]
    assert [(x["variant"], x["target"]) for x in table["lines"]] == [(v, d) for d in densities for v in variants]
    for line in table["lines"]:
        row, first = rows[line["variant"], line["target"]], rows["scope", line["target"]]
        psnr, difference = np.array(row["psnr"]), np.array(row["psnr"]) - first["psnr"]
        sparse = np.array(row["seconds"]["sparse_attention"]) + row["seconds"]["selection"]
        expected = {"density": np.mean(row["density"]), "psnr": psnr.mean(), "psnr_deviation": psnr.std(ddof=1), "psnr_least": psnr.min(),
                    "pooled_psnr": np.mean(row["pooled_psnr"]), "ssim": np.mean(row["ssim"]), "paired_difference": difference.mean(),
                    "paired_deviation": difference.std(ddof=1), "wins": (difference > 0).sum(),
                    "call_speedup": np.median(row["same_calls_dense_seconds"] / sparse),
                    "run_speedup": np.median(np.array(data["dense"]["seconds"]["total"]) / row["seconds"]["total"])}
        assert line["against"] == "scope"
        for key, value in expected.items():
            assert near(line[key], value), (line["variant"], key, line[key], value)
        printed = [x for x in result.stdout.splitlines() if x.startswith(line["variant"] + " ") and f"{line['density']:.4f}" in x]
        assert len(printed) == 1 and f"{line['psnr']:.2f} ± {line['psnr_deviation']:.2f}" in printed[0], printed
        if line["variant"] != "scope":
            assert f"{line['paired_difference']:+.2f} ± {line['paired_deviation']:.2f}" in printed[0] and f"{line['wins']}/3" in printed[0]
    with open(f"{FOLDER}/a.csv") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 3 * len(rows)
    for line in lines:
        row, seed = rows[line["variant"], float(line["target"])], int(line["seed"])
        sparse = row["seconds"]["sparse_attention"][seed] + row["seconds"]["selection"][seed]
        for name, value in {"density": row["density"][seed], "psnr": row["psnr"][seed], "pooled_psnr": row["pooled_psnr"][seed],
                            "ssim": row["ssim"][seed], "seconds": row["seconds"]["total"][seed], "sparse_seconds": sparse,
                            "dense_seconds": data["dense"]["seconds"]["total"][seed],
                            "same_calls_dense_seconds": row["same_calls_dense_seconds"][seed]}.items():
            assert near(float(line[name]), value, 1e-5), (line, name, value)
    plot = open(f"{FOLDER}/a.svg").read()
    assert plot.count("<polyline") == 3 and all(v in plot for v in variants)

    # The same bits again, with other neighbours and threads; one seed has no spread; without a control there is none.
    accept("ablate", *small, "--seeds", 1, "--variants", "svg2", "--density", "0.3", "--threads", 1, "--no-control", "-o",
           f"{FOLDER}/b.json")
    (row,) = json.load(open(f"{FOLDER}/b.json"))["rows"]
    assert row["psnr"][0] == rows["svg2", 0.3]["psnr"][0]

    # One threshold for a run: what a run at that threshold keeps on the choosing videos, and what the report videos are made with.
    match = (*small, "--seeds", 1, "--clips", 1, "--variants", "scope-paper,sparge:q_block=8+k_block=8", "--density", "0.3,0.5",
             "--match", "run", "--choose", "0", "--no-control")
    result = accept("ablate", *match, "-o", f"{FOLDER}/run.json")
    assert "one threshold for all calls of a variant" in result.stdout and "4 thresholds to find" in result.stderr, result.stdout
    data = json.load(open(f"{FOLDER}/run.json"))
    assert data["match"] == "run" and json.load(open(f"{FOLDER}/a.json"))["match"] == "call"
    assert [row["threshold"]["control"] for row in data["rows"]] == ["rho", "rho", "density", "density"]
    for row in data["rows"]:
        threshold = row["threshold"]
        assert row["settings"]["target_density"] == "none" and float(row["settings"][threshold["control"]]) == threshold["value"]
        assert abs(threshold["density"] - row["target"]) < 0.01 * row["target"] or threshold["runs"] == 12 or \
            threshold["below"] < row["target"] < threshold["above"], threshold
        setting = ("--set", f"{threshold['control']}={threshold['value']}")
        densities_there = []
        for noise in (2**32, 2**32 + 1):
            accept("generate", *small, "--seed", noise, "--example", 0, "--method", row["variant"], *setting, "-o", f"{FOLDER}/choosing")
            densities_there.append(json.load(open(f"{FOLDER}/choosing/run.json"))["density"])
        assert near(np.mean(densities_there), threshold["density"]), (row["variant"], densities_there, threshold)
        accept("generate", *small, "--seed", 0, "--example", 1, "--method", row["variant"], *setting, "-o", f"{FOLDER}/report")
        assert near(json.load(open(f"{FOLDER}/report/run.json"))["density"], row["density"][0])
    low, high = (next(row["threshold"]["value"] for row in data["rows"] if row["target"] == target) for target in (0.3, 0.5))
    assert low < high
    # It goes on with the thresholds that it has.
    more = list(match)
    more[more.index("--seeds") + 1] = 2
    result = accept("ablate", *more, "-o", f"{FOLDER}/run2.json", "--resume", f"{FOLDER}/run.json")
    assert "thresholds to find" not in result.stderr, result.stderr
    again = json.load(open(f"{FOLDER}/run2.json"))
    assert [row["threshold"] for row in again["rows"]] == [row["threshold"] for row in data["rows"]] and again["seeds"] == 2
    # A floor at the density or above is lowered, and the rule decides again: no threshold is so small that the floor alone does.
    for variant, density in (("scope:groups=8", 0.1), ("scope:groups=8+alpha=0.3", 0.3), ("svg2:groups=8+codes=40", 0.1)):
        accept("ablate", *match[:-8], variant, "--density", density, *match[-5:], "-o", f"{FOLDER}/floor.json")
        (row,) = json.load(open(f"{FOLDER}/floor.json"))["rows"]
        threshold = row["threshold"]
        assert threshold["alpha"] == density / 2 and row["settings"]["alpha"] == str(density / 2) and threshold["value"] > 0.1, threshold

    # Each method once at its own settings.
    result = accept("ablate", *small, "--seeds", 1, "--variants", "scope,svg2,fast", "--match", "own", "--no-control", "-o",
                    f"{FOLDER}/own.json")
    data = json.load(open(f"{FOLDER}/own.json"))
    assert data["match"] == "own"
    assert [(row["variant"], row["target"]) for row in data["rows"]] == [("scope", None), ("svg2", None), ("fast", None)]
    assert data["rows"][0]["settings"]["rho"] == "0.9" and data["rows"][0]["settings"]["target_density"] == "none"
    assert len(data["tables"][0]["lines"]) == 3 and "at its own settings" in result.stdout

    # At a fixed rho the density is measured: that of a run with the same rho. A setting may be every variant's.
    result = accept("ablate", *small, "--seeds", 1, "--variants", "scope,scope:rule=top_p", "--rho", "0.5,0.9", "--no-control",
                    "-o", f"{FOLDER}/rho.json", "--csv", f"{FOLDER}/rho.csv")
    data = json.load(open(f"{FOLDER}/rho.json"))
    assert [(x["variant"], x["rho"]) for x in data["tables"][0]["lines"]] == [(v, r) for r in (0.5, 0.9)
                                                                              for v in ("scope", "scope:rule=top_p")]
    for row in data["rows"]:
        assert "target" not in row and row["settings"]["target_density"] == "none" and row["notes"] == []
        accept("generate", *small, "--seed", 0, "--example", 0, "-o", f"{FOLDER}/given", "--method", row["variant"], "--set",
               f"rho={row['rho']}")
        assert near(json.load(open(f"{FOLDER}/given/run.json"))["density"], row["density"][0]), row["variant"]
        assert f"{row['variant']} at rho {row['rho']}  " in result.stdout and f"{row['density'][0]:.4f}" in result.stdout
    assert open(f"{FOLDER}/rho.csv").readline().startswith("variant,rho,seed,density,")
    accept("ablate", *small, "--seeds", 1, "--variants", "scope,scope:target_scope=sample", "--density", "0.3", "--no-control",
           "--set", "target_scope=head", "-o", f"{FOLDER}/head.json")
    head, sample = json.load(open(f"{FOLDER}/head.json"))["rows"]
    assert (sample["settings"]["target_scope"], head["settings"]["target_scope"]) == ("sample", "head")
    assert abs(sample["density"][0] - 0.3) < 0.005 and head["psnr"] != sample["psnr"] == rows["scope", 0.3]["psnr"][:1]

    # A variant with densities of its own runs once, beside every point.
    by_step = "scope:density_steps=0.6:0.4,1:0.2"
    result = accept("ablate", *small, "--seeds", 1, "--variants", f"{by_step},scope", "--density", "0.3,0.4", "--no-control",
                    "-o", f"{FOLDER}/steps.json", "--csv", f"{FOLDER}/steps.csv")
    data = json.load(open(f"{FOLDER}/steps.json"))
    assert [(x["variant"], x["target"]) for x in data["rows"]] == [(by_step, None), ("scope", 0.3), ("scope", 0.4)]
    assert [(x["variant"], x["target"]) for x in data["tables"][0]["lines"]] == [(by_step, None), ("scope", 0.3),
                                                                                 (by_step, None), ("scope", 0.4)]
    accept("generate", *small, "--seed", 0, "--example", 0, "-o", f"{FOLDER}/given", "--method", by_step)
    assert near(json.load(open(f"{FOLDER}/given/run.json"))["density"], data["rows"][0]["density"][0])
    assert 0.22 < data["rows"][0]["density"][0] < 0.38

    accept("ablate", *small, "--seeds", 1, "--variants",
           "fast,scope-mean:target_density=0.26+dense_steps=0+dense_layers=0,quality", "--density", "0.3",
           "--no-control", "-o", f"{FOLDER}/presets.json")
    fast, given, quality = json.load(open(f"{FOLDER}/presets.json"))["rows"]
    assert {r["target"] for r in (fast, given, quality)} == {None} and {r["calls"]["dense"] for r in (fast, quality)} == {0}
    assert abs(fast["density"][0] - 0.18) < 0.01 and abs(quality["density"][0] - 0.26) < 0.01 and quality["psnr"] == given["psnr"]

    # A run that is stopped leaves the seeds that were done, in a file of its own.
    checks += 1
    stopped = subprocess.Popen([SCOPE, "ablate", *map(str, small), "--seeds", "60", "--variants", "svg2", "--density", "0.3",
                                "--no-control", "-o", f"{FOLDER}/stopped.json"], stderr=subprocess.PIPE, text=True)
    while "seed 2 of 60 done" not in (line := stopped.stderr.readline()):
        assert line, "it ended by itself"
    stopped.kill()
    stopped.communicate()
    assert not os.path.exists(f"{FOLDER}/stopped.json")
    (unfinished,) = glob.glob(f"{FOLDER}/stopped.json.*.unfinished")
    data = json.load(open(unfinished))
    done = data["seeds"]
    assert 2 <= done < 60 and len(data["rows"][0]["psnr"]) == len(data["dense"]["seconds"]["total"]) == done
    assert data["rows"][0]["psnr"][:2] == rows["svg2", 0.3]["psnr"][:2]

    # Another run goes on after them, and gives what one run gives but for its times; a finished result of fewer seeds will do too.
    same = (*small, "--variants", "svg2,scope:density_steps=1:0.2", "--density", "0.3", "--no-control")
    accept("ablate", *same, "--seeds", 4, "-o", f"{FOLDER}/whole.json")
    accept("ablate", *same, "--seeds", 2, "-o", f"{FOLDER}/half.json")
    result = accept("ablate", *same, "--seeds", 4, "--resume", f"{FOLDER}/half.json", "-o", f"{FOLDER}/resumed.json")
    assert "6 videos" in result.stderr, result.stderr
    accept("ablate", *same, "--seeds", 4, "--resume", f"{FOLDER}/resumed.json", "-o", f"{FOLDER}/again.json")  # nothing is left to do
    whole, half, resumed, again = (json.load(open(f"{FOLDER}/{name}.json")) for name in ("whole", "half", "resumed", "again"))
    assert resumed == again and resumed["dense"]["seconds"]["total"][:2] == half["dense"]["seconds"]["total"] and resumed["finished"]
    for one, other, begun in zip(whole["rows"], resumed["rows"], half["rows"]):
        assert all(one[key] == other[key] for key in one if key not in ("seconds", "same_calls_dense_seconds")), one["variant"]
        assert len(other["seconds"]["total"]) == 4 and other["seconds"]["total"][:2] == begun["seconds"]["total"]
        assert other["same_calls_dense_seconds"][:2] == begun["same_calls_dense_seconds"]
    finished = accept("ablate", *small, "--seeds", done + 1, "--variants", "svg2", "--density", "0.3", "--no-control",
                      "--resume", unfinished, "-o", f"{FOLDER}/stopped.json")
    assert "2 videos" in finished.stderr and json.load(open(f"{FOLDER}/stopped.json"))["rows"][0]["psnr"][:done] == data["rows"][0]["psnr"]
    half_path = ("--resume", f"{FOLDER}/half.json")
    refuse(2, "has steps 5, and this run 6", *small[:4], "--steps", 6, *same[6:], "--seeds", 4, *half_path)
    refuse(2, f'has commit "{half["commit"]}", and this run "b"', *same, "--seeds", 4, "--commit", "b", *half_path)
    refuse(2, "has 2 seeds", *same, "--seeds", 1, *half_path)
    refuse(2, "has no scope at 0.3", *small, "--variants", "svg2,scope", "--density", "0.3", "--no-control", "--seeds", 4, *half_path)
    refuse(2, "with other settings", *same, "--set", "seed=3", "--seeds", 4, *half_path)
    refuse(2, "instruction_set", *same, "--seeds", 4, "--instruction-set", "portable", *half_path)
    for text, word in (("half", "no result of scope ablate"), ('{"version": "0.2.0"}', "no result of scope ablate"),
                       (json.dumps({**half, "rows": [{**half["rows"][0], "psnr": [30]}]}), "psnr has not 2 values"),
                       (json.dumps({**half, "rows": [{**half["rows"][0], "notes": ["x"]}]}), "about another variant")):
        open(f"{FOLDER}/broken.json", "w").write(text)
        refuse(3, word, *same, "--seeds", 4, "--resume", f"{FOLDER}/broken.json")

    # A profile is for the methods that take one.
    open(f"{FOLDER}/p.csv", "w").write("step,layer,head,density\n" + "".join(f"4,{layer},{head},0.9\n" for layer in range(6)
                                                                             for head in range(2)))
    accept("ablate", *small, "--seeds", 1, "--variants", "svoo,svg2", "--density", "0.3", "--no-control", "--profile",
           f"{FOLDER}/p.csv", "-o", f"{FOLDER}/p.json")
    refuse(2, "--profile: none of scope,svg2 takes one; svoo does", *small, "--seeds", 1, "--variants", "scope,svg2",
           "--profile", f"{FOLDER}/p.csv")
    assert [os.path.basename(r["settings"]["profile"]) for r in json.load(open(f"{FOLDER}/p.json"))["rows"]] == ["p.csv", "none"]

    # A suite says what it leaves out: 120 keys are one block of sparge's, and two of sol's, which are neighbours.
    result = accept("ablate", *small, "--seeds", 1, "--suite", "paper", "--no-control", "-o", f"{FOLDER}/c.json")
    data = json.load(open(f"{FOLDER}/c.json"))
    assert {x["variant"] for x in data["skipped"]} == {"sparge", "sol"} and "not run: sparge: target density: got 0.05" in result.stdout
    assert [t["title"] for t in data["tables"]] == ["Key partitions", "Rules", "Where a density is met", "Proxy and tail",
                                                    "Methods", "Schedules"]
    assert len(data["rows"]) == len({(r["variant"], r["target"]) for r in data["rows"]}), "each is run once"
    kinds = {(r["settings"]["rule"], r["settings"]["partition"], r["settings"]["proxy"], r["settings"]["tail"]) for r in data["rows"]}
    for wanted in (("top_p", "rope", "codes", "none"), ("hybrid", "rope", "codes", "none"), ("online", "even:1", "codes", "none"),
                   ("online", "random:3", "codes", "none"), ("online", "even:8", "codes", "none"), ("online", "rope", "exact", "none"),
                   ("online", "rope", "codes", "first_order"), ("clusters", "even:1", "codes", "none")):
        assert wanted in kinds, wanted

    # Usage: 2.
    refuse(2, "there is no \"scopee\"", *small, "--variants", "scopee")
    refuse(2, "dense is what the others", *small, "--variants", "scope,dense")
    refuse(2, "partition", *small, "--variants", "scope:partition=odd")
    refuse(2, "--seeds", *small, "--seeds", 0)
    refuse(2, "--steps: got 0", *small[:4], "--steps", 0)
    refuse(2, "every call of scope:dense_steps=1 is a dense one", *small[:4], "--steps", 1, "--variants",
           "scope:dense_steps=1", "--no-control")
    refuse(2, "target_density", *small, "--density", "1.5")
    refuse(2, "target_density", *small, "--density", "0.1,")
    refuse(2, "--rho: scope:density_steps=1:0.2 has densities of its own", *small, "--rho", "0.9", "--variants",
           "scope:density_steps=1:0.2")
    refuse(2, "--match: --rho says what each variant runs at", *small, "--rho", "0.9", "--match", "run")
    refuse(2, "--choose: the threshold of --match run", *small, "--choose", "0")
    refuse(2, "--match", *small, "--match", "step")
    refuse(2, "--choose: with --image, name the PNG files", *small, "--match", "run", "--image", f"{FOLDER}/report/frame_000.png")
    refuse(3, "no.png", *small, "--match", "run", "--image", f"{FOLDER}/report/frame_000.png", "--choose", f"{FOLDER}/no.png")
    refuse(2, "--choose", *small, "--match", "run", "--choose", "7")
    refuse(2, "has rule target, which meets its density in every call", *small, "--match", "run", "--variants", "scope:rule=target")
    refuse(2, "--suite", *small, "--suite", "paper", "--variants", "scope")
    refuse(2, "paper", *small, "--suite", "papers")
    refuse(2, "--density", *small, "--rho", "0.9", "--density", "0.2")
    refuse(2, "--rho", *small, "--suite", "paper", "--rho", "0.9")
    refuse(2, "rho: got \"1.5\"", *small, "--rho", "0.5,1.5")
    refuse(2, "--rho: sparge has rule blocks_topk", *small, "--rho", "0.9", "--variants", "scope,sparge")
    refuse(2, "--set", *small, "--set", "target_scope")
    refuse(2, "target_scope: got \"heads\", expected one of head, sample", *small, "--set", "target_scope=heads")
    # Bad input: 3.
    refuse(3, "the least that sparge keeps here is 1.0000", *small, "--variants", "sparge", "--density", "0.2", "--seeds", 1,
           "--no-control")
    refuse(3, "kernel", *small, "--variants", "scope:kernel=wgmma")
    refuse(3, "this grid needs 24 x 20", "--grid", "5x5x6", "--condition", clips, "--steps", 2)
    refuse(3, "tiny-wann", "--model", "tiny-wann")
    refuse(3, "nothing.safetensors", "--condition", f"{FOLDER}/nothing.safetensors")
    tensors.save(f"{FOLDER}/other.safetensors", {"noise": np.zeros(2, np.float32)})
    refuse(3, "prompt_embeds", *small[:2], "--condition", f"{FOLDER}/other.safetensors")
    refuse(3, "--plot: cannot write into", *small, "--plot", f"{FOLDER}/missing/a.svg")
print(f"{checks} commands behaved")
