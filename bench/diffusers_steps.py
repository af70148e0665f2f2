r"""Times passes of diffusers' transformers in the shapes of video models, dense and enabled; writes JSON.

    SCOPE_LIBRARY=build/cuda/libscope.so PYTHONPATH=python python3 bench/diffusers_steps.py --model wan2.1-t2v-14b \
        --json bench/results/h200_diffusers_wan.json              (two minutes for Wan, three for HunyuanVideo, more with fp8)
    … --model ltx-2 --grid 16x34x60 --layers 8 --variants scope-mean:target_density=0.1+dense_steps=0
                                                                  another length, a part of the layers
    … --modes compiled --linear bf16,torchao                      dense and variants, then all of them with fp8 linear layers
    … --small                                                     tiny shapes on the CPU, to see that it runs

A pass is one forward of the transformer for one branch, and a step has one for each branch: two in Wan and LTX-2, one in the others. Dense
passes are diffusers' own with cuDNN's attention; sparse ones those of scope_attn.enable: the first of a video, whose states are cold,
and warm ones. --repeat says how many dense and warm passes; a video's first ones run once. A run is the schedule of the model's row,
added up from them. Before anything is timed a pass of two layers of each kind runs at the same size, so that no kernel is loaded and
no graph compiled inside what counts. Weights and inputs are random and drawn on the device.

--linear puts the linear layers of all blocks into fp8 after the bf16 ones were timed: "torchao" by its quantize_ with
Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()), "fp8" by bench/fp8_linear.py, which does the same with PyTorch alone.
A case says how many times as fast it is as bf16 dense passes, and as dense passes with the same linear layers.

Needs PyTorch and diffusers, and no network. A file of --json that is not finished, of the same commit and options, is gone on with.
"""
import argparse
import statistics
import sys
import time
from typing import Any, NamedTuple

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch._dynamo.utils import counters

import fp8_linear
import provenance
import scope_attn

LINEAR = ["bf16"], ["bf16", "fp8"], ["bf16", "torchao"]
WARM_UP_LAYERS = 2  # of each kind: the first gets its input in another layout than the others


class Kind(NamedTuple):
    """What we know of a model; the defaults of its class are its shape."""

    row: str  # of scope_attn.models()
    transformer: str  # its class
    blocks: dict[str, str]  # lists of layers, and the options that say how many there are
    branches: int
    text: int  # tokens
    small: dict[str, Any]  # a tiny shape
    inputs: Any  # of a Bench: what a pass takes beside the time


def wan_inputs(bench, text_dim="text_dim"):
    frames, height, width = bench.grid
    return dict(hidden_states=bench.draw(1, bench.config.in_channels, frames, 2 * height, 2 * width),
                encoder_hidden_states=bench.draw(1, bench.kind.text, bench.config[text_dim]))


def hunyuan_inputs(bench):
    """No text is padding, and guidance is embedded."""
    return dict(**wan_inputs(bench, "text_embed_dim"),
                encoder_attention_mask=torch.ones(1, bench.kind.text, device=bench.device, dtype=torch.int64),
                pooled_projections=bench.draw(1, bench.config.pooled_projection_dim),
                guidance=torch.full((1,), 6000.0, device=bench.device, dtype=bench.dtype))


def ltx2_inputs(bench):
    """Video in patches of one latent, and 126 tokens of audio in a stream of its own, as 121 frames have."""
    frames, height, width = bench.grid
    text = bench.draw(2, 1, bench.kind.text, bench.config.caption_channels)
    return dict(hidden_states=bench.draw(1, bench.tokens, bench.config.in_channels), encoder_hidden_states=text[0],
                audio_hidden_states=bench.draw(1, 126, bench.config.audio_in_channels), audio_encoder_hidden_states=text[1],
                num_frames=frames, height=height, width=width, audio_num_frames=126)


