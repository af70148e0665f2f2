"""`scope ablate` from outside: its figures against `scope generate` and `scope evaluate`, its statistics, and hostile input."""
import csv
import json
import os
import re
import types

import numpy as np
import pytest

import pngs
import tensors

VARIANTS, DENSITIES = ["scope", "scope:partition=even:8", "svg2"], [0.15, 0.3]
RUN_VARIANTS = "scope-paper,sparge:q_block=8+k_block=8"


def near(a, b, tolerance=1e-9):
    return np.allclose(a, b, rtol=tolerance, atol=tolerance)


def read(path):
    with open(path) as file:
        return json.load(file)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    path, random = tmp_path_factory.mktemp("t") / "clips.safetensors", np.random.default_rng(1)
    tensors.save(path, {"prompt_embeds": random.normal(0, 0.3, (2, 8, 32)).astype(np.float32),
                        "truth": random.integers(0, 256, (2, 1, 16, 24, 3), dtype=np.uint8)})
    return path


@pytest.fixture(scope="module")
def small(clips):
    return ("--grid", "5x4x6", "--condition", clips, "--steps", 5)


@pytest.fixture(scope="module")
def ablate(scope):
    """ablate(path, *arguments): what the command said on its two streams, and the JSON that it wrote."""
    def run(path, *arguments):
        result = scope("ablate", *arguments, "-o", path)
        assert result.returncode == 0, f"{arguments}: {result.stdout}{result.stderr}"
        return types.SimpleNamespace(stdout=result.stdout, stderr=result.stderr, data=read(path))

    return run


@pytest.fixture(scope="module")
def density_of(scope, small, tmp_path_factory):
    """density_of(*flags): that of a run which these flags give."""
    folder = tmp_path_factory.mktemp("t") / "run"

    def run(*flags):
        scope.accept("generate", *small, *flags, "-o", folder)
        return read(folder / "run.json")["density"]

    return run


@pytest.fixture
def refuse(scope, tmp_path):
    return lambda code, word, *arguments: scope.refuse(code, word, "ablate", "-o", tmp_path / "refused.json", *arguments)


@pytest.fixture(scope="module")
def found(ablate, small, tmp_path_factory):
    """An ablation of three variants at two densities over three seeds: its folder, what it said, its JSON, and its rows by name."""
    folder = tmp_path_factory.mktemp("t")
    said = ablate(folder / "a.json", *small, "--seeds", 3, "--variants", ",".join(VARIANTS), "--density", "0.15,0.3",
                  "--csv", folder / "a.csv", "--plot", folder / "a.svg", "--commit", "abc")
    said.rows = {(r["variant"], r["target"]): r for r in said.data["rows"]}
    said.folder = folder
    return said


def test_every_variant_runs_at_every_density(found):
    assert re.search(r"24 videos; the first dense one took [0-9.]+ s", found.stderr), found.stderr
    data, rows = found.data, found.rows
    assert data["grid"] == [5, 4, 6] and data["seeds"] == 3 and data["clips"] == 2 and data["commit"] == "abc" and data["skipped"] == []
    assert data["match"] == "call"
    assert set(rows) == {("dense in bf16", 1)} | {(v, d) for v in VARIANTS for d in DENSITIES}, set(rows)
    # Rounding moves a video far less than leaving keys out.
    assert rows["dense in bf16", 1]["control"] and min(rows["dense in bf16", 1]["psnr"]) > 40 > rows["scope", 0.15]["psnr"][0]


