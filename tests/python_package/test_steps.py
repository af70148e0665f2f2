"""bench/diffusers_steps.py on tiny shapes: its JSON is whole, runs are added up from passes, and no graph is compiled while it times."""
import json
import pathlib
import subprocess
import sys

import pytest

diffusers = pytest.importorskip("diffusers")
import tiny_pipelines as tiny

if tiny.DEVICE != "cpu":
    pytest.skip("the tiny shapes are the CPU's", allow_module_level=True)

SCRIPT = pathlib.Path(__file__).parents[2] / "bench/diffusers_steps.py"
KEYS = {"commit", "machine", "host", "model", "grid", "tokens", "text", "branches", "steps", "dtype", "linears", "repeat", "cases"}
CASE_KEYS = {"mode", "linear", "variant", "settings", "density", "measured_density", "repeat", "dense_pass_s", "first_pass_s",
             "warm_pass_s", "run_s", "run_range_s", "dense_layers", "times_faster", "times_faster_same_linear", "peak_bytes"}


@pytest.mark.parametrize("model, branches, dense_steps", [("wan2.1-t2v-14b", 2, 4), ("hunyuanvideo", 1, 2)])
def test_steps(tmp_path, model, branches, dense_steps):
    """Of 20 steps Wan's row has a fifth dense, HunyuanVideo's a tenth, the preset none."""
    path = tmp_path / "steps.json"
    done = subprocess.run([sys.executable, SCRIPT, "--small", "--model", model, "--steps", "20", "--json", path],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "compiled inside" not in done.stderr
    data = json.loads(path.read_text())
    assert set(data) >= KEYS and data["finished"] and data["branches"] == branches and data["tokens"] == 192
    assert [(case["mode"], case["variant"]) for case in data["cases"]] == [
        ("eager", "dense"), ("compiled", "dense"), ("compiled", "scope:target_density=0.2"), ("compiled", "fast")]
    assert all(set(case) == CASE_KEYS for case in data["cases"])
    assert all(case["repeat"] == 1 and case["run_range_s"] == [case["run_s"]] * 2 for case in data["cases"])
    eager, dense, scope, fast = data["cases"]
    for case in (eager, dense):
        assert case["run_s"] == pytest.approx(branches * 20 * case["dense_pass_s"]) and case["times_faster"] == 1
    assert scope["run_s"] == pytest.approx(branches * (dense_steps * scope["dense_pass_s"] + scope["first_pass_s"] +
                                                       (19 - dense_steps) * scope["warm_pass_s"]))
    assert fast["dense_pass_s"] is None and fast["run_s"] == pytest.approx(branches * (fast["first_pass_s"] + 19 * fast["warm_pass_s"]))
    for case, density in ((scope, 0.2), (fast, 0.12)):
        assert case["density"] == density and case["measured_density"] == pytest.approx(density, rel=0.05)
        assert case["times_faster"] == pytest.approx(dense["run_s"] / case["run_s"])


@pytest.mark.parametrize("model, branches", [("ltx-2", 2), ("minimax-h3", 1)])
def test_other_shapes(tmp_path, model, branches):
    """Another grid, without dense steps: a run is one first pass and warm ones."""
    if not hasattr(diffusers, "LTX2VideoTransformer3DModel"):
        pytest.skip("diffusers does not have it")
    path = tmp_path / "steps.json"
    done = subprocess.run([sys.executable, SCRIPT, "--small", "--model", model, "--steps", "8", "--grid", "2x8x10", "--modes", "compiled",
                           "--variants", "scope-mean:target_density=0.3+dense_steps=0", "--json", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    data = json.loads(path.read_text())
    assert data["grid"] == [2, 8, 10] and data["tokens"] == 160 and data["branches"] == branches
    _, ours = data["cases"]
    assert ours["measured_density"] == pytest.approx(0.3, rel=0.1) and ours["dense_pass_s"] is None and ours["dense_layers"] == 1
    assert ours["run_s"] == pytest.approx(branches * (ours["first_pass_s"] + 7 * ours["warm_pass_s"]))


@pytest.mark.parametrize("model, layers", [("wan2.1-t2v-14b", 30), ("hunyuanvideo", 66)])
def test_fp8_linear(tmp_path, model, layers):
    """Cases that are named, again with fp8 layers: beside bf16 dense passes, and the same layers' dense ones. A stopped one goes on."""
    path = tmp_path / "steps.json"
    command = [sys.executable, SCRIPT, "--small", "--model", model, "--steps", "4", "--linear", "bf16,fp8", "--variants", "quality,fast",
               "--fp8-variants", "fast", "--repeat", "2", "--json", path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "compiled inside" not in done.stderr
    data = json.loads(path.read_text())
    assert data["finished"] and (data["fp8_layers"], data["not_in_fp8"]) == (layers, [])
    assert [(case["mode"], case["linear"], case["variant"]) for case in data["cases"]] == [
        ("eager", "bf16", "dense"), ("compiled", "bf16", "dense"), ("compiled", "bf16", "quality"), ("compiled", "bf16", "fast"),
        ("compiled", "fp8", "dense"), ("compiled", "fp8", "fast")]
    _, bf16, quality, _, fp8, fast = data["cases"]
    assert [case["repeat"] for case in data["cases"]] == [1, 2, 2, 2, 2, 2]
    assert quality["run_range_s"][0] <= quality["run_s"] <= quality["run_range_s"][1]
    assert fp8["times_faster"] == pytest.approx(bf16["run_s"] / fp8["run_s"]) and fp8["times_faster_same_linear"] == 1
    assert fast["times_faster"] == pytest.approx(bf16["run_s"] / fast["run_s"])
    assert fast["times_faster_same_linear"] == pytest.approx(fp8["run_s"] / fast["run_s"])
    path.write_text(json.dumps({**data, "finished": False, "cases": data["cases"][:4]}))
    assert subprocess.run(command, capture_output=True).returncode == 0
    again = json.loads(path.read_text())
    assert again["finished"] and again["cases"][:4] == data["cases"][:4] and len(again["cases"]) == 6


@pytest.mark.parametrize("given, told", [(["--modes", "compiled,eager"], "--modes"), (["--linear", "fp8"], "--linear: got fp8, expected"),
                                         (["--linear", "bf16,torchao"], "refuses a machine without a GPU"), (["--layers", "1"], "--layers"),
                                         (["--fp8-variants", "svg2"], "--fp8-variants: got svg2, expected some of"),
                                         (["--modes", "eager", "--variants", "fast", "--steps", "3", "--repeat", "3"],
                                          "fast has 3 sparse steps of 3, expected at least 4"),
                                         (["--modes", "eager", "--variants", "dense"], "dense has 0 sparse steps")])
def test_refusals(given, told):
    done = subprocess.run([sys.executable, SCRIPT, "--small", *given], capture_output=True, text=True)
    assert done.returncode != 0 and told in done.stderr and "Traceback" not in done.stderr
