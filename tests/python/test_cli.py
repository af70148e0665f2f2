"""The scope command from outside: figures against numpy, and hostile inputs that it refuses by name without leaving a file."""
import csv
import json
import re
import types
import xml.etree.ElementTree

import numpy as np
import pytest

import tensors

META = {"grid": "3x4x5", "rope": "12,10,10"}


@pytest.fixture(scope="module")
def qkv(tmp_path_factory):
    """q, k and v, as a file of all three and as .npy files."""
    folder = tmp_path_factory.mktemp("t")
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((2, 60, 32)).astype(np.float32) for name in "qkv"}
    good = folder / "good.safetensors"
    tensors.save(good, arrays, META)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    npy = [word for name in "qkv" for word in (f"--{name}", folder / f"{name}.npy")]
    return types.SimpleNamespace(good=good, arrays=arrays, npy=("attend", *npy, "--rope", "12,10,10"), **arrays)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.safetensors"


@pytest.fixture
def base(qkv, out):
    return ("attend", qkv.good, "-o", out)


@pytest.fixture(scope="module")
def compare(qkv):
    return ("compare", qkv.good, "--repeat", 1)


def read(path):
    with open(path) as file:
        return json.load(file)


def table(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def test_attend_writes_what_its_options_ask_for(scope, base, out):
    scope.accept(*base)
    assert set(tensors.load(out)[0]) == {"out"}
    scope.accept(*base, "--dump", "--lse", "--layer", 0, "--step", 3, "--steps", 10)
    assert {"out", "lse"} <= set(tensors.load(out)[0])


def test_every_json_says_of_which_build_it_is(scope, qkv, base, tmp_path):
    version, commit = re.fullmatch(r"(\d+\.\d+\.\d+) \(commit ([0-9a-f]{40}\+?|unknown)\)\n", scope.accept("--version")).groups()
    scope.accept(*base, "--stats", tmp_path / "stats.json")
    scope.accept("compare", qkv.good, "--methods", "scope", "--density", 0.5, "--json", tmp_path / "compare.json")
    scope.accept("inspect", qkv.good, "-o", tmp_path / "inspect")
    scope.accept("bench", "--grid", "2x4x5", "--rope", "12,10,10", "--heads", 1, "--json", tmp_path / "bench.json")
    for name in ("stats.json", "compare.json", "inspect/inspect.json", "bench.json"):
        data = read(tmp_path / name)
        assert (data["version"], data["commit"]) == (version, commit), (name, data["version"], data["commit"])


def test_npy_and_safetensors_agree(scope, qkv, out, tmp_path):
    scope.accept(*qkv.npy, "-o", tmp_path / "out.npy")
    scope.accept(*qkv.npy, "-o", out)
    assert np.array_equal(np.load(tmp_path / "out.npy"), tensors.load(out)[0]["out"])


def test_a_state_is_written_and_read(scope, base, tmp_path):
    for warm in (False, True):
        scope.accept(*base, "--state", tmp_path / "state.bin", "--stats", tmp_path / "stats.json")
        assert read(tmp_path / "stats.json")["warm"] is warm


def test_methods_lists_settings_and_models(scope):
    said, tables = scope.accept("methods"), json.loads(scope.accept("methods", "--json"))
    assert "scope-paper" in said and "first_sample" in [row["name"] for row in tables["settings"]]
    for row in tables["models"]:
        line = next(line for line in said.splitlines() if line.split()[:1] == [row["name"]])
        for words in (("rope", ",".join(map(str, row["rope"])) if any(row["rope"]) else "none"), ("grid", "x".join(map(str, row["grid"])))):
            assert words in list(zip(line.split(), line.split()[1:])), (words, line)


def test_help_names_commands_and_options(scope):
    assert "make-qkv" in scope.accept("--help") and "--dump" in scope.accept("attend", "--help")


@pytest.mark.parametrize("method", ("svg2", "svg2-ear", "svoo", "sparge:q_block=4+k_block=2",
                                    "sparge-cdf:similarity=-1+q_block=4+k_block=2", "sol:q_block=2+k_block=2",
                                    "scope:partition=even:2+rule=hybrid"))
def test_a_target_density_is_met(scope, base, method):
    said = scope.accept(*base, "--method", method, "--target-density", 0.3)
    assert abs(float(said.split("density ")[-1].split(",")[0]) - 0.3) < 0.02, said


def test_a_target_density_that_changes_something_is_told(scope, base):
    assert "nearest to 0.3" in scope.accept(*base, "--method", "sparge:q_block=4+k_block=15", "--target-density", 0.3)
    assert "alpha lowered from 0.1 to 0.05" in scope.accept(*base, "--method", "svg2:target_scope=head", "--target-density", 0.1)


@pytest.mark.parametrize("method,rule", (("scope", "target"), ("scope:rule=top_p", "top_p"), ("svg2:groups=5+codes=90", "clusters"),
                                         ("sparge:k_block=4", "blocks_topk")))
def test_bench_runs_the_own_rule_of_a_method_at_the_density_asked_for(scope, tmp_path, method, rule):
    scope.accept("bench", "--grid", "4x8x8", "--heads", 1, "--repeat", 1, "--density", 0.3, "--json", tmp_path / "b.json",
                 "--method", method)
    rows = read(tmp_path / "b.json")["cases"][0]["rows"]
    assert [row["name"] for row in rows][:2] == ["dense", "warm"] and abs(rows[1]["density"] - 0.3) < 0.02, rows
    assert rows[1]["settings"]["rule"] == rule, rows[1]


SPECS = ["scope", "scope-exact", "svg2:codes=60", "svg2-ear:codes=60", "svoo:codes=60", "sparge:q_block=4+k_block=2",
         *(f"scope:partition={p}" for p in ("even:1", "even:2", "random:3", "rope", "even:4", "even:8")),
         *(f"scope:rule={rule}" for rule in ("top_p", "hybrid", "online"))]


def test_compare_meets_densities_in_table_json_csv_and_svg(scope, compare, tmp_path):
    said = scope.accept(*compare, "--samples", 20, "--methods", ",".join(SPECS), "--density", "0.2,0.5", "--json", tmp_path / "c.json",
                        "--csv", tmp_path / "c.csv", "--plots", tmp_path / "c-")
    assert all(spec in said for spec in SPECS) and "±" in said, said
    rows, lines = read(tmp_path / "c.json")["rows"], table(tmp_path / "c.csv")
    assert len(rows) == len(lines) == 1 + 2 * len(SPECS)
    for row, line in zip(rows, lines):
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
        lines = xml.etree.ElementTree.parse(tmp_path / f"c-{name}.svg").findall("{http://www.w3.org/2000/svg}polyline")
        assert [len(line.get("points").split()) for line in lines] == [2] * len(SPECS)
    assert "= 3x4x5" in scope.accept(*compare, "--samples", "all", "--methods", "svg2", "--density", 0.3)


def test_compare_measures_densities_at_a_given_rho(scope, compare, tmp_path):
    """A setting may be every method's."""
    said = scope.accept(*compare, "--methods", "scope,svg2:codes=60", "--rho", "0.5,0.9", "--set", "alpha=0", "--json",
                        tmp_path / "c.json", "--csv", tmp_path / "c.csv")
    given = read(tmp_path / "c.json")
    both = [("dense", 1), *((method, rho) for method in ("scope", "svg2:codes=60") for rho in (0.5, 0.9))]
    assert [(row["method"], row["rho"]) for row in given["rows"]] == both
    assert given["settings"]["scope"]["alpha"] == "0" and "scope at rho 0.5" in said
    assert open(tmp_path / "c.csv").readline().startswith("method,rho,density")
    assert given["rows"][1]["density"] < given["rows"][2]["density"] and all(row["notes"] == [] for row in given["rows"])


@pytest.mark.parametrize("met", ("head", "sample"))
def test_compare_meets_a_density_over(scope, compare, tmp_path, met):
    scope.accept(*compare, "--methods", "scope", "--density", 0.4, "--set", f"target_scope={met}", "--json", tmp_path / "c.json")
    (_, row) = read(tmp_path / "c.json")["rows"]
    assert abs(row["density"] - 0.4) < 0.01, row


GROUPS = 5


def words_of(bits):
    """Rows of booleans as rows of 32-bit words."""
    return np.packbits(np.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, 4)]), axis=-1, bitorder="little").view(np.uint32)


