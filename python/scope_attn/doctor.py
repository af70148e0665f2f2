"""python -m scope_attn.doctor: what was found here, what the library can do with it, and a one-second self-test."""
import importlib
import importlib.metadata
import os
import pathlib
import platform
import sys

import scope_attn
from scope_attn import _c_api

CUDA_DRIVER = "580"  # the first that a CUDA 13 runtime works with


def say(what, text):
    print(f"{what:<12} {text}")


def version_of(module):
    """Of a module that is optional here; None where it is missing."""
    try:
        return importlib.import_module(module).__version__
    except ImportError:
        return None


def package_version():
    try:
        return importlib.metadata.version("scope-attn")
    except importlib.metadata.PackageNotFoundError:
        return "not installed, from " + str(pathlib.Path(__file__).parent)


def built_with():
    """What the wheel's build wrote down."""
    path = pathlib.Path(_c_api.library().path).with_name("build_info.txt")
    return path.read_text().strip() if path.exists() else "not by pip: it does not say what with"


def cpu_name():
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor() or "a CPU")


def driver():
    """The NVIDIA driver's version line, or None."""
    path = pathlib.Path("/proc/driver/nvidia/version")
    return path.read_text().splitlines()[0] if path.exists() else None


def gpus():
    """A context for every GPU that the library can use."""
    found = []
    while True:
        try:
            found.append(scope_attn.Context(f"cuda:{len(found)}"))
        except scope_attn.ScopeError:
            return found


def self_test(q, k, v, tolerance):
    """Keeping every key must equal dense attention, and a target density must be met."""
    rope = (24, 20, 20)
    dense = scope_attn.attention(q, k, v, method="dense")
    whole = scope_attn.attention(q, k, v, rope=rope, rho=1)
    difference = float(abs(dense - whole).max())
    stats = scope_attn.Stats()
    scope_attn.attention(q, k, v, rope=rope, target_density=0.2, stats=stats)
    passed = difference < tolerance and abs(stats.density - 0.2) < 0.01
    return passed, f"rho = 1 equals dense within {difference:.1e}; asked for density 0.2, got {stats.density:.3f}"


def main():
    say("scope-attn", package_version())
    say("python", f"{platform.python_version()}; numpy {version_of('numpy') or 'not installed'}; "
        f"PyTorch {version_of('torch') or 'not installed'}")
    try:
        library = _c_api.library()
    except ImportError as error:
        say("library", error)
        return 1
    say("library", f"{library.version().decode()}, {library.path}")
    say("built", built_with())
    say("cpu", f"{cpu_name()}, {os.cpu_count()} cores, {scope_attn.Context(threads=1).instruction_set}")
    contexts = gpus()
    for context in contexts:
        say(context.device, context.instruction_set)
    say("driver", driver() or "no NVIDIA driver")
    if not contexts:
        say("gpu", f"none: it takes a library built with CUDA, a GPU of sm_80 or later, and driver {CUDA_DRIVER} or newer")

    ok = True
    if version_of("numpy"):
        import numpy
        q, k, v = numpy.random.default_rng(0).standard_normal((3, 1, 2, 768, 64), numpy.float32)
        passed, text = self_test(q, k, v, 1e-4)
        ok = ok and passed
        say("self-test", f"cpu {'passed' if passed else 'FAILED'}: {text}")
    else:
        say("self-test", "cpu skipped: it needs numpy")
    for context in contexts:
        if version_of("torch") is None:
            say("self-test", f"{context.device} skipped: device memory comes from PyTorch")
            continue
        import torch
        q, k, v = torch.randn(3, 1, 2, 768, 64, generator=torch.Generator().manual_seed(0)).to(context.device, torch.bfloat16)
        passed, text = self_test(q, k, v, 0.05)
        ok = ok and passed
        say("self-test", f"{context.device} {'passed' if passed else 'FAILED'}: {text}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
