"""Baselines as their authors run them, from outside: `scope generate --known`, profiles of a dense run, and SVOO's own files."""
import csv
import json
import os

import pytest

import pngs

COUNTS = ("--set", "groups=8", "--set", "codes=20")
DENSE = ("--method", "dense", "--profile-samples", "all")
SVOO = ("--method", "svoo", *COUNTS, "--set", "profile_low=0.05", "--set", "profile_high=1", "--set", "rho=0.3", "--latents")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    image = tmp_path_factory.mktemp("t") / "first.png"
    pngs.write(image, pngs.slopes())
    return ("--grid", "5x4x6", "--image", image, "--steps")


@pytest.fixture(scope="module")
def generate(scope, small):
    """generate(folder, *arguments): what the command said, and the run.json that it wrote."""
    def run(folder, *arguments):
        said = scope.accept("generate", "-o", folder, *small, 6, *arguments)
        return said, json.load(open(folder / "run.json"))

    return run


@pytest.fixture
def refuse_run(scope, small, tmp_path):
    return lambda code, words, *arguments, steps=6: scope.refuse(code, words, "generate", "-o", tmp_path / "refused", *small, steps,
                                                                 *arguments)


def test_a_row_that_is_named_sets_what_it_has_for_the_method(generate, tmp_path):
    """And says so."""
    said, run = generate(tmp_path / "svoo", "--known", "wan2.1-i2v-14b", "--method", "svoo", *COUNTS)
    row = {"rho": "0.9", "profile_low": "0.1", "profile_high": "0.15", "dense_steps": "0.2", "reuse_start": "9", "reuse_interval": "20",
           "reuse_steps": "40", "layers": "40"}
    assert run["known"] == {"model": "wan2.1-i2v-14b", "settings": row}, run["known"]
    assert {k: run["settings"][k] for k in row} == row
    assert "known model wan2.1-i2v-14b, as named, though it has 40 layers x 40 heads and config.json 6 x 2: " + \
        " ".join(f"{k}={v}" for k, v in row.items()) in said, said
    _, run = generate(tmp_path / "svg2", "--known", "wan2.1-i2v-14b", "--method", "svg2", *COUNTS)
    assert [all(c["dense"] for c in step) for step in run["layers"]] == [True] * 2 + [False] * 4, "0.35 of 6 steps"
    _, run = generate(tmp_path / "scope", "--known", "wan2.1-i2v-14b")
    assert [all(c["dense"] for c in step) for step in run["layers"]] == [True] + [False] * 5, "0.2 of 6 steps"
    assert run["known"]["settings"] == {"rho": "0.9", "dense_steps": "0.2", "warm_prefix": "no", "layers": "40"}


def test_what_is_given_stands_over_the_row(generate, tmp_path):
    """In the method or by itself."""
    said, run = generate(tmp_path / "given", "--known", "wan2.1-i2v-14b", "--method", "svg2:groups=8", "--set", "dense_steps=0.5",
                         "--set", "codes=20")
    assert run["settings"]["dense_steps"] == "0.5" and run["settings"]["groups"] == "8"
    assert run["known"]["settings"]["dense_steps"] == "0.35"
    assert "groups=8 (given; its own: 300) dense_steps=0.5 (given; its own: 0.35) warm_prefix=no" in said, said


@pytest.mark.parametrize("arguments", ((), ("--known", "none")))
def test_a_shape_that_no_row_has_gets_nothing(generate, tmp_path, arguments):
    said, run = generate(tmp_path / "plain", *arguments)
    assert run["known"] is None and "known" not in said and run["settings"]["layers"] == "0", said


def test_a_shape_of_a_row_gets_the_first_of_its_shape_and_why(scope, bundled, refuse_run, tmp_path):
    config = json.load(open(bundled / "config.json"))
    for name, layers, heads, channels in ((30, 30, 12, 28), (40, 40, 40, 28), ("text", 40, 40, 12)):
        (tmp_path / str(name)).mkdir()
        (tmp_path / str(name) / "config.json").write_text(
            json.dumps({**config, "num_layers": layers, "num_attention_heads": heads, "in_channels": channels}))
    def told(words, name, *more):
        """What is said of the row before the run is refused."""
        said = scope.refuse(2, words, "generate", "-o", tmp_path / "refused", "--model", tmp_path / str(name), "--grid", "5x4x6",
                            "--method", "svoo", *more)
        return said.stdout

    # The config has channels beside the noise, as models from images do.
    for name, *words in (
            (30, "config.json fits wan2.1-t2v-1.3b: 30 layers x 12 heads of 128 channels, from text, one transformer; "
             "none of this shape is from an image", "--known none takes none",
             "known model wan2.1-t2v-1.3b, by config.json: rho=0.9", "reuse_interval=20"),
            (40, "config.json fits wan2.1-i2v-14b: 40 layers x 40 heads of 128 channels, from an image, one transformer;",
             "known model wan2.1-i2v-14b, by config.json: rho=0.9"),
            ("text", "config.json fits wan2.1-t2v-14b: 40 layers x 40 heads of 128 channels, from text, one transformer; "
             "wan2.1-14b-480p, wan2.1-14b-distilled fit as well, later in the table; --known NAME takes another's settings, "
             "--known none takes none", "known model wan2.1-t2v-14b, by config.json: rho=0.9")):
        said = told("--condition", name)
        for word in words:
            assert word in said, (word, said)
    assert "known model" not in told("--condition", 30, "--known", "none")
    said = told("", 40, "--known", "wan2.2-a14b")
    assert "known model wan2.2-a14b, as named: rho=0.9" in said and "config.json fits" not in said, said
    refuse_run(2, ["there is no \"sora\"", "wan2.1-t2v-14b", "hunyuanvideo-13b"], "--known", "sora")