@pytest.fixture(scope="module")
def drawn():
    """A selection drawn by chance: labels, and the masks of 5 groups. Query 7 attends to nothing."""
    rng = np.random.default_rng(0)
    masks = rng.random((2, GROUPS, 60)) < 0.3
    masks[..., 56:], masks[:, :, 0] = False, True
    labels = rng.integers(0, GROUPS, (2, 60)).astype(np.int32)
    labels[:, 7] = -1
    return labels, masks


def test_compare_judges_the_selection_of_a_file(scope, qkv, compare, drawn, tmp_path):
    """Density, recall and error are those of numpy. The last 4 keys are always seen."""
    (labels, masks), always, file = drawn, np.arange(60) >= 56, tmp_path / "mine.safetensors"
    tensors.save(file, {"labels": labels, "mask": words_of(masks), "keep": words_of(always[None])})
    said = scope.accept(*compare, "--samples", "all", "--methods", "scope", "--density", 0.3, "--selection", file,
                        "--selection", f"again={file}", "--json", tmp_path / "c.json", "--csv", tmp_path / "c.csv", "--plots",
                        tmp_path / "c-")
    given = read(tmp_path / "c.json")
    mine, again = given["rows"][2:]
    assert mine["method"] == "mine" and given["selections"] == {"mine": str(file), "again": str(file)}
    assert {name: x for name, x in mine.items() if "seconds" not in name and name not in ("method", "speedup", "notes")} == \
        {name: x for name, x in again.items() if "seconds" not in name and name not in ("method", "speedup", "notes")}
    seen = (np.take_along_axis(masks, np.maximum(labels, 0)[..., None], 1) | always) & (labels[..., None] >= 0)
    logits = qkv.q.astype(np.float64) @ qkv.k.astype(np.float64).transpose(0, 2, 1) / 32**0.5
    weights = np.exp(logits)
    exact, sparse = (w / np.maximum(w.sum(-1, keepdims=True), 1e-300) for w in (weights, weights * seen))
    values = qkv.v.astype(np.float64)
    error = np.mean([np.linalg.norm((sparse[h] - exact[h]) @ values[h]) / np.linalg.norm(exact[h] @ values[h]) for h in range(2)])
    counted = np.array([masks[h].sum(-1)[labels[h][labels[h] >= 0]].sum() / (59 * 56) for h in range(2)])
    assert abs(mine["density"] - counted.mean()) < 1e-12, (mine, counted)
    assert abs(mine["mass_recall"] - (exact * seen).sum(-1).mean()) < 1e-6 and abs(mine["error"] - error) < 1e-5 * error, (mine, error)
    assert mine["target"] is None and mine["selection_seconds"] is None and mine["attend_seconds"] > 0
    assert "not timed" in said and "mine: as its file has it" in said
    assert table(tmp_path / "c.csv")[2]["method"] == "mine" and "mine" in open(tmp_path / "c-error.svg").read()


