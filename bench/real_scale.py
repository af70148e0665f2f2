"""Whole models: the tables of docs/notebook/real_scale.md and docs/guide/diffusers.md and the README's first figures; bench/report.py writes them."""
import sys

import provenance
from video_report import replace

MODELS = {"wan": ("h200_steps_wan.json", "h200_diffusers_wan.json"), "hunyuan": ("h200_steps_hunyuan.json", "h200_diffusers_hunyuan.json")}
LENGTHS = {"LTX-2": ("h200_ltx2_14080.json", "h200_ltx2_32640.json", "h200_ltx2_130560.json"),
           "MiniMax-H3": ("h200_h3_38000.json", "h200_h3_96000.json")}
PARTS = ("dense_attention", "attend", "selection", "linear", "rest")
COLUMNS = ("", "density", "dense pass, s", "first sparse pass", "warm sparse pass", *(part.replace("_", " ") for part in PARTS), "whole run, s",
           "× compiled diffusers", "peak, GiB")


def seconds(value):
    return "" if value is None else f"{value:.2f}"


def line(host, case, compiled_s):
    """compiled_s: the run of diffusers' compiled dense passes; None: it was not measured."""
    parts = case.get("parts") or {}
    density = "1" if case["measured_density"] is None else f"{case['measured_density']:.3f}"
    over = "" if compiled_s is None else f"**{compiled_s / case['run_s']:.2f}×**"
    peak = "" if case["peak_bytes"] is None else f"{case['peak_bytes'] / 2**30:.1f}"
    return "| " + " | ".join((f"{host}, `{case['variant']}`", density, *(seconds(case[f"{name}_pass_s"]) for name in ("dense", "first", "warm")),
                              *(seconds(parts.get(part)) for part in PARTS), f"{case['run_s']:,.0f}", over, peak)) + " |"


def repeats(data):
    return f"medians of {data['repeat']}" if data["repeat"] > 1 else "one run of each pass"


def source(name, data):
    machine = data["machine"]
    packages = "".join(f", {title} {machine[key]}" for key, title in (("torch", "PyTorch"), ("diffusers", "diffusers")) if key in machine)
    return f"`bench/results/{name}`, commit `{data['commit'][:10]}`, {machine['gpu']}{provenance.words(data)}{packages}, {repeats(data)}"


def section(load, names):
    """A model's table, of those of its two files that are there."""
    found = {}
    for name in names:
        try:
            found[name] = load(name)
        except FileNotFoundError:
            pass
    if not found:
        return "Not part of the committed figures: the commands below add it.\n"
    first, *others = found.values()
    for key in ("grid", "tokens", "text", "branches", "steps"):
        if any(data[key] != first[key] for data in others):
            sys.exit(f"{', '.join(found)}: {key} differs, and one table holds both")
    for name, data in found.items():
        if data["layers"] != data["model_layers"]:
            sys.exit(f"{name} has {data['layers']} of {data['model_layers']} layers, expected the whole model")
    cases = [(data["host"] + (f", {case['mode']}" if "mode" in case else ""), case) for data in found.values() for case in data["cases"]]
    compiled_s = next((case["run_s"] for host, case in cases if host == "diffusers, compiled" and case["variant"] == "dense"), None)
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|", *(line(*row, compiled_s) for row in cases), ""]
    text = (f"{'×'.join(map(str, first['grid']))} = {first['tokens']:,} tokens and {first['text']} of text; a run is {first['steps']} steps of "
            f"{first['branches']} pass{'es' if first['branches'] > 1 else ''}.")
    for data in found.values():
        if data.get("linear"):
            linear = data["linear"]
            text += (f" Linear layers of the {data['host']} runner: {linear['tflops']:.0f} TFLOP/s, {100 * linear['share']:.0f} % of the "
                     f"{linear['cublaslt_tflops']:.0f} that cuBLASLt alone has at these shapes.")
        if data["host"] == "diffusers":
            text += f" Dense attention of diffusers is {data['dense_attention']}'s."
    return "\n".join(lines + [text, "", f"Source: {'; '.join(source(name, data) for name, data in found.items())}.", ""])


def whole_model(data, case, dense):
    """Seconds of a warm pass with all the model's layers, where a part of them ran: its dense layers, and the others."""
    layer = dense["dense_pass_s"] / data["layers"]
    if case is dense:
        return data["model_layers"] * layer
    sparse = (case["warm_pass_s"] - case["dense_layers"] * layer) / (data["layers"] - case["dense_layers"])
    return case["dense_layers"] * layer + (data["model_layers"] - case["dense_layers"]) * sparse


