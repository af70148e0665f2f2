"""Makes, in the current folder, every file that the hostile inputs name: sound ones, and each of the others with one thing wrong."""
import json
import os
import shutil
import struct
import sys
import zlib

import numpy as np

SHAPE = (2, 60, 32)
META = {"grid": "3x4x5", "rope": "12,10,10"}


def write(path, data):
    if os.path.dirname(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data if isinstance(data, bytes) else data.encode())


def tensors(path, arrays, meta=META, types=None):
    names = {"float32": "F32", "float16": "F16", "float64": "F64", "int32": "I32", "int64": "I64", "uint32": "U32", "uint8": "U8", "uint16": "BF16", "bool": "BOOL"}
    header, at = {"__metadata__": meta} if meta is not None else {}, 0
    for name, array in arrays.items():
        header[name] = {"dtype": (types or {}).get(name, names[str(array.dtype)]), "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    raw(path, header, b"".join(np.ascontiguousarray(a).tobytes() for a in arrays.values()))


def raw(path, header, data=b"", length=None):
    """A .safetensors file from its parts, which need not fit."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    write(path, struct.pack("<Q", len(text) if length is None else length) + text + data)


def npy(path, header, data=b"", version=(1, 0), length=None):
    """A .npy file from its parts, which need not fit."""
    text = header.encode("latin-1")
    size = struct.pack("<H" if version[0] == 1 else "<I", len(text) if length is None else length)
    write(path, b"\x93NUMPY" + bytes(version) + size + text + data)


def chunk(kind, data, crc=None):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data) if crc is None else crc)


def png(path, width=24, height=16, depth=8, colour=2, interlace=0, rows=None, end=True, between=b"", crc=None, shade=0):
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    if rows is None:
        line = bytes((7 * x + shade) % 256 for x in range(-(-width * channels * depth // 8)))
        rows = (b"\0" + line) * height
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace)
    write(path, b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header, crc) + between + chunk(b"IDAT", zlib.compress(rows)) + (chunk(b"IEND", b"") if end else b""))


def clip(name, frames=2, run=None, **picture):
    for i in range(frames):
        png(f"{name}/frame_{i:03}.png", **picture)
    if run is not None:
        write(f"{name}/run.json", run if isinstance(run, (str, bytes)) else json.dumps(run))


def qkv_files(q, k, v):
    whole = {"q": q, "k": k, "v": v}
    tensors("good.safetensors", whole)
    data = open("good.safetensors", "rb").read()
    size = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8:8 + size]), data[8 + size:]
    entry = header["q"]
    # Headers.
    raw("length_2_63.safetensors", header, body, length=1 << 63)
    raw("length_max.safetensors", header, body, length=(1 << 64) - 1)
    raw("length_0.safetensors", b"", body)
    raw("length_short.safetensors", header, body, length=size - 1)
    raw("list.safetensors", b"[]")
    raw("null.safetensors", b"null")
    raw("bom.safetensors", b"\xef\xbb\xbf" + json.dumps(header).encode(), body)
    raw("deep.safetensors", b'{"__metadata__":' + 50000 * b"[" + 50000 * b"]" + b"}")
    raw("deep_object.safetensors", 50000 * b'{"a":' + b"1" + 50000 * b"}")
    raw("twice.safetensors", json.dumps(header).replace('"k"', '"q"').encode(), body)
    raw("not_utf8.safetensors", json.dumps({**header, "X": entry}).replace('"X"', '"\\u0000"').encode().replace(b"\\u0000", b"\xff"), body)
    raw("nul_name.safetensors", {"q\0": entry, **header}, body)
    raw("nan.safetensors", json.dumps(header).replace("60", "NaN").encode(), body)
    raw("many.safetensors", {f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(65537)})
    for name, change in {
            "offset_negative": {"data_offsets": [-1, 15359]}, "offset_reversed": {"data_offsets": [15360, 0]}, "offset_float": {"data_offsets": [0, 15360.5]},
            "offset_huge": {"data_offsets": [0, 1 << 63]}, "offset_three": {"data_offsets": [0, 1, 15360]}, "offset_text": {"data_offsets": ["0", "15360"]},
            "dtype_f8": {"dtype": "F8_E4M3"}, "dtype_lower": {"dtype": "f32"}, "dtype_number": {"dtype": 4}, "shape_negative": {"shape": [-2, -60, 32]},
            "shape_float": {"shape": [2.0, 60, 32]}, "shape_overflow": {"shape": [1 << 32, 1 << 32, 1 << 32]}, "shape_wraps": {"shape": [1 << 62, 1 << 62, 4]},
            "shape_text": {"shape": "2x60x32"}, "shape_rank": {"shape": [1] * 40 + [2, 60, 32]}, "shape_true": {"shape": [True, 60, 32]},
            "extra_key": {"strides": [1, 2, 3]}}.items():
        raw(f"{name}.safetensors", {**header, "q": {**entry, **change}}, body)
    raw("no_shape.safetensors", {**header, "q": {k: v for k, v in entry.items() if k != "shape"}}, body)
    # Metadata.
    for name, meta in {"meta_number": {"grid": 5}, "meta_list": ["grid"], "grid_zero": {**META, "grid": "0x4x5"}, "grid_unicode": {**META, "grid": "٣x٤x٥"},
                       "grid_negative": {**META, "grid": "-3x-4x5"}, "grid_power": {**META, "grid": "4294967296x4294967296x15"}, "grid_long": {**META, "grid": "1x" * 3000 + "60"},
                       "grid_escape": {**META, "grid": "\x1b[2J3x4x5"}, "rope_negative": {**META, "rope": "60,-14,-14"}, "rope_zero": {**META, "rope": "0,0,32"},
                       "rope_odd": {**META, "rope": "11,11,10"}, "rope_two": {**META, "rope": "16,16"}, "rope_huge": {**META, "rope": "9223372036854775807,1,1"},
                       "sets_object": {**META, "subspaces": "{}"}, "sets_empty": {**META, "subspaces": "[]"}, "sets_inner": {**META, "subspaces": "[[]]"},
                       "sets_float": {**META, "subspaces": "[[0.5]]"}, "sets_huge": {**META, "subspaces": "[[99999999999999999999]]"}, "sets_negative": {**META, "subspaces": "[[-1]]"},
                       "sets_deep": {**META, "subspaces": 20000 * "["}, "sets_1e400": {**META, "subspaces": "[[1e400]]"}}.items():
        tensors(f"{name}.safetensors", whole, meta)
    # Shapes and values.
    for name, shape in {"no_tokens": (2, 0, 32), "no_heads": (0, 60, 32), "no_dim": (2, 60, 0), "wide": (1, 8, 264), "rank_1": (32,), "rank_5": (1, 1, 2, 60, 32), "no_batch": (0, 2, 60, 32)}.items():
        tensors(f"{name}.safetensors", dict.fromkeys("qkv", np.ones(shape, np.float32)), {"rope": "12,10,10"})
    tensors("no_keys.safetensors", {"q": q, "k": k[:, :0], "v": v[:, :0]})
    tensors("one_token.safetensors", {x: y[:, :1] for x, y in whole.items()}, {"grid": "1x1x1", "rope": "12,10,10"})
    tensors("doubles.safetensors", {x: y.astype(np.float64) for x, y in whole.items()})
    tensors("zeros.safetensors", {x: 0 * y for x, y in whole.items()})
    tensors("tiny.safetensors", {x: np.full_like(y, 1e-44) for x, y in whole.items()})
    tensors("large.safetensors", {**whole, "q": 1e19 * q})
    tensors("largest.safetensors", {**whole, "q": 1e17 * q, "k": 1e17 * k})
    tensors("half_inf.safetensors", {x: np.full_like(y, np.inf, np.float16) if x == "k" else y.astype(np.float16) for x, y in whole.items()})
    bf16 = {x: (y.view(np.uint32) >> 16).astype(np.uint16) for x, y in whole.items()}
    bf16["q"][1, 59, 31] = 0x7FC0
    tensors("bf16_nan.safetensors", bf16)
    tensors("v_nan.safetensors", {**whole, "v": np.full_like(v, np.nan)})
    for name, more in {"q_lengths_negative": {"q_lengths": np.array([-1])}, "k_lengths_min": {"k_lengths": np.array([-1 << 63])}, "q_lengths_i32": {"q_lengths": np.array([60], np.int32)},
                       "q_lengths_two": {"q_lengths": np.array([60, 60])}, "k_lengths_scalar": {"k_lengths": np.array(60)}, "keep_i32": {"keep": np.zeros((1, 2), np.int32)},
                       "dense_short": {"dense_queries": np.zeros((1, 1), np.uint32)}, "keep_past_end": {"keep": np.full((1, 2), 0xFFFFFFFF, np.uint32)},
                       "no_valid": {"q_lengths": np.array([0]), "k_lengths": np.array([0])}, "unknown_tensor": {"surprise": np.zeros(3, np.uint8)}}.items():
        tensors(f"{name}.safetensors", {**whole, **more})


def npy_files(q, k, v):
    for name, array in (("q", q), ("k", k), ("v", v)):
        np.save(f"{name}.npy", array)
    good = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 60, 32), }".ljust(117) + "\n"
    body = q.tobytes()
    np.save("fortran.npy", np.asfortranarray(q))
    np.save("bool.npy", q > 0)
    np.save("scalar.npy", np.float32(1))
    np.save("complex.npy", q.astype(np.complex64))
    npy("version_9.npy", good, body, version=(9, 0))
    npy("version_2_length.npy", good, body, version=(2, 0), length=0xFFFFFFFF)
    npy("length_0.npy", "", body)
    npy("long_header.npy", good[:-1] + 20000 * " " + "\n", body)
    npy("trailing.npy", good, body + b"\0")
    npy("missing_byte.npy", good, body[:-1])
    for name, old, new in (("big_endian", "<f4", ">f4"), ("native", "<f4", "=f4"), ("structured", "'<f4'", "[('a', '<f4')]"), ("negative", "(2,", "(-2,"), ("minus_zero", "(2,", "(-0,"),
                           ("float_shape", "60", "60.0"), ("power", "(2, 60", "(4611686018427387904, 16"), ("no_paren", ")", ""), ("hex", "60", "0x3c"), ("underscore", "60", "6_0"),
                           ("long_int", "60", "60L"), ("digits", "60", 400 * "9"), ("shape_list", "(2, 60, 32)", "[2, 60, 32]"), ("unicode_digit", "60", "\xb2"), ("evil", "'<f4'", "__import__('os')"),
                           ("true_1", "False", "1"), ("twice", "'fortran_order': False", "'descr': '<f4'"), ("rank_9", "(2, 60, 32)", "(1, 1, 1, 1, 1, 1, 2, 60, 32)"), ("newline", "'<f4'", "'<\nf4'")):
        npy(f"{name}.npy", good.replace(old, new), body)


def profiles():
    head = "step,layer,head,density\n"
    body = "4,3,0,0.5\n4,3,1,0.25\n"
    for name, text in {
            "good": head + body, "crlf": (head + body).replace("\n", "\r\n"), "no_end": (head + body)[:-1], "bom": "\ufeff" + head + body, "nan": head + "4,3,0,nan\n4,3,1,0.5\n",
            "inf": head + "4,3,0,inf\n", "minus_nan": head + "4,3,0,-nan\n", "over": head + "4,3,0,1.0000001\n", "minus": head + "4,3,0,-0.1\n", "overflow": head + "4,3,0,1e999\n",
            "underflow": head + "4,3,0,1e-999\n4,3,1,0.5\n", "nul": head + "4,3,0,0.5\0\n", "spaces": head + "4, 3, 0, 0.5\n", "plus": head + "+4,3,0,0.5\n", "hex": head + "0x4,3,0,0.5\n",
            "digits": head + "٤,3,0,0.5\n", "step_2_64": head + "18446744073709551620,3,0,0.5\n", "step_minus": head + "-4,3,0,0.5\n", "head_huge": head + "4,3,1048576,0.5\n",
            "head_gap": head + "4,3,0,0.5\n4,3,7,0.5\n", "twice": head + body + body, "blank": head + "\n" + body, "five": head + "4,3,0,0.5,9\n", "quotes": head + '"4","3","0","0.5"\n',
            "header_only": head, "header_upper": head.upper() + body, "authors_step_0": "Step,Layer,Head,Sparsity\n0,3,0,0.5\n", "semicolons": (head + body).replace(",", ";"),
            "escape": head + "\x1b[2J\x07\n", "long_line": head + 100000 * "4" + "\n", "mac": (head + body).replace("\n", "\r"), "layer_huge": head + "4,9223372036854775807,0,0.5\n",
            "utf16": None}.items():
        write(f"p_{name}.csv", text if text is not None else (head + body).encode("utf-16"))


def clips(repository):
    layer = {"density": 0.5, "dense": False, "k_head": [3, 4]}
    run = {"method": "scope", "grid": [1, 2, 2], "layers": [[layer]], "seconds": {"total": 1, "dense_prefix": 0, "sparse_attention": 0, "selection": 0, "rest": 1}}
    clip("clip", run=run)
    clip("other", run=run, shade=9)
    for name, text in {
            "run_list": "[]", "run_null": "null", "run_nan": '{"grid": [NaN]}', "run_1e999": '{"seconds": {"total": 1e999}}', "run_grid": '{"grid": "1x2x3"}', "run_grid_empty": '{"grid": []}',
            "run_settings": '{"settings": [1]}', "run_seconds": '{"seconds": 5}', "run_layers": '{"layers": 5}', "run_layers_ragged": json.dumps({"layers": [[layer], [layer, layer]]}),
            "run_layers_text": json.dumps({"layers": [[{**layer, "density": "0.5"}]]}), "run_heads": json.dumps({"layers": [[{**layer, "head_density": [1]}]]}), "run_empty": "",
            "run_cut": json.dumps(run)[:-3], "run_not_utf8": b'{"method": "\xff"}', "run_comment": "// a comment\n{}", "run_two": "{}{}", "run_layers_empty": '{"layers": []}',
            "run_step_empty": '{"layers": [[]]}', "run_k_head": json.dumps({"layers": [[{**layer, "k_head": 5}]]})}.items():
        clip(name, run=text)
    clip("run_script", run={**run, "method": "</script><script>alert(1)</script>", "settings": {"<!--": "]]>", "a": "\u2028"}})
    clip("run_keys", run='{"method": "scope", "method": "svg2", "unknown": {"a": [1, 2, {"b": null}]}}')
    for name, options in {"gray": {"colour": 0}, "alpha": {"colour": 6}, "palette": {"colour": 3}, "deep16": {"depth": 16}, "interlaced": {"interlace": 1}, "bad_crc": {"crc": 1}, "endless": {"end": False},
                          "no_rows": {"rows": b""}, "short_rows": {"rows": b"\0" + 72 * b"a"}, "more_rows": {"rows": 40 * (b"\0" + 72 * b"a")}, "filter_9": {"rows": 16 * (b"\x09" + 72 * b"a")},
                          "zero_width": {"width": 0, "rows": b"\0"}, "bomb": {"width": 0x7FFFFFFF, "height": 0x7FFFFFFF, "rows": b"\0"}, "over_31": {"width": 0xFFFFFFFF, "rows": b"\0"},
                          "wide": {"width": 60000, "height": 60000, "rows": b"\0"}, "bad_depth": {"depth": 3}, "other_size": {"width": 12},
                          "text": {"between": chunk(b"tEXt", b"Comment\0" + 300 * b"x")}, "critical": {"between": chunk(b"ABCD", b"x")}, "zip_bomb": {"between": chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(50_000_000)))},
                          "header_twice": {"between": chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))}}.items():
        shutil.copytree("clip", f"png_{name}")
        png(f"png_{name}/frame_001.png", **options)
    for name, data in {"empty": b"", "jpeg": b"\xff\xd8\xff\xe0" + bytes(100), "signature": b"\x89PNG\r\n\x1a\n"}.items():
        shutil.copytree("clip", f"png_{name}")
        write(f"png_{name}/frame_001.png", data)
    shutil.copytree("clip", "png_folder")
    os.remove("png_folder/frame_001.png")
    os.mkdir("png_folder/frame_001.png")
    shutil.copytree("clip", "png_dangling")
    os.remove("png_dangling/frame_001.png")
    os.symlink("nowhere", "png_dangling/frame_001.png")
    os.mkdir("empty")
    clip("upper", frames=0)
    png("upper/frame_000.PNG")
    png("first.png")
    png("zero_first.png", width=0, rows=b"\0")


def models(repository):
    source = f"{repository}/tests/data/video/t2v_sharded"
    shutil.copytree(source, "model")
    shutil.copy(f"{source}/case.safetensors", "case.safetensors")
    os.remove("model/case.safetensors")
    config = json.load(open("model/config.json"))
    index_name = "diffusion_pytorch_model.safetensors.index.json"
    index = json.load(open(f"model/{index_name}"))
    first, last = sorted(set(index["weight_map"].values()))[0], sorted(set(index["weight_map"].values()))[-1]

    def variant(name, file, text):
        os.mkdir(name)
        for each in os.listdir("model"):
            os.symlink(f"../model/{each}", f"{name}/{each}")
        if os.path.lexists(f"{name}/{file}"):
            os.remove(f"{name}/{file}")
        if text is not None:
            write(f"{name}/{file}", text if isinstance(text, (str, bytes)) else json.dumps(text))

    for name, change in {"heads_0": {"num_attention_heads": 0}, "heads_minus": {"num_attention_heads": -2}, "heads_huge": {"num_attention_heads": 1 << 40}, "heads_text": {"num_attention_heads": "2"},
                         "heads_float": {"num_attention_heads": 2.5}, "dim_odd": {"attention_head_dim": 11}, "layers_0": {"num_layers": 0}, "layers_huge": {"num_layers": 1 << 62},
                         "patch_0": {"patch_size": [0, 2, 2]}, "patch_two": {"patch_size": [2, 2]}, "patch_minus": {"patch_size": [1, -2, 2]}, "eps_minus": {"eps": -1}, "eps_0": {"eps": 0},
                         "eps_text": {"eps": "1e-6"}, "text_dim_0": {"text_dim": 0}, "qk_norm": {"qk_norm": "layer_norm"}, "class": {"_class_name": "FluxTransformer2DModel"},
                         "in_channels": {"in_channels": 3}, "freq_odd": {"freq_dim": 15}, "null": {"ffn_dim": None}, "seq_0": {"rope_max_seq_len": 0}, "true": {"num_layers": True}}.items():
        variant(f"config_{name}", "config.json", {**config, **change})
    for name, text in {"list": "[]", "empty": "", "cut": json.dumps(config)[:-5], "not_utf8": b'{"_class_name": "\xff"}', "deep": 9999 * '{"a":' + "1" + 9999 * "}", "twice": json.dumps(config)[:-1] + ', "num_layers": 1}', "1e999": json.dumps({**config, "eps": 0}).replace('"eps": 0', '"eps": 1e999'), "folder": None}.items():
        variant(f"config_{name}", "config.json", text)
    os.mkdir("config_folder/config.json")
    for name, text in {"list": "[]", "unknown": {"speed": "fast"}, "latent": {"latent": "vae"}, "shift_0": {"shift": 0}, "shift_text": {"shift": "3"}, "shift_1e999": '{"shift": 1e999}', "twice": '{"shift": 3, "shift": 5}', "grid_two": {"grid": [3, 4]},
                       "grid_minus": {"grid": [-3, 4, 5]}, "grid_huge": {"grid": [1 << 40, 1 << 40, 1]}, "steps_0": {"steps": 0}, "steps_half": {"steps": 2.5}, "prompts": {"prompts": "no"}, "rgb": {"latent": "rgb"}}.items():
        variant(f"scope_{name}", "scope.json", text)
    weights = index["weight_map"]
    some = next(iter(weights))
    for name, text in {"passwd": {**weights, some: "../../../../../../etc/passwd"}, "absolute": {**weights, some: "/etc/passwd"}, "missing": {**weights, some: "nowhere.safetensors"}, "number": {**weights, some: 5},
                       "other": {**weights, some: last if weights[some] != last else first}, "fewer": {k: v for k, v in weights.items() if k != some}, "list": list(weights), "empty": {}, "dot": {**weights, some: "."}}.items():
        variant(f"index_{name}", index_name, {"metadata": {}, "weight_map": text})
    variant("index_none", index_name, {"metadata": {}})
    shard = open(f"model/{first}", "rb").read()
    variant("shard_cut", first, shard[:-1])
    variant("shard_empty", first, b"")
    variant("shard_gone", first, None)
    size = struct.unpack("<Q", shard[:8])[0]
    header = json.loads(shard[8:8 + size])
    name = next(k for k in header if k != "__metadata__")
    raw("scratch", {**header, name: {**header[name], "shape": [1, *header[name]["shape"]]}}, shard[8 + size:])
    variant("shard_shape", first, open("scratch", "rb").read())
    os.remove("scratch")
    nan = bytearray(shard)
    nan[-4:] = struct.pack("<f", float("nan"))
    variant("shard_nan", first, bytes(nan))
    case = open("case.safetensors", "rb").read()
    size = struct.unpack("<Q", case[:8])[0]
    return {k: v["shape"] for k, v in json.loads(case[8:8 + size]).items() if k != "__metadata__"}


def conditions():
    """Prompts and noise for the model, whose text has 6 channels and whose latents have 4."""
    prompt = np.ones((5, 6), np.float32)
    for name, arrays in {"prompt": {"prompt_embeds": prompt}, "prompt_wide": {"prompt_embeds": np.ones((5, 7), np.float32)}, "prompt_none": {"other": prompt}, "prompt_empty": {"prompt_embeds": prompt[:0]},
                         "prompt_nan": {"prompt_embeds": prompt * np.nan}, "prompt_int": {"prompt_embeds": prompt.astype(np.int32)}, "prompt_rank": {"prompt_embeds": prompt[0]},
                         "prompt_batch_0": {"prompt_embeds": np.ones((0, 5, 6), np.float32)}, "negative_wide": {"prompt_embeds": prompt, "negative_prompt_embeds": np.ones((5, 7), np.float32)},
                         "prompt_inf": {"prompt_embeds": prompt * np.inf}, "noise": {"noise": np.zeros((4, 1, 4, 4), np.float32)}, "noise_shape": {"noise": np.zeros((4, 1, 4, 5), np.float32)},
                         "noise_nan": {"noise": np.full((4, 1, 4, 4), np.nan, np.float32)}, "noise_none": {"sound": np.zeros((4, 1, 4, 4), np.float32)}}.items():
        tensors(f"{name}.safetensors", arrays, None)


def paths():
    os.symlink("loop_b", "loop_a")
    os.symlink("loop_a", "loop_b")
    os.symlink("nowhere/at/all", "dangling")
    os.symlink("good.safetensors", "alias")
    os.mkfifo("fifo")
    os.mkdir("folder")
    for name in (b"new\nline.safetensors", b"es\x1b[31mcape.safetensors", b"\xff\xfe.safetensors", b" ", b"--threads", "g\u0308\U0001f3a5.safetensors".encode(), b"a=b:c+d,e.safetensors"):
        os.symlink("good.safetensors", name)
    write("text.txt", "mine\n")
    for name, text in (("fails", "exit 1"), ("dies", "kill -9 $$"), ("nothing", "exit 0")):
        write(f"bin_{name}/ffmpeg", f"#!/bin/sh\n{text}\n")
        os.chmod(f"bin_{name}/ffmpeg", 0o755)
    os.makedirs("bin_folder/ffmpeg")
    write("zero", "")
    write("linked.safetensors", "an earlier result")
    os.symlink("linked.safetensors", "link")


def make(repository):
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal(SHAPE).astype(np.float32) for _ in range(3))
    qkv_files(q, k, v)
    npy_files(q, k, v)
    profiles()
    clips(repository)
    models(repository)
    conditions()
    paths()


if __name__ == "__main__":
    make(sys.argv[1])