def minimax_inputs(bench):
    """Text, 250 tokens of audio and the video, one after the other in one sequence."""
    counts = {1: bench.kind.text, 2: 250, 0: bench.tokens}
    tags = torch.cat([torch.full((count,), tag, device=bench.device) for tag, count in counts.items()])
    places = torch.zeros(len(tags), 3, device=bench.device)
    places[tags == 0] = torch.cartesian_prod(*(torch.arange(float(n), device=bench.device) for n in bench.grid))
    where = {name: (tags == tag).nonzero()[:, 0] for tag, name in enumerate(("video_indices", "text_indices", "audio_indices"))}
    return dict(hidden_states=bench.draw(1, bench.tokens, 4 * bench.config.in_channels), encoder_hidden_states=bench.draw(
        1, bench.kind.text, bench.config.text_dim), audio_hidden_states=bench.draw(1, 250, bench.config.audio_in_channels),
                timestep_indices=torch.zeros_like(tags), token_tags=tags, position_ids=places, **where)


KINDS = {
    "wan2.1-t2v-14b": Kind("wan2.1-t2v-14b", "WanTransformer3DModel", dict(blocks="num_layers"), branches=2, text=512, small=dict(
        num_attention_heads=2, attention_head_dim=24, ffn_dim=64, text_dim=32, num_layers=3), inputs=wan_inputs),
    "hunyuanvideo": Kind("hunyuanvideo-13b", "HunyuanVideoTransformer3DModel", dict(
        transformer_blocks="num_layers", single_transformer_blocks="num_single_layers"), branches=1, text=256, small=dict(
        num_attention_heads=2, attention_head_dim=24, num_layers=3, num_single_layers=4, text_embed_dim=32, pooled_projection_dim=16,
        rope_axes_dim=(4, 10, 10)), inputs=hunyuan_inputs),
    "ltx-2": Kind("ltx-2", "LTX2VideoTransformer3DModel", dict(transformer_blocks="num_layers"), branches=2, text=1024, small=dict(
        num_attention_heads=2, attention_head_dim=24, cross_attention_dim=48, audio_num_attention_heads=2, audio_attention_head_dim=12,
        audio_cross_attention_dim=24, caption_channels=32, num_layers=3), inputs=ltx2_inputs),
    "minimax-h3": Kind("minimax-h3", "MiniMaxH3Transformer3DModel", dict(transformer_blocks="num_layers"), branches=1, text=454, small=dict(
        num_attention_heads=2, attention_head_dim=32, hidden_size=48, num_refiner_layers=1, ffn_dim=64, text_dim=16, freq_dim=32,
        time_embed_hidden_dim=32, time_embed_dim=16, rope_freq_dim=4, num_layers=3), inputs=minimax_inputs),
}


class Pipeline:
    """What enable() needs of one."""

    def __init__(self, transformer):
        self.transformer, self.scheduler = transformer, FlowMatchEulerDiscreteScheduler(shift=5.0)


def without_mask(block, args):
    """Before a block of HunyuanVideo: its mask hides padding, of which there is none, and cuDNN has less to do without one."""
    return *args[:3], None, *args[4:]