def test_a_selection_that_is_wrong_is_refused(scope, compare, drawn, tmp_path):
    labels, masks = drawn
    selection, bad = {"labels": labels, "mask": words_of(masks)}, tmp_path / "bad.safetensors"
    tensors.save(bad, {"mask": selection["mask"]})
    scope.refuse(3, 'no tensor "labels"', *compare, "--selection", bad)
    for broken, word in (({**selection, "labels": labels[:1]}, "labels: got i32 [1, 60]"),
                         ({**selection, "mask": words_of(masks)[..., :1]},
                          "mask: got u32 [2, 5, 1], expected 32-bit integers [1, 2, 5, 2]"),
                         ({**selection, "labels": labels.astype(np.float32)}, "expected 32-bit integers"),
                         ({**selection, "labels": labels + GROUPS}, "selection.labels[0]: got"),
                         ({**selection, "mask": selection["mask"] | np.uint32(1 << 31)}, "bits of keys that are not valid"),
                         ({**selection, "mask": np.zeros((2, 61, 2), np.uint32)}, "mask: got 61 groups, expected 1..60"),
                         ({**selection, "keep": np.zeros((2, 2), np.uint32)}, "keep: got u32 [2, 2]")):
        tensors.save(bad, broken)
        scope.refuse(3, word, *compare, "--methods", "scope", "--density", 0.3, "--selection", bad)
    scope.refuse(2, "expected FILE or NAME=FILE", *compare, "--selection", "mine=")
    scope.refuse(3, "cannot open", *compare, "--selection", tmp_path / "absent.safetensors")