def lengths(load):
    """Passes at several lengths, of models whose layers are all alike."""
    lines = ["| | tokens | compiled dense, s | `scope-mean` at 0.10, s | times as fast | `fast`, s | times as fast |", "|---" * 7 + "|"]
    sources, data = [], None
    for title, names in LENGTHS.items():
        for name in names:
            data = load(name)
            dense, mean, fast = data["cases"]
            dense_s, *ours = (whole_model(data, case, dense) for case in (dense, mean, fast))
            lines.append(f"| {title} | {data['tokens']:,} | {dense_s:.2f} | " + " | ".join(f"{s:.2f} | **{dense_s / s:.2f}×**" for s in ours) + " |")
            sources.append(source(name, data))
    return "\n".join([*lines, "", f"A warm pass of one branch with random weights. {data['layers']} layers ran, and were scaled up to the model's: its dense "
                      "layer once (`fast` has none), the others in proportion. Dense attention is cuDNN's; no step is dense.", "",
                      f"Source: {'; '.join(sources)}.", ""])


def page(load, text):
    """The page with its tables anew."""
    text = replace(text, "lengths", lengths(load))
    for part, names in MODELS.items():
        text = replace(text, part, section(load, names))
    return text


def compiled_case(data, variant):
    return next(case for case in data["cases"] if case["mode"] == "compiled" and case["variant"] == variant)


def faster(data, variant):
    """How many times as fast as the compiled dense run, with the spread over repetitions where there are some."""
    dense, case = compiled_case(data, "dense"), compiled_case(data, variant)
    spread = ""
    if data["repeat"] > 1:
        low, high = (dense["run_s"] / case["run_range_s"][i] for i in (1, 0))
        spread = f" ({low:.2f} to {high:.2f})"
    return f"{dense['run_s'] / case['run_s']:.2f}{spread}"


def headline(load):
    """The README's first figures: whole models in diffusers."""
    wan, hunyuan = (load(f"h200_diffusers_{name}.json") for name in MODELS)
    paper = "scope:target_density=0.2"
    return f"""In diffusers it is one line, `scope_attn.enable(pipe, "fast")`. How much faster transformers of two models' shapes then run their 720p schedules on an H200:

| times as fast as compiled dense attention | Wan2.1 14B | HunyuanVideo 13B |
|---|---|---|
| preset `fast`: density 0.18, nothing dense | **{faster(wan, 'fast')}** | **{faster(hunyuan, 'fast')}** |
| `scope` at density 0.20 after the model's dense steps | {faster(wan, paper)} | {faster(hunyuan, paper)} |

Dense attention is cuDNN's. All {wan['layers']} and {hunyuan['layers']} layers ran with random weights, {repeats(wan)}{', of unknown spread' if wan['repeat'] == 1 else ''}, added up over the schedule; text encoding and the VAE are left out ([docs/notebook/real_scale.md](docs/notebook/real_scale.md)). How near to dense videos stay was judged on two small models: [docs/notebook/fidelity.md](docs/notebook/fidelity.md).
"""


def diffusers(load):
    """docs/guide/diffusers.md: dense passes and enabled ones."""
    lines = ["| | density | dense pass, s | first sparse pass | warm sparse pass | whole run, s | times as fast as compiled dense |", "|---" * 7 + "|"]
    sources = []
    for name, title in (("wan", "Wan2.1 14B"), ("hunyuan", "HunyuanVideo 13B")):
        data = load(f"h200_diffusers_{name}.json")
        compiled_s = compiled_case(data, "dense")["run_s"]
        for case in data["cases"]:
            density = "1" if case["measured_density"] is None else f"{case['measured_density']:.2f}"
            lines.append(f"| {title}, {case['mode']}, `{case['variant']}` | {density} | " +
                         " | ".join(seconds(case[f"{which}_pass_s"]) for which in ("dense", "first", "warm")) +
                         f" | {case['run_s']:,.0f} | **{compiled_s / case['run_s']:.2f}×** |")
        sources.append(source(f"h200_diffusers_{name}.json", data))
    return "\n".join([*lines, "", "A pass is one forward of the whole transformer with random weights for one branch, and a run the model's 50 steps added up from "
                      "passes. Dense attention is cuDNN's. What the passes consist of: [real_scale.md](../notebook/real_scale.md).", "", f"Source: {'; '.join(sources)}.", ""])
