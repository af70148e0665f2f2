"""Options that contradict one another or do nothing, files that are none, numbers out of bounds: refused, in words.

    check_inputs.py SCOPE-COMMAND REPOSITORY
"""
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib

SCOPE, REPOSITORY = sys.argv[1:]
checks = 0


def scope(*arguments):
    # Nothing here takes seconds: what does not come back waits for a pipe, or reads without end.
    return subprocess.run([SCOPE, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def accept(*arguments):
    global checks
    checks += 1
    result = scope(*arguments)
    assert result.returncode == 0, f"{arguments}: {result.stdout}{result.stderr}"
    return result.stdout


def refuse(code, words, *arguments):
    """The command must exit with `code`, say all `words`, quote no endless number, and leave nothing behind."""
    global checks
    checks += 1
    if os.path.exists(OUT):
        os.remove(OUT)
    before = sorted(os.listdir(FOLDER))
    result = scope(*arguments)
    text = result.stdout + result.stderr
    assert result.returncode == code, f"{arguments}: exit {result.returncode}, expected {code}: {text}"
    for word in words:
        assert word.lower() in text.lower(), f"{arguments}: nothing about {word!r} in: {text}"
    assert not re.search(r"\d{30}", text), f"{arguments}: {text}"
    assert sorted(os.listdir(FOLDER)) == before, f"{arguments}: left {set(os.listdir(FOLDER)) - set(before)} behind"


def read_tensors(path):
    data = open(path, "rb").read()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    metadata = header.pop("__metadata__", {})
    return {name: (x["dtype"], x["shape"], data[8 + size + x["data_offsets"][0]:8 + size + x["data_offsets"][1]])
            for name, x in header.items()}, metadata


def write_tensors(path, tensors, metadata):
    header, at = {"__metadata__": metadata}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def write_png(path, shade):
    height, width = 16, 24
    rows = b"".join(b"\0" + bytes((7 * x + 3 * y + shade) % 256 for x in range(3 * width)) for y in range(height))
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def clip(name, frames):
    os.makedirs(f"{FOLDER}/{name}")
    for frame in frames:
        write_png(f"{FOLDER}/{name}/frame_{frame:03}.png", frame)
    return f"{FOLDER}/{name}"


def contradictions():
    base = ("attend", GOOD, "-o", OUT)
    # The input, twice or against itself.
    for name in "qkv":
        refuse(2, [f"--{name}", "good.safetensors"], *base, f"--{name}", f"{FOLDER}/{name}.npy")
    text = (*base, "--grid", "3x4x4", "--text", "12")
    accept(*text)
    for name, entry in (("keep", ("U32", [1, 2], b"\1" + bytes(7))), ("dense_queries", ("U32", [1, 2], b"\1" + bytes(7)))):
        write_tensors(BAD, {**TENSORS, name: entry}, META)
        refuse(2, ["--text", name], "attend", BAD, *text[2:])
    for name in ("q_lengths", "k_lengths"):
        write_tensors(BAD, {**TENSORS, name: ("I64", [1], struct.pack("<q", 59))}, META)
        refuse(2, ["--text", name, "padding"], "attend", BAD, *text[2:])
        write_tensors(BAD, {**TENSORS, name: ("I64", [1], struct.pack("<q", 60))}, META)
        accept("attend", BAD, *text[2:])
    sets = json.dumps([list(range(0, 32, 2)), list(range(1, 32, 2))])
    accept(*base, "--subspaces", sets)
    for method in ("svg2", "scope-exact", "sparge", "svoo", "dense"):
        refuse(2, ["--subspaces", method], *base, "--subspaces", sets, "--method", method)
    refuse(2, ["--subspaces", "partition"], *base, "--subspaces", sets, "--set", "partition=even:4")
    refuse(2, ["--subspaces", "--rope"], *base, "--subspaces", sets, "--rope", "12,10,10")
    write_tensors(BAD, TENSORS, {**META, "subspaces": sets})
    refuse(2, ["subspaces", "partition", "bad.safetensors"], "attend", BAD, "-o", OUT, "--method", "scope:partition=even:4")
    accept("attend", BAD, "-o", OUT, "--method", "svg2:partition=even:1")  # which reads no subspaces

    # Settings that the others make idle. `decides` must be in the message.
    for method, setting, decides in (
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
            ("scope", "workspace_limit=9", "no device"), ("dense", "rho=0.5", "method dense"), ("dense", "groups=5", "method dense")):
        name = setting.split("=")[0]
        refuse(2, ["--set", name, decides], *base, "--method", method, "--set", setting)
        both = f"{method}{'+' if ':' in method else ':'}{setting}"
        refuse(2, [name, decides], *base, "--method", both)
    place = ("--layer", "3", "--step", "4", "--steps", "9")
    for more in (("--method", "svoo", "--set", "first_iterations=2"),  # what it has anyway
                 (*place, "--set", "dense_layers=2", "--set", "dense_steps=0.1"), ("--set", "rule=target", "--set", "density=0.3"),
                 ("--state", f"{FOLDER}/new.bin", "--set", "iterations=3", "--set", "state_dtype=bf16"),
                 ("--method", "dense", "--set", "check_finite=no")):
        accept(*base, *more)
    refuse(2, ["rho", "target_density is 0.2"], *base, "--target-density", "0.2", "--set", "rho=0.5")
    refuse(2, ["rho", "density_steps is 0.5:0.3,1:0.1"], *base, "--set", "density_steps=0.5:0.3,1:0.1", "--set", "rho=0.5")
    refuse(2, ["density_steps", "target_density is 0.2"], *base, "--set", "density_steps=1:0.1", "--target-density", "0.2")
    refuse(2, ["density_steps", "method dense"], *base, "--set", "density_steps=1:0.1", "--method", "dense")
    refuse(2, ["rho", "twice", "0.8", "0.7"], *base, "--set", "rho=0.8", "--set", "rho=0.7")
    refuse(2, ["rho", "twice", "0.8", "0.7"], *base, "--method", "scope:rho=0.8", "--set", "rho=0.7")
    refuse(2, ["target_density", "0.3", "0.2"], *base, "--set", "target_density=0.3", "--target-density", "0.2")
    refuse(2, ["--layer", "method dense"], *base, "--method", "dense", "--layer", "3")
    refuse(2, ["--step", "method dense"], *base, "--method", "dense", "--step", "3", "--steps", "9")
    open(f"{FOLDER}/p.csv", "w").write("step,layer,head,density\n4,3,0,0.5\n4,3,1,0.5\n")
    refuse(2, ["profile", "no layer"], *base, "--method", "svoo", "--set", f"profile={FOLDER}/p.csv")

    # Machines.
    refuse(2, ["--device", "--backend cpu"], *base, "--device", "1")
    refuse(2, ["--backend"], "make-qkv", "--backend", "cpu", "-o", OUT)
    refuse(2, ["--instruction-set"], "make-qkv", "--instruction-set", "avx2", "-o", OUT)
    refuse(2, ["--backend"], "doctor", "--backend", "cpu")
    refuse(2, ["--device"], "doctor", "--device", "0")
    refuse(2, ["--backend"], "profile", f"1:2:{GOOD}", "--backend", "cpu", "-o", OUT)

    # The other commands.
    compare = ("compare", GOOD, "--samples", "4", "--repeat", "1", "--density", "0.3")
    refuse(2, ["target_density", "0.5", "0.3"], *compare, "--methods", "scope:target_density=0.5")
    refuse(2, ["rho", "target_density is 0.3"], *compare, "--methods", "scope:rho=0.5")
    refuse(2, ["--density", "density_steps=0.5:0.2,1:0.1"], *compare, "--methods", "svg2:codes=20,scope:density_steps=0.5:0.2,1:0.1")
    refuse(2, ["dense_steps", "no step"], *compare, "--methods", "scope:dense_steps=0.1")
    refuse(2, ["--subspaces", "svg2,sparge"], *compare, "--methods", "svg2,sparge", "--subspaces", sets)
    refuse(2, ["--subspaces", "partition", "scope:partition=even:2"], *compare, "--methods", "svg2,scope:partition=even:2",
           "--subspaces", sets)
    accept(*compare, "--methods", "scope,svg2:codes=20", "--subspaces", sets)
    shutil.copy(f"{FOLDER}/p.csv", f"{FOLDER}/a.csv")
    refuse(2, ["profile", "a.csv", "p.csv"], *compare, *place, "--methods", f"svoo:profile={FOLDER}/p.csv", "--profile", f"{FOLDER}/a.csv")
    refuse(2, ["q_block", "group is kmeans"], "inspect", GOOD, "-o", f"{FOLDER}/look", "--scoring", "scope:q_block=4")
    refuse(2, ["codes", "proxy is exact"], "inspect", GOOD, "-o", f"{FOLDER}/look", "--method", "scope-exact:codes=4")
    refuse(2, ["rho", "target_density is 0.2"], "bench", "--grid", "2x4x4", "--set", "rho=0.5")
    for flag, value in (("--grid", "2x4x4"), ("--heads", "1"), ("--density", "0.2"), ("--sweep", None)):
        refuse(2, [flag, "--suite"], "bench", "--suite", flag, *([value] if value else []))
    refuse(2, ["--grid", "--sweep"], "bench", "--sweep", "--grid", "2x4x4")
    refuse(2, ["--commit", "--json"], "bench", "--grid", "2x4x4", "--commit", "abc")
    refuse(2, ["--commit", "--output"], "ablate", "--commit", "abc")
    refuse(2, ["rho", "target_density is 0.2"], "ablate", "--variants", "scope:rho=0.5")
    one = clip("one", range(2))
    refuse(2, ["--head", "--qkv"], "report", one, "--head", "0", "-o", f"{FOLDER}/r.html")
    refuse(2, ["--skip", "second clip"], "report", one, "--skip", "1", "-o", f"{FOLDER}/r.html")
    generate = ("generate", "-o", f"{FOLDER}/run", "--steps", "1", "--grid", "5x4x6", "--image", f"{one}/frame_000.png")
    for flag in ("--dump-steps", "--dump-layers"):
        refuse(2, [flag, "--dump-qkv"], *generate, flag, "0")
    refuse(2, ["--noise", "--seed"], *generate, "--noise", GOOD, "--seed", "3")
    refuse(2, ["q_block", "group is kmeans"], *generate, "--set", "q_block=8")
    refuse(2, ["target_density", "0.3", "0.2"], *generate, "--set", "target_density=0.3", "--target-density", "0.2")
    write_tensors(BAD, {"prompt_embeds": ("F32", [8, 32], bytes(4 * 8 * 32))}, {})
    refuse(3, ["--example", "one sample"], *generate, "--condition", BAD, "--example", "1")


def files_that_are_none():
    base = ("attend", GOOD, "-o", OUT)
    model = f"{FOLDER}/model"
    shutil.copytree(f"{REPOSITORY}/tests/data/video/i2v_image_branch", model)
    case = f"{REPOSITORY}/tests/data/video/i2v_image_branch/case.safetensors"
    a, b = clip("a", range(2)), clip("b", range(2))
    pipe, zeros = f"{FOLDER}/pipe", f"{FOLDER}/zeros"
    os.mkfifo(pipe)
    os.symlink("/dev/zero", zeros)

    def instead(path, *arguments):
        """Refused whichever of the two stands at the path."""
        kept = f"{FOLDER}/kept"
        if os.path.exists(path):
            os.rename(path, kept)
        for source in (pipe, zeros):
            os.symlink(source, path)
            refuse(3, [path, "not a regular file"], *arguments)
            os.remove(path)
        if os.path.exists(kept):
            os.rename(kept, path)

    x = f"{FOLDER}/x"
    instead(x, *base, "--method", "svoo", "--set", f"profile={x}", "--layer", "3", "--step", "4", "--steps", "9")
    instead(x, "compare", GOOD, "--methods", "svoo", "--profile", x, "--layer", "3", "--step", "4", "--steps", "9")
    instead(x, "attend", x, "-o", OUT)
    instead(x, "attend", "--q", x, "--k", x, "--v", x, "-o", OUT)
    instead(x, *base, "--state", x)
    instead(x, "profile", f"1:2:{x}", "-o", OUT)
    instead(f"{b}/frame_001.png", "evaluate", a, b)
    instead(f"{b}/run.json", "report", a, b, "-o", f"{FOLDER}/r.html")
    generate = ("generate", "-o", f"{FOLDER}/run", "--model", model, "--grid", "3x4x5", "--steps", "1")
    instead(f"{model}/config.json", *generate, "--condition", case)
    instead(f"{model}/scope.json", *generate, "--condition", case)
    instead(f"{model}/diffusion_pytorch_model.safetensors", *generate, "--condition", case)
    instead(x, *generate, "--condition", x)
    instead(x, *generate, "--condition", case, "--noise", x)
    instead(x, "generate", "-o", f"{FOLDER}/run", "--steps", "1", "--image", x)

    # Plain files that are too long, or not what their first line must say.
    svoo = (*base, "--method", "svoo", "--layer", "3", "--step", "4", "--steps", "9", "--set", f"profile={x}")
    open(x, "w").close()
    os.truncate(x, (64 << 20) + 1)
    refuse(3, [x, "at most 67108864"], *svoo)
    for content, quoted in ((b"step,layer,density\n1,2,0.5\n", '"step,layer,density"'),
                            (b"\x1b[31m\xff" + 200 * b"y" + b"\n", '"?[31m?yyy'), (b"", '""')):
        open(x, "wb").write(content)
        refuse(3, [x, "line 1", f"got {quoted}"], *svoo)
    os.remove(x)
    deep = f"{b}/run.json"
    open(deep, "w").write('{"x":' + 200000 * "[" + 200000 * "]" + "}")
    refuse(3, [deep, "nested"], "report", a, b, "-o", f"{FOLDER}/r.html")
    os.truncate(deep, (64 << 20) + 1)
    refuse(3, [deep, "at most 67108864"], "evaluate", a, b)


def states():
    for dtype, size in (("f32", 4), ("bf16", 2)):
        state = f"{FOLDER}/{dtype}.bin"
        base = ("attend", GOOD, "-o", OUT, "--state", state, "--set", "groups=5", "--set", "codes=7", "--set", f"state_dtype={dtype}")
        accept(*base)
        good = open(state, "rb").read()
        up = lambda n: -(-n // 64) * 64
        centroids = up(64 + 16)
        codebooks = up(centroids + 2 * 5 * 32 * size)
        for value in (float("nan"), float("inf"), -float("inf"), -2e18, 3e38):
            bits = struct.pack("<f", value)
            for name, at in (("centroids", centroids), ("centroids", centroids + (2 * 5 * 32 - 1) * size), ("codebooks", codebooks),
                             ("codebooks", codebooks + (2 * 7 * 32 - 1) * size)):
                open(state, "wb").write(good[:at] + (bits if size == 4 else bits[2:]) + good[at + size:])
                before = open(state, "rb").read()
                refuse(3, [state, name, "1.01e+18"], *base)
                assert open(state, "rb").read() == before
        open(state, "wb").write(good)
        accept(*base)


def numbers():
    base = ("attend", GOOD, "-o", OUT)
    threads = [("attend", GOOD, "-o", OUT), ("compare", GOOD), ("make-qkv", "-o", OUT), ("evaluate", "a", "b"),
               ("report", "a", "-o", OUT), ("doctor",),
               ("profile", f"1:2:{GOOD}", "-o", OUT), ("bench",), ("demo",), ("inspect", GOOD, "-o", f"{FOLDER}/look"),
               ("generate", "-o", f"{FOLDER}/run"), ("ablate",)]
    cases = [(command, "--threads", value, "from 0 to 1024") for command in threads
             for value in ("-1", "99999", "1025", "2.5", "x", "0x10", "")]
    cases += [(("make-qkv", "-o", OUT), "--seed", value, "from 0 to 2^63 - 1") for value in ("-1", "99999999999999999999", "1e3")]
    cases += [(command, "--seed", "-1", "from 0 to") for command in (("generate", "-o", f"{FOLDER}/run"), ("bench",))]
    cases += [(("make-qkv", "-o", OUT), "--heads", "0", "from 1 to 65536"), (("bench",), "--heads", "-3", "from 1 to 65536"),
              (("demo",), "--heads", "0", "from 1 to"),
              (("demo",), "--samples", "0", "from 1 to"), (base, "--layer", "-1", "from 0 to 100000"),
              (base, "--step", "-1", "from 0 to 1000000000"),
              (base, "--steps", "0", "from 1 to 1000000000"), (base, "--quality", "-1", "from 0 to"), (base, "--text", "-1", "from 0 to"),
              (base, "--text", "9223372036854775807", "from 0 to"), (base, "--device", "-1", "from 0 to 1023"),
              (("compare", GOOD), "--layer", "-1", "from 0 to 100000"),
              (("compare", GOOD), "--repeat", "0", "from 1 to 1000"), (("bench",), "--repeat", "0", "from 1 to 1000"),
              (("bench",), "--quality", "-1", "from 0 to"),
              (("evaluate", "a", "b"), "--skip", "-1", "from 0 to"), (("report", "a", "-o", OUT), "--skip", "-1", "from 0 to"),
              (("report", "a", "-o", OUT), "--fps", "0", "above 0.01 and up to 120"),
              (("report", "a", "-o", OUT), "--fps", "nan", "above 0.01"),
              (("profile", f"1:2:{GOOD}", "-o", OUT), "--mass", "1.5", "above 0 and up to 1"),
              (("inspect", GOOD, "-o", f"{FOLDER}/look"), "--head", "-1", "from 0 to"),
              (("inspect", GOOD, "-o", f"{FOLDER}/look"), "--repeat", "0", "from 1 to"), (("ablate",), "--seeds", "0", "from 1 to 10000"),
              (("ablate",), "--steps", "0", "from 1 to 100000")]
    cases += [(("generate", "-o", f"{FOLDER}/run"), flag, value, "above 0 and up to 1000")
              for flag in ("--shift", "--guidance") for value in ("0", "-1", "1001", "nan", "inf", "1e999")]
    cases += [(("generate", "-o", f"{FOLDER}/run"), flag, value, bounds) for flag, value, bounds in
              (("--steps", "0", "from 1 to 100000"), ("--steps", "-1", "from 1 to"), ("--example", "-1", "from 0 to"))]
    for command, flag, value, bounds in cases:
        refuse(2, [f"{flag}: got {value or 'nothing'}", bounds], *command, f"{flag}={value}" if value else flag, *([] if value else [""]))


def not_a_number():
    """Dense calls refuse NaN in q and k as sparse ones do (docs/reference/abi.md)."""
    for name in "qk":
        dtype, shape, data = TENSORS[name]
        write_tensors(BAD, {**TENSORS, name: (dtype, shape, data[:400] + struct.pack("<f", float("nan")) + data[404:])}, META)
        for more in (("--method", "dense"), ("--layer", "0"), ()):
            refuse(3, [f"{name}: NaN"], "attend", BAD, "-o", OUT, *more)
        accept("attend", BAD, "-o", OUT, "--method", "dense", "--set", "check_finite=no")


def partners():
    """Frames of one name are compared; the others are named."""
    a, same = clip("first", (0, 1, 2, 3)), clip("same", (0, 1, 2, 3))
    assert "4 frames are equal" in accept("evaluate", a, same)
    shifted = clip("shifted", (1, 2, 3, 4))
    for command in (("evaluate",), ("report", "-o", f"{FOLDER}/r.html")):
        refuse(3, [f"only {a} has frame_000.png", f"only {shifted} has frame_004.png"], *command, a, shifted)
    refuse(3, ["1 frames", "has 4", f"only {a} has frame_000.png, frame_001.png, frame_003.png"], "evaluate", a, clip("short", (2,)))
    refuse(3, ["has frame_010.png, frame_011.png, frame_012.png, frame_013.png and 6 more"], "evaluate", a,
           clip("long", (0, 1, 2, 3, *range(10, 20))))


with tempfile.TemporaryDirectory() as FOLDER:
    OUT, GOOD, BAD = (f"{FOLDER}/{name}.safetensors" for name in ("out", "good", "bad"))
    accept("make-qkv", "--grid", "3x4x5", "--rope", "12,10,10", "--heads", "2", "-o", GOOD)
    TENSORS, META = read_tensors(GOOD)
    contradictions()
    files_that_are_none()
    states()
    numbers()
    not_a_number()
    partners()
print(f"{checks} commands behaved")
