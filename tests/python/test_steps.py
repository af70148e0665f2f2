"""`scope steps` from outside: figures of tiny models without weights, their bits, their sums, and bad input."""
import json
import math
import signal
import time

import pytest

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
SMALL = ("--grid", "4x8x8", "--steps", 10, "--variants", VARIANTS)


@pytest.fixture
def model(tmp_path):
    """model(name, config): a folder with this config.json."""
    def make(name, config):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        return tmp_path / name

    return make


@pytest.fixture
def wan(model):
    return model("wan", WAN)


@pytest.fixture
def steps(scope, tmp_path):
    """What the command writes."""
    def run(*arguments):
        said = scope.accept("steps", *arguments, "--json", tmp_path / "out.json")
        out = json.load(open(tmp_path / "out.json"))
        for case in out["cases"]:
            assert case["variant"] in said, said
        return out

    return run


def near(a, b):
    return math.isclose(a, b, rel_tol=1e-9)


def expect_sums(out, schedule):
    """Every key, and sums. schedule: of each sparse variant, what its run adds up to."""
    assert set(out) == KEYS, set(out) ^ KEYS
    assert {"tflops", "cublaslt_tflops", "share"} <= set(out["linear"]) and out["linear"]["tflops"] > 0
    assert out["linear"]["mode"] == "plain" and out["linear"]["not_quantised"] == []
    assert {shape["operands"] for shape in out["linear"]["shapes"]} == {out["dtype"]}
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
    assert others[1]["density"] == 0.12 and others[1]["dense_pass_s"] is None and others[1]["parts"]["dense_attention"] == 0


def wan_run(case, dense):
    """20 % dense steps but in `fast`; with guidance each branch has a first pass."""
    prefix = 2 if case["variant"].startswith("scope") else 0
    seconds = 2 * prefix * dense + 2 * case["first_pass_s"] + (2 * (10 - prefix) - 2) * case["warm_pass_s"]
    return seconds, seconds


def hunyuan_run(case, dense):
    """With the known model's row K-means runs in the one dense step too: the sparse steps are warm then."""
    if case["variant"] == "fast":
        return (case["first_pass_s"] + 9 * case["warm_pass_s"],) * 2
    assert case["dense_pass_s"] > dense
    return dense + 9 * case["warm_pass_s"], dense + 10 * max(case["first_pass_s"], case["warm_pass_s"])


def bits(out):
    return [case["output"] for case in out["cases"]]


def test_figures_of_wan_add_up_and_its_bits_repeat(steps, wan):
    first = steps("--model", wan, *SMALL, "--commit", "abc")
    expect_sums(first, wan_run)
    assert (first["grid"], first["tokens"], first["text"], first["branches"], first["steps"]) == ([4, 8, 8], 256, 512, 2, 10)
    assert (first["host"], first["model"], first["commit"], first["dtype"], first["repeat"]) == ("native", "wan", "abc", "f32", 2)
    assert first["config"] == WAN and first["layers"] == first["model_layers"] == 3
    assert len(set(bits(first))) == 3
    assert bits(steps("--model", wan, *SMALL, "--repeat", 2)) == bits(first)
    assert not set(bits(steps("--model", wan, *SMALL, "--seed", 1))) & set(bits(first))
    rounded = steps("--model", wan, *SMALL, "--compute", "bf16")
    assert rounded["dtype"] == "bf16" and not set(bits(rounded)) & set(bits(first))


def test_fewer_layers_are_told(steps, wan):
    fewer = steps("--model", wan, *SMALL, "--layers", 2, "--repeat", 1)
    expect_sums(fewer, wan_run)
    assert (fewer["layers"], fewer["model_layers"], fewer["config"]["num_layers"], fewer["repeat"]) == (2, 3, 2, 1)


