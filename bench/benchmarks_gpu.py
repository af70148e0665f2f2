"""Times SCOPE on a GPU against PyTorch's cuDNN and FlashAttention-2 SDPA on the same tensors in one process; writes JSON.

    python3 bench/benchmarks_gpu.py --libscope build/cuda/libscope.so --command build/cuda/bin/scope --json bench/results/h200.json
    python3 bench/benchmarks_gpu.py … --parts methods --json bench/results/h200_methods.json

q, k, v come from the bundled video model at Wan's 720p grid and from `scope make-qkv`; heads are repeated to the model's count.
Needs PyTorch with CUDA, numpy and safetensors.
"""
import argparse
import contextlib
import ctypes
import pathlib
import statistics
import subprocess
import sys
import tempfile

import numpy
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "python" / "scope_attn"))
sys.path.insert(0, str(ROOT / "tools" / "tiny_video"))
import _c_api as api
import provenance

STAGES = ("group", "encode", "score", "select", "attend")
VIDEO_HEADS = 12  # the bundled model's: 2 in each of 6 layers
DAMPED = "scope-mean:tail=mean+tail_weight=0.75+select_stride=1+warm_sample=1"  # scope-mean before 0.3
METHODS = ("scope", "scope-paper", "scope-exact", DAMPED, "scope-mean", "svg2", "svg2:first_sample=0.1", "sparge")  # as in `scope compare`
MEANS = (DAMPED, "scope-mean", "scope-mean:warm_sample=1", "scope-mean:products=qk8")


def median_ms(body, repeat, warm=2):
    """Median GPU time of body() in ms."""
    times = []
    for i in range(warm + repeat):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        body()
        end.record()
        end.synchronize()
        if i >= warm:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def synthetic(command, grid, rope, heads, count):
    """[1, heads, tokens, dim] bf16 from `scope make-qkv`: `count` different heads, repeated."""
    from safetensors.torch import load_file
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/qkv.safetensors"
        subprocess.run([command, "make-qkv", "-o", path, "--grid", "x".join(map(str, grid)), "--rope", ",".join(map(str, rope)),
                        "--heads", str(count), "--dtype", "bf16"], check=True, stdout=subprocess.DEVNULL)
        tensors = load_file(path)
    return tuple(repeat_heads(tensors[name].cuda().reshape(1, count, -1, sum(rope)), heads) for name in "qkv")


def repeat_heads(x, heads):
    return x[:, [h % x.shape[1] for h in range(heads)]].contiguous()


def video_model(grid, heads):
    """Every head of the bundled model at the middle of a sampling run, repeated."""
    import video
    from export import Capture
    from sample import load, noise_for, sample
    net = load(str(ROOT / "models" / "tiny-wan"), "cuda")
    seed = video.HELD_OUT
    rgb, tokens = video.clips([seed], grid, "cuda")
    latent = video.to_latent(rgb)

    class Enough(Exception):
        pass

    class Middle(Capture):
        def __call__(self, step, layer, q, k, v):
            if step > self.at:
                raise Enough
            return super().__call__(step, layer, q, k, v)

    capture = Middle(10)
    with contextlib.suppress(Enough):
        sample(net, latent, tokens, noise_for([seed], latent.shape[1:], "cuda"), 20, capture)
    assert sum(layer[0].shape[1] for layer in capture.layers) == VIDEO_HEADS
    return tuple(repeat_heads(torch.cat([layer[i] for layer in capture.layers], 1).bfloat16(), heads) for i in range(3))


def with_text(tensors, text):
    """Appends `text` tokens of the same scale."""
    generator = torch.Generator("cuda").manual_seed(5)
    more = [torch.randn(x.shape[0], x.shape[1], text, x.shape[3], device="cuda", generator=generator) * x.float().std() for x in tensors]
    return tuple(torch.cat([x, y.to(x.dtype)], 2).contiguous() for x, y in zip(tensors, more))


