"""Tests of provenance.py and staleness.py, without a GPU: python3 -m unittest discover -s bench"""
import json
import os
import pathlib
import struct
import subprocess
import tempfile
import unittest
from unittest import mock

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


class InAFolder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def write(self, name, content):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(content, bytes):
            content = (content if isinstance(content, str) else json.dumps(content)).encode()
        path.write_bytes(content)
        return str(path)


class DeviceCode(InAFolder):
    def code(self, *entries):
        return provenance.device_code(self.write("libscope.so", b"before" + fatbin(*entries) + b"between" + fatbin() + b"after"))

    def test_covers_machine_code_and_constants_alone(self):
        parts = {".text.kernel_1": b"code", ".nv.constant3": b"table", ".debug_line": b"line 7"}
        at = "/here/src/cuda/select/scan.cu"
        code = self.code((at, 90, elf(parts)))
        self.assertEqual(list(code), ["select/scan.cu"])
        moved = {".text.kernel_2": b"code", ".nv.constant3": b"table", ".debug_line": b"line 8"}
        self.assertEqual(self.code(("/there/src/cuda/select/scan.cu", 90, elf(moved))), code)
        for name in (".text.kernel_1", ".nv.constant3"):
            self.assertNotEqual(self.code((at, 90, elf({**parts, name: b"other"}))), code, name)

    def test_takes_one_architecture_and_our_sources(self):
        cubin = elf({".text.k": b"code"})
        code = self.code(("src/cuda/a.cu", 80, cubin), ("src/cuda/b.cu", 90, cubin), ("/cuda/library.cu", 90, cubin))
        self.assertEqual(list(code), ["b.cu"])

    def test_refuses_compressed_code(self):
        with self.assertRaisesRegex(SystemExit, "compressed"):
            self.code(("src/cuda/a.cu", 90, b"\x28\xb5\x2f\xfd" + bytes(60)))


class State(InAFolder):
    def test_finds_the_most_seeds_of_this_commit(self):
        result = str(self.folder / "call.json")
        self.assertEqual(provenance.state(result, "new", 4), "")
        self.write("call.json", {"commit": "old", "finished": True, "seeds": 4})
        self.write("call.json.1-0.unfinished", {"commit": "new", "finished": False, "seeds": 1})
        best = self.write("call.json.2-0.unfinished", {"commit": "new", "finished": False, "seeds": 2})
        self.write("call.json.3-0.unfinished", '{"commit": "new", "see')
        self.assertEqual(provenance.state(result, "old", 4), "finished")
        self.assertEqual(provenance.state(result, "new", 4), best)
        self.write("call.json", {"commit": "new", "finished": True, "seeds": 3})
        self.assertEqual(provenance.state(result, "new", 3), "finished")
        self.assertEqual(provenance.state(result, "new", 4), result)
        self.write("h200.json", {"commit": "new", "finished": False, "cases": []})
        self.assertEqual(provenance.state(str(self.folder / "h200.json"), "new", 0), "")

    def test_keeps_the_clocks_of_every_run(self):
        result, program = str(self.folder / "a.json"), self.write("scope", b"")
        with mock.patch.object(provenance, "device_state", side_effect=[{"clocks.sm": str(i)} for i in range(6)]):
            provenance.begin(result, "new")  # and was killed
            provenance.begin(result, "new")
            self.write("a.json", {"seeds": 6})
            provenance.end(result, "new", program)
            provenance.begin(result, "new")
            self.write("a.json", {"commit": "new", "seeds": 12})
            provenance.end(result, "new", program)
        found = json.loads(pathlib.Path(result).read_text())
        clocks = [[run[at]["clocks.sm"] for at in ("start", "end") if at in run] for run in found["device_state"]]
        self.assertEqual(clocks, [["0"], ["1", "2"], ["3", "4"]])
        self.assertEqual((found["commit"], found["device_code"]), ("new", {}))
        self.assertEqual(sorted(os.listdir(self.folder)), ["a.json", "scope"])


class Staleness(InAFolder):
    def setUp(self):
        super().setUp()
        for name, value in (("ROOT", self.folder), ("RESULTS", self.folder / "results")):
            patch = mock.patch.object(staleness, name, value)
            patch.start()
            self.addCleanup(patch.stop)
        self.git("init", "-q")
        for path in staleness.CODE:
            self.write(path if "." in path else f"{path}/file", "1")
        self.write("results/same_bits.json", {"pairs": []})
        self.first = self.commit()

    def git(self, *arguments):
        who = ("-c", "user.name=a", "-c", "user.email=a")
        return subprocess.run(["git", "-C", self.folder, *who, *arguments], check=True, capture_output=True, text=True).stdout.strip()

    def commit(self):
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "a")
        return self.git("rev-parse", "HEAD")

    def videos(self, commit, **machine):
        return staleness.videos({"commit": commit, "machine": {"gpu": "a", **machine}})

    def test_videos_follow_code_and_pairs(self):
        self.write("README.md", "words")
        self.commit()
        self.assertIsNone(self.videos(self.first))
        self.write("src/file", "2")
        self.assertIn("src/file", self.videos(self.first))  # not committed yet
        second = self.commit()
        self.assertIn("1 commits changed code", self.videos(self.first))
        self.assertIn("not in history", self.videos("0" * 40))
        self.write("cli/file", "2")
        third = self.commit()
        pairs = [{"old": old, "new": new, "backend": "cuda"} for old, new in ((second, third), (self.first, second))]
        self.write("results/same_bits.json", {"pairs": pairs})
        self.assertIsNone(self.videos(self.first))
        self.write("results/same_bits.json", {"pairs": [{**pair, "backend": "cpu"} for pair in pairs]})
        self.assertIn("2 commits changed code", self.videos(self.first))
        self.write("results/same_bits.json", {"pairs": pairs[:1]})
        self.assertIsNone(self.videos(second))
        self.assertIn("no comparison", self.videos(self.first))

    def test_timings_follow_device_code(self):
        data = {"commit": self.first, "device_code": {"scan.cu": "1", "tail.cu": "2"}}
        self.write("src/cuda/scan.cu", "1")
        self.commit()
        self.assertIsNone(staleness.timing("h200.json", data, {"scan.cu": "1", "tail.cu": "2", "new.cu": "3"}))
        self.assertIn("tail.cu", staleness.timing("h200.json", data, {"scan.cu": "1", "tail.cu": "3"}))
        self.assertEqual(staleness.timing("h200.json", data, "no build"), "no build")
        self.assertIn("src/cuda/scan.cu", staleness.timing("h200.json", {"commit": self.first}, {}))
        self.assertIsNone(staleness.timing("cpu_suite.json", {"commit": self.first}, {}))
        for name, why in (("kernels_s8.cpp", None),
                          ("attend.cpp", f"1 of its sources changed since {self.first[:10]}, src/cpu/attend.cpp among them")):
            self.write(f"src/cpu/{name}", "1")
            self.commit()
            self.assertEqual(staleness.timing("cpu_suite.json", {"commit": self.first}, {}), why)

    def test_a_build_that_is_older_says_nothing(self):
        self.assertIn("no CUDA build", staleness.built_code())
        source = self.write("src/cuda/scan.cu", "1")
        programs = [self.write("build/cuda/libscope.so", b""), self.write("build/cuda/bin/scope", b"")]
        os.utime(source, (1, 1))
        os.utime(self.folder / "src" / "file", (1, 1))
        self.assertEqual(staleness.built_code(), {})
        os.utime(programs[1], (0, 0))
        self.assertIn("older than src/cuda/scan.cu", staleness.built_code())


if __name__ == "__main__":
    unittest.main()