class Bench:
    def __init__(self, options):
        self.options, self.kind, self.cuda = options, KINDS[options.model], not options.small
        self.row = next(row for row in scope_attn.models() if row.name == self.kind.row)
        self.steps = options.steps or self.row.steps
        self.device, self.dtype = ("cuda", torch.bfloat16) if self.cuda else ("cpu", torch.float32)
        self.grid = options.grid or (self.row.grid if self.cuda else (3, 8, 8))
        self.tokens = self.grid[0] * self.grid[1] * self.grid[2]
        self.transformer = self.make_transformer()
        self.config, self.pipe = self.transformer.config, Pipeline(self.transformer)
        if self.cuda:
            self.transformer.set_attention_backend("_native_cudnn")
        if self.kind.row == "hunyuanvideo-13b" and not options.mask:
            for name in self.kind.blocks:
                for block in getattr(self.transformer, name):
                    block.register_forward_pre_hook(without_mask)
        self.inputs = self.kind.inputs(self)

    def quantise(self, kind):
        """Puts the linear layers of the blocks into fp8, for good; how many, and which stay as they are."""
        blocks = [block for name in self.kind.blocks for block in getattr(self.transformer, name)]
        torch._dynamo.reset()  # graphs hold the layers that were there
        if kind == "fp8":
            return fp8_linear.quantise(blocks, "scaled_mm")
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_
        linears = fp8_linear.linears(blocks)
        for block in blocks:  # inductor keeps its options, so that all rows are compiled alike
            quantize_(block, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False))
        left = [name for name, linear in linears if type(linear.weight.data) is torch.Tensor]
        return len(linears) - len(left), left

    def draw(self, *shape):
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def make_transformer(self):
        """As from_pretrained would give it: what diffusers keeps in f32 is."""
        shape = {} if self.cuda else dict(self.kind.small)
        if self.options.layers:
            shape.update(dict.fromkeys(self.kind.blocks.values(), self.options.layers))
        torch.manual_seed(0)
        torch.set_default_dtype(self.dtype)
        with torch.device(self.device):
            transformer = getattr(diffusers, self.kind.transformer)(**shape).eval().requires_grad_(False)
        torch.set_default_dtype(torch.float32)
        for name, parameter in transformer.named_parameters():
            if not set(name.split(".")).isdisjoint(transformer._keep_in_fp32_modules or ()):
                parameter.data = parameter.data.float()
        return transformer

    def forward(self, at):
        """A pass at a step, always of the same branch."""
        scheduler = self.pipe.scheduler
        scheduler.set_begin_index(0)
        scheduler._step_index = at
        timestep = scheduler.timesteps[at].to(self.device, self.dtype if self.kind.row == "ltx-2" else None).expand(1)
        with self.transformer.cache_context("cond"):
            self.transformer(timestep=timestep, return_dict=False, **self.inputs)
        if self.cuda:
            torch.cuda.synchronize()

    def timed(self, at):
        """Seconds of a pass."""
        graphs, begin = counters["stats"]["unique_graphs"], time.perf_counter()
        self.forward(at)
        seconds = time.perf_counter() - begin
        if counters["stats"]["unique_graphs"] > graphs:
            print(f"a graph was compiled inside a timed pass of {seconds:.2f} s", file=sys.stderr, flush=True)
        return seconds

    def begin(self, *steps):
        """Passes of a few layers at these steps, which do not count; then a new video."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        whole = {name: getattr(self.transformer, name) for name in self.kind.blocks}
        for name, blocks in whole.items():
            setattr(self.transformer, name, blocks[:WARM_UP_LAYERS])
        self.new_video()
        for at in steps:
            self.forward(at)
        for name, blocks in whole.items():
            setattr(self.transformer, name, blocks)
        self.new_video()

    def new_video(self):
        self.pipe.scheduler.set_timesteps(self.steps)

    def case(self, mode, linear, variant, settings, density, measured_density, repeat, dense_s, first_s, warm_s, run_s, runs_s,
             dense_layers=None):
        """dense_layers: of a sparse pass. Seconds of one branch: run_s of the schedule's passes by their medians, runs_s by those of
        each repetition.
        """
        runs_s = [self.kind.branches * seconds for seconds in (run_s, min(runs_s), max(runs_s))]
        return dict(mode=mode, linear=linear, variant=variant, settings=settings, density=density, measured_density=measured_density,
                    repeat=repeat, dense_pass_s=dense_s, first_pass_s=first_s, warm_pass_s=warm_s, run_s=runs_s[0], run_range_s=runs_s[1:],
                    dense_layers=dense_layers, peak_bytes=torch.cuda.max_memory_allocated() if self.cuda else None)

    def dense(self, mode, linear):
        """The yardstick is the last mode's; another is timed once."""
        self.begin(0)
        passes = [self.timed(0) for _ in range(self.options.repeat if mode == self.options.modes[-1] else 1)]
        seconds = statistics.median(passes)
        return self.case(mode, linear, "dense", {}, None, None, len(passes), seconds, None, None, self.steps * seconds,
                         [self.steps * s for s in passes])

    def schedule(self, method, settings):
        """Steps in which layers beyond the dense ones attend sparsely, and how many layers are dense."""
        plan = scope_attn.Plan(batch=1, heads=self.row.heads, q_tokens=self.tokens, k_tokens=self.tokens, dim=self.row.dim,
                               dtype=str(self.dtype).split(".")[1], rope=self.row.rope if any(self.row.rope) else None,
                               device=self.device, method=method, model=self.row.name, **settings)
        sparse = [step for step in range(self.steps) if plan.reason(self.row.layers - 1, step, self.steps) is scope_attn.Reason.SPARSE]
        return sparse, int(plan.setting("dense_layers"))

    def enabled(self, mode, linear, variant):
        """A dense pass of the schedule, if it has any, the first sparse one and warm ones.

        Where dense steps cluster too (HunyuanVideo), the dense pass is the first of a video, whose clustering takes longest, and stands
        for all of them; the first sparse one is warm then.
        """
        method, settings = parsed(variant)
        sparse, dense_layers = self.schedule(method, settings)
        dense = [step for step in range(self.steps) if step not in sparse]
        least = 1 + self.options.repeat  # the first, and warm ones
        if len(sparse) < least:
            sys.exit(f"--variants: {variant} has {len(sparse)} sparse steps of {self.steps}, expected at least {least}")
        scope_attn.enable(self.pipe, method, min_tokens=0, **settings)
        self.begin(*dense[:1], *sparse[:2])
        dense_s = self.timed(dense[0]) if dense else None
        first_s, *warm = [self.timed(step) for step in sparse[:least]]
        receipt = scope_attn.receipt(self.pipe)
        told = receipt.settings["settings"]
        scope_attn.disable(self.pipe)
        run = lambda warm_s: len(dense) * (dense_s or 0) + first_s + (len(sparse) - 1) * warm_s
        warm_s = statistics.median(warm)
        return self.case(mode, linear, variant, {"method": method, "model": self.row.name, **told}, float(told["target_density"]),
                         receipt.density, len(warm), dense_s, first_s, warm_s, run(warm_s), [run(s) for s in warm], dense_layers)


