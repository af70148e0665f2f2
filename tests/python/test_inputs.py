"""Options that contradict one another or do nothing, files that are none, numbers out of bounds: refused, in words."""
import json
import os
import shutil
import struct
import types

import numpy as np
import pytest

import pngs
import tensors

SETS = json.dumps([list(range(0, 32, 2)), list(range(1, 32, 2))])
PROFILE = "step,layer,head,density\n4,3,0,0.5\n4,3,1,0.5\n"
PLACE = ("--layer", 3, "--step", 4, "--steps", 9)


@pytest.fixture(scope="module")
def good(scope, tmp_path_factory):
    """A sound input: its path, its tensors and its metadata."""
    path = tmp_path_factory.mktemp("t") / "good.safetensors"
    scope.accept("make-qkv", "--grid", "3x4x5", "--rope", "12,10,10", "--heads", 2, "-o", path)
    arrays, metadata = tensors.load(path)
    return types.SimpleNamespace(path=path, arrays=arrays, meta=metadata)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.safetensors"


@pytest.fixture
def bad(tmp_path):
    return tmp_path / "bad.safetensors"


@pytest.fixture
def base(good, out):
    return ("attend", good.path, "-o", out)


@pytest.fixture
def compare(good):
    return ("compare", good.path, "--samples", 4, "--repeat", 1, "--density", 0.3)


@pytest.fixture
def generate(clip, tmp_path):
    return ("generate", "-o", tmp_path / "run", "--steps", 1, "--grid", "5x4x6", "--image", clip("one", range(2)) / "frame_000.png")


@pytest.fixture
def clip(tmp_path):
    """clip(name, numbers): a folder of frames with these numbers, which decide how they look."""
    def make(name, numbers):
        (tmp_path / name).mkdir()
        for number in numbers:
            pngs.write(tmp_path / name / f"frame_{number:03}.png", pngs.slopes(shade=number))
        return tmp_path / name

    return make


def test_an_input_is_not_given_twice(scope, base, tmp_path):
    for name in "qkv":
        scope.refuse(2, [f"--{name}", "good.safetensors"], *base, f"--{name}", tmp_path / f"{name}.npy")


def test_text_is_given_by_the_option_or_by_the_file(scope, good, base, bad, out):
    text = ("-o", out, "--grid", "3x4x4", "--text", 12)
    scope.accept(*base[:2], *text)
    for name in ("keep", "dense_queries"):
        tensors.save(bad, good.arrays | {name: np.array([[1, 0]], np.uint32)}, good.meta)
        scope.refuse(2, ["--text", name], "attend", bad, *text)
    for name in ("q_lengths", "k_lengths"):
        tensors.save(bad, good.arrays | {name: np.array([59], np.int64)}, good.meta)
        scope.refuse(2, ["--text", name, "padding"], "attend", bad, *text)
        tensors.save(bad, good.arrays | {name: np.array([60], np.int64)}, good.meta)
        scope.accept("attend", bad, *text)


def test_subspaces_are_for_methods_that_read_them(scope, good, base, bad, out):
    scope.accept(*base, "--subspaces", SETS)
    for method in ("svg2", "scope-exact", "sparge", "svoo", "dense"):
        scope.refuse(2, ["--subspaces", method], *base, "--subspaces", SETS, "--method", method)
    scope.refuse(2, ["--subspaces", "partition"], *base, "--subspaces", SETS, "--set", "partition=even:4")
    scope.refuse(2, ["--subspaces", "--rope"], *base, "--subspaces", SETS, "--rope", "12,10,10")
    tensors.save(bad, good.arrays, {**good.meta, "subspaces": SETS})
    scope.refuse(2, ["subspaces", "partition", "bad.safetensors"], "attend", bad, "-o", out, "--method", "scope:partition=even:4")
    scope.accept("attend", bad, "-o", out, "--method", "svg2:partition=even:1")  # which reads no subspaces