@pytest.fixture(scope="module")
def profile(scope, qkv, tmp_path_factory):
    """A profile of two steps: its path, and the fewest keys that hold 95 % of a query's mass, the maximum over files of one place."""
    folder = tmp_path_factory.mktemp("t")
    sharper, path = folder / "sharper.safetensors", folder / "p.csv"
    tensors.save(sharper, {**qkv.arrays, "q": 3 * qkv.q}, META)
    scope.accept("profile", f"0:1:{qkv.good}", f"0:1:{sharper}", f"5:0:{sharper}", "--samples", "all", "-o", path)

    def density(q):
        logits = np.einsum("hid,hjd->hij", q.astype(np.float64), qkv.k.astype(np.float64)) / np.sqrt(32)
        mass = -np.sort(-np.exp(logits - logits.max(-1, keepdims=True)))
        reached = np.cumsum(mass / mass.sum(-1, keepdims=True), -1) >= 0.95
        return (reached.argmax(-1) + 1).mean(-1) / 60

    plain, sharp = density(qkv.q), density(3 * qkv.q)
    return path, {("0", "1", str(h)): max(plain[h], sharp[h]) for h in range(2)} | {("5", "0", str(h)): sharp[h] for h in range(2)}


@pytest.fixture
def unprofiled(base):
    return (*base, "--method", "svoo:codes=20", "--layer", 1, "--steps", 9, "--set", "dense_steps=0")


@pytest.fixture
def svoo(unprofiled, profile):
    return (*unprofiled, "--set", f"profile={profile[0]}")


PLACE = ("--layer", 1, "--step", 3, "--steps", 9)


def test_a_profile_is_what_numpy_makes_of_the_files(profile):
    path, want = profile
    rows = table(path)
    assert [(r["step"], r["layer"], r["head"]) for r in rows] == list(want)
    assert all(abs(float(r["density"]) - want[r["step"], r["layer"], r["head"]]) < 1e-5 for r in rows), rows


def test_svoo_keeps_the_entry_of_a_head_within_its_bounds(scope, svoo, profile, tmp_path):
    stats = tmp_path / "s.json"
    scope.accept(*svoo, "--step", 0, "--stats", stats)
    clipped = [min(max(profile[1]["0", "1", str(h)], 0.15), 0.2) for h in range(2)]
    assert all(abs(h["alpha"] - x) < 1e-5 for h, x in zip(read(stats)["heads"], clipped))
    # Under a target over the sample, shares that are too large keep their proportions.
    said = scope.accept(*svoo, "--step", 0, "--stats", stats, "--target-density", 0.2, "--set", "target_scope=sample")
    found = read(stats)
    assert "scaled to a mean of 0.1" in said and found["heads"][0]["rho"] == found["heads"][1]["rho"], said
    assert all(abs(h["alpha"] - 0.1 * x / np.mean(clipped)) < 1e-5 for h, x in zip(found["heads"], clipped))


def test_clusters_of_svoo_stay_from_step_to_step(scope, svoo, tmp_path):
    for step, iterations in ((1, 2), (2, 2), (3, 0)):
        scope.accept(*svoo, "--step", step, "--set", "reuse_start=3", "--set", "reuse_steps=0", "--state", tmp_path / "svoo.bin", "--stats",
                     tmp_path / "s.json")
        stats = read(tmp_path / "s.json")
        assert stats["iterations"] == iterations and [h["alpha"] for h in stats["heads"]] == [0.1, 0.1], stats


def test_compare_takes_a_profile(scope, compare, profile):
    said = scope.accept(*compare, "--methods", "svoo:codes=20,svg2:codes=20", "--profile", profile[0], *PLACE, "--density", 0.3)
    assert "svoo:codes=20" in said


def test_a_profile_that_does_not_fit_is_refused(scope, compare, unprofiled, profile, tmp_path):
    bad = tmp_path / "bad.csv"
    bad.write_text("step,layer,head,density\n0,1,0,0.5\n0,1,one,0.5\n")
    scope.refuse(3, "bad.csv line 3", *unprofiled, "--step", 0, "--set", f"profile={bad}")
    scope.refuse(3, "nowhere.csv", *unprofiled, "--step", 0, "--set", f"profile={tmp_path}/nowhere.csv")
    bad.write_text("step,layer,head,density\n0,1,0,0.5\n")
    scope.refuse(3, "has 1 heads, the shape has 2", *unprofiled, "--step", 0, "--set", f"profile={bad}")
    scope.refuse(2, "none of scope,svg2", *compare, "--methods", "scope,svg2", "--profile", profile[0], *PLACE)
    scope.refuse(2, "needs --layer", *compare, "--methods", "svoo", "--profile", profile[0])
    scope.refuse(2, "dense_steps", *compare, "--methods", "svoo", "--step", 0, "--steps", 9)


