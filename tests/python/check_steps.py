"""`scope steps` from outside: figures of tiny models without weights, their bits, their sums, and bad input.

    check_steps.py SCOPE-COMMAND
"""
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time

SCOPE = sys.argv[1]
checks = 0
# The command leaves ignored what its parent ignores, as nohup and a shell's & do.
signal.signal(signal.SIGINT, signal.default_int_handler)

WAN = {"_class_name": "WanTransformer3DModel", "num_attention_heads": 2, "attention_head_dim": 24, "num_layers": 3, "ffn_dim": 64,
       "text_dim": 32, "in_channels": 36, "out_channels": 16, "image_dim": 20, "added_kv_proj_dim": 48, "freq_dim": 32,
       "patch_size": [1, 2, 2], "qk_norm": "rms_norm_across_heads"}
HUNYUAN = {"_class_name": "HunyuanVideoTransformer3DModel", "num_attention_heads": 2, "attention_head_dim": 24, "num_layers": 1,
           "num_single_layers": 2, "num_refiner_layers": 1, "rope_axes_dim": [4, 10, 10], "text_embed_dim": 32,
           "pooled_projection_dim": 16, "qk_norm": "rms_norm"}
KEYS = {"commit", "version", "machine", "host", "model", "config", "layers", "model_layers", "known", "grid", "tokens",
        "text", "branches", "steps", "seed", "dtype", "repeat", "linear", "cases"}
CASE = {"variant", "settings", "density", "measured_density", "dense_pass_s", "first_pass_s", "warm_pass_s", "parts", "run_s",
        "times_faster", "peak_bytes", "output"}
PARTS = {"dense_attention", "attend", "selection", "linear", "rest"}
VARIANTS = "scope:target_density=0.3,fast"


def scope(*arguments):
    global checks
    checks += 1
    return subprocess.run([SCOPE, "steps", *map(str, arguments)], capture_output=True, text=True)


def steps(*arguments):
    """What the command writes."""
    path = f"{FOLDER}/out.json"
    result = scope(*arguments, "--json", path)
    assert result.returncode == 0, f"{arguments}: {result.stdout}{result.stderr}"
    with open(path) as file:
        out = json.load(file)
    os.remove(path)
    for case in out["cases"]:
        assert case["variant"] in result.stdout, result.stdout
    return out


def refuse(code, words, *arguments):
    """The command must exit with `code` and say each of `words`, and write nothing."""
    result = scope(*arguments, "--json", f"{FOLDER}/refused.json")
    text = result.stdout + result.stderr
    assert result.returncode == code, f"{arguments}: exit {result.returncode}, expected {code}: {text}"
    for word in words:
        assert word in text, f"{arguments}: nothing about {word!r} in: {text}"
    assert not os.path.exists(f"{FOLDER}/refused.json"), arguments


def model(name, config):
    os.mkdir(f"{FOLDER}/{name}")
    with open(f"{FOLDER}/{name}/config.json", "w") as file:
        json.dump(config, file)
    return f"{FOLDER}/{name}"


def near(a, b):
    return math.isclose(a, b, rel_tol=1e-9)


def check(out, schedule):
    """Every key, and sums. schedule: of each sparse variant, what its run adds up to."""
    assert set(out) == KEYS, set(out) ^ KEYS
    assert {"tflops", "cublaslt_tflops", "share"} <= set(out["linear"]) and out["linear"]["tflops"] > 0
    assert out["linear"]["share"] is None  # the CPU has no cuBLASLt
    dense, *others = out["cases"]
    assert dense["variant"] == "dense" and [case["variant"] for case in others] == VARIANTS.split(",")
    for case in out["cases"]:
        assert set(case) == CASE, set(case) ^ CASE
        assert set(case["parts"]) == PARTS and all(seconds >= 0 for seconds in case["parts"].values()), case["parts"]
        whole = case["dense_pass_s"] if case is dense else case["warm_pass_s"]
        assert near(sum(case["parts"].values()), whole), case
        assert case["parts"]["linear"] > 0 and case["parts"]["rest"] > 0
        assert near(case["times_faster"], dense["run_s"] / case["run_s"])
        assert len(case["output"]) == 16
    passes = out["steps"] * out["branches"]
    assert near(dense["run_s"], passes * dense["dense_pass_s"])
    assert dense["first_pass_s"] is dense["warm_pass_s"] is dense["density"] is dense["measured_density"] is None
    assert dense["parts"]["attend"] == dense["parts"]["selection"] == 0 < dense["parts"]["dense_attention"]
    for case in others:
        assert case["parts"]["attend"] > 0 and case["parts"]["selection"] > 0
        assert abs(case["measured_density"] - case["density"]) < 0.02, case
        low, high = schedule(case, dense["dense_pass_s"])
        assert low * (1 - 1e-9) <= case["run_s"] <= high * (1 + 1e-9), (case, low, high)
    assert others[0]["density"] == 0.3 and others[0]["dense_pass_s"] is not None and others[0]["parts"]["dense_attention"] > 0
    assert others[1]["density"] == 0.18 and others[1]["dense_pass_s"] is None and others[1]["parts"]["dense_attention"] == 0


