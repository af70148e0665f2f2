#!/usr/bin/env python3
"""Shows that two builds of the `scope` command give the same bits, and compares their speed."""
import argparse
import concurrent.futures
import dataclasses
import glob
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile

import numpy as np

REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, f"{REPOSITORY}/tests/python")
import tensors

HELP = """
Each case is one or more calls of `scope attend` (or generate, make-qkv) by both builds on the same files: every method that
OLD lists, in every type, with text, padding, masks, first and warm calls; and every method under every choice of every
setting that `OLD methods --json` lists (rules, tails, products, target scopes, proxies, groupings, encodings, ...). All tensors
that come out are compared bit by bit, and all that OLD's statistics say, but for seconds, kernel names and byte sizes. What one
build refuses the other must refuse with the same exit code; such cases are counted apart. Methods, types and choices that were
never compared, since both builds refuse them on this backend, are named with the refusal; so are choices that only NEW has.
Settings that only NEW has stay at their defaults.

  tools/compare_builds.py old/build/release/bin/scope build/release/bin/scope
  tools/compare_builds.py old/build/cuda/bin/scope build/cuda/bin/scope --backend cuda --times 3
  tools/compare_builds.py build/release/bin/scope build/release/bin/scope --quick --self-test

Exit codes: 0 all the same, 1 a difference, 2 wrong usage."""

DTYPES = ("f32", "f16", "bf16")
# Choices of the tables that count for nothing, and so are refused, unless something else is set beside them.
BESIDE = {"target_scope": "+target_density=0.3"}
# Values that no table lists, and choices beside others.
CHOICES = (
    "scope:partition=even:8", "scope:partition=even:1", "scope:partition=random:3", "scope:proxy=exact", "scope:tail=first_order",
    "scope:proxy=exact+tail=first_order", "scope:proxy=exact+rule=target+density=0.1", "scope:rule=target+tail=first_order",
    "scope:group=raster", "scope:group=raster+proxy=exact", "scope:group=blocks", "scope:group=blocks+q_block=48",
    "scope:encode=blocks+partition=even:1", "scope:encode=blocks+k_block=40", "scope:group=cocluster+encode=cocluster+partition=even:1",
    "scope:groups=7+codes=5", "scope:groups=1+codes=1", "scope:first_sample=1", "scope:first_iterations=3+iterations=4", "scope:seed=7",
    "scope:rho=1", "scope:rho=0.5+alpha=0", "scope:alpha=1", "scope:check_finite=no", "scope:state_dtype=bf16",
    "scope:kernel=portable", "scope:kernel=portable+proxy=exact+tail=first_order", "scope:kernel=wgmma", "scope:workspace_limit=1",
    "svg2:state_dtype=bf16", "svg2:tail=centroids", "svg2:rho=0.5+groups=20+codes=40", "svg2:kernel=portable", "svg2:workspace_limit=1",
    "svg2-ear:tail=none", "svg2-ear:groups=20+codes=40+rho=0.6", "svoo:groups=20+codes=40", "svoo:tail=centroids",
    "svoo:rule=error_aware", "sparge:similarity=0.9", "sparge:q_block=32+k_block=48+density=0.2", "sparge:kernel=portable",
    "sparge-cdf:similarity=-1+rho=0.7", "dense:kernel=portable", "dense:kernel=wgmma")


@dataclasses.dataclass
class Case:
    group: str
    name: str
    calls: list  # arguments of each call; {out} is a folder of the build's own
    choice: str = ""  # of the tables, as rule=fixed, where it is there for that


def run(command, *arguments):
    environment = {**os.environ, "SCOPE_MODELS": f"{REPOSITORY}/models"}
    return subprocess.run([command, *map(str, arguments)], capture_output=True, text=True, env=environment)


def must_run(command, *arguments):
    result = run(command, *arguments)
    if result.returncode != 0:
        sys.exit(f"{command} {' '.join(map(str, arguments))}: exit {result.returncode}: {result.stdout}{result.stderr}")
    return result.stdout