def test_figures_of_hunyuan_add_up(steps, model):
    out = steps("--model", model("hunyuan", HUNYUAN), *SMALL, "--known", "hunyuanvideo-13b")
    expect_sums(out, hunyuan_run)
    assert (out["tokens"], out["text"], out["branches"], out["known"]) == (256, 256, 1, "hunyuanvideo-13b")


def test_a_bundled_shape_is_found_by_its_name(steps):
    """With its known model's steps."""
    out = steps("--model", "wan2.1-t2v-1.3b", "--layers", 1, "--grid", "1x2x2", "--repeat", 1, "--variants", "dense")
    assert (out["model"], out["layers"], out["model_layers"], out["steps"]) == ("wan2.1-t2v-1.3b", 1, 30, 50)
    assert len(out["cases"]) == 1 and {(s["rows"], s["in"], s["out"]): s["calls"] for s in out["linear"]["shapes"]} == {
        (4, 64, 1536): 1, (4, 1536, 1536): 6, (512, 1536, 1536): 2, (4, 1536, 8960): 1, (4, 8960, 1536): 1, (4, 1536, 64): 1}


def test_bad_input_is_refused(scope, model, wan, tmp_path):
    refuse = lambda code, words, *arguments: scope.refuse(code, words, "steps", *arguments, "--json", tmp_path / "refused.json")
    refuse(3, ["there is no \"wan3\"", "wan2.1-t2v-14b", "hunyuanvideo"], "--model", "wan3")
    refuse(3, "config.json", "--model", f"{tmp_path}/nowhere/")
    other = model("other", {"_class_name": "CogVideoXTransformer3DModel"})
    refuse(3, ["_class_name", "CogVideoXTransformer3DModel", "WanTransformer3DModel"], "--model", other)
    huge = model("huge", {**WAN, "num_attention_heads": 1024, "num_layers": 1024, "added_kv_proj_dim": 1024 * 24})
    refuse(5, ["GB", "needs", "free"], "--model", huge, "--grid", "4x8x8")
    refuse(2, "--grid", "--model", wan)
    refuse(3, ["--grid", "1024"], "--model", wan, "--grid", "4x8x2000")
    refuse(2, ["--layers: got 4", "3"], "--model", wan, *SMALL, "--layers", 4)
    refuse(2, "--layers", "--model", wan, *SMALL, "--layers", 0)
    refuse(2, ["scop", "svg2"], "--model", wan, "--grid", "4x8x8", "--variants", "scop")
    refuse(3, ["fp8", "cpu", "GPU"], "--model", wan, *SMALL, "--linear", "fp8")
    refuse(3, ["fp8", "cpu", "GPU"], "--model", wan, *SMALL, "--linear", "fp8-fast")
    refuse(2, ["--linear", "fp4"], "--model", wan, *SMALL, "--linear", "fp4")
    refuse(2, "dense in all of", "--model", wan, "--grid", "4x8x8", "--variants", "scope:dense_layers=3")
    refuse(3, "density_steps", "--model", wan, "--grid", "4x8x8", "--variants", "scope:density_steps=0.5:0.3,1:0.1")
    refuse(2, "dense", "--model", wan, "--grid", "4x8x8", "--variants", "dense:kernel=portable")
    refuse(2, "--repeat", "--model", wan, *SMALL, "--repeat", 0)


def test_an_output_that_cannot_be_is_refused_before_any_work(scope, wan, tmp_path):
    for path, code in ((tmp_path / "none" / "out.json", 3), (wan / "config.json", 2)):  # no such folder; an input
        assert not scope.refuse(code, "--json", "steps", "--model", wan, *SMALL, "--json", path).stdout


def test_a_run_that_is_stopped_leaves_nothing(scope, wan, interruptible, tmp_path):
    before = scope.snapshot()
    process = scope.start("steps", "--model", wan, *SMALL, "--repeat", 1000, "--json", tmp_path / "late.json")
    process.stdout.readline()  # the title: passes have begun
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert scope.snapshot() == before