@pytest.mark.parametrize("seed", range(3))
def test_every_figure_is_what_other_commands_give_for_the_seed(scope, small, found, tmp_path, seed):
    """Noise s, clip s modulo 2, frame 0 left out."""
    common, rows = ("generate", *small, "--seed", seed, "--example", seed % 2), found.rows
    scope.accept(*common, "-o", tmp_path / "dense", "--method", "dense")
    scope.accept(*common, "-o", tmp_path / "bf16", "--method", "dense", "--compute", "bf16")
    pairs = [("bf16", rows["dense in bf16", 1])]
    for i, (variant, density) in enumerate((v, d) for v in VARIANTS for d in DENSITIES):
        scope.accept(*common, "-o", tmp_path / f"run{i}", "--method", variant, "--target-density", density)
        pairs.append((f"run{i}", rows[variant, density]))
    for name, row in pairs:
        scope.accept("evaluate", tmp_path / "dense", tmp_path / name, "--skip", 1, "--json", tmp_path / "q.json")
        quality, run = read(tmp_path / "q.json"), read(tmp_path / name / "run.json")
        for key in ("psnr", "pooled_psnr", "ssim"):
            assert near(quality[key], row[key][seed]), (name, row["variant"], seed, key, quality[key], row[key][seed])
        assert near(quality["frames"][quality["worst_frame"]]["psnr"], row["worst_psnr"][seed])
        assert near(run["density"], row["density"][seed]), (row["variant"], seed)
        assert run["settings"] == row["settings"], row["variant"]


def test_times_add_up(found):
    dense = found.data["dense"]
    for row in [dense, *found.data["rows"]]:
        s = row["seconds"]
        assert near(s["total"], np.sum([s[k] for k in ("dense_calls", "sparse_attention", "selection", "rest")], axis=0))
    for row in found.data["rows"]:
        ran_sparse = not row["control"]
        assert (min(row["seconds"]["selection"]) > 0) == ran_sparse and (min(row["same_calls_dense_seconds"]) > 0) == ran_sparse
        assert row["calls"] == ({"dense": 10, "sparse": 20} if ran_sparse else {"dense": 30, "sparse": 0}), row["calls"]
        # 4 of 5 steps and 5 of 6 layers run sparse: the rest of the self-attention is elsewhere.
        assert np.all(np.array(row["same_calls_dense_seconds"]) < dense["seconds"]["dense_calls"])


def test_the_table_is_what_the_seeds_say(found):
    data, rows = found.data, found.rows
    (table,) = data["tables"]
    assert [(x["variant"], x["target"]) for x in table["lines"]] == [(v, d) for d in DENSITIES for v in VARIANTS]
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
        printed = [x for x in found.stdout.splitlines() if x.startswith(line["variant"] + " ") and f"{line['density']:.4f}" in x]
        assert len(printed) == 1 and f"{line['psnr']:.2f} ± {line['psnr_deviation']:.2f}" in printed[0], printed
        if line["variant"] != "scope":
            assert f"{line['paired_difference']:+.2f} ± {line['paired_deviation']:.2f}" in printed[0] and f"{line['wins']}/3" in printed[0]


def test_csv_and_plot_show_the_rows(found):
    rows = found.rows
    with open(found.folder / "a.csv") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 3 * len(rows)
    for line in lines:
        row, seed = rows[line["variant"], float(line["target"])], int(line["seed"])
        sparse = row["seconds"]["sparse_attention"][seed] + row["seconds"]["selection"][seed]
        for name, value in {"density": row["density"][seed], "psnr": row["psnr"][seed], "pooled_psnr": row["pooled_psnr"][seed],
                            "ssim": row["ssim"][seed], "seconds": row["seconds"]["total"][seed], "sparse_seconds": sparse,
                            "dense_seconds": found.data["dense"]["seconds"]["total"][seed],
                            "same_calls_dense_seconds": row["same_calls_dense_seconds"][seed]}.items():
            assert near(float(line[name]), value, 1e-5), (line, name, value)
    plot = open(found.folder / "a.svg").read()
    assert plot.count("<polyline") == 3 and all(v in plot for v in VARIANTS)


def test_one_seed_on_one_thread_gives_the_same_bits(ablate, small, found, tmp_path):
    """With other neighbours; one seed has no spread; without a control there is none."""
    (row,) = ablate(tmp_path / "b.json", *small, "--seeds", 1, "--variants", "svg2", "--density", 0.3, "--threads", 1,
                    "--no-control").data["rows"]
    assert row["psnr"][0] == found.rows["svg2", 0.3]["psnr"][0]