def read_tables(command):
    """Methods by name, and for every setting that takes words alone, those words: ([method], {setting: [choice]})."""
    tables = json.loads(must_run(command, "methods", "--json"))
    values = {row["name"]: row["values"].split(" | ") for row in tables["settings"]}
    word = re.compile("[a-z][a-z0-9_]*")
    return [row["name"] for row in tables["methods"]], {name: words for name, words in values.items() if all(map(word.fullmatch, words))}


def make_inputs(command, dtypes, backend, folder):
    """The files that cases read, by name."""
    files = {}

    def make(name, dtype, grid="5x9x13", rope="44,42,42", heads=2, seed=1):
        files[name] = f"{folder}/{name}.safetensors"
        must_run(command, "make-qkv", "--grid", grid, "--rope", rope, "--heads", heads, "--seed", seed, "--dtype", dtype, "-o", files[name])

    def derive(name, dtype, change, metadata):
        arrays, others = (tensors.load(files[source])[0] for source in (f"base.{dtype}", f"other.{dtype}"))
        files[name] = f"{folder}/{name}.safetensors"
        types = {x: dtype.upper() for x in ("q", "k", "v")}
        tensors.save(files[name], change(dict(arrays), others), metadata, types)

    random = np.random.default_rng(1)
    both = lambda x, y: {name: np.stack([x[name], y[name]]) for name in ("q", "k", "v")}
    words = lambda rows, n, chance: np.packbits(random.random((rows, -(-n // 32) * 32)) < chance, axis=1, bitorder="little").view(np.uint32)
    grid, n = {"grid": "5x9x13", "rope": "44,42,42"}, 5 * 9 * 13
    for dtype in dtypes:
        make(f"base.{dtype}", dtype)
        make(f"other.{dtype}", dtype, seed=2)
        make(f"dim64.{dtype}", dtype, rope="24,20,20")
        make(f"dim40.{dtype}", dtype, rope="16,12,12")
        make(f"odd.{dtype}", dtype, grid="3x7x11", heads=3)
        make(f"tiny.{dtype}", dtype, grid="1x3x5", heads=1)
        make(f"large.{dtype}", dtype, grid="9x15x15" if backend == "cpu" else "13x20x32")
        derive(f"batch.{dtype}", dtype, both, grid)
        derive(f"padded.{dtype}", dtype,
               lambda x, y: {**both(x, y), "q_lengths": np.array([n, n - 71]), "k_lengths": np.array([n - 130, n])}, grid)
        derive(f"empty.{dtype}", dtype, lambda x, y: {**both(x, y), "q_lengths": np.array([n, 0]), "k_lengths": np.array([n, 0])}, grid)
        derive(f"text.{dtype}", dtype, lambda x, y: {k: np.concatenate([x[k], y[k][:, :21]], axis=1) for k in x}, grid)
        derive(f"masks.{dtype}", dtype, lambda x, y: {**both(x, y), "keep": words(2, n, 0.05), "dense_queries": words(2, n, 0.03)}, grid)
        derive(f"padded_masks.{dtype}", dtype, lambda x, y: {**both(x, y), "keep": words(2, n, 0.05), "dense_queries": words(2, n, 0.03),
                                                             "q_lengths": np.array([n - 7, 33]), "k_lengths": np.array([40, n - 1])}, grid)
        derive(f"cross.{dtype}", dtype, lambda x, y: {"q": x["q"], "k": y["k"][:, :431], "v": y["v"][:, :431]}, {"rope": "44,42,42"})

        def spoil(*names):
            def change(x, _):
                bad = {"f32": (np.nan, np.inf), "f16": (np.nan, np.inf), "bf16": (0x7fc1, 0x7f80)}[dtype]
                for name in names:
                    x[name] = x[name].copy()
                    x[name][0, 5, 3], x[name][1, 300, 100] = bad
                return x
            return change
        derive(f"bad_v.{dtype}", dtype, spoil("v"), grid)
        derive(f"bad_qk.{dtype}", dtype, spoil("q", "k"), grid)
        if dtype != "bf16":  # .npy has none
            for name, array in tensors.load(files[f"base.{dtype}"])[0].items():
                np.save(f"{folder}/{name}.{dtype}.npy", array)
    files["profile"] = f"{folder}/profile.csv"
    with open(files["profile"], "w") as file:
        file.write("step,layer,head,density\n")
        file.writelines(f"{s},{layer},{h},{0.02 * (1 + s + layer) + 0.05 * h}\n" for s in range(5) for layer in range(3) for h in range(2))
    return files


def make_cases(methods, able, dtypes, choices, files, backend, folder):
    """`able` are the methods that the backend has; the others are tried once, to be refused."""
    cases = []
    lean = backend == "cuda"  # a process takes half a second to start there, however little it does
    narrow = dtypes[-1]
    each_dtype = (narrow,) if lean else dtypes
    machine = ["--backend", backend, "--threads", "2"]  # as many threads wherever it runs

    def add(group, file, method, *more, steps=None, warm=not lean, name="", choice=""):
        """One call, or a first and a warm one; or one for each of `steps` of 5, with the state going along."""
        if method.split(":")[0] not in able and group != "methods":
            return
        dense = method.split(":")[0] == "dense"
        whole = [] if dense else ["--dump", "--state", "{out}/state"]
        common = ["attend", files[file], "--method", method, "--lse", *whole, *machine, *more]
        calls = [["--step", s, "--steps", 5] for s in steps] if steps else [[], []] if warm and not dense else [[]]
        cases.append(Case(group, f"{name or file} {method} {' '.join(map(str, more))}",
                          [[*common, *call, "-o", f"{{out}}/{i}.safetensors", "--stats", f"{{out}}/{i}.json"]
                           for i, call in enumerate(calls)], choice))

    for dtype, method in itertools.product(dtypes, methods):
        add("methods", f"base.{dtype}", method, warm=True)
    for dtype, method in itertools.product(each_dtype, methods):
        for kind in ("dim64", "dim40"):
            add("head dimensions", f"{kind}.{dtype}", method)
        for kind in ("odd", "tiny"):
            add("token counts", f"{kind}.{dtype}", method)
    sparse = [method for method in methods if method != "dense"]
    for method in methods:
        add("token counts", f"large.{narrow}", method, warm=True)
        for setting, choice in ((name, choice) for name in choices for choice in choices[name]):
            # Products depend on the type. Other choices are compared in one: the methods that have them run in every type.
            for dtype in dtypes if setting == "products" else (narrow,):
                place, steps = (("--layer", 2), (0, 4)) if setting == "warm_prefix" else ((), None)
                add("choices of the tables", f"base.{dtype}", f"{method}:{setting}={choice}{BESIDE.get(setting, '')}", *place, steps=steps,
                    choice=f"{setting}={choice}" + (f" with {dtype}" if setting == "products" else ""))
        for dtype in each_dtype:
            add("target_density", f"base.{dtype}", method, "--target-density", "0.2")
            add("target_density", f"base.{dtype}", method, "--target-density", "0.4")
    for rule, dtype in itertools.product(choices["rule"], each_dtype):
        for extra in ("+proxy=exact", "+tail=first_order", "+partition=even:1"):
            add("rules", f"large.{dtype}", f"scope:rule={rule}{extra}", choice=f"rule={rule}")
    for choice, dtype in itertools.product(CHOICES, each_dtype):
        if lean or not ("kernel=" in choice or "workspace_limit=" in choice):  # which are a GPU's
            add("choices", f"base.{dtype}", choice, warm=not lean or "state" in choice)
    for kind in ("batch", "padded", "masks", "empty", "cross", "padded_masks"):
        wide = kind == "padded_masks" or not lean
        for method, dtype in itertools.product(methods if wide else ("scope", "svg2"), each_dtype):
            add("batches, padding, masks", f"{kind}.{dtype}", method, warm=wide)
        for choice in ("scope:tail=first_order", "scope:proxy=exact", "scope:group=raster", "scope:rule=fixed") if wide else ():
            add("batches, padding, masks", f"{kind}.{narrow}", choice)
    for method, dtype in itertools.product((*methods, "scope:tail=first_order"), each_dtype):
        add("text", f"text.{dtype}", method, "--text", "21")
    for method in sparse:
        add("schedule", f"base.{narrow}", method, "--layer", 0, steps=(4,))
        add("schedule", f"base.{narrow}", method, "--layer", 2, steps=(0, 1, 4) if lean else range(5))
    for settings in ("warm_prefix=yes", "dense_last_steps=0.4+dense_steps=0", "reuse_start=1+reuse_interval=3", "dense_steps=1"):
        for method in ("scope", "svg2") if lean else ("scope", "scope-exact", "svg2", "svg2-ear", "svoo"):
            add("schedule", f"base.{narrow}", f"{method}:{settings}", "--layer", 2, steps=(0, 1, 4) if lean else range(5))
    for method in ("svoo", "svg2", "svg2-ear"):
        for more in ("", "+target_density=0.2", "+profile_low=0.1+profile_high=0.3"):
            add("schedule", f"base.{narrow}", f"{method}:profile={files['profile']}{more}", "--layer", 1, steps=(1, 2, 4), name="profile")
    for reuse in ("svoo:reuse_start=1+reuse_interval=3", "scope:reuse_start=1+reuse_interval=3+warm_prefix=yes"):
        add("schedule", f"padded_masks.{narrow}", reuse, "--layer", 2, steps=range(5))
    add("schedule", f"base.{narrow}", "scope", "--model", "wan2.1-t2v-1.3b", "--layer", 2, steps=range(5))
    add("schedule", f"base.{narrow}", "scope", "--subspaces",
        json.dumps([list(range(1, 128, 2)), list(range(0, 60, 2)), list(range(60, 128, 2))]), name="subspaces")
    for method in methods:
        if not lean:
            add("quality", f"base.{narrow}", method, "--quality", 16)
        add("NaN and infinities", f"bad_v.{narrow}", method)
        add("NaN and infinities", f"bad_qk.{narrow}", method)
        add("NaN and infinities", f"bad_qk.{narrow}", method, "--set", "check_finite=no")
        if backend == "cpu":
            for instructions, dtype in itertools.product(("avx2", "portable"), dtypes):
                add("instruction sets", f"base.{dtype}", method, "--instruction-set", instructions)
    cases += [Case(".npy files", f"{dtype}", [["attend", *(x for name in "qkv" for x in (f"--{name}", f"{folder}/{name}.{dtype}.npy")),
                                               "--rope", "44,42,42", "-o", "{out}/0.npy", *machine]])
              for dtype in dtypes if dtype != "bf16"]
    cases += [Case("make-qkv", f"{dtype} {rope}",
                   [["make-qkv", "--grid", "4x9x11", "--rope", rope, "--heads", 3, "--dtype", dtype, "--seed", 5,
                     "--threads", "2", "-o", "{out}/0.safetensors"]])
              for dtype in dtypes for rope in ("44,42,42", "16,12,12")]
    model, video = f"{REPOSITORY}/tests/data/video/i2v_image_branch", f"{REPOSITORY}/tests/data/video/i2v_image_branch/case.safetensors"
    small = ["--model", model, "--grid", "3x4x5", "--condition", video, "--noise", video]
    if "cuda" in machine:  # its heads have 12 channels, which no GPU kernel takes
        small = ["--model", f"{REPOSITORY}/models/tiny-wan", "--grid", "3x20x32", "--example", 0]
    cases += [Case("generate", method, [["generate", *small, "--steps", 3, "--method", method, *machine, "-o", "{out}/run"]])
              for method in able]
    return cases


def all_files(folder):
    return sorted(os.path.relpath(os.path.join(at, name), folder) for at, _, names in os.walk(folder) for name in names)


def what_is_said(value):
    """A JSON value without what two builds may differ in."""
    if isinstance(value, dict):
        return {k: what_is_said(v) for k, v in value.items()
                if k not in ("kernel", "seconds", "commit") and not k.endswith(("_bytes", "_seconds"))}
    return [what_is_said(v) for v in value] if isinstance(value, list) else value


def json_difference(old, new, at):
    """The first thing that OLD says and NEW does not; what only NEW says is new."""
    if isinstance(old, dict) and isinstance(new, dict):
        pairs = [(v, new.get(k), f"{at}.{k}") for k, v in old.items()]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = [(a, b, f"{at}[{i}]") for i, (a, b) in enumerate(zip(old, new))]
    else:
        return None if type(old) is type(new) and (old == new or (old != old and new != new)) else f"{at}: {old} became {new}"
    return next(filter(None, (json_difference(*pair) for pair in pairs)), None)


def tensor_difference(old, new, at):
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        return f"{at}: {old.dtype} {list(old.shape)} became {new.dtype} {list(new.shape)}"
    if old.tobytes() == new.tobytes():
        return None
    width = old.dtype.itemsize
    a, b = (np.frombuffer(x.tobytes(), np.uint8).reshape(-1, width) for x in (old, new))
    wrong = np.flatnonzero((a != b).any(axis=1))
    index = np.unravel_index(wrong[0], old.shape) if old.shape else ()
    return f"{at}{list(map(int, index))}: {old[index]} became {new[index]}; {len(wrong)} of {old.size} elements differ"


def file_difference(old, new, name):
    if name.endswith(".json"):
        return json_difference(*(what_is_said(json.load(open(path))) for path in (old, new)), name)
    if name.endswith(".npy"):
        return tensor_difference(np.load(old), np.load(new), name)
    if not name.endswith(".safetensors"):
        return None if open(old, "rb").read() == open(new, "rb").read() else f"{name}: other bytes"
    (a, meta_a), (b, meta_b) = tensors.load(old), tensors.load(new)
    if a.keys() != b.keys():
        return f"{name}: tensors {sorted(a)} became {sorted(b)}"
    for meta in (meta_a, meta_b):
        if "settings" in meta:
            meta["settings"] = what_is_said(json.loads(meta["settings"]))
    first = next(filter(None, (tensor_difference(a[x], b[x], f"{name}: {x}") for x in a)), None)
    return first or json_difference(meta_a, meta_b, f"{name}: metadata")


def compare(case, old, new, perturb):
    """('same', None), ('refused', message) or ('differs', what); files of the case are gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        for i, arguments in enumerate(case.calls):
            results = {}
            for build, command in (("old", old), ("new", new)):
                os.makedirs(f"{folder}/{build}", exist_ok=True)
                results[build] = run(command, *(str(x).replace("{out}", f"{folder}/{build}") for x in arguments))
            codes = {build: result.returncode for build, result in results.items()}
            said = last_line(results["old"] if codes["old"] else results["new"])
            if codes["old"] != codes["new"] or codes["old"] < 0:
                return "differs", f"call {i}: exit {codes['old']} became {codes['new']}: {said}"
            if codes["old"] != 0:
                return "refused", f"exit {codes['old']}: {said}"
        # The state's layout is a build's own: what it is worth shows in the warm call.
        names, others = ([x for x in all_files(f"{folder}/{build}") if x != "state"] for build in ("old", "new"))
        if names != others:
            return "differs", f"files {names} became {others}"
        if perturb:
            flip_a_bit(f"{folder}/new", names)
        found = next(filter(None, (file_difference(f"{folder}/old/{x}", f"{folder}/new/{x}", x) for x in names)), None)
    return ("differs", found) if found else ("same", None)


def flip_a_bit(folder, names):
    """The lowest bit of the last element of the last call's `out`."""
    path = f"{folder}/{[x for x in names if x.endswith('.safetensors')][-1]}"
    arrays, metadata = tensors.load(path)
    out = arrays["out"].copy()
    out.reshape(-1)[-1:].view(np.uint8)[0] ^= 1
    tensors.save(path, {**arrays, "out": out}, metadata)


def last_line(result):
    return "".join((result.stderr or result.stdout).strip().splitlines()[-1:])


def never_compared(cases, results):
    """(choice, refusal) of the choices of the tables that no case could compare."""
    compared, refused = set(), {}
    for case, (kind, note) in zip(cases, results):
        if kind == "refused":
            refused.setdefault(case.choice, note)
        else:
            compared.add(case.choice)
    return [(choice, note) for choice, note in refused.items() if choice and choice not in compared]


def check_bits(options, folder):
    (methods, choices), (_, newer) = read_tables(options.old), read_tables(options.new)
    files = make_inputs(options.old, DTYPES, options.backend, folder)
    skipped = []  # (what, why)

    def try_each(kind, calls):
        """Those that OLD has on this backend."""
        tried = {name: run(options.old, "attend", *call, "-o", f"{folder}/able.safetensors", "--backend", options.backend)
                 for name, call in calls.items()}
        skipped.extend((f"{kind} {name}", last_line(result)) for name, result in tried.items() if result.returncode != 0)
        able = [name for name, result in tried.items() if result.returncode == 0]
        if not able:
            sys.exit(f"OLD takes no {kind} on {options.backend}: {skipped[-1][1]}")
        return able

    dtypes = try_each("type", {dtype: (files[f"base.{dtype}"], "--method", "dense") for dtype in DTYPES})
    able = try_each("method", {method: (files[f"base.{dtypes[-1]}"], "--method", method) for method in methods})
    cases = make_cases(methods, able, dtypes, choices, files, options.backend, folder)
    if options.only:
        cases = [case for case in cases if options.only in case.group or options.only in case.name]
        if not cases:
            sys.exit(f"--only: no group and no case has {options.only!r} in its name")
    if options.quick:  # every method once, and the first and the last of each group
        groups = [[case for case in cases if case.group == group] for group in dict.fromkeys(case.group for case in cases)]
        cases = groups[0][-len(methods):] + [case for group in groups[1:] for case in (group[0], group[-1])]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda i: compare(cases[i], options.old, options.new, options.self_test and i == 0), range(len(cases))))
    print(f"{len(methods)} methods ({', '.join(methods)}), {options.backend}: {len(cases)} cases, "
          f"{sum(len(c.calls) for c in cases)} calls of each build\n")
    print(f"{'':<26}{'cases':>7}{'identical':>11}{'refused by both':>17}{'differing':>11}")
    bad = 0
    for group in dict.fromkeys(case.group for case in cases):
        mine = [(case, *result) for case, result in zip(cases, results) if case.group == group]
        kinds, shown = [kind for _, kind, _ in mine], False
        print(f"{group:<26}{len(mine):>7}{kinds.count('same'):>11}{kinds.count('refused'):>17}{kinds.count('differs'):>11}")
        for case, kind, note in mine:
            if options.verbose or (kind == "differs" and not shown):
                print(f"    {kind}: {case.name}{': ' + note if note else ''}")
            shown = shown or kind == "differs"
        bad += kinds.count("differs")
        if "same" not in kinds and "differs" not in kinds and not (options.quick or options.only):
            print("    nothing was compared: every case was refused")
            bad += 1
    print()
    if not options.quick:
        skipped += never_compared(cases, results)
    skipped += [(f"{setting}={choice}", "only NEW has it") for setting, words in newer.items() for choice in words
                if choice not in choices.get(setting, ())]
    for what, why in skipped:
        print(f"skipped: {what}: {why}")
    if options.quick or options.only:
        print("a part of the cases; without --quick and --only it is all of them")
    if options.self_test:
        found = bad == 1 and results[0][0] == "differs"
        print(f"self-test: the flipped bit was {'found, and nothing else' if found else 'NOT what was found'}")
        return found
    print("every bit is the same" if bad == 0 else f"{bad} differ")
    return bad == 0


def warm_calls(command, folder, tag, file, method, density):
    """Seconds of one more warm call in a process of its own; the first one fills the state."""
    state = [] if method == "dense" else ["--target-density", density, "--state", f"{folder}/{tag}.state"]
    arguments = ["attend", file, "--method", method, *state, "-o", f"{folder}/out.safetensors", "--stats", f"{folder}/stats.json"]
    if state and not os.path.exists(f"{folder}/{tag}.state"):
        must_run(command, *arguments)
    must_run(command, *arguments)
    return json.load(open(f"{folder}/stats.json"))["seconds"]["total"]


def builds_in_turn(options, i):
    """Each goes first in every other round."""
    return [("old", options.old), ("new", options.new)][:: -1 if i % 2 else 1]


def time_cpu(options, folder):
    """Rows {(shape, what): {build: [seconds]}}; calls of the two builds take turns."""
    rows = {}
    for dtype in ("f32", "bf16"):
        file = f"{folder}/timed.{dtype}.safetensors"
        must_run(options.old, "make-qkv", "--grid", "16x32x32", "--heads", 2, "--dtype", dtype, "-o", file)
        for i, method in itertools.product(range(options.times), ("scope", "svg2", "dense")):
            for build, command in builds_in_turn(options, i):
                seconds = warm_calls(command, folder, f"{build}.{method}.{dtype}", file, method, 0.2)
                rows.setdefault((f"2 x 16,384 x 128, {dtype}, density 0.20", method), {}).setdefault(build, []).append(seconds)
    return rows


def time_cuda(options, folder):
    """As time_cpu, by `scope bench`: a process makes 40 heads in seconds, and then times 5 calls of each kind in turns."""
    rows = {}
    for i, method in itertools.product(range(options.times), ("scope", "svg2", "sparge")):
        for build, command in builds_in_turn(options, i):
            must_run(command, "bench", "--backend", "cuda", "--grid", "21x45x80", "--heads", 40, "--dtype", "bf16", "--density", "0.2,0.1",
                     "--method", method, "--repeat", 5, "--json", f"{folder}/bench.json")
            for case in json.load(open(f"{folder}/bench.json"))["cases"]:
                shape = f"40 x 75,600 x 128, bf16, density {case['density']:.2f}"
                for row in case["rows"]:
                    name = {"dense": "dense", "warm, exact proxy": "scope-exact"}.get(row["name"], f"{method}, {row['name']}")
                    rows.setdefault((shape, name), {}).setdefault(build, []).append(row["seconds"])
    return rows


def report_times(options, folder):
    rows = (time_cuda if options.backend == "cuda" else time_cpu)(options, folder)
    print(f"\n{'medians of whole calls, ms':<64}{'OLD':>10}{'NEW':>10}{'NEW/OLD':>10}{'spread of OLD':>16}")
    for (shape, name), seconds in rows.items():
        old, new = (1e3 * statistics.median(seconds[build]) for build in ("old", "new"))
        spread = (max(seconds["old"]) - min(seconds["old"])) / statistics.median(seconds["old"])
        print(f"{shape + ', ' + name:<64}{old:>10.2f}{new:>10.2f}{new / old:>10.3f}{100 * spread:>15.1f}%")


def library(path, command):
    found = path or next(iter(sorted(glob.glob(f"{os.path.dirname(os.path.abspath(command))}/../libscope.so*"))), None)
    return found and os.path.realpath(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__, epilog=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD", help="the scope command whose results are right")
    parser.add_argument("new", metavar="NEW", help="the scope command that must give the same")
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu", help="where the calls run")
    parser.add_argument("--times", type=int, default=0, metavar="N",
                        help="also time N rounds of warm calls, the builds taking turns; hold the machine quiet")
    parser.add_argument("--no-bits", action="store_true", help="only times and sizes")
    parser.add_argument("--quick", action="store_true", help="a few cases of each group, in seconds")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with TEXT in their group or name, as: --only rule=deviation")
    parser.add_argument("--self-test", action="store_true",
                        help="flip one bit of one of NEW's outputs: succeeds if that, and only that, is found")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 16), help="cases at a time (default: cores, up to 16)")
    parser.add_argument("--verbose", action="store_true", help="a line for every case, with what was refused and why")
    parser.add_argument("--lib-old", help="OLD's libscope.so (default: beside the command's folder), for its size")
    parser.add_argument("--lib-new", help="NEW's libscope.so")
    options = parser.parse_args()
    for command in (options.old, options.new):
        if not os.access(command, os.X_OK):
            parser.error(f"{command}: not a program")
    options.old, options.new = os.path.abspath(options.old), os.path.abspath(options.new)
    same = True
    with tempfile.TemporaryDirectory() as folder:
        if not options.no_bits:
            same = check_bits(options, folder)
        if options.times > 0:
            report_times(options, folder)
    paths = library(options.lib_old, options.old), library(options.lib_new, options.new)
    if all(paths):
        old, new = map(os.path.getsize, paths)
        print(f"libscope.so: {old:,} bytes became {new:,}, {new / old:.3f} of it")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
