r"""Times denoising steps of diffusers' Wan transformer in the 14B shape at 720p, dense and enabled, eager and compiled; writes JSON.

    SCOPE_LIBRARY=build/cuda/libscope.so PYTHONPATH=python python3 bench/diffusers_wan.py --layers 10 \
        --json bench/results/h200_diffusers.json            (about four minutes)
    … --small                                               a tiny shape on the CPU, to see that it runs

Weights are random and drawn on the device; a step is one pass for each CFG branch. Layer 0 attends densely in every case, so that
with fewer layers than the model's 40 a step is that of one layer and 39 times the mean of the others; the JSON says so.
Needs PyTorch and diffusers, and no network.
"""
import argparse
import json
import statistics
import time

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel

import scope_attn

MODEL = {row.name: row for row in scope_attn.models()}["wan2.1-t2v-14b"]


class Pipeline:
    """What enable() needs of one."""

    def __init__(self, transformer, steps):
        self.transformer, self.scheduler = transformer, FlowMatchEulerDiscreteScheduler(shift=5.0)
        self.scheduler.set_timesteps(steps)


def make_transformer(layers, heads, dim, ffn, text_dim, device, dtype):
    """As from_pretrained would give it: norms and time embeddings in f32."""
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        transformer = WanTransformer3DModel(num_attention_heads=heads, attention_head_dim=dim, ffn_dim=ffn, text_dim=text_dim,
                                            num_layers=layers).eval().requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    for name, module in transformer.named_modules():
        if any(part in name.split(".") for part in transformer._keep_in_fp32_modules):
            module.float()
    for block in (*transformer.blocks, transformer):
        block.scale_shift_table.data = block.scale_shift_table.data.float()
    return transformer


