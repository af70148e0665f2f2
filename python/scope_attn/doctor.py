"""What was found here, what the library can do with it, and a one-second self-test; --measure: from which density on it pays."""
import argparse
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
    found: list[scope_attn.Context] = []
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


def arguments(given):
    parser = argparse.ArgumentParser(prog="python -m scope_attn.doctor", description=__doc__)
    parser.add_argument("--measure", type=int, metavar="TOKENS",
                        help="time dense attention and scope-mean on this machine, for a video of so many "
                        "tokens (Wan2.1 at 480p has 32,760, at 720p 75,600), and say from which density on sparse attention pays")
    parser.add_argument("--heads", type=int, help="attention heads of --measure; 8 on a GPU and 1 on a CPU unless it is given")
    parser.add_argument("--dim", type=int, default=128, help="channels of a head, for --measure; %(default)s unless it is given")
    parser.add_argument("--device", help="cpu or cuda:N, for --measure; the first GPU unless it is given, or else the CPU")
    found = parser.parse_args(given)
    for name in ("measure", "heads", "dim"):
        value = getattr(found, name)
        if value is not None and value < 1:
            parser.error(f"--{name}: got {value}, expected 1 or more")
    return found


def measure(options, contexts):
    """Whether it could be measured."""
    if version_of("torch") is None:
        say("measure", "it needs PyTorch: pip install torch")
        return False
    import torch

    from . import _measure
    devices = [context.device for context in contexts if torch.cuda.is_available()] + ["cpu"]
    device = options.device or devices[0]
    if device not in devices:
        say("measure", f'--device: got "{device}", expected {" or ".join(devices)}')
        return False
    try:
        _measure.measure(options.measure, options.heads, options.dim, device, say)
    except (scope_attn.ScopeError, ValueError, RuntimeError) as error:  # PyTorch's lack of memory is a RuntimeError
        say("measure", f"FAILED on {device}: {str(error).splitlines()[0]}")
        return False
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return True


def main(given=None):
    options = arguments(given)
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
    if options.measure is not None:
        ok = measure(options, contexts) and ok
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