def last_bits(tokens, text):
    bits = numpy.zeros((tokens + 31) // 32 * 32, dtype=numpy.uint8)
    bits[tokens - text:tokens] = 1
    return numpy.packbits(bits, bitorder="little").view(numpy.uint32).copy()


class Scope:
    """One plan on the GPU with its memory; call() launches on the current stream."""

    def __init__(self, libscope, q, k, v, method, settings, rope, text=0, selection=False):
        batch, heads, tokens, dim = q.shape
        self.plan = libscope.plan(method, settings, backend="cuda", device=torch.cuda.current_device(), threads=1, batch=batch,
                                 heads=heads, q_tokens=tokens, k_tokens=k.shape[2], dim=dim, rope=rope, dense_queries=int(text > 0),
                                 dtype=api.BF16 if q.dtype == torch.bfloat16 else api.F16)
        info = self.plan.info
        memory = lambda n: torch.empty(max(n, 1), dtype=torch.uint8, device="cuda")
        self.out = torch.full_like(q, float("nan"))
        self.memory = [memory(info.workspace_bytes), q, k, v]  # arguments hold addresses alone
        self.stats, self.state = api.CallStats(), None
        fields = {"workspace": self.memory[0].data_ptr(),
                  **{name: api.Tensor(x.data_ptr(), x.stride(0), x.stride(1), x.stride(2))
                     for name, x in dict(q=q, k=k, v=v, out=self.out).items()}}
        if info.state_bytes:
            self.memory.append(memory(info.state_bytes))
            fields["state"] = self.state = self.plan.state(self.memory[-1].data_ptr())
        if text:
            self.bits = last_bits(tokens, text)
            fields["keep"] = fields["dense_queries"] = self.bits.ctypes.data
        if selection:
            g, words = info.selection_groups, info.mask_words
            self.labels = torch.empty(batch, heads, tokens, dtype=torch.int32, device="cuda")
            self.mask = torch.empty(batch, heads, g, words, dtype=torch.int32, device="cuda")
            self.sizes, self.counts = (torch.empty(batch, heads, g, dtype=torch.int32, device="cuda") for _ in range(2))
            fields["selection"] = api.Selection(labels=self.labels.data_ptr(), mask=self.mask.data_ptr(),
                                                sizes=self.sizes.data_ptr(), counts=self.counts.data_ptr())
        self.arguments = self.plan.arguments(**fields)

    def call(self, first=False, stats=None):
        if first and self.state is not None:
            self.state.reset()
        self.arguments.stream = torch.cuda.current_stream().cuda_stream
        self.arguments.stats = stats
        self.plan.launch(self.arguments)

    def stages(self, repeat=5, first=False):
        """Median of each stage in ms, and the density."""
        rows = []
        for _ in range(repeat):
            self.call(first, ctypes.pointer(self.stats))
            self.plan.read_stats(self.arguments)
            rows.append({name: 1e3 * getattr(self.stats, f"{name}_seconds") for name in (*STAGES, "total")})
        result = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        result["other"] = result["total"] - sum(result[name] for name in STAGES)
        return result, self.stats.density, self.stats.total_density


def quality(scope, q, k, v, text=0, heads=8, queries=64):
    """Mass recall, and the output's relative error, on random queries of some heads, the same for all methods, against f32."""
    recall, error, norm = [], 0.0, 0.0
    tokens = q.shape[2] - text
    rows = torch.randperm(tokens, generator=torch.Generator().manual_seed(7))[:queries].cuda()
    shifts = torch.arange(32, device="cuda", dtype=torch.int32)
    for h in range(min(heads, q.shape[1])):
        p = torch.softmax(q[0, h, rows].float() @ k[0, h].float().mT / q.shape[-1] ** 0.5, -1)
        words = scope.mask[0, h, scope.labels[0, h, rows].long()]
        kept = ((words[:, :, None] >> shifts) & 1).flatten(1)[:, :k.shape[2]].bool()
        kept[:, tokens:] = True
        recall.append((p * kept).sum(-1).mean().item())
        exact = p @ v[0, h].float()
        error += (scope.out[0, h, rows].float() - exact).square().sum().item()
        norm += exact.square().sum().item()
    return statistics.mean(recall), (error / norm) ** 0.5


def parse(variant, settings):
    """"svg2:groups=87+codes=390" -> the method's name, and its settings beside those given."""
    name, _, changes = variant.partition(":")
    return name, {**settings, **dict(change.split("=") for change in changes.split("+") if change)}


def padding(scope, rows):
    """Work with every group padded to a multiple of `rows` queries, over the useful work."""
    sizes, counts = scope.sizes.double(), scope.counts.double()
    return ((torch.ceil(sizes / rows) * rows * counts).sum() / (sizes * counts).sum()).item()


def compare(libscope, name, tensors, different_heads, rope, densities, options, text=0, long=True, methods=()):
    """Every variant of `scope` at each density; with `methods`, those instead, each solved for the density."""
    q, k, v = tensors
    heads, tokens, dim = q.shape[1:]
    flop = 4 * heads * tokens * tokens * dim
    result = {"name": name, "heads": heads, "different_heads": different_heads, "tokens": tokens, "text": text, "dim": dim,
              "rope": rope, "rows": []}
    print(f"\n{name}: {heads} heads x {tokens} tokens ({text} of text) x {dim}, {q.dtype}", flush=True)
    print(f"{'':34} {'density':>8} {'total':>8} {'/cuDNN':>7} " + " ".join(f"{s:>7}" for s in STAGES) +
          f" {'other':>6} {'TFLOP/s':>8} {'recall':>7} {'error':>7}")
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def peer(backend):
        with sdpa_kernel(backend):
            return median_ms(lambda: sdpa(q, k, v), options.repeat if long else options.repeat + 4)

    cudnn = peer(SDPBackend.CUDNN_ATTENTION)

    def row(label, ms, density=1.0, stages=None, pairs=None, extra=None):
        attend = (stages or {}).get("attend", ms)
        tflops = flop * (density if pairs is None else pairs) / attend / 1e9
        entry = {"name": label, "density": density, "ms": ms, "ratio": ms / cudnn, "attend_tflops": tflops, "stages_ms": stages,
                 **(extra or {})}
        result["rows"].append(entry)
        cells = " ".join(f"{stages[s]:7.2f}" for s in STAGES) + f" {stages['other']:6.2f}" if stages else " " * 46
        tail = (f" {entry['mass_recall']:7.4f} {entry['error']:7.4f}  padding {entry['padding_64']:.3f} {entry['padding_128']:.3f}"
                if "mass_recall" in entry else "")
        print(f"{label:34} {density:8.4f} {ms:8.2f} {ms / cudnn:7.3f} {cells} {tflops:8.1f}{tail}", flush=True)

    row("PyTorch cuDNN", cudnn)
    if long:
        row("PyTorch FlashAttention-2", peer(SDPBackend.FLASH_ATTENTION))
    for kernel in ("wgmma", "portable") if long else ("wgmma",):
        dense = Scope(libscope, q, k, v, "dense", {"kernel": kernel}, rope)
        row(f"dense, {kernel}", median_ms(dense.call, options.repeat, 1))
        del dense
    for products in ("qk8", "qkv8") if long else ():
        dense = Scope(libscope, q, k, v, "dense", {"products": products}, rope)
        row(f"dense, {products}", median_ms(dense.call, options.repeat, 1))
        del dense
    for density in densities:
        variants = [("scope, rule=target", "scope", {"rule": "target"})]
        if methods:
            variants = [(variant, *parse(variant, {"target_density": density})) for variant in methods]
        elif long:
            variants += [("scope, fixed k", "scope", {"rule": "fixed"}), ("scope-exact, rule=target", "scope-exact", {"rule": "target"}),
                         ("scope-mean, rule=target", "scope-mean", {"rule": "target"}),
                         *((f"scope-mean, target, {p}", "scope-mean", {"rule": "target", "products": p}) for p in ("qk8", "qkv8")),
                         ("scope, target, first-order tail", "scope", {"rule": "target", "tail": "first_order"})]
            if density == densities[0]:
                variants += [("scope, target, portable", "scope", {"rule": "target", "kernel": "portable"}),
                             ("scope, target, 100 MiB workspace", "scope",
                              {"rule": "target", "target_scope": "head", "workspace_limit": 100})]
        else:
            variants += [("scope-exact, rule=target", "scope-exact", {"rule": "target"})]
        for label, method, settings in variants:
            if not methods:
                settings = {**settings, "density": density}
            scope = Scope(libscope, q, k, v, method, settings, rope, text, selection=True)
            scope.call(first=True)
            wanted = methods or (long and label in ("scope, rule=target", "scope-mean, rule=target"))
            first_ms = median_ms(lambda: scope.call(first=True), 3, 1) if wanted else None
            scope.call(first=True)
            scope.call()
            recall, error = quality(scope, q, k, v, text)
            pads = {f"padding_{rows}": padding(scope, rows) for rows in (64, 128)}
            scope.arguments.selection = None
            ms = median_ms(scope.call, options.repeat)
            stages, measured, total = scope.stages()
            row(label, ms, measured, stages, total, {**pads, "settings": settings, "method": label if methods else method,
                                                     "mass_recall": recall, "error": error,
                                                     "target_scope": scope.plan.setting("target_scope"),
                                                     "total_density": total, "first_ms": first_ms,
                                                     "workspace_bytes": scope.plan.info.workspace_bytes,
                                                     "groups": scope.plan.info.groups, "codes": scope.plan.info.codes})
            if first_ms:
                print(f"{'  its first call':34} {'':8} {first_ms:8.2f} {first_ms / cudnn:7.3f}")
            del scope
    if long and not text and not methods:
        # The same call on [batch, tokens, heads, dim] memory.
        scope = Scope(libscope, *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)), "scope",
                      {"rule": "target", "density": densities[0]}, rope)
        scope.call(first=True)
        ms = median_ms(scope.call, options.repeat)
        stages, measured, total = scope.stages()
        row("scope, rule=target, token-major", ms, measured, stages, total, {"settings": {"density": densities[0]}})
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libscope", required=True, help="libscope.so built with CUDA")
    parser.add_argument("--command", required=True, help="the scope command, for make-qkv")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--parts", default="video,synthetic,hunyuan,dim64,sweep",
                        help="of video, synthetic, hunyuan, dim64, sweep, methods and means; all but the last two unless given")
    parser.add_argument("--densities", default="0.2,0.1")
    parser.add_argument("--json")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    libscope = api.LibScope(options.libscope)
    densities = [float(x) for x in options.densities.split(",")]
    clocks = subprocess.run(["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,clocks.sm,clocks.mem", "--format=csv,noheader"],
                            capture_output=True, text=True).stdout.strip()
    result = {"machine": {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
                          "driver, max SM, SM, memory clocks": clocks},
              "commit": options.commit, "finished": False, "parts": options.parts, "densities": densities, "repeat": options.repeat,
              "dtype": "bf16", "cases": [], "sweep": [], "methods": []}
    begun = provenance.load(options.json, options.commit) if options.json else {}
    if begun.get("finished") is False and all(begun[key] == result[key] for key in ("parts", "densities", "repeat")):
        result = begun  # what was measured before it was stopped stays

    def add(part, name, make_tensors, different_heads, *arguments, **keywords):
        """A case, unless it is there. The result is written after each."""
        if all(case["name"] != name for case in result[part]):
            result[part].append(compare(libscope, name, make_tensors(), different_heads, *arguments, options, **keywords))
            save()

    def save():
        if options.json:
            provenance.save(options.json, result)

    wan, wan_rope, hunyuan_rope, rope_64 = (21, 45, 80), (44, 42, 42), (16, 56, 56), (24, 20, 20)
    wan_synthetic = lambda: synthetic(options.command, wan, wan_rope, 40, 8)
    parts = options.parts.split(",")
    if "video" in parts:
        add("cases", "video model, Wan 720p", lambda: video_model(wan, 40), VIDEO_HEADS, wan_rope, densities)
    if "synthetic" in parts:
        add("cases", "synthetic, Wan 720p", wan_synthetic, 8, wan_rope, densities)
    if "hunyuan" in parts:
        add("cases", "synthetic, HunyuanVideo 720p",
            lambda: with_text(synthetic(options.command, (33, 45, 80), hunyuan_rope, 24, 6), 256), 6, hunyuan_rope, densities, text=256)
    if "dim64" in parts:
        add("cases", "synthetic, 21x45x80, dim 64", lambda: synthetic(options.command, wan, rope_64, 40, 8), 8, rope_64, densities)
    if "sweep" in parts:
        for grid in ((5, 20, 20), (10, 20, 40), (16, 32, 32), (21, 30, 52), (21, 45, 80)):
            add("sweep", f"synthetic, {'x'.join(map(str, grid))}", lambda: synthetic(options.command, grid, wan_rope, 40, 8), 8, wan_rope,
                [0.05, 0.1, 0.2, 0.3, 0.5], long=False)
    if "methods" in parts:
        for name, tensors, heads in (("video model, Wan 720p", lambda: video_model(wan, 40), VIDEO_HEADS),
                                     ("synthetic, Wan 720p", wan_synthetic, 8)):
            add("methods", name, tensors, heads, wan_rope, densities, long=False, methods=METHODS)
    if "means" in parts:
        add("methods", "video model, Wan 720p", lambda: video_model(wan, 40), VIDEO_HEADS, wan_rope, densities, long=False, methods=MEANS)
    result["finished"] = True
    save()


if __name__ == "__main__":
    main()
