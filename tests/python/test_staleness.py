"""What bench/provenance.py says of a result, and bench/staleness.py of its age; without a GPU."""
import json
import os
import pathlib
import struct
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "bench"))
import provenance
import staleness


def elf(sections):
    """A 64-bit ELF file with these sections, {name: bytes}."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (".names", *sections))
    bodies = {".names": names, **sections}
    headers, data = [bytes(64)], b""
    for name, body in bodies.items():
        headers.append(struct.pack("<IIQQQQ", names.index(b"\0" + name.encode() + b"\0") + 1, 1, 0, 0, 64 + len(data),
                                   len(body)) + bytes(24))
        data += body
    start = bytearray(64)
    start[:4] = b"\x7fELF"
    struct.pack_into("<Q", start, 0x28, 64 + len(data))
    struct.pack_into("<HHH", start, 0x3A, 64, len(headers), 1)
    return bytes(start) + data + b"".join(headers)


def fatbin(*entries):
    """(source, architecture, cubin) each; as nvcc puts them into an object."""
    text = b""
    for source, architecture, cubin in entries:
        name = source.encode().ljust(64, b"\0")
        text += struct.pack("<HHIQI8xI2I", 2, 0x101, 64 + len(name), len(cubin), 0, architecture, 64,
                            len(source)).ljust(64, b"\0") + name + cubin
    return provenance.FATBIN + struct.pack("<Q", len(text)) + text


@pytest.fixture
def write(tmp_path):
    """write(name, content): the path of a file with these bytes, this text or this JSON."""
    def write(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(content, bytes):
            content = (content if isinstance(content, str) else json.dumps(content)).encode()
        path.write_bytes(content)
        return str(path)

    return write


@pytest.fixture
def code(write):
    """code(*entries): the device code of a library with these."""
    return lambda *entries: provenance.device_code(write("libscope.so", b"before" + fatbin(*entries) + b"between" + fatbin() + b"after"))


def test_device_code_is_machine_code_and_constants_alone(code):
    parts = {".text.kernel_1": b"code", ".nv.constant3": b"table", ".debug_line": b"line 7"}
    at = "/here/src/cuda/select/scan.cu"
    found = code((at, 90, elf(parts)))
    assert list(found) == ["select/scan.cu"]
    moved = {".text.kernel_2": b"code", ".nv.constant3": b"table", ".debug_line": b"line 8"}
    assert code(("/there/src/cuda/select/scan.cu", 90, elf(moved))) == found
    for name in (".text.kernel_1", ".nv.constant3"):
        assert code((at, 90, elf({**parts, name: b"other"}))) != found, name


def test_device_code_is_of_one_architecture_and_our_sources(code):
    cubin = elf({".text.k": b"code"})
    assert list(code(("src/cuda/a.cu", 80, cubin), ("src/cuda/b.cu", 90, cubin), ("/cuda/library.cu", 90, cubin))) == ["b.cu"]


def test_compressed_device_code_is_refused(code):
    with pytest.raises(SystemExit, match="compressed"):
        code(("src/cuda/a.cu", 90, b"\x28\xb5\x2f\xfd" + bytes(60)))


def test_the_state_of_a_result_is_the_most_seeds_of_this_commit(write, tmp_path):
    result = str(tmp_path / "call.json")
    assert provenance.state(result, "new", 4) == ""
    write("call.json", {"commit": "old", "finished": True, "seeds": 4})
    write("call.json.1-0.unfinished", {"commit": "new", "finished": False, "seeds": 1})
    best = write("call.json.2-0.unfinished", {"commit": "new", "finished": False, "seeds": 2})
    write("call.json.3-0.unfinished", '{"commit": "new", "see')
    assert provenance.state(result, "old", 4) == "finished"
    assert provenance.state(result, "new", 4) == best
    write("call.json", {"commit": "new", "finished": True, "seeds": 3})
    assert provenance.state(result, "new", 3) == "finished"
    assert provenance.state(result, "new", 4) == result
    write("h200.json", {"commit": "new", "finished": False, "cases": []})
    assert provenance.state(str(tmp_path / "h200.json"), "new", 0) == ""


def test_a_result_keeps_the_clocks_of_every_run(write, monkeypatch, tmp_path):
    result, program = str(tmp_path / "a.json"), write("scope", b"")
    states = iter([{"clocks.sm": str(i)} for i in range(6)])
    monkeypatch.setattr(provenance, "device_state", lambda *_: next(states))
    provenance.begin(result, "new")  # and was killed
    provenance.begin(result, "new")
    write("a.json", {"seeds": 6})
    provenance.end(result, "new", program)
    provenance.begin(result, "new")
    write("a.json", {"commit": "new", "seeds": 12})
    provenance.end(result, "new", program)
    found = json.loads(pathlib.Path(result).read_text())
    clocks = [[run[at]["clocks.sm"] for at in ("start", "end") if at in run] for run in found["device_state"]]
    assert clocks == [["0"], ["1", "2"], ["3", "4"]]
    assert (found["commit"], found["device_code"]) == ("new", {})
    assert sorted(os.listdir(tmp_path)) == ["a.json", "scope"]


@pytest.fixture
def commit(write, monkeypatch, tmp_path):
    """commit(): what is there, in a repository of our code's folders and of a list of pairs; its hash."""
    monkeypatch.setattr(staleness, "ROOT", tmp_path)
    monkeypatch.setattr(staleness, "RESULTS", tmp_path / "results")

    def git(*arguments):
        who = ("-c", "user.name=a", "-c", "user.email=a")
        return subprocess.run(["git", "-C", tmp_path, *who, *arguments], check=True, capture_output=True, text=True).stdout.strip()

    def commit():
        git("add", "-A")
        git("commit", "-q", "--allow-empty", "-m", "a")
        return git("rev-parse", "HEAD")

    git("init", "-q")
    for path in staleness.CODE:
        write(path if "." in path else f"{path}/file", "1")
    write("results/same_bits.json", {"pairs": []})
    return commit