with tempfile.TemporaryDirectory() as FOLDER:
    wan, hunyuan = model("wan", WAN), model("hunyuan", HUNYUAN)
    small = ("--grid", "4x8x8", "--steps", 10, "--variants", VARIANTS)

    def wan_run(case, dense):
        """20 % dense steps but in `fast`; with guidance each branch has a first pass."""
        prefix = 2 if case["variant"].startswith("scope") else 0
        seconds = 2 * prefix * dense + 2 * case["first_pass_s"] + (2 * (10 - prefix) - 2) * case["warm_pass_s"]
        return seconds, seconds

    first = steps("--model", wan, *small, "--commit", "abc")
    check(first, wan_run)
    assert (first["grid"], first["tokens"], first["text"], first["branches"], first["steps"]) == ([4, 8, 8], 256, 512, 2, 10)
    assert (first["host"], first["model"], first["commit"], first["dtype"], first["repeat"]) == ("native", "wan", "abc", "f32", 2)
    assert first["config"] == WAN and first["layers"] == first["model_layers"] == 3

    bits = lambda out: [case["output"] for case in out["cases"]]
    assert len(set(bits(first))) == 3
    assert bits(steps("--model", wan, *small, "--repeat", 2)) == bits(first)
    assert not set(bits(steps("--model", wan, *small, "--seed", 1))) & set(bits(first))
    rounded = steps("--model", wan, *small, "--compute", "bf16")
    assert rounded["dtype"] == "bf16" and not set(bits(rounded)) & set(bits(first))
    fewer = steps("--model", wan, *small, "--layers", 2, "--repeat", 1)
    check(fewer, wan_run)
    assert (fewer["layers"], fewer["model_layers"], fewer["config"]["num_layers"], fewer["repeat"]) == (2, 3, 2, 1)

    def hunyuan_run(case, dense):
        """With the known model's row K-means runs in the one dense step too: the sparse steps are warm then."""
        if case["variant"] == "fast":
            return (case["first_pass_s"] + 9 * case["warm_pass_s"],) * 2
        assert case["dense_pass_s"] > dense
        return dense + 9 * case["warm_pass_s"], dense + 10 * max(case["first_pass_s"], case["warm_pass_s"])

    out = steps("--model", hunyuan, *small, "--known", "hunyuanvideo-13b")
    check(out, hunyuan_run)
    assert (out["tokens"], out["text"], out["branches"], out["known"]) == (256, 256, 1, "hunyuanvideo-13b")

    # A bundled shape, found by its name, with its known model's steps.
    out = steps("--model", "wan2.1-t2v-1.3b", "--layers", 1, "--grid", "1x2x2", "--repeat", 1, "--variants", "dense")
    assert (out["model"], out["layers"], out["model_layers"], out["steps"]) == ("wan2.1-t2v-1.3b", 1, 30, 50)
    assert len(out["cases"]) == 1 and {(s["rows"], s["in"], s["out"]): s["calls"] for s in out["linear"]["shapes"]} == {
        (4, 64, 1536): 1, (4, 1536, 1536): 6, (512, 1536, 1536): 2, (4, 1536, 8960): 1, (4, 8960, 1536): 1, (4, 1536, 64): 1}

    refuse(3, ["there is no \"wan3\"", "wan2.1-t2v-14b", "hunyuanvideo"], "--model", "wan3")
    refuse(3, ["config.json"], "--model", f"{FOLDER}/nowhere/")
    other = model("other", {"_class_name": "CogVideoXTransformer3DModel"})
    refuse(3, ["_class_name", "CogVideoXTransformer3DModel", "WanTransformer3DModel"], "--model", other)
    huge = model("huge", {**WAN, "num_attention_heads": 1024, "num_layers": 1024, "added_kv_proj_dim": 1024 * 24})
    refuse(5, ["GB", "needs", "free"], "--model", huge, "--grid", "4x8x8")
    refuse(2, ["--grid"], "--model", wan)
    refuse(3, ["--grid", "1024"], "--model", wan, "--grid", "4x8x2000")
    refuse(2, ["--layers: got 4", "3"], "--model", wan, *small, "--layers", 4)
    refuse(2, ["--layers"], "--model", wan, *small, "--layers", 0)
    refuse(2, ["scop", "svg2"], "--model", wan, "--grid", "4x8x8", "--variants", "scop")
    refuse(2, ["dense in all of"], "--model", wan, "--grid", "4x8x8", "--variants", "scope:dense_layers=3")
    refuse(3, ["density_steps"], "--model", wan, "--grid", "4x8x8", "--variants", "scope:density_steps=0.5:0.3,1:0.1")
    refuse(2, ["dense"], "--model", wan, "--grid", "4x8x8", "--variants", "dense:kernel=portable")
    refuse(2, ["--repeat"], "--model", wan, *small, "--repeat", 0)
    for path, code in ((f"{FOLDER}/none/out.json", 3), (f"{wan}/config.json", 2)):  # no such folder; an input
        result = scope("--model", wan, *small, "--json", path)
        assert result.returncode == code and "--json" in result.stderr and not result.stdout, result

    # Stopped, it leaves nothing.
    before = sorted(os.listdir(FOLDER))
    process = subprocess.Popen([SCOPE, "steps", "--model", wan, *map(str, small), "--repeat", "1000", "--json", f"{FOLDER}/late.json"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()  # the title: passes have begun
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert sorted(os.listdir(FOLDER)) == before

print(f"{checks} checks of scope steps")