@pytest.fixture(scope="module")
def match(small):
    return (*small, "--clips", 1, "--match", "run", "--choose", 0, "--no-control")


@pytest.fixture(scope="module")
def matched(ablate, match, tmp_path_factory):
    """One threshold for a run, found on the choosing videos: the path of the result, and what was said."""
    path = tmp_path_factory.mktemp("t") / "run.json"
    return path, ablate(path, *match, "--seeds", 1, "--variants", RUN_VARIANTS, "--density", "0.3,0.5")


def test_a_threshold_for_a_run_is_what_the_videos_are_made_with(matched, density_of):
    said, rows = matched[1], matched[1].data["rows"]
    assert "one threshold for all calls of a variant" in said.stdout and "4 thresholds to find" in said.stderr, said.stdout
    assert said.data["match"] == "run"
    assert [row["threshold"]["control"] for row in rows] == ["rho", "rho", "density", "density"]
    for row in rows:
        threshold = row["threshold"]
        assert row["settings"]["target_density"] == "none" and float(row["settings"][threshold["control"]]) == threshold["value"]
        assert abs(threshold["density"] - row["target"]) < 0.01 * row["target"] or threshold["runs"] == 12 or \
            threshold["below"] < row["target"] < threshold["above"], threshold
        setting = ("--method", row["variant"], "--set", f"{threshold['control']}={threshold['value']}")
        choosing = [density_of("--seed", noise, "--example", 0, *setting) for noise in (2**32, 2**32 + 1)]
        assert near(np.mean(choosing), threshold["density"]), (row["variant"], choosing, threshold)
        assert near(density_of("--seed", 0, "--example", 1, *setting), row["density"][0])
    low, high = (next(row["threshold"]["value"] for row in rows if row["target"] == target) for target in (0.3, 0.5))
    assert low < high


def test_more_seeds_go_on_with_the_thresholds_that_are_there(ablate, match, matched, tmp_path):
    path, before = matched
    more = ablate(tmp_path / "run2.json", *match, "--seeds", 2, "--variants", RUN_VARIANTS, "--density", "0.3,0.5", "--resume", path)
    assert "thresholds to find" not in more.stderr, more.stderr
    assert [row["threshold"] for row in more.data["rows"]] == [row["threshold"] for row in before.data["rows"]] and more.data["seeds"] == 2


@pytest.mark.parametrize("variant,density", (("scope:groups=8", 0.1), ("scope:groups=8+alpha=0.3", 0.3), ("svg2:groups=8+codes=40", 0.1)))
def test_a_floor_at_the_density_or_above_is_lowered(ablate, match, tmp_path, variant, density):
    """The rule decides again: no threshold is so small that the floor alone does."""
    (row,) = ablate(tmp_path / "floor.json", *match, "--seeds", 1, "--variants", variant, "--density", density).data["rows"]
    threshold = row["threshold"]
    assert threshold["alpha"] == density / 2 and row["settings"]["alpha"] == str(density / 2) and threshold["value"] > 0.1, threshold


def test_each_method_runs_once_at_its_own_settings(ablate, small, tmp_path):
    said = ablate(tmp_path / "own.json", *small, "--seeds", 1, "--variants", "scope,svg2,fast", "--match", "own", "--no-control")
    data = said.data
    assert data["match"] == "own"
    assert [(row["variant"], row["target"]) for row in data["rows"]] == [("scope", None), ("svg2", None), ("fast", None)]
    assert data["rows"][0]["settings"]["rho"] == "0.9" and data["rows"][0]["settings"]["target_density"] == "none"
    assert len(data["tables"][0]["lines"]) == 3 and "at its own settings" in said.stdout