def test_commands_without_what_they_need_are_refused(scope, qkv, out, tmp_path):
    scope.refuse(2, "subcommand")
    scope.refuse(2, "--output", "attend", qkv.good)
    scope.refuse(2, "--q, --k and --v", "attend", "-o", out)
    scope.refuse(2, "npy", "attend", qkv.good, "-o", tmp_path / "o.npy", "--dump")
    scope.refuse(2, "grid", "make-qkv", "--grid", "3x4", "-o", out)
    scope.refuse(2, "STEP:LAYER:FILE", "profile", qkv.good, "-o", out)
    scope.refuse(2, "STEP:LAYER:FILE", "profile", f"1:-2:{qkv.good}", "-o", out)
    scope.refuse(2, "mass", "profile", f"1:2:{qkv.good}", "--mass", 0, "-o", out)


def test_compare_refuses_methods_and_densities(scope, compare):
    scope.refuse(2, "svg2", *compare, "--methods", "scope,svg3")
    scope.refuse(2, "its own line", *compare, "--methods", "dense")
    scope.refuse(2, "target_density", *compare, "--density", "0.1,2")
    scope.refuse(2, "target_density", *compare, "--density", "0.1,")
    scope.refuse(2, "--rho", *compare, "--density", 0.1, "--rho", 0.9)
    scope.refuse(2, "rule blocks_topk, which compares with none", *compare, "--methods", "sparge", "--rho", 0.9)
    scope.refuse(2, "--samples", *compare, "--samples", 0)
    scope.refuse(2, "setting", *compare, "--methods", "scope:rhoo=1")
    scope.refuse(3, "grid", *compare, "--grid", "3x4x6")
    scope.refuse(3, "the least that sparge keeps here is 1.0", *compare, "--methods", "sparge")


def test_attend_refuses_settings(scope, base):
    scope.refuse(2, "rho", *base, "--set", "rho=0")
    scope.refuse(2, "rho", *base, "--set", "rho=1.5")
    scope.refuse(2, "iterations", *base, "--set", "iterations=0")
    scope.refuse(2, "name=value", *base, "--set", "rho")
    scope.refuse(2, "first_sample", *base, "--set", "sample=1")  # the error lists what exists
    scope.refuse(2, "scope-exact", *base, "--method", "svg3")
    scope.refuse(2, "svg2", *base, "--method", "svg3:codes=4")
    scope.refuse(2, "name=value", *base, "--method", "svg2:codes")
    scope.refuse(2, "there is no \"code\"", *base, "--method", "svg2:codes=4+code=3")
    scope.refuse(2, "target_density", *base, "--target-density", 0)
    scope.refuse(2, "target_density", *base, "--target-density", 1.5)
    scope.refuse(2, "dense keeps everything", *base, "--method", "dense", "--target-density", 0.2)
    scope.refuse(2, "one subspace", *base, "--method", "svg2:partition=rope")
    scope.refuse(2, "wan2.1", *base, "--model", "sora")
    scope.refuse(2, "partition", *base, "--set", "partition=even:0")
    scope.refuse(3, "the least that sparge keeps here is 1.0", *base, "--method", "sparge", "--target-density", 0.3)


def test_a_known_model_without_ranges_of_rope_gives_none(scope, qkv, out):
    """A method that needs them says so; one that needs none runs."""
    plain = (*qkv.npy[:-2], "-o", out, "--model", "ltx-2")
    scope.refuse(2, "partition: rope needs the channel counts", *plain)
    scope.accept(*plain, "--method", "scope-mean")


