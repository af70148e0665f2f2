"""Times our dense attention and PyTorch's CPU SDPA on the same tensors in one process, as ratios, and writes JSON.

    bench/compare_pytorch.sh [--json FILE] [--commit HASH]      (makes the virtual environment and builds the library)
"""
import argparse
import json
import pathlib
import platform
import statistics
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "python" / "scope_attn"))
import _c_api as api

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--libscope", required=True)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--tokens", type=int, default=8192)
parser.add_argument("--dim", type=int, default=128)
parser.add_argument("--repeat", type=int, default=7)
parser.add_argument("--threads", type=int, default=torch.get_num_threads())
parser.add_argument("--json")
parser.add_argument("--commit", default="")
options = parser.parse_args()
torch.set_num_threads(options.threads)
libscope = api.LibScope(options.libscope)
cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.processor())
result = {"machine": {"cpu": cpu, "threads": options.threads, "torch": torch.__version__}, "commit": options.commit,
          "shape": {"heads": options.heads, "tokens": options.tokens, "dim": options.dim}, "repeat": options.repeat, "rows": []}
torch.manual_seed(0)
for name, dtype, code in (("f32", torch.float32, api.F32), ("bf16", torch.bfloat16, api.BF16)):
    q, k, v = (torch.randn(1, options.heads, options.tokens, options.dim).to(dtype) for _ in range(3))
    out = torch.full_like(q, float("nan"))
    plan = libscope.plan("dense", threads=options.threads, batch=1, heads=options.heads, q_tokens=options.tokens,
                        k_tokens=options.tokens, dim=options.dim, dtype=code)
    arguments = {key: api.Tensor(x.data_ptr(), x.stride(0), x.stride(1), x.stride(2))
                 for key, x in dict(q=q, k=k, v=v, out=out).items()}
    ours, theirs = [], []
    for i in range(options.repeat + 1):  # interleaved; the first round warms up
        start = time.perf_counter()
        stats = plan.run(**arguments)
        middle = time.perf_counter()
        reference = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        end = time.perf_counter()
        if i:
            ours.append(middle - start)
            theirs.append(end - middle)
    exact = torch.nn.functional.scaled_dot_product_attention(q[:, :1].double(), k[:, :1].double(), v[:, :1].double())
    error = ((out[:, :1].double() - exact).norm() / exact.norm()).item()
    error_theirs = ((reference[:, :1].double() - exact).norm() / exact.norm()).item()
    flop = 4 * options.heads * options.tokens**2 * options.dim
    a, b = statistics.median(ours), statistics.median(theirs)
    result["rows"].append({"dtype": name, "scope_seconds": a, "torch_seconds": b, "speed_ratio": b / a, "scope_gflops": flop / a / 1e9,
                           "torch_gflops": flop / b / 1e9, "scope_error": error, "torch_error": error_theirs,
                           "bf16_dots": stats.arithmetic == b"bf16"})
    print(f"{name}: ours {1e3 * a:.0f} ms ({flop / a / 1e9:.0f} GFLOP/s, error {error:.1e}), PyTorch {1e3 * b:.0f} ms "
          f"({flop / b / 1e9:.0f} GFLOP/s, error {error_theirs:.1e}): {b / a:.2f}x its speed")
if options.json:
    pathlib.Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
