"""Baselines as their authors run them, from outside: `scope generate --known`, profiles of a dense run, and SVOO's own files.

    check_known.py SCOPE-COMMAND REPOSITORY
"""
import csv
import json
import os
import struct
import subprocess
import sys
import tempfile
import zlib

SCOPE, REPOSITORY = sys.argv[1:]
checks = 0


def scope(*arguments):
    global checks
    checks += 1
    return subprocess.run([SCOPE, *map(str, arguments)], capture_output=True, text=True)


def accept(*arguments):
    result = scope(*arguments)
    assert result.returncode == 0, f"{arguments}: {result.stdout}{result.stderr}"
    return result.stdout


def refuse(code, words, *arguments):
    """The command must exit with `code` and say each of `words`, and leave no run behind."""
    result = scope(*arguments)
    text = result.stdout + result.stderr
    assert result.returncode == code, f"{arguments}: exit {result.returncode}, expected {code}: {text}"
    for word in words:
        assert word in text, f"{arguments}: nothing about {word!r} in: {text}"
    assert not os.path.exists(f"{FOLDER}/refused"), arguments
    return text


def png(path, height, width):
    rows = b"".join(b"\0" + bytes((7 * x + 3 * y) % 256 for x in range(3 * width)) for y in range(height))
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)) +
                   chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def densities(path):
    with open(path) as file:
        return {(int(r["step"]), int(r["layer"]), int(r["head"])): float(r["density"]) for r in csv.DictReader(file)}


