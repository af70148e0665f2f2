"""Whole models: the tables of docs/notebook/real_scale.md, and what README and guides show of them; bench/report.py writes them."""
import contextlib
import statistics
import sys

import provenance
from video_report import commit, listed, replace, row

MODELS = {"wan": ("h200_steps_wan.json", "h200_diffusers_wan.json"), "hunyuan": ("h200_steps_hunyuan.json", "h200_diffusers_hunyuan.json")}
LENGTHS = {"LTX-2": ("h200_ltx2_14080.json", "h200_ltx2_32640.json", "h200_ltx2_130560.json"),
           "MiniMax-H3": ("h200_h3_38000.json", "h200_h3_96000.json")}
PARTS = ("dense_attention", "attend", "selection", "linear", "rest")
COLUMNS = ("", "density", "dense pass, s", "first sparse pass, s", "warm sparse pass, s",
           *(f"{part.replace('_', ' ')}, s" for part in PARTS), "whole run, s", "times as fast as compiled diffusers", "peak memory, GiB")


def seconds(value):
    return "" if value is None else f"{value:.2f}"


def line(host, case, compiled_s):
    """compiled_s: the run of diffusers' compiled dense passes; None: it was not measured."""
    parts = case.get("parts") or {}
    density = "1" if case["measured_density"] is None else f"{case['measured_density']:.3f}"
    over = "" if compiled_s is None else f"**{compiled_s / case['run_s']:.2f}×**"
    peak = "" if case["peak_bytes"] is None else f"{case['peak_bytes'] / 2**30:.1f}"
    return "| " + " | ".join((f"{host}, `{case['variant']}`", density,
                              *(seconds(case[f"{name}_pass_s"]) for name in ("dense", "first", "warm")),
                              *(seconds(parts.get(part)) for part in PARTS), f"{case['run_s']:,.0f}", over, peak)) + " |"


def repeats(data):
    return f"medians of {data['repeat']} dense and warm passes" if data["repeat"] > 1 else "one run of each pass"


def sources(found):
    """Where results, by their names, come from; those that were made alike stand together."""
    alike = {}
    for name, data in found.items():
        machine = data["machine"]
        packages = "".join(f", {title} {machine[key]}" for key, title in (("torch", "PyTorch"), ("diffusers", "diffusers"))
                           if key in machine)
        made = f"{commit(data)}, {machine['gpu']}{provenance.words(data)}{packages}, {repeats(data)}"
        alike.setdefault(made, []).append(f"`bench/results/{name}`")
    return "; ".join(f"{listed(names)}, {made}" for made, names in alike.items())


def source(name, data):
    return sources({name: data})


def section(load, names):
    """A model's table, of those of its two files that are there."""
    found = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            found[name] = load(name)
    if not found:
        return "Not part of the committed figures: the commands below add it.\n"
    first, *others = found.values()
    for key in ("grid", "tokens", "text", "branches", "steps"):
        if any(data[key] != first[key] for data in others):
            sys.exit(f"{', '.join(found)}: {key} differs, and one table holds both")
    for name, data in found.items():
        if data["layers"] != data["model_layers"]:
            sys.exit(f"{name} has {data['layers']} of {data['model_layers']} layers, expected the whole model")
    cases = [(", ".join([data["host"], *([case["mode"]] if "mode" in case else []),
                         *(["fp8 linear layers"] if case.get("linear", "bf16") != "bf16" else [])]), case)
             for data in found.values() for case in data["cases"]]
    compiled_s = next((case["run_s"] for host, case in cases if host == "diffusers, compiled" and case["variant"] == "dense"), None)
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|", *(line(*row, compiled_s) for row in cases), ""]
    text = (f"There are {'×'.join(map(str, first['grid']))} = {first['tokens']:,} tokens of video and {first['text']} of "
            f"text. A run is {first['steps']} steps of {first['branches']} pass{'es' if first['branches'] > 1 else ''}.")
    for data in found.values():
        if data.get("linear"):
            linear = data["linear"]
            text += (f" The linear layers of the {data['host']} runner reach {linear['tflops']:.0f} TFLOP/s, "
                     f"{100 * linear['share']:.0f} % of the {linear['cublaslt_tflops']:.0f} that cuBLASLt alone reaches at "
                     "these shapes.")
        if data["host"] == "diffusers":
            text += f" Dense attention in diffusers is {data['dense_attention']}'s."
    return "\n".join([*lines, text, "", f"Source: {sources(found)}.", ""])


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
    found, layers, data = {}, {}, None
    for title, names in LENGTHS.items():
        for name in names:
            data = load(name)
            dense, mean, fast = data["cases"]
            dense_s, *ours = (whole_model(data, case, dense) for case in (dense, mean, fast))
            lines.append(f"| {title} | {data['tokens']:,} | {dense_s:.2f} | " +
                         " | ".join(f"{s:.2f} | **{dense_s / s:.2f}×**" for s in ours) + " |")
            found[name] = data
            layers[title] = f"{data['model_layers']} of {title}"
    return "\n".join([*lines, "", f"Seconds are of a warm pass of one branch with random weights. {data['layers']} layers "
                      f"ran, and their time was scaled up to the {' and the '.join(layers.values())}: the dense layer "
                      "counts once (`fast` has none), the others in proportion. Dense attention is cuDNN's, and no step is "
                      "dense.", "",
                      f"Source: {sources(found)}.", ""])