def test_attend_refuses_options(scope, base, tmp_path):
    scope.refuse(2, "subspaces", *base, "--subspaces", "[[0,1],[2")
    scope.refuse(2, "subspaces", *base, "--subspaces", "[[0,-1]]")
    scope.refuse(2, "steps", *base, "--step", 3)
    scope.refuse(2, "step", *base, "--step", 9, "--steps", 9)
    scope.refuse(2, "steps", *base, "--step", 5, "--steps", 9223372036854775807)
    scope.refuse(2, "grid", *base, "--grid", "3x4x")
    scope.refuse(2, "dump", *base, "--method", "dense", "--dump")
    scope.refuse(2, "threads", *base, "--threads", -1)
    scope.refuse(2, "state", *base, "--method", "dense", "--state", tmp_path / "none.bin")


def test_options_that_do_not_fit_the_input_are_refused(scope, base, out):
    scope.refuse(3, "grid", *base, "--grid", "3x4x6")
    scope.refuse(3, "channel 2", *base, "--subspaces", "[[0,1]]")
    scope.refuse(3, "already", *base, "--subspaces", "[[0,1],[1,2]]")
    scope.refuse(3, "rope", *base, "--rope", "12,10,11")
    scope.refuse(3, "text", *base, "--grid", "3x4x5", "--text", 61)
    scope.refuse(3, "instruction_set", *base, "--instruction-set", "mmx")
    scope.refuse(3, "even number", "make-qkv", "--rope", "43,42,42", "-o", out)


def test_paths_that_lead_nowhere_are_refused(scope, qkv, out, tmp_path):
    scope.refuse(3, "nowhere", "profile", f"1:2:{tmp_path}/nowhere.safetensors", "-o", out)
    scope.refuse(3, "nowhere", "attend", tmp_path / "nowhere.safetensors", "-o", out)
    scope.refuse(3, "missing", "attend", qkv.good, "-o", tmp_path / "missing" / "out.safetensors")


def test_tensors_that_do_not_fit_are_refused(scope, qkv, out, tmp_path):
    q, k, v = qkv.q, qkv.k, qkv.v
    path = tmp_path / "bad.safetensors"

    def bad(word, arrays, metadata=META, code=3):
        tensors.save(path, arrays, metadata)
        scope.refuse(code, word, "attend", path, "-o", out)

    bad('"v"', {"q": q, "k": k})
    bad("rank", {"q": q, "k": k[None], "v": v[None]})
    bad("q: got shape", {"q": q[0], "k": k[0], "v": v[0]})
    bad("v: got shape", {"q": q, "k": k, "v": v[:, :59]})
    bad("k: got shape", {"q": q, "k": k[:, :, :31], "v": v[:, :, :31]})
    bad("k: got shape", {"q": q, "k": k[:1], "v": v[:1]})
    bad("expected f32", {"q": q.astype(np.int32), "k": k.astype(np.int32), "v": v.astype(np.int32)})
    bad("k: got f16", {"q": q, "k": k.astype(np.float16), "v": v})
    bad("grid", {"q": q, "k": k, "v": v}, {"grid": "3x4x7", "rope": "12,10,10"})
    bad("keep", {"q": q, "k": k, "v": v, "keep": np.zeros((1, 3), np.uint32)})
    bad("k_lengths", {"q": q, "k": k, "v": v, "k_lengths": np.array([61], np.int64)})
    bad("rope needs", {"q": q, "k": k, "v": v}, {}, code=2)
    for broken in ("q", "k"):
        arrays = {"q": q.copy(), "k": k.copy(), "v": v}
        arrays[broken][1, 7, 3] = np.nan
        bad(f"{broken}: NaN", arrays)


def test_files_that_are_cut_or_too_long_are_refused(scope, qkv, base, out, tmp_path):
    bad, good = tmp_path / "bad.safetensors", qkv.good.read_bytes()
    for data in (*(good[:end] for end in (0, 1, 7, 8, 50, len(good) - 1)), good + b"x"):
        bad.write_bytes(data)
        scope.refuse(3, "bad.safetensors", "attend", bad, "-o", out)
    state = tmp_path / "state.bin"
    scope.accept(*base, "--state", state)
    for data in (b"x" * state.stat().st_size, b"short"):
        state.write_bytes(data)
        scope.refuse(3, "state.bin", *base, "--state", state)
    np.save(tmp_path / "q.npy", np.array([{}], dtype=object), allow_pickle=True)
    scope.refuse(3, "q.npy", "attend", "--q", tmp_path / "q.npy", *qkv.npy[3:], "-o", out)