def test_at_a_fixed_rho_the_density_is_measured(ablate, small, density_of, tmp_path):
    """That of a run with the same rho."""
    said = ablate(tmp_path / "rho.json", *small, "--seeds", 1, "--variants", "scope,scope:rule=top_p", "--rho", "0.5,0.9", "--no-control",
                  "--csv", tmp_path / "rho.csv")
    assert [(x["variant"], x["rho"]) for x in said.data["tables"][0]["lines"]] == [(v, r) for r in (0.5, 0.9)
                                                                                   for v in ("scope", "scope:rule=top_p")]
    for row in said.data["rows"]:
        assert "target" not in row and row["settings"]["target_density"] == "none" and row["notes"] == []
        density = density_of("--seed", 0, "--example", 0, "--method", row["variant"], "--set", f"rho={row['rho']}")
        assert near(density, row["density"][0]), row["variant"]
        assert f"{row['variant']} at rho {row['rho']}  " in said.stdout and f"{row['density'][0]:.4f}" in said.stdout
    assert open(tmp_path / "rho.csv").readline().startswith("variant,rho,seed,density,")


def test_a_setting_may_be_that_of_every_variant(ablate, small, found, tmp_path):
    head, sample = ablate(tmp_path / "head.json", *small, "--seeds", 1, "--variants", "scope,scope:target_scope=sample", "--density", 0.3,
                          "--no-control", "--set", "target_scope=head").data["rows"]
    assert (sample["settings"]["target_scope"], head["settings"]["target_scope"]) == ("sample", "head")
    assert abs(sample["density"][0] - 0.3) < 0.005 and head["psnr"] != sample["psnr"] == found.rows["scope", 0.3]["psnr"][:1]


def test_a_variant_with_densities_of_its_own_runs_once_beside_every_point(ablate, small, density_of, tmp_path):
    by_step = "scope:density_steps=0.6:0.4,1:0.2"
    data = ablate(tmp_path / "steps.json", *small, "--seeds", 1, "--variants", f"{by_step},scope", "--density", "0.3,0.4", "--no-control",
                  "--csv", tmp_path / "steps.csv").data
    assert [(x["variant"], x["target"]) for x in data["rows"]] == [(by_step, None), ("scope", 0.3), ("scope", 0.4)]
    assert [(x["variant"], x["target"]) for x in data["tables"][0]["lines"]] == [(by_step, None), ("scope", 0.3),
                                                                                 (by_step, None), ("scope", 0.4)]
    assert near(density_of("--seed", 0, "--example", 0, "--method", by_step), data["rows"][0]["density"][0])
    assert 0.22 < data["rows"][0]["density"][0] < 0.38


def test_presets_are_their_settings(ablate, small, tmp_path):
    fast, given, quality = ablate(tmp_path / "presets.json", *small, "--seeds", 1, "--variants",
                                  "fast,scope-mean:target_density=0.18+dense_steps=0+dense_layers=0,quality", "--density", 0.3,
                                  "--no-control").data["rows"]
    assert {r["target"] for r in (fast, given, quality)} == {None} and {r["calls"]["dense"] for r in (fast, quality)} == {0}
    assert abs(fast["density"][0] - 0.12) < 0.01 and abs(quality["density"][0] - 0.18) < 0.01 and quality["psnr"] == given["psnr"]


def test_a_stopped_run_leaves_its_seeds_and_another_goes_on_after_them(scope, ablate, small, found, tmp_path):
    stopped = scope.start("ablate", *small, "--seeds", 60, "--variants", "svg2", "--density", 0.3, "--no-control", "-o",
                          tmp_path / "stopped.json")
    while "seed 2 of 60 done" not in (line := stopped.stderr.readline()):
        assert line, "it ended by itself"
    stopped.kill()
    stopped.communicate()
    assert not (tmp_path / "stopped.json").exists()
    (unfinished,) = tmp_path.glob("stopped.json.*.unfinished")
    data = read(unfinished)
    done = data["seeds"]
    assert 2 <= done < 60 and len(data["rows"][0]["psnr"]) == len(data["dense"]["seconds"]["total"]) == done
    assert data["rows"][0]["psnr"][:2] == found.rows["svg2", 0.3]["psnr"][:2]
    finished = ablate(tmp_path / "stopped.json", *small, "--seeds", done + 1, "--variants", "svg2", "--density", 0.3, "--no-control",
                      "--resume", unfinished)
    assert "2 videos" in finished.stderr and finished.data["rows"][0]["psnr"][:done] == data["rows"][0]["psnr"]