class Bench:
    def __init__(self, options):
        self.options, self.cuda = options, not options.small
        self.device, self.dtype = ("cuda", torch.bfloat16) if self.cuda else ("cpu", torch.float32)
        self.grid = (3, 8, 8) if options.small else MODEL.grid
        heads, dim, ffn, text_dim = (2, 24, 64, 32) if options.small else (MODEL.heads, MODEL.dim, 13824, 4096)
        self.pipe = Pipeline(make_transformer(options.layers, heads, dim, ffn, text_dim, self.device, self.dtype), options.steps)
        draw = lambda *shape: torch.randn(*shape, device=self.device, dtype=self.dtype)
        frames, height, width = self.grid
        self.latents = draw(1, 16, frames, 2 * height, 2 * width)
        self.texts = {branch: draw(1, 512, text_dim) for branch in ("cond", "uncond")}

    def step(self, at):
        """Milliseconds of one denoising step, both branches."""
        transformer, scheduler = self.pipe.transformer, self.pipe.scheduler
        scheduler.set_begin_index(0)
        scheduler._step_index = at
        timestep = scheduler.timesteps[at].to(self.device).expand(1)
        self.wait()
        begin = time.perf_counter()
        for branch, text in self.texts.items():
            with transformer.cache_context(branch):
                transformer(hidden_states=self.latents, timestep=timestep, encoder_hidden_states=text, return_dict=False)
        self.wait()
        return 1e3 * (time.perf_counter() - begin)

    def wait(self):
        if self.cuda:
            torch.cuda.synchronize()

    def median(self):
        """Of dense steps, after one that does not count."""
        self.step(0)
        return statistics.median(self.step(0) for _ in range(self.options.repeat))

    def one_layer(self):
        """A dense step of layer 0 alone, with all that is not a layer."""
        blocks = self.pipe.transformer.blocks
        self.pipe.transformer.blocks = blocks[:1]
        ms = self.median()
        self.pipe.transformer.blocks = blocks
        return ms

    def whole(self, ms, one_layer):
        """Of the model's layers, from a step of --layers."""
        layers = self.options.layers
        return ms if layers == MODEL.layers else one_layer + (ms - one_layer) / (layers - 1) * (MODEL.layers - 1)

    def memory(self):
        return torch.cuda.max_memory_allocated() if self.cuda else None

    def dense(self, mode):
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        one, ms = self.one_layer(), self.median()
        return dict(mode=mode, density=None, one_layer_ms=one, measured_ms=ms, step_ms=self.whole(ms, one), peak_bytes=self.memory())

    def enabled(self, mode, density, dense):
        """With the schedule of the model's row: the steps of the prefix, the first sparse step, and the warm ones."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        scope_attn.enable(self.pipe, self.options.method, target_density=density, min_tokens=0)
        steps, one = self.options.steps, dense["one_layer_ms"]
        prefix = int(MODEL.dense_steps * steps)
        self.step(prefix), self.step(prefix + 1)  # memory and kernels, which do not count
        dense_ms, first, warm = self.step(0), [], []
        for _ in range(self.options.repeat):
            self.pipe.scheduler.set_timesteps(steps)  # a new video
            first.append(self.step(prefix))
        for i in range(self.options.repeat):
            warm.append(self.step(prefix + 1 + i))
        receipt = scope_attn.receipt(self.pipe)
        call_ms = lambda chosen: 1e3 * statistics.median(call.seconds for call in receipt.calls if chosen(call))
        attention = dict(warm_call_ms=call_ms(lambda call: call.sparse and call.stats.warm),
                         dense_call_ms=call_ms(lambda call: not call.sparse))
        scope_attn.disable(self.pipe)
        dense_ms, first_ms, warm_ms = (self.whole(ms, one) for ms in (dense_ms, statistics.median(first), statistics.median(warm)))
        schedule = prefix * dense_ms + first_ms + (steps - prefix - 1) * warm_ms
        return dict(mode=mode, density=density, measured_density=receipt.density, dense_step_ms=dense_ms, first_step_ms=first_ms,
                    warm_step_ms=warm_ms, **attention, schedule_ms=schedule, times_faster=steps * dense["step_ms"] / schedule,
                    peak_bytes=self.memory())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny shape on the CPU")
    parser.add_argument("--layers", type=int, default=MODEL.layers, help="layers to run, at least 2; steps are scaled to the model's")
    parser.add_argument("--method", default="scope-mean")
    parser.add_argument("--density", type=lambda text: [float(part) for part in text.split(",")], default=[0.2, 0.1, 0.05])
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["eager", "compiled"])
    parser.add_argument("--steps", type=int, default=MODEL.steps, help="of the schedule that the ratio is for")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--commit", default="")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.layers < 2:
        parser.error("--layers: a layer of its own for the dense one, so at least 2")
    bench = Bench(options)
    if bench.cuda:
        bench.pipe.transformer.set_attention_backend("_native_cudnn")
    result = {"machine": {"device": torch.cuda.get_device_name() if bench.cuda else "cpu", "torch": torch.__version__,
                          "diffusers": diffusers.__version__},
              "commit": options.commit, "grid": list(bench.grid), "dtype": str(bench.dtype).split(".")[1], "layers_run": options.layers,
              "layers": MODEL.layers, "heads": bench.pipe.transformer.config.num_attention_heads, "steps": options.steps,
              "dense_steps": MODEL.dense_steps, "dense_layers": 1, "repeat": options.repeat, "branches": 2,
              "dense_backend": "cuDNN" if bench.cuda else "native", "settings": {"method": options.method, "state_dtype": "bf16"}, "cases": []}
    with torch.no_grad():
        for mode in options.modes:
            if mode == "compiled":
                bench.pipe.transformer.compile_repeated_blocks(fullgraph=True)
            dense = bench.dense(mode)
            cases = [dense] + [bench.enabled(mode, density, dense) for density in options.density]
            result["cases"] += cases
            for case in cases:
                print(", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in case.items()),
                      flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)
            file.write("\n")


main()