def parsed(variant):
    """METHOD[:NAME=VALUE[+NAME=VALUE…]], as the command scope takes it."""
    method, _, settings = variant.partition(":")
    return method, dict(setting.split("=", 1) for setting in settings.split("+") if setting)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=KINDS, default="wan2.1-t2v-14b")
    parser.add_argument("--small", action="store_true", help="a tiny shape on the CPU")
    parser.add_argument("--layers", type=int, help="of each kind of block, at least 2, to try it; without it the whole model")
    parser.add_argument("--grid", type=lambda text: tuple(map(int, text.split("x"))), help="tokens along T, H and W, as 21x45x80; "
                        "without it the model's usual size")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["eager", "compiled"],
                        help="eager, compiled or both, in this order; variants run in the last, dense attention in each")
    parser.add_argument("--variants", type=lambda text: text.split(","), default=["scope:target_density=0.2", "fast"],
                        help="METHOD[:NAME=VALUE[+NAME=VALUE…]], separated by commas, each with a target density")
    parser.add_argument("--linear", type=lambda text: text.split(","), default=["bf16"],
                        help="bf16, or bf16,torchao or bf16,fp8: all cases of the last mode again with fp8 linear layers")
    parser.add_argument("--fp8-variants", type=lambda text: text.split(","), help="of --variants, those with fp8 linear layers too; "
                        "without it all of them")
    parser.add_argument("--mask", action="store_true",
                        help="give attention HunyuanVideo's mask of padding, as diffusers does, though it is all ones")
    parser.add_argument("--steps", type=int, help="of the schedule that the run is added up for; without it the model's")
    parser.add_argument("--repeat", type=int, default=1,
                        help="medians of so many dense and warm passes; eager dense ones beside compiled ones run once")
    parser.add_argument("--commit", default="")
    parser.add_argument("--json", help="written anew after each case")
    options = parser.parse_args()
    if options.modes not in (["eager"], ["compiled"], ["eager", "compiled"]):
        parser.error(f"--modes: got {','.join(options.modes)}, expected eager, compiled or eager,compiled")
    if options.linear not in LINEAR:
        parser.error(f"--linear: got {','.join(options.linear)}, expected {', '.join(','.join(each) for each in LINEAR)}")
    if "torchao" in options.linear and options.small:
        parser.error("--linear: torchao's float8 refuses a machine without a GPU; take bf16,fp8")
    if len(options.linear) > 1 and not options.small and torch.cuda.get_device_capability() < (8, 9):
        parser.error(f"--linear: {torch.cuda.get_device_name()} has no fp8, which begins with sm_89")
    for variant in options.fp8_variants or []:
        if variant not in options.variants:
            parser.error(f"--fp8-variants: got {variant}, expected some of --variants, {','.join(options.variants)}")
    if options.layers is not None and options.layers < WARM_UP_LAYERS:
        parser.error(f"--layers: got {options.layers}, expected at least {WARM_UP_LAYERS}")
    start, bench = time.perf_counter(), Bench(options)
    result = {"commit": options.commit, "finished": False,
              "machine": {"gpu": torch.cuda.get_device_name() if bench.cuda else "none", "torch": torch.__version__,
                          "diffusers": diffusers.__version__},
              "host": "diffusers", "model": options.model,
              "layers": sum(len(getattr(bench.transformer, name)) for name in bench.kind.blocks),
              "model_layers": bench.row.layers, "heads": bench.config.num_attention_heads, "dim": bench.config.attention_head_dim,
              "grid": list(bench.grid), "tokens": bench.tokens, "text": bench.kind.text, "branches": bench.kind.branches,
              "steps": bench.steps,
              "dtype": str(bench.dtype).split(".")[1], "dense_attention": "cuDNN" if bench.cuda else "native", "masked": options.mask,
              "linears": options.linear, "repeat": options.repeat, "cases": []}
    begun = provenance.load(options.json, options.commit) if options.json else {}
    if begun.get("finished") is False and all(begun.get(key) == value for key, value in result.items() if key != "cases"):
        result["cases"] = [case for case in begun["cases"] if case["variant"] == "dense" or case["variant"] in options.variants]
        result.update({name: begun[name] for name in ("fp8_layers", "not_in_fp8") if name in begun})

    def add(case, dense_s, same_linear_s):
        """With how many times as fast the run is as this mode's dense ones. The result is written after each."""
        case["times_faster"], case["times_faster_same_linear"] = (seconds / case["run_s"] for seconds in (dense_s, same_linear_s))
        print(f"{time.perf_counter() - start:5.0f} s  " + ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in case.items()), flush=True)
        result["cases"].append(case)
        write()

    def write():
        if options.json:
            provenance.save(options.json, result)

    with torch.no_grad():
        for mode in options.modes:
            if mode == "compiled":
                bench.transformer.compile_repeated_blocks(fullgraph=True, dynamic=False, backend="inductor" if bench.cuda else "aot_eager")
            last = mode == options.modes[-1]
            dense_s = None
            for linear in options.linear if last else options.linear[:1]:
                if linear != "bf16":
                    result["fp8_layers"], result["not_in_fp8"] = bench.quantise(linear)
                done = {case["variant"]: case for case in result["cases"] if (case["mode"], case["linear"]) == (mode, linear)}
                dense = done.get("dense") or bench.dense(mode, linear)
                dense_s = dense_s or dense["run_s"]
                if "dense" not in done:
                    add(dense, dense_s, dense["run_s"])
                for variant in options.variants if last else []:
                    if variant not in done and (linear == "bf16" or variant in (options.fp8_variants or options.variants)):
                        add(bench.enabled(mode, linear, variant), dense_s, dense["run_s"])
    result["finished"] = True
    write()


if __name__ == "__main__":
    main()
