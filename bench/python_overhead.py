"""What a call from Python costs besides the C call, and on a GPU that it neither copies nor waits; prints one JSON object.

    SCOPE_LIBRARY=build/release/libscope.so PYTHONPATH=python python3 bench/python_overhead.py [--device cuda] [--json FILE]

`added_us` is everything but the C call, which is left out, `whole_us` the host's time with it. Ways take turns, and the smallest of
many batches counts, since other work on the machine only adds to them. `empty_like, compiled` is what any compiled graph costs. On a
GPU 10 warm calls run under torch.profiler: any copy or wait among them, or a profiler that does not see a deliberate one, is an error.
"""
import argparse
import importlib.util
import json
import pathlib
import platform
import sys
import time
from typing import Any

import numpy

import scope_attn
from scope_attn import _c_api

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--device", default="cpu")
parser.add_argument("--json", type=pathlib.Path, help="write the object here too")
options = parser.parse_args()
on_gpu = options.device.startswith("cuda")
settings: dict[str, Any] = dict(rope=(24, 20, 20), target_density=0.25)
CALLS = 10
torch: Any = importlib.import_module("torch") if importlib.util.find_spec("torch") else None


def smallest(ways, batch=20, batches=200):
    """Of each way, in microseconds a call."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(batches):
        for name, call in ways.items():
            start = time.perf_counter()
            for _ in range(batch):
                call()
            times[name].append(time.perf_counter() - start)
            if on_gpu:
                torch.cuda.synchronize()
    return {name: round(1e6 * min(found) / batch, 1) for name, found in times.items()}


def ways_of(kind, q, k, v, dtype):
    plan = scope_attn.Plan(batch=1, heads=1, q_tokens=32, k_tokens=32, dim=64, dtype=dtype, device=options.device, **settings)
    states = [scope_attn.State() for _ in range(2)]
    return {f"Plan.run, {kind}": lambda: plan.run(q, k, v, state=states[0]),
            f"attention, {kind}": lambda: scope_attn.attention(q, k, v, state=states[1], **settings)}


def watch(call):
    """What the calls launched, copied and waited for. A wait at the profiler's own end is not among them."""
    from torch.profiler import ProfilerActivity, profile, record_function
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function("the calls"):
            for _ in range(CALLS):
                call()
        torch.cuda.synchronize()
    events = list(profiler.events())
    marks = [event.time_range for event in events if event.name == "the calls" and event.device_type.name == "CPU"]
    inside = [event.name for event in events if event.device_type.name == "CPU"
              and any(mark.start <= event.time_range.start and event.time_range.end <= mark.end for mark in marks)]
    on_device = [event.name for event in events if event.device_type.name != "CPU"]
    return dict(calls=CALLS, launches=sum("Launch" in name for name in inside),
                kernels=sum(not name.startswith(("Memcpy", "Memset", "the calls")) for name in on_device),
                memcpy=sum("memcpy" in name.lower() for name in inside) + sum(name.startswith("Memcpy") for name in on_device),
                synchronize=sum("synchronize" in name.lower() for name in inside))


x = numpy.random.default_rng(0).standard_normal((3, 1, 1, 32, 64), numpy.float32)
ways = {} if on_gpu else ways_of("numpy", x[0], x[1], x[2], "float32")
found = dict(device=platform.processor() or platform.machine(), python=platform.python_version(), scope=_c_api.library().version().decode(),
             settings=settings)
if torch is not None:
    torch.set_grad_enabled(False)
    found["torch"] = torch.__version__
    if on_gpu:
        found["device"] = torch.cuda.get_device_name(options.device)
    dtype = "bfloat16" if on_gpu else "float32"
    q, k, v = torch.from_numpy(x).to(options.device, getattr(torch, dtype))
    ways.update(ways_of("PyTorch", q, k, v, dtype))
    state = scope_attn.State()
    compiled = torch.compile(lambda q, k, v: scope_attn.attention(q, k, v, state=state, **settings), fullgraph=True)
    ways["attention, compiled"] = lambda: compiled(q, k, v)  # with what every compiled graph costs
for name, call in list(ways.items()):
    try:
        for _ in range(3):
            call()  # plans, states and graphs are made
    except Exception as error:
        if name != "attention, compiled":
            raise
        found["not compiled"] = str(error).splitlines()[0]  # for want of a compiler, for example
        del ways[name]
wrong = []
if on_gpu:
    text = scope_attn.pack_bits(torch.arange(32)[None] >= 24)
    state_with_text = scope_attn.State()
    watched = {**ways, "attention with text": lambda: scope_attn.attention(q, k, v, state=state_with_text, keep=text, dense_queries=text,
                                                                          q_lengths=[30], k_lengths=[30], **settings)}
    watched["attention with text"]()
    found["warm_calls"] = {name: watch(call) for name, call in watched.items()}
    deliberate = lambda: (ways["attention, PyTorch"]().cpu(), torch.cuda.current_stream().synchronize())
    control = found["a copy and a wait in each"] = watch(deliberate)
    wrong = [f"{name}: {seen}" for name, seen in found["warm_calls"].items()
             if seen["memcpy"] or seen["synchronize"] or not (seen["launches"] and seen["kernels"])]
    if control["memcpy"] < CALLS or control["synchronize"] < CALLS:
        wrong.append(f"the profiler does not see copies and waits: {control}")
if "attention, compiled" in ways:
    nothing = torch.compile(lambda q, k, v: torch.empty_like(q), fullgraph=True)
    nothing(q, k, v)
    ways["empty_like, compiled"] = lambda: nothing(q, k, v)
found["whole_us"] = smallest(ways, batches=50)
_c_api.library().run = lambda *arguments: None
found["added_us"] = smallest(ways)
found["wrong"] = wrong
print(json.dumps(found))
if options.json and not wrong:
    options.json.write_text(json.dumps(found, indent=1) + "\n")
sys.exit(bool(wrong))