@pytest.fixture(scope="module")
def same(small):
    return (*small, "--variants", "svg2,scope:density_steps=1:0.2", "--density", 0.3, "--no-control")


@pytest.fixture(scope="module")
def half(ablate, same, tmp_path_factory):
    """A finished result of two seeds: its path and its JSON."""
    path = tmp_path_factory.mktemp("t") / "half.json"
    return path, ablate(path, *same, "--seeds", 2).data


def test_a_result_of_fewer_seeds_is_gone_on_from(ablate, same, half, tmp_path):
    """It gives what one run gives but for its times."""
    whole = ablate(tmp_path / "whole.json", *same, "--seeds", 4).data
    path, half = half
    result = ablate(tmp_path / "resumed.json", *same, "--seeds", 4, "--resume", path)
    assert "6 videos" in result.stderr, result.stderr
    resumed = result.data
    again = ablate(tmp_path / "again.json", *same, "--seeds", 4, "--resume", tmp_path / "resumed.json").data  # nothing is left to do
    assert resumed == again and resumed["dense"]["seconds"]["total"][:2] == half["dense"]["seconds"]["total"] and resumed["finished"]
    for one, other, begun in zip(whole["rows"], resumed["rows"], half["rows"]):
        assert all(one[key] == other[key] for key in one if key not in ("seconds", "same_calls_dense_seconds")), one["variant"]
        assert len(other["seconds"]["total"]) == 4 and other["seconds"]["total"][:2] == begun["seconds"]["total"]
        assert other["same_calls_dense_seconds"][:2] == begun["same_calls_dense_seconds"]


def test_a_result_of_another_run_is_refused(refuse, small, same, half, tmp_path):
    path, half = half
    resume = ("--resume", path)
    refuse(2, "has steps 5, and this run 6", *small[:4], "--steps", 6, *same[6:], "--seeds", 4, *resume)
    refuse(2, f'has commit "{half["commit"]}", and this run "b"', *same, "--seeds", 4, "--commit", "b", *resume)
    refuse(2, "has 2 seeds", *same, "--seeds", 1, *resume)
    refuse(2, "has no scope at 0.3", *small, "--variants", "svg2,scope", "--density", 0.3, "--no-control", "--seeds", 4, *resume)
    refuse(2, "with other settings", *same, "--set", "seed=3", "--seeds", 4, *resume)
    refuse(2, "instruction_set", *same, "--seeds", 4, "--instruction-set", "portable", *resume)
    for text, word in (("half", "no result of scope ablate"), ('{"version": "0.2.0"}', "no result of scope ablate"),
                       (json.dumps({**half, "rows": [{**half["rows"][0], "psnr": [30]}]}), "psnr has not 2 values"),
                       (json.dumps({**half, "rows": [{**half["rows"][0], "notes": ["x"]}]}), "about another variant")):
        (tmp_path / "broken.json").write_text(text)
        refuse(3, word, *same, "--seeds", 4, "--resume", tmp_path / "broken.json")


def test_a_profile_is_for_methods_that_take_one(ablate, refuse, small, tmp_path):
    profile = tmp_path / "p.csv"
    profile.write_text("step,layer,head,density\n" + "".join(f"4,{layer},{head},0.9\n" for layer in range(6) for head in range(2)))
    rows = ablate(tmp_path / "p.json", *small, "--seeds", 1, "--variants", "svoo,svg2", "--density", 0.3, "--no-control", "--profile",
                  profile).data["rows"]
    refuse(2, "--profile: none of scope,svg2 takes one; svoo does", *small, "--seeds", 1, "--variants", "scope,svg2", "--profile", profile)
    assert [os.path.basename(r["settings"]["profile"]) for r in rows] == ["p.csv", "none"]