def videos(commit):
    return staleness.videos({"commit": commit, "machine": {"gpu": "a"}})


def test_videos_follow_code_and_pairs(write, commit):
    first = commit()
    write("README.md", "words")
    commit()
    assert videos(first) is None
    write("src/file", "2")
    assert "src/file" in videos(first)  # not committed yet
    second = commit()
    assert "1 commits changed code" in videos(first)
    assert "not in history" in videos("0" * 40)
    write("cli/file", "2")
    third = commit()
    pairs = [{"old": old, "new": new, "backend": "cuda"} for old, new in ((second, third), (first, second))]
    write("results/same_bits.json", {"pairs": pairs})
    assert videos(first) is None
    write("results/same_bits.json", {"pairs": [{**pair, "backend": "cpu"} for pair in pairs]})
    assert "2 commits changed code" in videos(first)
    write("results/same_bits.json", {"pairs": pairs[:1]})
    assert videos(second) is None
    assert "no comparison" in videos(first)


def test_videos_made_in_pytorch_follow_its_code_too(write, commit):
    first = commit()
    write("bench/fp8_linear.py", "1")
    commit()
    assert videos(first) is None
    assert "bench/fp8_linear.py" in staleness.videos({"commit": first, "machine": {"gpu": "a"}, "kind": "fp8"})


def test_timings_follow_device_code(write, commit):
    first = commit()
    data = {"commit": first, "device_code": {"scan.cu": "1", "tail.cu": "2"}}
    write("src/cuda/scan.cu", "1")
    commit()
    assert staleness.timing("h200.json", data, {"scan.cu": "1", "tail.cu": "2", "new.cu": "3"}) is None
    assert "tail.cu" in staleness.timing("h200.json", data, {"scan.cu": "1", "tail.cu": "3"})
    assert staleness.timing("h200.json", data, "no build") == "no build"
    assert "src/cuda/scan.cu" in staleness.timing("h200.json", {"commit": first}, {})
    assert staleness.timing("cpu_suite.json", {"commit": first}, {}) is None
    for name, why in (("kernels_s8.cpp", None),
                      ("attend.cpp", f"1 of its sources changed since {first[:10]}, src/cpu/attend.cpp among them")):
        write(f"src/cpu/{name}", "1")
        commit()
        assert staleness.timing("cpu_suite.json", {"commit": first}, {}) == why


def test_a_build_that_is_older_says_nothing(write, commit, tmp_path):
    assert "no CUDA build" in staleness.built_code()
    source = write("src/cuda/scan.cu", "1")
    programs = [write("build/cuda/libscope.so", b""), write("build/cuda/bin/scope", b"")]
    os.utime(source, (1, 1))
    os.utime(tmp_path / "src" / "file", (1, 1))
    assert staleness.built_code() == {}
    os.utime(programs[1], (0, 0))
    assert "older than src/cuda/scan.cu" in staleness.built_code()