# (method, setting, what decides that it is idle and must be in the message)
@pytest.mark.parametrize("method,setting,decides", (
    ("scope", "q_block=8", "group is kmeans"), ("sparge", "groups=8", "group is blocks"),
    ("scope-exact", "codes=8", "proxy is exact"),
    ("scope-exact", "partition=even:2", "proxy is exact"), ("scope-exact", "encode=blocks", "proxy is exact"),
    ("scope", "k_block=8", "encode is kmeans"), ("sparge", "codes=8", "encode is blocks"),
    ("sparge", "first_sample=1", "group is blocks"),
    ("sparge", "seed=3", "group is blocks"), ("svoo", "first_iterations=9", "group is cocluster"),
    ("scope:rule=target", "rho=0.5", "rule is target"),
    ("scope", "density=0.3", "rule is online"), ("sparge", "rho=0.5", "rule is blocks_topk"),
    ("scope:rule=top_p", "alpha=0.3", "rule is top_p"),
    ("scope", "similarity=0.3", "rule is online"), ("svg2", "tail_weight=0.3", "tail is none"),
    ("svoo", "profile_low=0.3", "profile is none"),
    ("scope", "layers=30", "profile is none"), ("scope", "dense_layers=2", "no layer"), ("scope", "dense_steps=0.5", "no step"),
    ("scope", "dense_last_steps=0.5", "no step"), ("scope", "warm_prefix=yes", "no step"), ("scope", "reuse_interval=3", "no step"),
    ("scope", "reuse_start=3", "reuse_interval is 1"), ("scope", "state_dtype=bf16", "no state"),
    ("scope", "iterations=9", "no state"),
    ("scope", "workspace_limit=9", "no device"), ("dense", "rho=0.5", "method dense"), ("dense", "groups=5", "method dense")))
def test_settings_that_others_make_idle_are_refused(scope, base, method, setting, decides):
    name = setting.split("=")[0]
    scope.refuse(2, ["--set", name, decides], *base, "--method", method, "--set", setting)
    both = f"{method}{'+' if ':' in method else ':'}{setting}"
    scope.refuse(2, [name, decides], *base, "--method", both)


def test_settings_that_count_are_accepted(scope, base, tmp_path):
    for more in (("--method", "svoo", "--set", "first_iterations=2"),  # what it has anyway
                 (*PLACE, "--set", "dense_layers=2", "--set", "dense_steps=0.1"), ("--set", "rule=target", "--set", "density=0.3"),
                 ("--state", tmp_path / "new.bin", "--set", "iterations=3", "--set", "state_dtype=bf16"),
                 ("--method", "dense", "--set", "check_finite=no")):
        scope.accept(*base, *more)


def test_a_setting_is_not_given_twice(scope, base):
    scope.refuse(2, ["rho", "target_density is 0.2"], *base, "--target-density", "0.2", "--set", "rho=0.5")
    scope.refuse(2, ["rho", "density_steps is 0.5:0.3,1:0.1"], *base, "--set", "density_steps=0.5:0.3,1:0.1", "--set", "rho=0.5")
    scope.refuse(2, ["density_steps", "target_density is 0.2"], *base, "--set", "density_steps=1:0.1", "--target-density", "0.2")
    scope.refuse(2, ["density_steps", "method dense"], *base, "--set", "density_steps=1:0.1", "--method", "dense")
    scope.refuse(2, ["rho", "twice", "0.8", "0.7"], *base, "--set", "rho=0.8", "--set", "rho=0.7")
    scope.refuse(2, ["rho", "twice", "0.8", "0.7"], *base, "--method", "scope:rho=0.8", "--set", "rho=0.7")
    scope.refuse(2, ["target_density", "0.3", "0.2"], *base, "--set", "target_density=0.3", "--target-density", "0.2")


def test_places_are_for_methods_that_have_a_schedule(scope, base, tmp_path):
    scope.refuse(2, ["--layer", "method dense"], *base, "--method", "dense", "--layer", 3)
    scope.refuse(2, ["--step", "method dense"], *base, "--method", "dense", "--step", 3, "--steps", 9)
    (tmp_path / "p.csv").write_text(PROFILE)
    scope.refuse(2, ["profile", "no layer"], *base, "--method", "svoo", "--set", f"profile={tmp_path}/p.csv")


def test_machines_are_for_commands_that_choose_one(scope, good, base, out):
    scope.refuse(2, ["--device", "--backend cpu"], *base, "--device", 1)
    scope.refuse(2, "--backend", "make-qkv", "--backend", "cpu", "-o", out)
    scope.refuse(2, "--instruction-set", "make-qkv", "--instruction-set", "avx2", "-o", out)
    scope.refuse(2, "--backend", "doctor", "--backend", "cpu")
    scope.refuse(2, "--device", "doctor", "--device", 0)
    scope.refuse(2, "--backend", "profile", f"1:2:{good.path}", "--backend", "cpu", "-o", out)


