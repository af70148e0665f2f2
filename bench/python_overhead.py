"""What a call from Python costs besides the C call: everything but that, which is left out; prints microseconds.

    SCOPE_LIBRARY=build/release/libscope.so PYTHONPATH=python python3 bench/python_overhead.py [--device cuda]

The smallest of many batches counts, since other work on the machine only adds to them.
"""
import argparse
import time

import numpy

import scope_attn
from scope_attn import _c_api

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--device", default="cpu")
options = parser.parse_args()
settings = dict(rope=(24, 20, 20), target_density=0.25)
try:
    import torch
except ImportError:
    torch = None


def smallest(call, batch=20, batches=300):
    times = []
    for _ in range(batches):
        start = time.perf_counter()
        for _ in range(batch):
            call()
        times.append(time.perf_counter() - start)
    return 1e6 * min(times) / batch


def ways_of(kind, q, k, v, dtype):
    plan = scope_attn.Plan(batch=1, heads=1, q_tokens=32, k_tokens=32, dim=64, dtype=dtype, device=options.device, **settings)
    states = [scope_attn.State() for _ in range(2)]
    return {f"Plan.run, {kind}": lambda: plan.run(q, k, v, state=states[0]),
            f"attention, {kind}": lambda: scope_attn.attention(q, k, v, state=states[1], **settings)}


x = numpy.random.default_rng(0).standard_normal((3, 1, 1, 32, 64), numpy.float32)
ways = ways_of("numpy", *x, "float32") if options.device == "cpu" else {}
if torch is not None:
    torch.set_grad_enabled(False)
    dtype = "float32" if options.device == "cpu" else "bfloat16"
    q, k, v = torch.from_numpy(x).to(options.device, getattr(torch, dtype))
    ways.update(ways_of("PyTorch", q, k, v, dtype))
    state = scope_attn.State()
    compiled = torch.compile(lambda q, k, v: scope_attn.attention(q, k, v, state=state, **settings), fullgraph=True)
    ways["attention, compiled"] = lambda: compiled(q, k, v)  # with what every compiled graph costs
for call in ways.values():
    call()  # plans, states and graphs are made
_c_api.library().run = lambda *arguments: None
for name, call in ways.items():
    print(f"{name:24} {smallest(call):6.1f} us")
