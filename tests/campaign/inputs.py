"""The hostile inputs to the command: arguments, the status and words that must come back, and what may be there afterwards.

Files are those of files.py, made anew for a replay. `within` names what surrounds a command: limits, closed streams, signals.
"""
import dataclasses
import glob
import json
import os
import resource
import signal
import struct
import subprocess
import time
from typing import Callable

import numpy as np


@dataclasses.dataclass
class Input:
    arguments: tuple
    status: int
    says: tuple  # each of these, in any case of letters
    makes: tuple = ()  # new names; everything else must be as before. None: `check` looks at them
    changes: tuple = ()
    within: str = ""
    check: Callable = None  # of what it made


INPUTS = []


def refuse(status, says, *arguments, **more):
    INPUTS.append(Input(arguments, status, (says,) if isinstance(says, str) else tuple(says), **more))


def accept(says, *arguments, makes=(), **more):
    refuse(0, says, *arguments, makes=(makes,) if isinstance(makes, str) else makes, **more)


LONG = "n" * 5000
OUT = "out.safetensors"


def read_out(path=OUT):
    with open(path, "rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(size))
        data = file.read()
    begin, end = header["out"]["data_offsets"]
    return np.frombuffer(data[begin:end], {"F32": "f4", "F16": "f2"}[header["out"]["dtype"]]).reshape(header["out"]["shape"])


def is_finite():
    assert np.isfinite(read_out()).all()


def is_zero():
    assert not read_out().any()


def is_json(path):
    def check():
        with open(path) as file:
            json.load(file, parse_constant=lambda text: (_ for _ in ()).throw(AssertionError(f"{text} is no JSON")))
    return check


# ---- .safetensors: what a header, its metadata and its tensors can say ----
for name, says in (("length_2_63", "header"), ("length_max", "header"), ("length_0", "header"), ("length_short", "header"), ("list", "expected '{'"), ("null", "expected '{'"), ("bom", "header"), ("deep", "expected an object"),
                   ("deep_object", "unknown field"), ("twice", "twice"), ("not_utf8", "header"), ("nan", "header"), ("many", "65536"), ("offset_negative", "data_offsets"), ("offset_reversed", "a hole"),
                   ("offset_float", "data_offsets"), ("offset_huge", "data_offsets"), ("offset_three", "data_offsets"), ("offset_text", "data_offsets"), ("dtype_f8", "F8_E4M3"), ("dtype_lower", "f32"),
                   ("dtype_number", "dtype"), ("shape_negative", "shape"), ("shape_float", "shape"), ("shape_overflow", "q"), ("shape_wraps", "q"), ("shape_text", "shape"), ("shape_rank", "rank"),
                   ("shape_true", "shape"), ("extra_key", "strides"), ("no_shape", "shape"), ("meta_number", "metadata"), ("meta_list", "metadata")):
    refuse(3, [f"{name}.safetensors", says], "attend", f"{name}.safetensors", "-o", OUT)
for name, status, says in (("grid_zero", 2, "grid"), ("grid_unicode", 2, "grid"), ("grid_negative", 2, "grid"), ("grid_power", 3, "grid"), ("grid_long", 2, "TxHxW"), ("grid_escape", 2, "grid"), ("rope_negative", 2, "rope"),
                           ("rope_zero", 2, "rope"), ("rope_huge", 3, "rope"), ("rope_two", 2, "T,H,W"), ("sets_object", 2, "subspaces"), ("sets_empty", 2, "subspaces"), ("sets_inner", 3, "subspace"),
                           ("sets_float", 2, "subspaces"), ("sets_huge", 2, "subspaces"), ("sets_negative", 2, "subspaces"), ("sets_deep", 2, "subspaces"), ("sets_1e400", 2, "subspaces"), ("no_heads", 3, "heads: got 0"), ("no_dim", 3, "dim: got 0"), ("nul_name", 3, "overlap"), ("wide", 3, "256"),
                           ("rank_1", 3, "q: got"), ("rank_5", 3, "q: got"), ("no_batch", 3, "batch: got 0"), ("doubles", 3, "f64"), ("large", 3, "q: "), ("half_inf", 3, "k: "), ("bf16_nan", 3, "q: NaN"),
                           ("q_lengths_negative", 3, "q_lengths"), ("k_lengths_min", 3, "k_lengths"), ("q_lengths_i32", 3, "q_lengths"), ("q_lengths_two", 3, "q_lengths"), ("k_lengths_scalar", 3, "k_lengths"),
                           ("keep_i32", 3, "keep"), ("dense_short", 3, "dense_queries")):
    refuse(status, says, "attend", f"{name}.safetensors", "-o", OUT)
for name, check in (("one_token", is_finite), ("zeros", is_finite), ("tiny", is_finite), ("largest", is_finite), ("no_valid", is_zero), ("rope_odd", is_finite),
                    ("keep_past_end", is_finite), ("unknown_tensor", is_finite), ("no_keys", is_zero), ("no_tokens", None)):
    accept("density", "attend", f"{name}.safetensors", "-o", OUT, makes=OUT, check=check)
accept("sparse", "attend", "v_nan.safetensors", "-o", OUT, makes=OUT)
for name in ("no_tokens", "no_keys"):
    for command in (("compare", f"{name}.safetensors"), ("profile", f"1:1:{name}.safetensors", "-o", "p.csv"), ("attend", f"{name}.safetensors", "--quality", 4, "-o", OUT),
                    ("report", "clip", "--qkv", f"{name}.safetensors", "-o", "r.html"), ("inspect", f"{name}.safetensors", "-o", "look")):
        refuse(3 if command[0] != "inspect" or name == "no_keys" else 2, "expected at least one of each" if command[0] != "inspect" else "expected", *command)
refuse(2, "--clusters: got 10", "inspect", "one_token.safetensors", "-o", "look")
accept("density", "compare", "zeros.safetensors", "--methods", "scope", "--density", 0.5, "--repeat", 1)
accept("look", "inspect", "zeros.safetensors", "--repeat", 1, "--samples", 2, "-o", "look", makes="look", check=is_json("look/inspect.json"))
refuse(2, "lengths", "profile", "1:1:no_valid.safetensors", "-o", "p.csv")

# ---- .npy ----
for name, says in (("big_endian", "big-endian"), ("native", "descr"), ("structured", "structured"), ("negative", "dimension"), ("float_shape", "header"), ("power", "power.npy"), ("no_paren", "header"), ("hex", "header"),
                   ("underscore", "header"), ("long_int", "header"), ("digits", "header"), ("shape_list", "header"), ("unicode_digit", "header"), ("evil", "header"), ("true_1", "True or False"), ("twice", "twice"),
                   ("rank_9", "rank"), ("newline", "descr"), ("version_9", "version"), ("version_2_length", "header"), ("length_0", "header"), ("long_header", "10000"), ("trailing", "bytes"), ("missing_byte", "bytes"),
                   ("minus_zero", "header")):
    refuse(3, [f"{name}.npy", says], "attend", "--q", f"{name}.npy", "--k", "k.npy", "--v", "v.npy", "--rope", "12,10,10", "-o", OUT)
for name, says in (("bool", "q: got"), ("scalar", "q: got"), ("complex", "complex.npy")):
    refuse(3, says, "attend", "--q", f"{name}.npy", "--k", "k.npy", "--v", "v.npy", "--rope", "12,10,10", "-o", OUT)
refuse(3, "fortran", "attend", "--q", "fortran.npy", "--k", "k.npy", "--v", "v.npy", "--rope", "12,10,10", "-o", OUT)
refuse(3, "good.safetensors", "attend", "--q", "good.safetensors", "--k", "k.npy", "--v", "v.npy", "-o", OUT)
refuse(3, "q.npy", "attend", "q.npy", "-o", OUT)
refuse(2, "--v", "attend", "--q", "q.npy", "--k", "k.npy", "-o", OUT)
accept("density", "attend", "--q", "q.npy", "--k", "q.npy", "--v", "q.npy", "--rope", "12,10,10", "-o", OUT, makes=OUT, check=is_finite)
refuse(2, "--lse", "attend", "good.safetensors", "-o", "out.npy", "--lse")
refuse(2, "--dump", "attend", "good.safetensors", "-o", "out.npy", "--dump")

# ---- profiles ----
place = ("--layer", 3, "--step", 4, "--steps", 9)
for name in ("nan", "inf", "minus_nan", "over", "minus", "overflow", "nul", "spaces", "plus", "hex", "digits", "step_2_64", "step_minus", "head_huge", "five", "quotes", "escape", "long_line"):
    refuse(3, [f"p_{name}.csv line 2", "got", "expected"], "attend", "good.safetensors", "--method", f"svoo:profile=p_{name}.csv", *place, "-o", OUT)
for name, says in (("bom", "line 1"), ("header_upper", "line 1"), ("semicolons", "line 1"), ("mac", "line 1"), ("utf16", "line 1"), ("header_only", "no entries"), ("twice", "already"), ("blank", "line 2"),
                   ("head_gap", "heads"), ("authors_step_0", "from 1")):
    refuse(3, [f"p_{name}.csv", says], "profile", f"p_{name}.csv", "-o", "p.csv")
refuse(3, "p_underflow.csv line 2", "profile", "p_underflow.csv", "-o", "p.csv")
for name in ("crlf", "no_end"):
    accept("2 entries of 2 heads", "profile", f"p_{name}.csv", "-o", "p.csv", makes="p.csv")
accept("1 entries", "profile", "p_layer_huge.csv", "-o", "p.csv", makes="p.csv")
refuse(3, "heads", "profile", "p_layer_huge.csv", "p_good.csv", "-o", "p.csv")
refuse(2, "p_good.csv", "profile", "p_good.csv", "-o", "p_good.csv")
refuse(2, "folder", "profile", "p_good.csv", "folder", "-o", "p.csv")
refuse(3, "folder", "profile", "1:2:folder", "-o", "p.csv")
for source in ("1:2:", "::", "1:2", "-1:2:q", "1e3:0:q", "1000000001:0:q", " 1:2:q", "٣:2:good.safetensors", ""):
    refuse(2, "STEP:LAYER:FILE" if source not in ("1:2:", "") else "", "profile", source, "-o", "p.csv")
for value in ("0", "-1", "1e999", "nan", "all,", "ALL", "1,2", "0x10", "99999999999999999999", "\u0661"):
    refuse(2, "--samples", "profile", "1:2:good.safetensors", f"--samples={value}", "-o", "p.csv")
for value in ("nan", "-nan", "1e999", "0x1p-1", "0,5", "1.0000001", "1e-400", ".", "5e-1x"):
    refuse(2, ["--mass", "above 0 and up to 1"], "profile", "1:2:good.safetensors", f"--mass={value}", "-o", "p.csv")

# ---- frames and run.json ----
for name, says in (("bad_crc", "frame_001.png"), ("endless", "frame_001.png"), ("no_rows", "frame_001.png"), ("short_rows", "frame_001.png"), ("filter_9", "frame_001.png"), ("zero_width", "frame_001.png"),
                   ("bomb", "frame_001.png"), ("over_31", "frame_001.png"), ("wide", "frame_001.png"), ("bad_depth", "frame_001.png"), ("other_size", "expected the 24 x 16"), ("critical", "frame_001.png"),
                   ("header_twice", "frame_001.png"), ("empty", "frame_001.png"), ("jpeg", "frame_001.png"), ("signature", "frame_001.png"), ("folder", "frame_001.png"), ("dangling", "frame_001.png"),
                   ("palette", "frame_001.png"), ("interlaced", "frame_001.png")):
    refuse(3, says, "evaluate", "clip", f"png_{name}", "--json", "e.json")
for name in ("gray", "alpha", "deep16", "text", "zip_bomb", "more_rows"):
    accept("", "evaluate", "clip", f"png_{name}", "--json", "e.json", makes="e.json", check=is_json("e.json"))
for name in ("empty", "upper", "text.txt", "fifo", "nowhere", "loop_a", "/proc/self/fd", LONG):
    refuse(3, name[:100], "evaluate", "clip", name)
for name in ("run_list", "run_null", "run_nan", "run_grid", "run_grid_empty", "run_settings", "run_seconds", "run_layers", "run_layers_ragged", "run_layers_text", "run_heads", "run_empty", "run_cut", "run_comment",
             "run_two", "run_layers_empty", "run_step_empty", "run_k_head", "run_1e999", "run_not_utf8"):
    refuse(3, f"{name}/run.json", "report", "clip", name, "-o", "r.html")


def page_is_safe():
    text = open("r.html", encoding="utf-8").read()
    data = text[text.index("alert(1)") - 200:text.index("alert(1)") + 200]
    assert "</script><script>" not in data and "<!--" not in data


accept("r.html", "report", "clip", "run_script", "-o", "r.html", makes="r.html", check=page_is_safe)
accept("r.html", "report", "clip", "run_keys", "-o", "r.html", makes="r.html")
accept("r.html", "report", "/*DATA*/</script>=clip", "=other", "-o", "r.html", "--title", "/*DATA*/ <b>\n</title>", makes="r.html")
accept("r.html", "report", "clip", "clip", "./clip", "clip/", "-o", "r.html", makes="r.html")
refuse(2, "clips", "report", *(["clip"] * 17), "-o", "r.html")
refuse(3, "nowhere", "report", "a=b=nowhere", "-o", "r.html")
refuse(3, "--output", "report", f"{LONG}=clip", "-o", "folder/missing/r.html")
refuse(2, "--skip", "report", "clip", "other", "--skip", 2, "-o", "r.html")
refuse(2, "--head", "report", "clip", "--qkv", "good.safetensors", "--head", 2, "-o", "r.html")
refuse(3, "one_token.safetensors", "report", "clip", "--qkv", "one_token.safetensors", "-o", "r.html")
for value in ("0.01", "121", "inf", "-8", "8fps", "", "1e-400"):
    refuse(2, "--fps", "report", "clip", f"--fps={value}", "-o", "r.html")
refuse(2, "--skip", "evaluate", "clip", "other", "--skip", "2")
refuse(2, "--skip", "evaluate", "clip", "other", "--skip", "1e0")
refuse(3, "--json", "evaluate", "clip", "other", "--json", "dangling")

# ---- models ----
run = ("generate", "--steps", 1, "--grid", "1x2x2", "--condition", "prompt.safetensors", "-o", "run")
for name, says in (("heads_0", "num_attention_heads"), ("heads_minus", "num_attention_heads"), ("heads_huge", "num_attention_heads"), ("heads_text", "num_attention_heads"), ("heads_float", "num_attention_heads"),
                   ("dim_odd", "attention_head_dim"), ("layers_0", "num_layers"), ("layers_huge", "num_layers"), ("patch_0", "patch_size"), ("patch_two", "patch_size"), ("patch_minus", "patch_size"), ("eps_minus", "eps"),
                   ("eps_text", "eps"), ("text_dim_0", "text_dim"), ("qk_norm", "qk_norm"), ("class", "FluxTransformer2DModel"), ("in_channels", "in_channels"), ("freq_odd", "[24, 15]"), ("null", "ffn_dim"),
                   ("seq_0", "rope_max_seq_len"), ("true", "num_layers"), ("list", "object"), ("empty", "config.json"), ("cut", "config.json"), ("not_utf8", "config.json"), ("deep", "nested"), ("twice", "appears twice"), ("1e999", "config.json"),
                   ("folder", "config.json")):
    refuse(3, says, *run, "--model", f"./config_{name}")
for name, says in (("list", "object"), ("unknown", "speed"), ("latent", "latent"), ("shift_0", "shift"), ("shift_text", "shift"), ("shift_1e999", "scope.json"), ("twice", "appears twice"), ("grid_two", "grid"), ("grid_minus", "grid"), ("grid_huge", "grid"),
                   ("steps_0", "steps"), ("steps_half", "steps"), ("prompts", "prompts"), ("rgb", "rgb")):
    refuse(3, says, *run, "--model", f"./scope_{name}")
for name, says in (("passwd", "etc/passwd"), ("absolute", "etc/passwd"), ("missing", "elsewhere"), ("number", "weight_map"), ("other", "tensor"), ("fewer", "tensor"), ("list", "weight_map"), ("empty", ""),
                   ("dot", "index.json"), ("none", "weight_map")):
    refuse(3, says, *run, "--model", f"./index_{name}")
for name, says in (("cut", "data byte"), ("empty", "safetensors"), ("gone", "00001-of-00003"), ("shape", "shape")):
    refuse(3, says, *run, "--model", f"./shard_{name}")
refuse(3, "NaN", *run, "--model", "./shard_nan")
for name in ("loop_a", "./loop_a", LONG, "./folder", "text.txt", "./fifo", "..", "tiny-wan/../tiny-wan", "\xff", "/", "wan2.1-t2v-14b"):
    refuse(3, "", *run, "--model", name)
run = (*run, "--model", "./model")
accept("run", *run, makes="run")
for name, says in (("prompt_wide", "prompt_embeds"), ("prompt_none", "prompt_embeds"), ("prompt_empty", "prompt_embeds"), ("prompt_nan", "NaN"), ("prompt_inf", "prompt_embeds"), ("prompt_int", "prompt_embeds"),
                   ("prompt_rank", "prompt_embeds"), ("prompt_batch_0", "prompt_embeds"), ("negative_wide", "negative_prompt_embeds"), ("good", "prompt_embeds")):
    refuse(3, says, *run[:5], "--condition", f"{name}.safetensors", *run[7:])
for name, says in (("noise_shape", "noise"), ("noise_nan", "noise"), ("noise_none", "noise"), ("prompt", "noise")):
    refuse(3, says, *run, "--noise", f"{name}.safetensors")
accept("", *run, "--noise", "noise.safetensors", makes="run")
refuse(2, "--image", *run, "--image", "first.png")
refuse(3, "negative_prompt_embeds", *run, "--guidance", 3)
refuse(3, "--example", *run, "--example", 1)
for value in ("0x2x2", "1x2", "1x2x2x", "1X2X2", "-1x2x2", "1x2x99999999999999999999", "1,2,2", "1x 2x2"):
    refuse(2, "--grid", *run[:3], f"--grid={value}", *run[5:])
refuse(3, "grid", *run[:3], "--grid", "2000x2x2", *run[5:])
for value in ("0,", "1", "0,0,9", "-1", "x", "0-1", "9999999999"):
    refuse(2, "--dump-steps", *run, "--dump-qkv", "d", f"--dump-steps={value}")
refuse(2, "--dump-layers", *run, "--dump-qkv", "d", "--dump-layers", 2)
refuse(2, "--profile-out", *run, "--profile-out", "p.csv")
refuse(3, "p_five.csv", *run, "--method", "dense", "--profile-out", "p_five.csv")
refuse(3, "heads", *run, "--method", "dense", "--profile-out", "p_layer_huge.csv")
refuse(2, "run/p.csv", *run, "--method", "dense", "--profile-out", "run/p.csv")
refuse(2, "--known", *run, "--known", "")
refuse(2, "wan2.1-t2v-14b", *run, "--known", "WAN2.1-T2V-14B")
refuse(2, "layers", *run, "--set", "dense_layers=99999999999")
accept("", *run, "--seed", str(2**63 - 1), makes="run", check=is_json("run/run.json"))
accept("", *run, "--shift", "1000", "--guidance", "1", makes="run")
refuse(2, "--compute", *run, "--compute", "BF16")
refuse(3, "not a readable PNG", "generate", "-o", "run", "--grid", "1x2x2", "--steps", 1, "--image", "good.safetensors")
refuse(3, "zero_first.png", "generate", "-o", "run", "--grid", "1x2x2", "--steps", 1, "--image", "zero_first.png")
refuse(3, "first.png", "generate", "-o", "run", "--grid", "1x9x9", "--steps", 1, "--image", "first.png")
accept("run", "generate", "-o", "run", "--grid", "1x4x6", "--steps", 1, "--image", "first.png", makes="run")

# ---- options ----
base = ("attend", "good.safetensors", "-o", OUT)
for value in ("rho=nan", "rho=1e999", "rho=0x1p-1", "rho=0,9", "rho= 0.9", "rho=0.9 ", "rho=+0.9", "rho=", "rho=\u0660.9", "alpha=-0", "alpha=-1e-300", "groups=0", "groups=65537", "groups=-1", "groups=1e3", "groups=Auto",
              "groups=18446744073709551617", "codes=0x10", "partition=even:33", "partition=even:-1", "partition=random:", "partition=rope:3", "partition=even:99999999999", "rule=Online", "rule=", "seed=-1",
              "seed=9223372036854775808", "first_sample=0", "first_sample=1e-999", "tail=none,mean", "=1", "rho==0.9", "RHO=0.9", "target_density=nan", "target_scope=both", "density_steps=", "density_steps=0.2:0.3", "density_steps=1:0", "density_steps=0.5:0.1,0.5:0.2,1:0.3", "density_steps=1:0.2,", "density_steps=0.2:0.3;1:0.1", "density_steps=" + "0.1:0.1," * 9999, "check_finite=maybe", "state_dtype=f16",
              "workspace_limit=0", "iterations=10001", "rho=" + "9" * 5000, LONG + "=1"):
    if value == "alpha=-0":
        accept("", *base, "--set", value, makes=OUT)
    else:
        refuse(2, value.split("=")[0][:20], *base, "--set", value)
for value in ("", ":", "scope:", "scope:+", "scope:rho=0.9+", "scope:rho=0.9+rho=0.9", "scope:rho=0.9:alpha=0.1", "Scope", "scope ", "scope,svg2", "sc\0ope".replace("\0", "\x01"), LONG, "scope:" + "+".join(["rho=0.9"] * 1000)):
    refuse(2, "", *base, f"--method={value}")
for value in ("nan", "0", "-0.1", "1e-999", "inf", "none", "20%", "0.2,0.3"):
    refuse(2, "target", *base, "--target-density", value)
refuse(2, "density", "compare", "good.safetensors", "--density", ",".join(["0.2"] * 30000) + ",x")
refuse(2, "--density", "compare", "good.safetensors", "--density", "none")
refuse(2, "rho: got \"nan\"", "compare", "good.safetensors", "--rho", "0.5,nan")
refuse(2, "there is no \"\"", "compare", "good.safetensors", "--methods", ",")
refuse(2, "there is no \"\"", "compare", "good.safetensors", "--methods", "scope,,svg2")
accept("density", "compare", "good.safetensors", "--methods", "scope,scope", "--density", "0.3", "--repeat", 1)
refuse(2, "step: got 9 of 9", "compare", "good.safetensors", "--step", 9, "--steps", 9)
refuse(2, "--plots", "compare", "good.safetensors", "--plots", "")
refuse(2, "step", *base, "--step", 9, "--steps", 9)
refuse(2, "--steps", *base, "--step", 0)
refuse(2, "--output", "attend", "good.safetensors", "-o", OUT, "-o", OUT)
refuse(2, "--threads", *base, "--threads", 1, "--threads", 1)
refuse(2, "--threads", *base, "--threads")
refuse(2, "--treads", *base, "--treads", 2)
refuse(2, "--thread", *base, "--thread", 2)
refuse(2, "extra", *base, "extra")
refuse(2, "-z", *base, "-z")
refuse(2, "-threads", *base, "-threads=2")
refuse(2, ["\"Attend\" (did you mean \"attend\"?)", "there are make-qkv, attend"], "Attend", "good.safetensors", "-o", OUT)
refuse(2, "there is no command", "\x1b[31m")
refuse(2, "", "--", "attend", "good.safetensors", "-o", OUT)
refuse(2, "", "attend", "compare", "good.safetensors", "-o", OUT, "compare")
refuse(2, "", "")
refuse(2, "", "attend", "--version")
refuse(2, "", "methods", "extra")
refuse(2, "", "methods", "--json=maybe")
accept("scope", "methods", "--json", "--json", "--json")
accept("Usage", "attend", "--help", "--nonsense")
refuse(3, "instruction_set", *base, "--instruction-set", "AVX2")
refuse(3, "instruction_set", "doctor", "--instruction-set", "sse9")
refuse(2, "--backend", *base, "--backend", "cuda:0")
refuse(2, "--text", *base, "--text", "\u0663")
refuse(3, "--text", *base, "--text", 2147483584)
refuse(3, "tokens", *base, "--text", 60, "--grid", "3x4x5")
accept("", *base, "--quality", 2147483648, makes=OUT)
accept("", *base, "--set", "groups=65536", "--set", "codes=65536", makes=OUT, check=is_finite)
refuse(2, "rho", *base, "--set", "rho=1e-300")
refuse(2, "target_density", *base, "--target-density", "1e-300")
accept("", *base, "--set", "partition=even:32", makes=OUT, check=is_finite)
refuse(2, "subspaces: ", *base, "--subspaces", "[[0,1]")
refuse(2, "subspaces: ", *base, "--subspaces", LONG)
refuse(2, "rope: got", *base, "--rope", "12,10,10,0")
for rope in ("32", "16,16", "8,8,8,8"):
    refuse(2, "expected T,H,W", *base, "--rope", rope)
refuse(2, "rope", *base, "--rope", "12;10;10")
for grid in ("0x1x1", "1x1", "x", "axbxc", "1x1x9223372036854775808", "\uff11x1x1", "1x1x1 "):
    refuse(2, "grid", "make-qkv", "--grid", grid, "-o", OUT)
refuse(3, "", "make-qkv", "--grid", "65536x65536x65536", "-o", OUT)
refuse(3, "", "make-qkv", "--grid", "100000x100000x1000", "--heads", 65536, "-o", OUT)
for rope in ("0,0,0", "1,1,2", "200,200,200", "-2,2,2", "2,2", "9223372036854775806,2,2"):
    refuse(3 if rope in ("1,1,2", "200,200,200", "2,2", "9223372036854775806,2,2") else 2, "rope", "make-qkv", "--grid", "1x2x2", "--rope", rope, "-o", OUT)
refuse(2, "--dtype", "make-qkv", "--dtype", "F32", "-o", OUT)
accept("", "make-qkv", "--grid", "1x1x1", "--rope", "2,2,2", "--heads", 1, "-o", OUT, makes=OUT)
refuse(2, "--output", "make-qkv", "--grid", "1x1x1", "-o", "out.npy")
refuse(2, "--query", "inspect", "good.safetensors", "--query", "0,0", "-o", "look")
refuse(2, "--query", "inspect", "good.safetensors", "--query", "3,0,0", "-o", "look")
refuse(2, "--query", "inspect", "good.safetensors", "--query", "-1,0,0", "-o", "look")
refuse(2, "--frames", "inspect", "good.safetensors", "--frames", "0,3", "-o", "look")
refuse(2, "--frames", "inspect", "good.safetensors", "--frames", ",", "-o", "look")
for value in ("0", "-1", "61", "99999999999", "1e1", ""):
    refuse(2, "--clusters", "inspect", "good.safetensors", f"--clusters={value}", "-o", "look")
refuse(2, "--scoring", "inspect", "good.safetensors", "--scoring", "dense", "-o", "look")
refuse(2, "--scoring", "inspect", "good.safetensors", "--scoring", "", "-o", "look")
accept("look", "inspect", "good.safetensors", "--scoring", "scope,scope", "--repeat", 1, "-o", "look", makes="look")
refuse(2, "--head", "inspect", "good.safetensors", "--head", 2, "-o", "look")
refuse(2, "grid", "bench", "--grid", "1x1")
refuse(3, "", "bench", "--grid", "100000x100000x1000")
refuse(2, "method dense keeps everything", "bench", "--grid", "1x2x2", "--method", "dense")
refuse(2, "density: got \"\"", "bench", "--grid", "1x2x2", "--density", "0.2,")
refuse(3, "", "demo", "--grid", "100000x100000x1000")
refuse(2, "grid", "demo", "--grid", "1x2x")
refuse(3, ["--grid: got 1x4x6", "one frame"], "ablate", "--grid", "1x4x6", "--image", "first.png")
small = ("ablate", "--grid", "2x4x6", "--image", "first.png", "--steps", 1, "--seeds", 1, "--no-control")
refuse(2, "there is no \"\"", *small, "--variants", ",")
accept("", *small, "--variants", "scope,scope")
refuse(2, "dense", *small, "--variants", "dense")
refuse(2, "--clips", *small, "--clips", "-1")
refuse(2, "--suite", *small, "--suite", "Paper")
refuse(3, "nowhere.png", *small[:3], "--image", "first.png,nowhere.png", "--steps", 100000, "--seeds", 2)
refuse(2, "--image", *small[:3], "--image", ",", *small[5:])
refuse(2, "--condition: this model needs", *small, "--model", "./model")
refuse(2, "--first-seed", *small, "--first-seed", str(2**63))
refuse(2, "--first-seed", *small[:5], "--steps", 1, "--first-seed", str(2**63 - 1), "--seeds", 2)

# ---- paths ----
for name in (b"new\nline.safetensors", b"es\x1b[31mcape.safetensors", b"\xff\xfe.safetensors", "g\u0308\U0001f3a5.safetensors", b" ", b"a=b:c+d,e.safetensors"):
    accept("density", "attend", name, "-o", OUT, makes=OUT)
    refuse(2, "which is also", "attend", "good.safetensors", "-o", name)
accept("density", "attend", "-o", OUT, "--", "--threads", makes=OUT)
for name in (b"bad\nname", b"bad\x1b[31mname", b"\xff\xfe", b"..."):
    refuse(3, "", "attend", name, "-o", OUT)
    accept("", "attend", "good.safetensors", "-o", name, makes=(name,))
for name in ("loop_a", "fifo", "folder", "/dev/null", "/dev/full", "/proc/self/mem", "/proc/x", "/sys/x", "text.txt/x", "loop_a/x", "dangling/x", LONG, "/" * 4000 + "proc/x", "folder/" + "n" * 256, "."):
    refuse(3, "--output", "attend", "good.safetensors", "-o", name)
for name in ("/dev/stdin", "/proc/self/environ", "/proc/self/maps", "/dev/zero", "/dev/tty", "zero", "text.txt", "loop_a", "dangling", "folder", "fifo", LONG, "good.safetensors/", "alias/x"):
    refuse(3, "", "attend", name, "-o", OUT)
refuse(3, "--state", *base, "--state", "folder")
refuse(3, "zero", *base, "--state", "zero")
refuse(3, "text.txt", *base, "--state", "text.txt")
refuse(3, "--state", *base, "--state", "loop_a")
refuse(3, "--state", *base, "--state", "fifo")
accept("link", "attend", "good.safetensors", "-o", "link", changes=("linked.safetensors",), check=lambda: read_out("linked.safetensors"))
refuse(2, "which is also", *base, "--state", "alias")
refuse(2, "which is also", *base, "--stats", "./folder/../" + OUT)
refuse(3, "text.txt", "inspect", "good.safetensors", "-o", "text.txt")
refuse(3, "--output", "inspect", "good.safetensors", "-o", "/proc/x")
for name in ("loop_a", "dangling", "dangling/deep"):
    refuse(3, "--output", "inspect", "good.safetensors", "-o", name)
    refuse(3, "--dump-qkv", *run, "--dump-qkv", name)
refuse(3, "--output", *run[:-3], "/proc/run", "--model", "./model")
refuse(3, "--dump-qkv", *run, "--dump-qkv", "/proc/d")
refuse(3, "--dump-qkv", *run, "--dump-qkv", "text.txt/d")
refuse(3, "--json", "evaluate", "clip", "other", "--json", "/sys/e.json")
refuse(2, "text.txt", *run[:-3], "text.txt", "--model", "./model")
refuse(2, "which no run wrote", *run[:-3], "model", "--model", "./model")

# ---- surroundings: limits, streams, signals, the current folder ----


def limited(kind, amount):
    return lambda: ({"preexec_fn": lambda: resource.setrlimit(kind, (amount, amount))}, None)


def closed(*streams):
    def close():
        for stream in streams:
            os.close(stream)
    return lambda: ({"preexec_fn": close}, None)


def broken_pipe(stream):
    def make():
        reader, writer = os.pipe()
        os.close(reader)
        return {stream: writer}, lambda process: os.close(writer)
    return make


def in_removed_folder():
    here = os.getcwd()

    def enter():
        os.mkdir("removed")
        os.chdir("removed")
        os.rmdir(f"{here}/removed")
    return {"preexec_fn": enter}, None


def signalled(number, seconds):
    def after(process):
        blocked, late = 0, time.monotonic() + 60  # until it takes them: before that it has made nothing, and they end it as any process
        while not blocked >> (signal.SIGTERM - 1) & 1 and time.monotonic() < late:
            with open(f"/proc/{process.pid}/status") as status:
                blocked = int(next((line.split()[1] for line in status if line.startswith("SigBlk")), "0"), 16)
        time.sleep(seconds)
        process.send_signal(number)
    return lambda: ({}, after)


def full(stream):
    return lambda: ({stream: open("/dev/full", "wb")}, None)




def in_company(process):
    """The same command five times more, at once."""
    others = [subprocess.Popen(process.args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(5)]
    assert not any(other.wait() for other in others)


def all_whole(*names):
    """Each result is there once and whole, and nothing half-written is left."""
    def check():
        for name in names:
            found = glob.glob(f"{name}*")
            assert name in found and all(each == name or each.endswith(".other") for each in found), found
            assert all(os.stat(each).st_nlink == 1 for each in found), f"two names of one result: {found}"
            for each in found:
                read_out(each) if name == OUT else open(each, "rb").read(1)[0]
    return check


def environment(**variables):
    return lambda: ({"env": {name: value.replace("HERE", os.getcwd()) for name, value in variables.items()}}, None)


SURROUNDINGS = {
    "company": lambda: ({}, in_company),
    "no environment": environment(), "models in a file": environment(SCOPE_MODELS="HERE/text.txt"), "models in a loop": environment(SCOPE_MODELS="HERE/loop_a"), "models nowhere": environment(SCOPE_MODELS=LONG),
    "models here": environment(SCOPE_MODELS="HERE"), "ffmpeg that fails": environment(PATH="HERE/bin_fails"), "ffmpeg that dies": environment(PATH="HERE/bin_dies"), "ffmpeg that is a folder": environment(PATH="HERE/bin_folder"),
    "ffmpeg that does nothing": environment(PATH="HERE/bin_nothing"), "another locale": environment(LC_ALL="tr_TR.UTF-8", LANG="de_DE.UTF-8"),
    "files of 1 KiB": limited(resource.RLIMIT_FSIZE, 1024), "no files": limited(resource.RLIMIT_FSIZE, 0), "eight files": limited(resource.RLIMIT_NOFILE, 8),
    "closed stdout": closed(1), "closed stderr": closed(2), "closed streams": closed(0, 1, 2), "full stdout": full("stdout"), "full stderr": full("stderr"), "broken stdout": broken_pipe("stdout"),
    "broken stderr": broken_pipe("stderr"), "removed folder": in_removed_folder, "SIGINT at once": signalled(signal.SIGINT, 0), "SIGTERM after 20 ms": signalled(signal.SIGTERM, 0.02),
    "SIGHUP after 0.1 s": signalled(signal.SIGHUP, 0.1),
}
for limit in ("files of 1 KiB", "no files"):
    says = "File too large" if limit == "files of 1 KiB" else ""  # our own file for its messages is limited too
    refuse(3, says, *base, within=limit)
    refuse(3, says, *base, "--stats", "s.json", "--state", "state.bin", within=limit)
    refuse(3, says, *run, within=limit)
    refuse(3, says, "report", "clip", "-o", "r.html", within=limit)
    refuse(3, says, "evaluate", "clip", "other", "--json", "e.json", "--plot", "e.svg", within=limit)
    refuse(3, says, "inspect", "good.safetensors", "--samples", 2, "--repeat", 1, "-o", "look", within=limit)
accept("density", *base, makes=OUT, within="eight files")
for streams in ("closed stdout", "full stdout"):
    refuse(3, "", *base, makes=(OUT,), within=streams, check=is_finite)
    refuse(3, "", "methods", within=streams)
    refuse(3, "", *run, makes=("run",), within=streams)
for streams in ("closed stderr", "full stderr", "broken stderr"):
    refuse(3, "", "attend", "nowhere", "-o", OUT, within=streams)
    refuse(2, "", "attend", "--nonsense", within=streams)
    accept("", *base, makes=OUT, within=streams, check=is_finite)
    accept("", *small, "-o", "a.json", makes="a.json", within=streams)
refuse(3, "", *base, makes=(OUT,), within="closed streams", check=is_finite)
refuse(3, "", "attend", "nowhere", "-o", OUT, within="closed streams")
refuse(141, "", "methods", within="broken stdout")
refuse(141, "", *base, makes=(OUT,), within="broken stdout", check=is_finite)
refuse(141, "", *small, "--variants", "scope,svg2", "--csv", "a.csv", makes=("a.csv",), within="broken stdout")
refuse(141, "", "compare", "good.safetensors", "--methods", "scope", "--repeat", 1, "--samples", 2, "--json", "c.json", makes=("c.json",), within="broken stdout")
refuse(141, "", "--help", within="broken stdout")
refuse(3, "--output", *base, within="removed folder")
refuse(3, "--output", "attend", "/dev/null", "-o", OUT, within="removed folder")
refuse(3, "", "generate", "-o", "run", within="removed folder")
refuse(3, "clip", "evaluate", "clip", "other", within="removed folder")
refuse(3, "--output", "make-qkv", "-o", OUT, within="removed folder")
for _ in range(3):
    accept("density", *base, "--state", "state.bin", "--stats", "s.json", makes=None, within="company", check=all_whole(OUT, "state.bin", "s.json"))
    accept("entries", "profile", "p_good.csv", "-o", "p.csv", makes=None, within="company", check=all_whole("p.csv"))
video = ("generate", "-o", "run", "--grid", "2x4x6", "--steps", 1, "--image", "first.png")
for surrounding in ("models in a file", "models in a loop", "models nowhere"):
    accept("run", *video, makes="run", within=surrounding)  # the bundled one is found after it
    refuse(3, "there is no \"model9\"", *video, "--model", "model9", within=surrounding)
accept("run", *run[:-1], "model", makes="run", within="models here")
for surrounding in ("no environment", "another locale", "ffmpeg that is a folder"):
    accept("run", *video, makes="run", within=surrounding, check=is_json("run/run.json"))
for surrounding in ("ffmpeg that fails", "ffmpeg that dies", "ffmpeg that does nothing"):
    refuse(3, "there is no clip.mp4", *video, makes=("run",), within=surrounding, check=is_json("run/run.json"))
for moment, status in (("SIGINT at once", 130), ("SIGTERM after 20 ms", 143), ("SIGHUP after 0.1 s", 129)):
    for command in (("make-qkv", "--grid", "21x90x160", "--heads", 4, "-o", OUT), ("bench", "--grid", "21x45x80", "--json", "b.json"), ("demo", "--grid", "21x45x80"),
                    ("generate", "-o", "run", "--grid", "13x20x32", "--dump-qkv", "d", "--dump-steps", 0), ("ablate", "--grid", "13x20x32", "-o", "a.json", "--csv", "a.csv")):
        refuse(status, "interrupted", *command, within=moment)