with tempfile.TemporaryDirectory() as FOLDER:
    png(f"{FOLDER}/first.png", 16, 24)
    small = ("--grid", "5x4x6", "--image", f"{FOLDER}/first.png", "--steps")
    counts = ("--set", "groups=8", "--set", "codes=20")

    def generate(name, *arguments):
        said = accept("generate", "-o", f"{FOLDER}/{name}", *small, 6, *arguments)
        return said, json.load(open(f"{FOLDER}/{name}/run.json"))

    def refuse_run(code, words, *arguments, steps=6):
        return refuse(code, words, "generate", "-o", f"{FOLDER}/refused", *small, steps, *arguments)

    # A row that is named sets what it has for the method, and says so.
    said, run = generate("svoo", "--known", "wan2.1-i2v-14b", "--method", "svoo", *counts)
    row = {"rho": "0.9", "profile_low": "0.1", "profile_high": "0.15", "dense_steps": "0.2", "reuse_start": "9", "reuse_interval": "20",
           "reuse_steps": "40", "layers": "40"}
    assert run["known"] == {"model": "wan2.1-i2v-14b", "settings": row}, run["known"]
    assert {k: run["settings"][k] for k in row} == row
    assert "known model wan2.1-i2v-14b, as named, though it has 40 layers x 40 heads and config.json 6 x 2: " + \
        " ".join(f"{k}={v}" for k, v in row.items()) in said, said
    _, run = generate("svg2", "--known", "wan2.1-i2v-14b", "--method", "svg2", *counts)
    assert [all(c["dense"] for c in step) for step in run["layers"]] == [True] * 2 + [False] * 4, "0.35 of 6 steps"
    _, run = generate("scope", "--known", "wan2.1-i2v-14b")
    assert [all(c["dense"] for c in step) for step in run["layers"]] == [True] + [False] * 5, "0.2 of 6 steps"
    assert run["known"]["settings"] == {"rho": "0.9", "dense_steps": "0.2", "warm_prefix": "no", "layers": "40"}

    # What is given stands over it, in the method or by itself.
    said, run = generate("given", "--known", "wan2.1-i2v-14b", "--method", "svg2:groups=8", "--set", "dense_steps=0.5", "--set", "codes=20")
    assert run["settings"]["dense_steps"] == "0.5" and run["settings"]["groups"] == "8"
    assert run["known"]["settings"]["dense_steps"] == "0.35"
    assert "groups=8 (given; its own: 300) dense_steps=0.5 (given; its own: 0.35) warm_prefix=no" in said, said

    # Without a name: nothing for a model whose shape no row has; otherwise the first row of its shape, and why.
    for arguments in ((), ("--known", "none")):
        said, run = generate("plain", *arguments)
        assert run["known"] is None and "known" not in said and run["settings"]["layers"] == "0", said
    config = json.load(open(f"{REPOSITORY}/models/tiny-wan/config.json"))
    for name, layers, heads, channels in ((30, 30, 12, 28), (40, 40, 40, 28), ("text", 40, 40, 12)):
        os.mkdir(f"{FOLDER}/{name}")
        json.dump({**config, "num_layers": layers, "num_attention_heads": heads, "in_channels": channels},
                  open(f"{FOLDER}/{name}/config.json", "w"))
    folder = lambda name: ("generate", "-o", f"{FOLDER}/refused", "--model", f"{FOLDER}/{name}", "--grid", "5x4x6", "--method", "svoo")
    # The config has channels beside the noise, as models from images do.
    refuse(2, ["config.json fits wan2.1-t2v-1.3b: 30 layers x 12 heads of 128 channels, from text, one transformer; none of this shape is "
               "from an image", "--known none takes none", "known model wan2.1-t2v-1.3b, by config.json: rho=0.9", "reuse_interval=20",
               "--condition"], *folder(30))
    refuse(2, ["config.json fits wan2.1-i2v-14b: 40 layers x 40 heads of 128 channels, from an image, one transformer;",
               "known model wan2.1-i2v-14b, by config.json: rho=0.9", "--condition"], *folder(40))
    refuse(2, ["config.json fits wan2.1-t2v-14b: 40 layers x 40 heads of 128 channels, from text, one transformer; wan2.1-14b-480p, "
               "wan2.1-14b-distilled fit as well, later in the table; --known NAME takes another's settings, --known none takes none",
               "known model wan2.1-t2v-14b, by config.json: rho=0.9", "--condition"], *folder("text"))
    assert "known model" not in refuse(2, ["--condition"], *folder(30), "--known", "none")
    assert "config.json fits" not in refuse(2, ["known model wan2.2-a14b, as named: rho=0.9"], *folder(40), "--known", "wan2.2-a14b")
    refuse_run(2, ["there is no \"sora\"", "wan2.1-t2v-14b", "hunyuanvideo-13b"], "--known", "sora")

    # A profile of a dense run: every step, layer and head, as `scope profile` measures the same q and k.
    dense = ("--method", "dense", "--profile-samples", "all")
    profile = f"{FOLDER}/p.csv"
    _, run = generate("dense", *dense, "--profile-out", profile, "--dump-qkv", f"{FOLDER}/qkv", "--dump-steps", "4")
    assert run["profile"]["path"] == profile and run["profile"]["samples"] == "all" and run["profile"]["mass"] == 0.95
    one = densities(profile)
    assert list(one) == [(s, n, h) for s in range(6) for n in range(6) for h in range(2)] and 0 < min(one.values()) < max(one.values()) <= 1
    files = [f"4:{n}:{FOLDER}/qkv/step_004_layer_0{n}.safetensors" for n in range(6)]
    assert len(os.listdir(f"{FOLDER}/qkv")) == 6
    accept("profile", *files, "--samples", "all", "-o", f"{FOLDER}/4.csv")
    assert densities(f"{FOLDER}/4.csv") == {k: v for k, v in one.items() if k[0] == 4}
    # Another prompt into the same file, or merged: what is higher stays.
    generate("other", *dense, "--seed", 7, "--profile-out", f"{FOLDER}/other.csv")
    two = densities(f"{FOLDER}/other.csv")
    both = {k: max(one[k], two[k]) for k in one}
    assert one != both != two
    accept("profile", profile, f"{FOLDER}/other.csv", "-o", f"{FOLDER}/both.csv")
    generate("other", *dense, "--seed", 7, "--profile-out", profile)
    assert densities(profile) == densities(f"{FOLDER}/both.csv") == both
    generate("few", "--method", "dense", "--profile-samples", 8, "--profile-out", f"{FOLDER}/few.csv")
    few = densities(f"{FOLDER}/few.csv")
    assert one != few and list(few) == list(one)

    # SVOO's own files say the same: steps from 1, a density called sparsity, \r\n.
    with open(f"{FOLDER}/authors.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["Step", "Layer", "Head", "Sparsity"])
        rows.writerows((s + 1, n, h, d) for (s, n, h), d in densities(profile).items())
    accept("profile", f"{FOLDER}/authors.csv", "-o", f"{FOLDER}/ours.csv")
    assert open(f"{FOLDER}/ours.csv").read() == open(profile).read()
    svoo = ("--method", "svoo", *counts, "--set", "profile_low=0.05", "--set", "profile_high=1", "--set", "rho=0.3", "--latents")
    runs = {name: generate(name, *svoo, "--set", f"profile={FOLDER}/{name}.csv")[1]["density"] for name in ("p", "authors", "few")}
    assert runs["p"] == runs["authors"] != runs["few"], runs
    latents = lambda name: open(f"{FOLDER}/{name}/latents.safetensors", "rb").read()
    assert latents("p") == latents("authors") != latents("few")

    # What does not fit is refused before any work, and what is there stays.
    refuse_run(2, ["--profile-out", "--method dense"], "--profile-out", f"{FOLDER}/new.csv")
    refuse_run(2, ["--profile-samples"], "--method", "dense", "--profile-samples", "0", "--profile-out", f"{FOLDER}/new.csv")
    refuse_run(3, ["no such folder"], *dense, "--profile-out", f"{FOLDER}/missing/new.csv")
    refuse_run(3, ["is of 6 steps, the run has 5"], *dense, "--profile-out", profile, steps=5)
    refuse_run(3, ["is of 6 steps, the run has 5"], *svoo, "--set", f"profile={profile}", steps=5)
    open(f"{FOLDER}/notes.csv", "w").write("Step,Layer\n1,2\n")
    refuse_run(3, ["notes.csv line 1: got \"Step,Layer\", expected step,layer,head,density or Step,Layer,Head,Sparsity"], *dense,
               "--profile-out", f"{FOLDER}/notes.csv")
    assert open(f"{FOLDER}/notes.csv").read() == "Step,Layer\n1,2\n" and not os.path.exists(f"{FOLDER}/new.csv")
    refuse(3, ["notes.csv line 1"], "profile", f"{FOLDER}/notes.csv", "-o", f"{FOLDER}/new.csv")
    open(f"{FOLDER}/notes.csv", "w").write("step,layer,head,density\n0,0,0,1\n")
    refuse(3, ["has 1 heads, the others have 2"], "profile", profile, f"{FOLDER}/notes.csv", "-o", f"{FOLDER}/new.csv")
print(f"{checks} commands behaved")