def densities(path):
    with open(path) as file:
        return {(int(r["step"]), int(r["layer"]), int(r["head"])): float(r["density"]) for r in csv.DictReader(file)}


@pytest.fixture(scope="module")
def one(generate, tmp_path_factory):
    """A dense run with its profile p.csv, and q and k of its step 4 in qkv."""
    folder = tmp_path_factory.mktemp("t")
    _, run = generate(folder / "dense", *DENSE, "--profile-out", folder / "p.csv", "--dump-qkv", folder / "qkv", "--dump-steps", 4)
    assert run["profile"]["path"] == str(folder / "p.csv") and run["profile"]["samples"] == "all" and run["profile"]["mass"] == 0.95
    return folder


@pytest.fixture(scope="module")
def merged(scope, generate, one, tmp_path_factory):
    """Profiles p.csv, of two prompts, and few.csv, of one prompt by few queries."""
    folder = tmp_path_factory.mktemp("t")
    profile, first, other = folder / "p.csv", densities(one / "p.csv"), folder / "other.csv"
    generate(folder / "other", *DENSE, "--seed", 7, "--profile-out", other)
    second = densities(other)
    both = {k: max(first[k], second[k]) for k in first}
    assert first != both != second
    scope.accept("profile", one / "p.csv", other, "-o", folder / "both.csv")
    profile.write_bytes((one / "p.csv").read_bytes())
    generate(folder / "other", *DENSE, "--seed", 7, "--profile-out", profile)
    assert densities(profile) == densities(folder / "both.csv") == both, "what is higher stays"
    generate(folder / "few", "--method", "dense", "--profile-samples", 8, "--profile-out", folder / "few.csv")
    few = densities(folder / "few.csv")
    assert first != few and list(few) == list(first)
    return folder


def test_a_dense_run_has_a_profile_of_every_step_layer_and_head(scope, one, tmp_path):
    """As `scope profile` measures the same q and k."""
    found = densities(one / "p.csv")
    assert list(found) == [(s, n, h) for s in range(6) for n in range(6) for h in range(2)]
    assert 0 < min(found.values()) < max(found.values()) <= 1
    files = [f"4:{n}:{one}/qkv/step_004_layer_0{n}.safetensors" for n in range(6)]
    assert len(os.listdir(one / "qkv")) == 6
    scope.accept("profile", *files, "--samples", "all", "-o", tmp_path / "4.csv")
    assert densities(tmp_path / "4.csv") == {k: v for k, v in found.items() if k[0] == 4}


def test_files_of_svoo_say_the_same(scope, generate, merged, tmp_path):
    """Steps from 1, a density called sparsity, \\r\\n."""
    with open(tmp_path / "authors.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["Step", "Layer", "Head", "Sparsity"])
        rows.writerows((s + 1, n, h, d) for (s, n, h), d in densities(merged / "p.csv").items())
    scope.accept("profile", tmp_path / "authors.csv", "-o", tmp_path / "ours.csv")
    assert (tmp_path / "ours.csv").read_text() == (merged / "p.csv").read_text()
    profiles = {"p": merged / "p.csv", "authors": tmp_path / "authors.csv", "few": merged / "few.csv"}
    runs = {name: generate(tmp_path / name, *SVOO, "--set", f"profile={path}")[1]["density"] for name, path in profiles.items()}
    assert runs["p"] == runs["authors"] != runs["few"], runs
    latents = lambda name: (tmp_path / name / "latents.safetensors").read_bytes()
    assert latents("p") == latents("authors") != latents("few")


def test_a_profile_that_does_not_fit_is_refused(scope, refuse_run, one, tmp_path):
    """Before any work, and what is there stays."""
    new, notes, profile = tmp_path / "new.csv", tmp_path / "notes.csv", one / "p.csv"
    refuse_run(2, ["--profile-out", "--method dense"], "--profile-out", new)
    refuse_run(2, ["--profile-samples"], "--method", "dense", "--profile-samples", 0, "--profile-out", new)
    refuse_run(3, ["no such folder"], *DENSE, "--profile-out", tmp_path / "missing" / "new.csv")
    refuse_run(3, ["is of 6 steps, the run has 5"], *DENSE, "--profile-out", profile, steps=5)
    refuse_run(3, ["is of 6 steps, the run has 5"], *SVOO, "--set", f"profile={profile}", steps=5)
    notes.write_text("Step,Layer\n1,2\n")
    refuse_run(3, ["notes.csv line 1: got \"Step,Layer\", expected step,layer,head,density or Step,Layer,Head,Sparsity"], *DENSE,
               "--profile-out", notes)
    scope.refuse(3, "notes.csv line 1", "profile", notes, "-o", new)
    notes.write_text("step,layer,head,density\n0,0,0,1\n")
    scope.refuse(3, "has 1 heads, the others have 2", "profile", profile, notes, "-o", new)