def page(load, text):
    """The page with its tables anew."""
    text = replace(text, "lengths", lengths(load))
    for part, names in MODELS.items():
        text = replace(text, part, section(load, names))
    return text


def compiled_case(data, variant, linear="bf16"):
    """linear: bf16, or fp8 whichever program made it. None: the result has no such case."""
    return next((case for case in data["cases"] if case["mode"] == "compiled" and case["variant"] == variant
                 and (case.get("linear", "bf16") == "bf16") == (linear == "bf16")), None)


def faster(data, variant):
    """How many times as fast as the compiled dense run, with the spread over repetitions where it shows."""
    dense, case = compiled_case(data, "dense"), compiled_case(data, variant)
    spread = ""
    if data["repeat"] > 1:
        low, high = (f"{dense['run_s'] / case['run_range_s'][i]:.2f}" for i in (1, 0))
        spread = f" ({low} to {high})" if low != high else ""
    return f"{dense['run_s'] / case['run_s']:.2f}{spread}"


# What runs, as the variant of passes and of its linear layers, and as a row of bench/fp8_gate.py.
TOGETHER = (("compiled dense", "dense", "bf16", None), ("dense, fp8 linear layers", "dense", "fp8", "dense, fp8"),
            ("`fast`", "fast", "bf16", "fast"), ("`fast`, `qk8`", "fast:products=qk8", "bf16", None),
            ("`fast`, fp8 linear layers", "fast", "fp8", "fast, fp8"),
            ("`fast`, `qk8`, fp8 linear layers", "fast:products=qk8", "fp8", None))


def together(load):
    """docs/guide/together.md: what sparse attention and fp8 linear layers give alone and together."""
    passes, videos, found = [], [], {}
    for model in MODELS:
        name = f"h200_diffusers_{model}.json"
        passes.append(None)
        with contextlib.suppress(FileNotFoundError):
            passes[-1] = found[name] = load(name)
    for name in ("fp8_clips_wan.json", "fp8_tiny_wan.json"):
        videos.append(None)
        with contextlib.suppress(FileNotFoundError):
            videos[-1] = {row["variant"]: row["psnr"] for row in load(name)["rows"]}
    times = "times as fast | over dense with the same linear layers | peak, GiB"
    lines = [f"| compiled blocks, 720p, H200 | Wan2.1 14B: {times} | HunyuanVideo 13B: {times} | PSNR in dB: 75,600 tokens | "
             "8,320 tokens |", "|---" * 9 + "|"]
    for title, variant, linear, judged in TOGETHER:
        cells = []
        for data in passes:
            case, dense, same = (data and compiled_case(data, *of) for of in ((variant, linear), ("dense",), ("dense", linear)))
            cells += [f"{dense['run_s'] / case['run_s']:.2f}", f"{same['run_s'] / case['run_s']:.2f}" if same else "not measured",
                      f"{case['peak_bytes'] / 2**30:.1f}"] if case else ["not measured"] * 3
        for rows in videos:
            psnr = rows.get(judged) if rows and judged else None
            cells.append("–" if variant == "dense" and linear == "bf16" else "not measured" if not psnr else
                         "equal" if None in psnr else f"{statistics.mean(psnr):.1f}")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join([
        *lines, "",
        "- **Times as fast**: a whole run of diffusers' transformer with random weights, added up from passes, over compiled dense in "
        "bf16 with cuDNN's attention; then over compiled dense with the same linear layers as the row.",
        "- **PSNR**: against dense videos of the same seeds, on two small models in PyTorch ([fidelity]"
        "(../notebook/fidelity.md#fp8-linear-layers)). fp8 was emulated there. No video of a full-size model was judged.", "",
        f"Source: {sources(found)}.", ""])


# What a reader sets, and how it was timed and judged: the variant of passes; variant, result and target of videos.
SETTINGS = (("`enable(pipe)`", None, ("scope-mean", "call", 0.2)),
            ('`enable(pipe, "quality")`', "quality", ("quality", "means", None)),
            ('`enable(pipe, "fast")`', "fast", ("fast", "means", None)),
            ("for comparison: SCOPE as published", "scope:target_density=0.2", ("scope-paper", "run", 0.2)))