def test_compare_refuses_contradictions(scope, compare, tmp_path):
    scope.refuse(2, ["target_density", "0.5", "0.3"], *compare, "--methods", "scope:target_density=0.5")
    scope.refuse(2, ["rho", "target_density is 0.3"], *compare, "--methods", "scope:rho=0.5")
    scope.refuse(2, ["--density", "density_steps=0.5:0.2,1:0.1"], *compare, "--methods", "svg2:codes=20,scope:density_steps=0.5:0.2,1:0.1")
    scope.refuse(2, ["dense_steps", "no step"], *compare, "--methods", "scope:dense_steps=0.1")
    scope.refuse(2, ["--subspaces", "svg2,sparge"], *compare, "--methods", "svg2,sparge", "--subspaces", SETS)
    scope.refuse(2, ["--subspaces", "partition", "scope:partition=even:2"], *compare, "--methods", "svg2,scope:partition=even:2",
                 "--subspaces", SETS)
    scope.accept(*compare, "--methods", "scope,svg2:codes=20", "--subspaces", SETS)
    for name in ("p.csv", "a.csv"):
        (tmp_path / name).write_text(PROFILE)
    scope.refuse(2, ["profile", "a.csv", "p.csv"], *compare, *PLACE, "--methods", f"svoo:profile={tmp_path}/p.csv", "--profile",
                 tmp_path / "a.csv")


def test_inspect_and_bench_refuse_contradictions(scope, good, tmp_path):
    scope.refuse(2, ["q_block", "group is kmeans"], "inspect", good.path, "-o", tmp_path / "look", "--scoring", "scope:q_block=4")
    scope.refuse(2, ["codes", "proxy is exact"], "inspect", good.path, "-o", tmp_path / "look", "--method", "scope-exact:codes=4")
    scope.refuse(2, ["rho", "target_density is 0.2"], "bench", "--grid", "2x4x4", "--set", "rho=0.5")
    for flag, value in (("--grid", "2x4x4"), ("--heads", "1"), ("--density", "0.2"), ("--sweep", None)):
        scope.refuse(2, [flag, "--suite"], "bench", "--suite", flag, *([value] if value else []))
    scope.refuse(2, ["--grid", "--sweep"], "bench", "--sweep", "--grid", "2x4x4")
    scope.refuse(2, ["--commit", "--json"], "bench", "--grid", "2x4x4", "--commit", "abc")


def test_commands_of_videos_refuse_contradictions(scope, good, clip, generate, bad, tmp_path):
    scope.refuse(2, ["--commit", "--output"], "ablate", "--commit", "abc")
    scope.refuse(2, ["rho", "target_density is 0.2"], "ablate", "--variants", "scope:rho=0.5")
    one = clip("other", range(2))
    scope.refuse(2, ["--head", "--qkv"], "report", one, "--head", 0, "-o", tmp_path / "r.html")
    scope.refuse(2, ["--skip", "second clip"], "report", one, "--skip", 1, "-o", tmp_path / "r.html")
    for flag in ("--dump-steps", "--dump-layers"):
        scope.refuse(2, [flag, "--dump-qkv"], *generate, flag, 0)
    scope.refuse(2, ["--noise", "--seed"], *generate, "--noise", good.path, "--seed", 3)
    scope.refuse(2, ["q_block", "group is kmeans"], *generate, "--set", "q_block=8")
    scope.refuse(2, ["target_density", "0.3", "0.2"], *generate, "--set", "target_density=0.3", "--target-density", "0.2")
    tensors.save(bad, {"prompt_embeds": np.zeros((8, 32), np.float32)})
    scope.refuse(3, ["--example", "one sample"], *generate, "--condition", bad, "--example", 1)


@pytest.fixture
def instead(scope, tmp_path):
    """instead(path, *arguments): the command is refused while a pipe, and an endless file, stand at the path."""
    def refuse(path, *arguments):
        kept = tmp_path / "kept"
        if os.path.exists(path):
            os.rename(path, kept)
        for source in (pipe, zeros):
            os.symlink(source, path)
            scope.refuse(3, [str(path), "not a regular file"], *arguments)
            os.remove(path)
        if os.path.exists(kept):
            os.rename(kept, path)

    pipe, zeros = tmp_path / "pipe", tmp_path / "zeros"
    os.mkfifo(pipe)
    os.symlink("/dev/zero", zeros)
    return refuse


@pytest.fixture
def x(tmp_path):
    """A path where nothing is."""
    return tmp_path / "x"


