"""Files that are none, states and tensors with numbers that must not be: refused in words.

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
    for content, quoted in ((b"step,layer,density\n1,2,0.5\n", '"step,layer,density"'), (b"\x1b[31m\xff" + 200 * b"y" + b"\n", '"?[31m?yyy'), (b"", '""')):
        open(x, "wb").write(content)
        refuse(3, [x, "line 1", f"got {quoted}"], *svoo)
    os.remove(x)
    deep = f"{b}/run.json"
    open(deep, "w").write('{"x":' + 200000 * "[" + 200000 * "]" + "}")
    refuse(3, [deep, "nested"], "report", a, b, "-o", f"{FOLDER}/r.html")
    os.truncate(deep, (64 << 20) + 1)
    refuse(3, [deep, "at most 67108864"], "evaluate", a, b)


def states():
    for dtype, size, code in (("f32", 4, "<f"), ("bf16", 2, None)):
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


def not_a_number():
    """Dense calls refuse NaN in q and k as sparse ones do (docs/abi.md)."""
    for name in "qk":
        dtype, shape, data = TENSORS[name]
        write_tensors(BAD, {**TENSORS, name: (dtype, shape, data[:400] + struct.pack("<f", float("nan")) + data[404:])}, META)
        for more in (("--method", "dense"), ("--layer", "0"), ()):
            refuse(3, [f"{name}: NaN"], "attend", BAD, "-o", OUT, *more)
        accept("attend", BAD, "-o", OUT, "--method", "dense", "--set", "check_finite=no")


with tempfile.TemporaryDirectory() as FOLDER:
    OUT, GOOD, BAD = (f"{FOLDER}/{name}.safetensors" for name in ("out", "good", "bad"))
    accept("make-qkv", "--grid", "3x4x5", "--rope", "12,10,10", "--heads", "2", "-o", GOOD)
    TENSORS, META = read_tensors(GOOD)
    files_that_are_none()
    states()
    not_a_number()
print(f"{checks} commands behaved")
