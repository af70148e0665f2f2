#!/usr/bin/env python3
"""Says how a result was made: the hashes of its device code, the GPU's clocks and power, and how far it got.

    bench/provenance.py state RESULT COMMIT [SEEDS]     prints "finished", the file to resume from, or nothing
    bench/provenance.py begin RESULT COMMIT             notes clocks and power in RESULT.making
    bench/provenance.py end RESULT COMMIT PROGRAM       moves them into RESULT, with the hashes of PROGRAM's device code
    bench/provenance.py code PROGRAM                    prints these hashes, a line for each source file

PROGRAM is a libscope.so or a scope command with CUDA parts. The hash of a source file covers the machine code and the constants of its
kernels for one kind of GPU. Names, line tables and paths are left out: a comment or another folder changes no hash.
"""
import datetime
import glob
import hashlib
import json
import os
import pathlib
import struct
import subprocess
import sys

ARCHITECTURE = 90  # the H200's
FATBIN, CUBIN = b"\x50\xed\x55\xba\x01\x00\x10\x00", 2  # magic number, version 1 and header size; the kind of an entry
CODE = (".text.", ".nv.constant2", ".nv.constant3", ".nv.constant4", ".nv.global.init")  # sections
QUERY = ("clocks.sm", "clocks.max.sm", "power.draw", "power.limit")  # MHz and W


def sections(elf):
    """(name, bytes) of each section of a 64-bit ELF file."""
    (table,), (size, count, names) = struct.unpack_from("<Q", elf, 0x28), struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    strings = headers[names][4]
    for name, kind, _, _, offset, length in headers:
        at = strings + name
        yield elf[at:elf.index(b"\0", at)].decode(), b"" if kind == 8 else elf[offset:offset + length]  # 8: no bytes in the file


def cubins(program, architecture):
    """(source file below src/cuda, cubin) of each kernel file of a program, from its fat binaries."""
    data, at = pathlib.Path(program).read_bytes(), 0
    while (at := data.find(FATBIN, at)) >= 0:
        at += 16
        end = at + struct.unpack_from("<Q", data, at - 8)[0]
        while at < end:
            kind, header, size = struct.unpack_from("<H2xIQ", data, at)
            packed, sm, name, length = struct.unpack_from("<I8xI2I", data, at + 16)
            source = data[at + name:at + name + length].rstrip(b"\0").decode()
            body = data[at + header:at + header + size]
            if kind == CUBIN and sm == architecture and "src/cuda/" in source:
                if packed or body[:4] != b"\x7fELF":
                    sys.exit(f"{program}: its device code is compressed, as in a wheel; expected the build of `cmake --preset cuda`")
                yield source.rpartition("src/cuda/")[2], body
            at += header + size


def device_code(program, architecture=ARCHITECTURE):
    """{source file: hash of its machine code}; empty without CUDA parts."""
    found = {}
    for source, cubin in cubins(program, architecture):
        parts = sorted(hashlib.sha256(body).hexdigest() for name, body in sections(cubin) if name.startswith(CODE))
        if parts:  # some files only launch others' kernels
            found[source] = hashlib.sha256("".join(parts).encode()).hexdigest()[:16]
    return dict(sorted(found.items()))


def device_state():
    """Clocks in MHz and power in W now; None where there is no nvidia-smi."""
    try:
        line = subprocess.run(["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"], capture_output=True,
                              text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), **dict(zip(QUERY, line.split(", ")))}


def load(path, commit):
    """A result of this commit, or {}; what was cut off while it was written is none."""
    try:
        data = json.loads(pathlib.Path(path).read_text())
    except (OSError, ValueError):
        return {}
    return data if data.get("commit") == commit else {}


def save(path, data):
    """Whole or not at all."""
    temporary = pathlib.Path(f"{path}.new")
    temporary.write_text(json.dumps(data, indent=1) + "\n")
    temporary.replace(path)


def state(result, commit, seeds=0):
    found = load(result, commit)
    if found and found.get("finished", True) and found.get("seeds", 0) >= int(seeds):
        return "finished"
    begun = [(data["seeds"], path) for path in (result, *glob.glob(glob.escape(result) + ".*.unfinished"))
             if (data := load(path, commit)) and "seeds" in data and data["seeds"] < int(seeds)]
    return max(begun)[1] if begun else ""


def begin(result, commit):
    making = load(f"{result}.making", commit)
    runs = making.get("device_state") or load(result, commit).get("device_state") or []
    save(f"{result}.making", {"commit": commit, "device_state": [*runs, {"start": device_state()}]})


def end(result, commit, program):
    making, data = load(f"{result}.making", commit), json.loads(pathlib.Path(result).read_text())
    making["device_state"][-1]["end"] = device_state()
    data["commit"] = data.get("commit") or commit
    data["device_state"] = [run for run in making["device_state"] if run["start"] or run.get("end")]
    data["device_code"] = device_code(program)
    save(result, data)
    os.remove(f"{result}.making")


def words(data):
    """Sittings (if several), clocks and power of a result, for the line of its source; "" where they are not recorded."""
    found = [x for run in data.get("device_state", ()) for x in (run["start"], run.get("end")) if x]
    if not found:
        return ""
    low_high = lambda key: "–".join(f"{value:g}" for value in sorted({min(v), max(v)})) if (v := [float(x[key]) for x in found]) else ""
    sittings = len(data["device_state"])
    return (f"; in {sittings} sittings" if sittings > 1 else "") + (
            f"; SM clock {low_high('clocks.sm')} of {float(found[0]['clocks.max.sm']):g} MHz and {low_high('power.draw')} of "
            f"{float(found[0]['power.limit']):g} W at the start and the end")


def main():
    commands = {"state": state, "begin": begin, "end": end,
                "code": lambda program: "\n".join(f"{h}  {s}" for s, h in device_code(program).items())}
    if len(sys.argv) < 3 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    if (text := commands[sys.argv[1]](*sys.argv[2:])) is not None:
        print(text)


if __name__ == "__main__":
    main()