def nearness(load, model):
    """Of each setting: the mean PSNR over the videos that all of them made, seeds from 0 on; how many those are, and the rows."""
    found = [row(load(f"{match}_{model}.json"), variant, target) for *_, (variant, match, target) in SETTINGS]
    videos = min(len(r["psnr"]) for r in found)
    return [f"{statistics.mean(r['psnr'][:videos]):.1f} dB" for r in found], videos, found


def gains(load, folder):
    """What three settings gain and lose. folder: that of the documentation, from the page that shows them."""
    models = [load(f"h200_diffusers_{name}.json") for name in MODELS]
    lines = ["| setting | keys kept | times as fast: Wan2.1 14B | HunyuanVideo 13B | nearness: 75,600 tokens | 8,320 tokens |",
             "|---" * 6 + "|"]
    (long, long_videos, rows), (short, short_videos, _) = (nearness(load, model) for model in ("clips_wan", "tiny_wan"))
    older = None  # the share of keys of a preset that was timed with another
    for (name, timed, (_, _, target)), found, far, near in zip(SETTINGS, rows, long, short):
        density = target or round(statistics.mean(found["density"]), 2)
        bold, times = "**" if timed == "fast" else "", []
        for data in models:
            case = timed and compiled_case(data, timed)
            kept = case["density"] if case else density
            older = kept if kept != density else older
            times.append(f"{bold}{faster(data, timed)}{bold}" + (f" at {kept:.2f}" if kept != density else "") if case else "–")
        lines.append(f"| {name} | {density:.2f} | {' | '.join(times)} | {far} | {near} |")
    first = models[0]
    spread = ", of unknown spread" if first["repeat"] == 1 else ""
    layers = " and ".join(str(data["layers"]) for data in models)
    notes = []
    if older:
        notes.append(f"- **At {older:.2f}**: timed when `fast` kept that share of the keys, in version 0.2. It keeps fewer now; whole "
                     "models were not timed again yet.")
    if rows[0]["settings"]["tail"] == "mean":
        notes.append("- **The first row** was judged with version 0.2's mean, one for each group. Today's is 2 dB nearer at densities "
                     "0.05 and 0.10 on the first model, and 3 dB on the second ([a finer mean]"
                     f"({folder}notebook/fidelity.md#a-finer-mean)).")
    return "\n".join([
        *lines, "",
        "- **Speed**: the whole 720p schedule on an H200, over diffusers' compiled blocks with cuDNN's dense attention. All "
        f"{layers} layers ran with random weights; runs are added up from passes ({repeats(first)}{spread}), without text encoding "
        f"and VAE ([whole models]({folder}notebook/real_scale.md)). –: not measured.",
        "- **Nearness**: PSNR against the dense video of the same seed; higher is nearer. Two small models of Wan's design were judged, "
        f"by the same {long_videos} and {short_videos} videos in every row ([fidelity]({folder}notebook/fidelity.md)); the first is not "
        "in this repository. **No video of a full-size model was judged.** On short videos the published method is nearer than `fast`.",
        *notes,
        "- **The last row**: its nearness is that of `scope-paper`"
        f"{', its speed that of `scope`' if compiled_case(first, SETTINGS[-1][1]) else ''} "
        f"([methods]({folder}reference/methods.md)), by one threshold for a run. The others meet their share in each call.", ""])


def diffusers(load):
    """docs/guide/diffusers.md: how long passes and runs take; docs/notebook/real_scale.md has all of them."""
    models = [load(f"h200_diffusers_{name}.json") for name in MODELS]
    lines = ["| compiled blocks, 720p, H200 | Wan2.1 14B | HunyuanVideo 13B |", "|---|---|---|"]
    for title, variant, key, digits in (("dense pass, s", "dense", "dense_pass_s", 2),
                                        ("`fast`: first sparse pass, s", "fast", "first_pass_s", 2),
                                        ("`fast`: warm sparse pass, s", "fast", "warm_pass_s", 2),
                                        ("dense run, s", "dense", "run_s", 0), ("`fast`: run, s", "fast", "run_s", 0)):
        lines.append(f"| {title} | " + " | ".join(f"{compiled_case(data, variant)[key]:,.{digits}f}" for data in models) + " |")
    lines.append("| `fast`: times as fast | " + " | ".join(f"**{faster(data, 'fast')}**" for data in models) + " |")
    return "\n".join([*lines, "", "A pass is one forward of the whole transformer with random weights, and a run the "
                      "model's 50 steps added up from passes. 8-bit products, fp8 layers, parts and sources: [whole "
                      "models](../notebook/real_scale.md).", ""])