def test_tensors_and_profiles_are_read_from_plain_files(good, base, out, instead, x):
    instead(x, *base, "--method", "svoo", "--set", f"profile={x}", *PLACE)
    instead(x, "compare", good.path, "--methods", "svoo", "--profile", x, *PLACE)
    instead(x, "attend", x, "-o", out)
    instead(x, "attend", "--q", x, "--k", x, "--v", x, "-o", out)
    instead(x, *base, "--state", x)
    instead(x, "profile", f"1:2:{x}", "-o", out)


def test_clips_are_read_from_plain_files(clip, instead, tmp_path):
    a, b = clip("a", range(2)), clip("b", range(2))
    instead(b / "frame_001.png", "evaluate", a, b)
    instead(b / "run.json", "report", a, b, "-o", tmp_path / "r.html")


def test_models_and_conditions_are_read_from_plain_files(data, instead, x, tmp_path):
    source = data / "video" / "i2v_image_branch"
    model, case = tmp_path / "model", source / "case.safetensors"
    shutil.copytree(source, model)
    generate = ("generate", "-o", tmp_path / "run", "--model", model, "--grid", "3x4x5", "--steps", 1)
    for name in ("config.json", "scope.json", "diffusion_pytorch_model.safetensors"):
        instead(model / name, *generate, "--condition", case)
    instead(x, *generate, "--condition", x)
    instead(x, *generate, "--condition", case, "--noise", x)
    instead(x, "generate", "-o", tmp_path / "run", "--steps", 1, "--image", x)


def test_a_profile_that_is_too_long_or_none_is_refused(scope, base, x):
    svoo = (*base, "--method", "svoo", *PLACE, "--set", f"profile={x}")
    x.touch()
    os.truncate(x, (64 << 20) + 1)
    scope.refuse(3, [str(x), "at most 67108864"], *svoo)
    for content, quoted in ((b"step,layer,density\n1,2,0.5\n", '"step,layer,density"'),
                            (b"\x1b[31m\xff" + 200 * b"y" + b"\n", '"?[31m?yyy'), (b"", '""')):
        x.write_bytes(content)
        scope.refuse(3, [str(x), "line 1", f"got {quoted}"], *svoo)


def test_a_run_json_that_is_too_deep_or_too_long_is_refused(scope, clip, tmp_path):
    a, b = clip("a", range(2)), clip("b", range(2))
    deep = b / "run.json"
    deep.write_text('{"x":' + 200000 * "[" + 200000 * "]" + "}")
    scope.refuse(3, [str(deep), "nested"], "report", a, b, "-o", tmp_path / "r.html")
    os.truncate(deep, (64 << 20) + 1)
    scope.refuse(3, [str(deep), "at most 67108864"], "evaluate", a, b)