def test_a_suite_says_what_it_leaves_out(ablate, small, tmp_path):
    """120 keys are one block of sparge's, and two of sol's, which are neighbours."""
    said = ablate(tmp_path / "c.json", *small, "--seeds", 1, "--suite", "paper", "--no-control")
    data = said.data
    assert {x["variant"] for x in data["skipped"]} == {"sparge", "sol"} and "not run: sparge: target density: got 0.05" in said.stdout
    assert [t["title"] for t in data["tables"]] == ["Key partitions", "Rules", "Where a density is met", "Proxy and tail",
                                                    "Methods", "Schedules"]
    assert len(data["rows"]) == len({(r["variant"], r["target"]) for r in data["rows"]}), "each is run once"
    kinds = {(r["settings"]["rule"], r["settings"]["partition"], r["settings"]["proxy"], r["settings"]["tail"]) for r in data["rows"]}
    for wanted in (("top_p", "rope", "codes", "none"), ("hybrid", "rope", "codes", "none"), ("online", "even:1", "codes", "none"),
                   ("online", "random:3", "codes", "none"), ("online", "even:8", "codes", "none"), ("online", "rope", "exact", "none"),
                   ("online", "rope", "codes", "first_order"), ("clusters", "even:1", "codes", "none")):
        assert wanted in kinds, wanted


def test_options_that_are_wrong_are_refused(refuse, small, tmp_path):
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
    refuse(2, "--suite", *small, "--suite", "paper", "--variants", "scope")
    refuse(2, "paper", *small, "--suite", "papers")
    refuse(2, "--density", *small, "--rho", "0.9", "--density", "0.2")
    refuse(2, "--rho", *small, "--suite", "paper", "--rho", "0.9")
    refuse(2, "rho: got \"1.5\"", *small, "--rho", "0.5,1.5")
    refuse(2, "--rho: sparge has rule blocks_topk", *small, "--rho", "0.9", "--variants", "scope,sparge")
    refuse(2, "--set", *small, "--set", "target_scope")
    refuse(2, "target_scope: got \"heads\", expected one of head, sample", *small, "--set", "target_scope=heads")


def test_ways_to_match_that_do_not_fit_are_refused(refuse, small, tmp_path):
    pngs.write(tmp_path / "frame.png", pngs.slopes())
    image = ("--image", tmp_path / "frame.png")
    refuse(2, "--match: --rho says what each variant runs at", *small, "--rho", "0.9", "--match", "run")
    refuse(2, "--choose: the threshold of --match run", *small, "--choose", "0")
    refuse(2, "--match", *small, "--match", "step")
    refuse(2, "--choose: with --image, name the PNG files", *small, "--match", "run", *image)
    refuse(3, "no.png", *small, "--match", "run", *image, "--choose", tmp_path / "no.png")
    refuse(2, "--choose", *small, "--match", "run", "--choose", "7")
    refuse(2, "has rule target, which meets its density in every call", *small, "--match", "run", "--variants", "scope:rule=target")


def test_inputs_that_do_not_fit_are_refused(refuse, small, clips, tmp_path):
    refuse(3, "the least that sparge keeps here is 1.0000", *small, "--variants", "sparge", "--density", "0.2", "--seeds", 1,
           "--no-control")
    refuse(3, "kernel", *small, "--variants", "scope:kernel=wgmma")
    refuse(3, "this grid needs 24 x 20", "--grid", "5x5x6", "--condition", clips, "--steps", 2)
    refuse(3, "tiny-wann", "--model", "tiny-wann")
    refuse(3, "nothing.safetensors", "--condition", tmp_path / "nothing.safetensors")
    tensors.save(tmp_path / "other.safetensors", {"noise": np.zeros(2, np.float32)})
    refuse(3, "prompt_embeds", *small[:2], "--condition", tmp_path / "other.safetensors")
    refuse(3, "--plot: cannot write into", *small, "--plot", tmp_path / "missing" / "a.svg")