@pytest.mark.parametrize("dtype,size", (("f32", 4), ("bf16", 2)))
def test_a_state_with_absurd_centroids_is_refused(scope, base, tmp_path, dtype, size):
    state = tmp_path / f"{dtype}.bin"
    base = (*base, "--state", state, "--set", "groups=5", "--set", "codes=7", "--set", f"state_dtype={dtype}")
    scope.accept(*base)
    good = state.read_bytes()
    up = lambda n: -(-n // 64) * 64
    centroids = up(64 + 16)
    codebooks = up(centroids + 2 * 5 * 32 * size)
    for value in (float("nan"), float("inf"), -float("inf"), -2e18, 3e38):
        bits = struct.pack("<f", value)
        for name, at in (("centroids", centroids), ("centroids", centroids + (2 * 5 * 32 - 1) * size), ("codebooks", codebooks),
                         ("codebooks", codebooks + (2 * 7 * 32 - 1) * size)):
            state.write_bytes(good[:at] + (bits if size == 4 else bits[2:]) + good[at + size:])
            before = state.read_bytes()
            scope.refuse(3, [str(state), name, "1.01e+18"], *base)
            assert state.read_bytes() == before
    state.write_bytes(good)
    scope.accept(*base)


def test_numbers_out_of_bounds_are_refused_in_words(scope, good, base, out, tmp_path):
    look, run = tmp_path / "look", tmp_path / "run"
    threads = [base, ("compare", good.path), ("make-qkv", "-o", out), ("evaluate", "a", "b"),
               ("report", "a", "-o", out), ("doctor",),
               ("profile", f"1:2:{good.path}", "-o", out), ("bench",), ("demo",), ("inspect", good.path, "-o", look),
               ("generate", "-o", run), ("ablate",)]
    cases = [(command, "--threads", value, "from 0 to 1024") for command in threads
             for value in ("-1", "99999", "1025", "2.5", "x", "0x10", "")]
    cases += [(("make-qkv", "-o", out), "--seed", value, "from 0 to 2^63 - 1") for value in ("-1", "99999999999999999999", "1e3")]
    cases += [(command, "--seed", "-1", "from 0 to") for command in (("generate", "-o", run), ("bench",))]
    cases += [(("make-qkv", "-o", out), "--heads", "0", "from 1 to 65536"), (("bench",), "--heads", "-3", "from 1 to 65536"),
              (("demo",), "--heads", "0", "from 1 to"),
              (("demo",), "--samples", "0", "from 1 to"), (base, "--layer", "-1", "from 0 to 100000"),
              (base, "--step", "-1", "from 0 to 1000000000"),
              (base, "--steps", "0", "from 1 to 1000000000"), (base, "--quality", "-1", "from 0 to"), (base, "--text", "-1", "from 0 to"),
              (base, "--text", "9223372036854775807", "from 0 to"), (base, "--device", "-1", "from 0 to 1023"),
              (("compare", good.path), "--layer", "-1", "from 0 to 100000"),
              (("compare", good.path), "--repeat", "0", "from 1 to 1000"), (("bench",), "--repeat", "0", "from 1 to 1000"),
              (("bench",), "--quality", "-1", "from 0 to"),
              (("evaluate", "a", "b"), "--skip", "-1", "from 0 to"), (("report", "a", "-o", out), "--skip", "-1", "from 0 to"),
              (("report", "a", "-o", out), "--fps", "0", "above 0.01 and up to 120"),
              (("report", "a", "-o", out), "--fps", "nan", "above 0.01"),
              (("profile", f"1:2:{good.path}", "-o", out), "--mass", "1.5", "above 0 and up to 1"),
              (("inspect", good.path, "-o", look), "--head", "-1", "from 0 to"),
              (("inspect", good.path, "-o", look), "--repeat", "0", "from 1 to"), (("ablate",), "--seeds", "0", "from 1 to 10000"),
              (("ablate",), "--steps", "0", "from 1 to 100000")]
    cases += [(("generate", "-o", run), flag, value, "above 0 and up to 1000")
              for flag in ("--shift", "--guidance") for value in ("0", "-1", "1001", "nan", "inf", "1e999")]
    cases += [(("generate", "-o", run), flag, value, bounds) for flag, value, bounds in
              (("--steps", "0", "from 1 to 100000"), ("--steps", "-1", "from 1 to"), ("--example", "-1", "from 0 to"))]
    for command, flag, value, bounds in cases:
        given = [f"{flag}={value}"] if value else [flag, ""]
        scope.refuse(2, [f"{flag}: got {value or 'nothing'}", bounds], *command, *given)


def test_dense_calls_refuse_nan_as_sparse_ones_do(scope, good, bad, out):
    """In q and k (docs/reference/abi.md)."""
    for name in "qk":
        array = good.arrays[name].copy()
        array.flat[100] = np.nan
        tensors.save(bad, good.arrays | {name: array}, good.meta)
        for more in (("--method", "dense"), ("--layer", 0), ()):
            scope.refuse(3, f"{name}: NaN", "attend", bad, "-o", out, *more)
        scope.accept("attend", bad, "-o", out, "--method", "dense", "--set", "check_finite=no")


def test_frames_of_one_name_are_compared_and_others_named(scope, clip, tmp_path):
    a, same = clip("first", (0, 1, 2, 3)), clip("same", (0, 1, 2, 3))
    assert "4 frames are equal" in scope.accept("evaluate", a, same)
    shifted = clip("shifted", (1, 2, 3, 4))
    for command in (("evaluate",), ("report", "-o", tmp_path / "r.html")):
        scope.refuse(3, [f"only {a} has frame_000.png", f"only {shifted} has frame_004.png"], *command, a, shifted)
    scope.refuse(3, ["1 frames", "has 4", f"only {a} has frame_000.png, frame_001.png, frame_003.png"], "evaluate", a, clip("short", (2,)))
    scope.refuse(3, "has frame_010.png, frame_011.png, frame_012.png, frame_013.png and 6 more", "evaluate", a,
                 clip("long", (0, 1, 2, 3, *range(10, 20))))
