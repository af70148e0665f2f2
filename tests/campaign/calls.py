"""The hostile inputs to the C ABI: a call that differs from a sound one in one thing, the status and words that must come back, and
nothing written."""
import ctypes as c
import pathlib
import sys
import threading

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python" / "scope_attn"))
import _c_api as api

INVALID, SHAPE, DTYPE, ALIGNMENT, UNSUPPORTED, SIZE, WORKSPACE, MEMORY, NON_FINITE, IO, FORMAT, BUSY = range(1, 13)
BATCH, HEADS, TOKENS, DIM = 2, 3, 60, 32
SOUND = dict(batch=BATCH, heads=HEADS, q_tokens=TOKENS, k_tokens=TOKENS, dim=DIM, dtype=api.F32, rope=(12, 10, 10), dense_queries=1)
BIG = 1 << 62


def tensor(array):
    b, h, t, _ = (s // array.itemsize for s in array.strides)
    return api.Tensor(array.ctypes.data, b, h, t)


class Calls:
    """A sound plan with its tensors, and in `wrong` what is wrong of each hostile use of it."""

    def __init__(self, library):
        self.lib, self.wrong = api.LibScope(library), []
        rng = np.random.default_rng(3)
        self.q, self.k, self.v = (rng.standard_normal((BATCH, HEADS, TOKENS, DIM)).astype(np.float32) for _ in range(3))
        self.out = np.full_like(self.q, 7)
        self.spare = np.zeros(1 << 16, np.complex128)
        self.plan = self.lib.plan("scope", threads=2, **SOUND)
        self.state = self.plan.state()

    def expect(self, what, status, says, call):
        """`call` ends with the status, says each word, and leaves `out` as it was."""
        before = self.out.copy()
        try:
            call()
            got, text = 0, ""
        except api.ScopeError as error:
            got, text = error.status, str(error)
        missing = [word for word in ([says] if isinstance(says, str) else says) if word not in text]
        changed = status != 0 and not np.array_equal(before, self.out)
        if got != status or missing or changed:
            self.wrong.append(f"{what}: status {got}, expected {status}; nothing about {missing}; out {'changed' if changed else 'as it was'}: {text}")

    def args(self, **values):
        return {"q": tensor(self.q), "k": tensor(self.k), "v": tensor(self.v), "out": tensor(self.out), **values}

    def run(self, what, status, says, plan=None, **values):
        self.expect(f"scope_run, {what}", status, says, lambda: (plan or self.plan).run(**self.args(**values)))

    def raw(self, what, status, says, **fields):
        """scope_run with fields of scope_run_args set after all else."""
        arguments = self.plan.arguments(**self.args())
        for name, value in fields.items():
            setattr(arguments, name, value)
        self.expect(f"scope_run, {what}", status, says, lambda: self.plan.launch(arguments))

    def make_plan(self, what, status, says, settings=None, **shape):
        def make():
            self.lib.plan("scope", settings or {}, threads=1, **{**SOUND, **shape})
        self.expect(f"scope_plan_create, {what}", status, says, make)

    def runs(self):
        def strided(name, **strides):
            x = tensor(getattr(self, name))
            for field, value in strides.items():
                setattr(x, field, value)
            return {name: x}

        self.run("as it should be", 0, "")
        for name in "qkv":
            self.run(f"{name} null", INVALID, [name, "null"], **strided(name, data=None))
            self.run(f"{name} at an odd address", ALIGNMENT, name, **strided(name, data=getattr(self, name).ctypes.data + 1))
            self.run(f"{name} with a negative stride", SHAPE, [name, "-32"], **strided(name, token_stride=-32))
            self.run(f"{name} with strides past 2^63", SIZE, "batch_stride", **strided(name, batch_stride=BIG))
        self.run("out at an odd address", ALIGNMENT, "out", **strided("out", data=self.out.ctypes.data + 2))
        self.run("out broadcast over tokens", SHAPE, ["out", "overlap"], **strided("out", token_stride=0))
        self.run("out with heads that overlap", SHAPE, ["out", "overlap"], **strided("out", head_stride=DIM))
        self.run("out with a negative stride", SHAPE, "out", **strided("out", head_stride=-1))
        self.run("out over k", INVALID, ["out", "k"], out=tensor(self.k))
        self.run("out over the end of v", INVALID, ["out", "v"], **strided("out", data=self.v.ctypes.data + self.v.nbytes - 128))
        self.run("out over q, shifted by a row", INVALID, ["out", "q"], **strided("out", data=self.q.ctypes.data + 128))
        self.run("out over q with other strides", INVALID, ["out", "q"], out=api.Tensor(self.q.ctypes.data, HEADS * TOKENS * DIM, DIM, HEADS * DIM))
        self.run("out over the workspace", INVALID, "out", workspace=self.out.ctypes.data, workspace_bytes=self.plan.info.workspace_bytes)
        self.run("lse over out", INVALID, ["out", "lse"], lse=self.out.ctypes.data)
        self.run("lse at an odd address", ALIGNMENT, "lse", lse=self.spare.ctypes.data + 1)
        self.run("v null with out", INVALID, "v", v=api.Tensor(None, 0, 0, 0))
        for value in (float("nan"), float("inf"), -1.0):
            self.run(f"scale {value}", INVALID, "scale", scale=value)
        self.run("reserved set", INVALID, "reserved", reserved=1)
        for name in ("q_lengths", "k_lengths"):
            for value in (-1, TOKENS + 1, -(1 << 63)):
                lengths = np.array([TOKENS, value], np.int64)
                self.run(f"{name} {value}", SHAPE, [f"{name}[1]", str(value)], **{name: lengths.ctypes.data})
            self.run(f"{name} at an odd address", ALIGNMENT, name, **{name: self.spare.ctypes.data + 4})
        for name in ("valid_queries", "valid_keys", "keep", "dense_queries"):
            self.run(f"{name} at an odd address", ALIGNMENT, name, **{name: self.spare.ctypes.data + 1})
            ones = np.full((BATCH, 2), 0xFFFFFFFF, np.uint32)  # bits past the 60 tokens mean nothing
            self.run(f"{name} all ones", 0, "", **{name: ones.ctypes.data})
            zeros = np.zeros((BATCH, 2), np.uint32)
            self.run(f"{name} all zeros", 0, "", **{name: zeros.ctypes.data})
        self.run("workspace null", INVALID, "workspace", workspace=None)
        self.run("workspace a byte short", WORKSPACE, ["workspace", str(self.plan.info.workspace_bytes)], workspace_bytes=self.plan.info.workspace_bytes - 1)
        self.run("workspace of negative size", WORKSPACE, "workspace", workspace_bytes=-1)
        self.run("report at an odd address", ALIGNMENT, "report", report=self.spare.ctypes.data + 8)
        for layer, step, steps, says in ((-2, -1, 0, "layer"), (0, 5, 5, "step"), (0, 5, 0, "step"), (0, -2, 5, "step"), (0, 0, -1, "step"), (0, 0, 1 << 62, "step")):
            self.run(f"layer {layer}, step {step} of {steps}", INVALID, says, layer=layer, step=step, steps=steps)
        for name in "qk":
            for value in (np.nan, np.inf, -np.inf, 2e18):
                array = getattr(self, name)
                kept = array[1, 2, 59, 31]
                array[1, 2, 59, 31] = value
                self.run(f"{value} in {name}", NON_FINITE, [f"{name}: NaN, Inf", "sample 1, head 2"])
                array[1, 2, 59, 31] = kept
        self.raw("struct_size 0", INVALID, "struct_size", struct_size=0)
        self.raw("struct_size of an int", INVALID, "struct_size", struct_size=4)
        self.raw("struct_size a byte short", INVALID, "struct_size", struct_size=c.sizeof(api.RunArgs) - 1)
        self.raw("struct_size 2^64 - 1", INVALID, "struct_size", struct_size=(1 << 64) - 1)
        self.raw("struct_size over a page", INVALID, "struct_size", struct_size=4097)
        stats = api.CallStats()
        stats.struct_size = 3
        self.run_with_stats("stats.struct_size 3", INVALID, "stats.struct_size", stats)
        heads = (api.HeadStats * (BATCH * HEADS))()
        self.raw("head_stats without struct_size", INVALID, "head_stats", head_stats=c.cast(heads, c.POINTER(api.HeadStats)))
        for name in ("labels", "sizes", "counts", "mask", "keep", "centroids", "codebooks", "codes"):
            self.run(f"selection.{name} at an odd address", ALIGNMENT, f"selection.{name}", selection=api.Selection(**{name: self.spare.ctypes.data + 2}))
            self.run(f"selection.{name} over out", INVALID, ["out", f"selection.{name}"], selection=api.Selection(**{name: self.out.ctypes.data}))
        other = self.lib.plan("scope", threads=1, **{**SOUND, "heads": 1}).state()
        self.run("a state of another shape", SHAPE, "state", state=other)
        self.expect("scope_run, args null", INVALID, "args", lambda: self.lib.run(self.plan.handle, None))
        self.expect("scope_run, plan null", INVALID, "plan", lambda: self.lib.run(None, self.plan.arguments(**self.args())))
        self.expect("scope_read_stats, plan null", INVALID, "plan", lambda: self.lib.read_stats(None, None))
        self.expect("scope_read_stats, args null", INVALID, "args", lambda: self.lib.read_stats(self.plan.handle, None))

    def run_with_stats(self, what, status, says, stats):
        arguments = self.plan.arguments(**self.args(stats=stats))
        self.expect(f"scope_run, {what}", status, says, lambda: self.plan.launch(arguments))

    def selections(self):
        info = self.plan.info
        labels = np.zeros((BATCH, HEADS, TOKENS), np.int32)
        mask = np.full((BATCH, HEADS, info.selection_groups, info.mask_words), 0x0FFFFFFF, np.uint32)

        def run(what, status, says, **fields):
            fields = {"labels": labels.ctypes.data, "mask": mask.ctypes.data, **fields}
            self.expect(f"scope_run_selection, {what}", status, says, lambda: self.plan.launch_selection(self.plan.arguments(**self.args(selection=api.Selection(**fields)))))

        run("as it should be", 0, "")
        run("labels null", INVALID, "labels", labels=None)
        run("mask null", INVALID, "mask", mask=None)
        run("labels at an odd address", ALIGNMENT, "labels", labels=labels.ctypes.data + 1)
        for value in (-2, info.selection_groups, -(1 << 31), (1 << 31) - 1):
            labels[1, 2, 59] = value
            run(f"label {value}", INVALID, ["label", str(value)])
        labels[1, 2, 59] = -1
        run("label -1", 0, "")
        mask[1, 2, 0, 1] = 0xFFFFFFFF
        run("bits past the keys", INVALID, "mask")
        mask[...] = 0
        run("an empty mask", 0, "")
        self.expect("scope_run_selection, no selection", INVALID, "selection", lambda: self.plan.launch_selection(self.plan.arguments(**self.args())))
        dense = self.lib.plan("dense", threads=1, **SOUND)
        self.expect("scope_run_selection, dense", INVALID, "dense", lambda: dense.launch_selection(dense.arguments(**self.args(selection=api.Selection(labels=labels.ctypes.data, mask=mask.ctypes.data)))))

    def plans(self):
        for name in ("batch", "heads", "dim"):
            for value in (0, -1, 1 << 32, BIG, -(1 << 63)):
                self.make_plan(f"{name} {value}", UNSUPPORTED if name == "dim" and value > 0 else SHAPE, [name, str(value)], **{name: value})
        for name in ("q_tokens", "k_tokens"):
            self.make_plan(f"{name} -1", SHAPE, name, **{name: -1})
            self.make_plan(f"{name} 2^62", SIZE, name, **{name: BIG})
            self.make_plan(f"{name} 0", 0, "", **{name: 0})
        self.make_plan("heads x batch x tokens past 2^63", SIZE, "", batch=1 << 30, heads=1 << 30, q_tokens=1 << 30)
        self.make_plan("dim 257", UNSUPPORTED, ["dim", "257"], dim=257, rope=(0, 0, 0), settings={"partition": "even:1"})
        for value in (-1, 3, 1 << 30):
            self.make_plan(f"dtype {value}", DTYPE, "dtype", dtype=value)
        for rope in ((12, 10, 11), (-12, 34, 10), (BIG, BIG, BIG), (1 << 62, -(1 << 62), 32)):
            self.make_plan(f"rope {rope}", SHAPE, "rope", rope=rope)
        self.make_plan("no rope", INVALID, "rope", rope=(0, 0, 0))
        sizes, channels = np.array([16, 16], np.int64), np.arange(DIM, dtype=np.int32)
        good = dict(subspaces=2, subspace_sizes=sizes.ctypes.data, subspace_channels=channels.ctypes.data)
        self.make_plan("its own sets", 0, "", **good)
        self.make_plan("sets without sizes", INVALID, "subspace_sizes", **{**good, "subspace_sizes": None})
        self.make_plan("sets without channels", INVALID, "subspace_channels", **{**good, "subspace_channels": None})
        for value in (-1, 257, BIG):
            self.make_plan(f"{value} sets", SHAPE, "subspaces", **{**good, "subspaces": value})
        for value in (0, -1, 17, BIG):
            wrong = np.array([16, value], np.int64)
            self.make_plan(f"a set of {value} channels", SHAPE, "subspace", **{**good, "subspace_sizes": wrong.ctypes.data})
        for value in (-1, 0, DIM, (1 << 31) - 1):
            wrong = channels.copy()
            wrong[31] = value
            self.make_plan(f"a set with channel {value}", SHAPE, "channel", **{**good, "subspace_channels": wrong.ctypes.data})
        for what, handles, says in (("context", (None, self.plan.method.handle), "context"), ("method", (self.plan.context.handle, None), "method")):
            self.expect(f"scope_plan_create, {what} null", INVALID, says, lambda handles=handles: self.lib.plan_create(*handles, self.plan.shape, c.c_void_p()))
        self.expect("scope_plan_create, shape null", INVALID, "shape", lambda: self.lib.plan_create(self.plan.context.handle, self.plan.method.handle, None, c.c_void_p()))
        self.expect("scope_plan_create, plan null", INVALID, "plan", lambda: self.lib.plan_create(self.plan.context.handle, self.plan.method.handle, self.plan.shape, None))
        self.expect("scope_plan_get_info, info null", INVALID, "info", lambda: self.lib.plan_get_info(self.plan.handle, None))
        self.expect("scope_plan_reason, both null", 0, "", lambda: self.lib.plan_reason(self.plan.handle, 0, 0, 1, None, None))
        self.expect("scope_plan_reason, step 1 of 1", INVALID, "step", lambda: self.lib.plan_reason(self.plan.handle, 0, 1, 1, None, None))

    def tables(self):
        method, text = self.plan.method.handle, c.create_string_buffer(b"keep", 64)
        for name, value, says in ((b"rho", b"nan", "rho"), (b"rho", b"", "rho"), (b"", b"1", "setting"), (b"rho\n", b"1", "setting"), (b"\xff\xfe", b"1", "setting"), (b"rho", b"\xff", "rho"),
                                  (b"rho", b"9" * 100000, "rho"), (None, b"1", "name"), (b"rho", None, "value"), (b"groups", b"-1", "groups"), (b"profile", b"/dev/zero", "")):
            self.expect(f"scope_method_set, {name} {str(value)[:20]}", IO if value == b"/dev/zero" else INVALID, says, lambda name=name, value=value: self.lib.method_set(method, name, value))
        self.expect("scope_method_set, method null", INVALID, "method", lambda: self.lib.method_set(None, b"rho", b"1"))
        self.expect("scope_method_get, buffer a byte short", INVALID, "capacity: got 3", lambda: self.lib.method_get(method, b"rho", text, 3, None))
        self.expect("scope_method_get, buffer null with a size", INVALID, "buffer", lambda: self.lib.method_get(method, b"rho", None, 64, None))
        self.expect("scope_method_get, nothing asked", 0, "", lambda: self.lib.method_get(method, b"rho", None, 0, None))
        if text.value != b"keep":
            self.wrong.append("scope_method_get wrote into a buffer that it refused")
        for name in (None, b"", b"Scope", b"scope:rho=0.5", b"\xff", b"n" * 100000):
            self.expect(f"scope_method_create, {str(name)[:20]}", INVALID, "name" if name is None else "method", lambda name=name: self.lib.method_create(name, c.c_void_p()))
        self.expect("scope_method_create, nowhere to put it", INVALID, "method", lambda: self.lib.method_create(b"scope", None))
        for model in (None, b"", b"wan", b"WAN2.1-T2V-14B"):
            self.expect(f"scope_method_apply_model, {model}", INVALID, "model", lambda model=model: self.lib.method_apply_model(method, model))
        fit, answer = self.lib.model_fit, api.ModelAnswer
        for fields, says in ((dict(layers=-1), "layers"), (dict(heads=-BIG), "heads"), (dict(dim=-1), "dim"), (dict(rope=(c.c_int64 * 3)(0, 0, -1)), "rope"), (dict(experts=-1), "experts"), (dict(experts=3), "experts"), (dict(reserved=1), "reserved")):
            self.expect(f"scope_model_fit, {fields}", INVALID, says, lambda fields=fields: fit(api.ModelQuery(**fields), answer()))
        self.expect("scope_model_fit, query null", INVALID, "query", lambda: fit(None, answer()))
        self.expect("scope_model_fit, answer null", INVALID, "answer", lambda: fit(api.ModelQuery(), None))
        for family in (b"", b"\xff", b"n" * 100000):
            self.expect(f"scope_model_fit, family {str(family)[:20]}", 0, "", lambda family=family: fit(api.ModelQuery(family=family, layers=BIG, nearest=77), answer()))
        for at, info in ((self.lib.setting_at, api.SettingInfo), (self.lib.method_at, api.MethodInfo), (self.lib.model_at, api.ModelInfo)):
            for index in (-1, 10000, -(1 << 31), (1 << 31) - 1):
                self.expect(f"{info.__name__} at {index}", INVALID, "index", lambda index=index: at(index, info()))
            self.expect(f"{info.__name__} null", INVALID, "info", lambda: at(0, None))
        for options, status, says in ((dict(backend=b"CPU"), UNSUPPORTED, "backend"), (dict(backend=b""), UNSUPPORTED, "backend"), (dict(threads=-1), INVALID, "threads"), (dict(threads=1 << 30), INVALID, "threads"),
                                      (dict(instruction_set=b"sse9"), UNSUPPORTED, "instruction_set"), (dict(instruction_set=b""), UNSUPPORTED, "instruction_set")):
            self.expect(f"scope_context_create, {options}", status, says, lambda options=options: self.lib.context_create(api.ContextOptions(**options), c.c_void_p()))
        self.expect("scope_context_create, nowhere to put it", INVALID, "context", lambda: self.lib.context_create(None, None))
        sizes, counts, k_head = np.ones(4, np.int32), np.ones(4, np.int32), c.c_int64(5)
        budget = self.lib.head_budget
        for what, arguments, says in (("sizes null", (None, counts.ctypes.data, 4, k_head), "sizes"), ("counts null", (sizes.ctypes.data, None, 4, k_head), "base_counts"), ("groups -1", (sizes.ctypes.data, counts.ctypes.data, -1, k_head), "groups"),
                                      ("k_head null", (sizes.ctypes.data, counts.ctypes.data, 4, None), "k_head")):
            self.expect(f"scope_head_budget, {what}", INVALID, says, lambda arguments=arguments: budget(*arguments))
        minus = np.array([3, -1, 1, 1], np.int32)
        self.expect("scope_head_budget, size -1", INVALID, "sizes", lambda: budget(minus.ctypes.data, counts.ctypes.data, 4, k_head))
        self.expect("scope_head_budget, count -1", INVALID, "base_counts", lambda: budget(sizes.ctypes.data, minus.ctypes.data, 4, k_head))
        zeros = np.zeros(4, np.int32)
        self.expect("scope_head_budget, no queries", 0, "", lambda: budget(zeros.ctypes.data, counts.ctypes.data, 4, k_head))
        largest = np.full(4, (1 << 31) - 1, np.int32)
        self.expect("scope_head_budget, largest counts", 0, "", lambda: budget(largest.ctypes.data, largest.ctypes.data, 4, k_head))
        if k_head.value != (1 << 31) - 1:
            self.wrong.append(f"scope_head_budget of the largest counts is {k_head.value}")
        for backend, dtype, dim in ((b"cpu", 7, 64), (b"cpu", 0, -1), (b"cpu", 0, BIG), (b"nothing", 0, 64), (None, -1, 0), (b"", 0, 64)):
            if self.lib.supports(backend, dtype, dim) != 0:
                self.wrong.append(f"scope_supports {backend} {dtype} {dim}")
        for destroy in (self.lib.context_destroy, self.lib.method_destroy, self.lib.plan_destroy, self.lib.state_destroy):
            destroy(None)
        if not all(self.lib.status_name(status) for status in (-1, 16, 1 << 30)):
            self.wrong.append("scope_status_name has no name for a status that there is not")

    def states(self):
        self.run("a first call with a state", 0, "", state=self.state)
        saved = self.state.save()
        memory = c.create_string_buffer(self.plan.info.state_bytes + 64)
        for what, address, status in (("null", None, INVALID), ("at an odd address", (c.addressof(memory) | 15) - 14, ALIGNMENT)):
            self.expect(f"scope_state_create, memory {what}", status, "memory", lambda address=address: self.lib.state_create(self.plan.handle, address, c.c_void_p()))
        dense = self.lib.plan("dense", threads=1, **SOUND)
        self.expect("scope_state_create, of a method without", INVALID, "keeps no state", lambda: self.lib.state_create(dense.handle, c.addressof(memory), c.c_void_p()))
        load = lambda data, size=None: self.lib.state_load(self.state.handle, None, data, len(data) if size is None else size)
        for what, data, status in (("empty", b"", FORMAT), ("cut", saved[:-1], FORMAT), ("longer", saved + b"\0", FORMAT), ("zeros", bytes(len(saved)), INVALID), ("ones", b"\xff" * len(saved), INVALID), ("header alone", saved[:64], FORMAT)):
            self.expect(f"scope_state_load, {what}", status, "", lambda data=data: load(data))
        for at in range(0, 64, 4):
            spoiled = bytearray(saved)
            spoiled[at] ^= 0x80
            if bytes(spoiled[at:at + 4]) != saved[at:at + 4] and any(saved[at:at + 4]):
                self.expect(f"scope_state_load, bit 7 of header byte {at}", INVALID if at < 12 else SHAPE, "state: ", lambda data=bytes(spoiled): load(data))
        for at, value in ((64, -1), (64, 1 << 30), (68, -1), (68, 1 << 30)):  # filled groups and codes of the first sample
            spoiled = saved[:at] + int(value).to_bytes(4, "little", signed=True) + saved[at + 4:]
            self.expect(f"scope_state_load, {value} at byte {at}", FORMAT, "", lambda data=spoiled: load(data))
        self.expect("scope_state_load, buffer null", INVALID, "buffer", lambda: self.lib.state_load(self.state.handle, None, None, len(saved)))
        short = c.create_string_buffer(b"\x07" * 100)
        self.expect("scope_state_save, buffer too small", INVALID, "capacity: got 100", lambda: self.lib.state_save(self.state.handle, None, short, 100, None))
        if short.raw[:100] != b"\x07" * 100:
            self.wrong.append("scope_state_save wrote into a buffer that it refused")
        self.expect("scope_state_save, buffer null with a size", INVALID, "buffer", lambda: self.lib.state_save(self.state.handle, None, None, len(saved), None))
        for value in (2, -1):
            self.expect(f"scope_state_set_filled {value}", 0, "", lambda value=value: self.lib.state_set_filled(self.state.handle, value))
        unfilled = self.plan.state()
        self.expect("scope_state_set_filled 1, of what no call has filled", 0, "", lambda: self.lib.state_set_filled(unfilled.handle, 1))
        self.run("a state that is said to be filled and is not", INVALID, "state", state=unfilled)
        for name, call in (("reset", lambda: self.lib.state_reset(None)), ("filled", lambda: self.lib.state_filled(None, c.c_int32())), ("save", lambda: self.lib.state_save(None, None, None, 0, None)),
                           ("load", lambda: self.lib.state_load(None, None, saved, len(saved)))):
            self.expect(f"scope_state_{name}, state null", INVALID, "state", call)
        self.expect("scope_state_filled, filled null", INVALID, "filled", lambda: self.lib.state_filled(self.state.handle, None))
        self.expect("the state is as before all this", 0, "", lambda: None if self.state.save() == saved else self.wrong.append("a refused load changed a state"))
        report = np.zeros(self.plan.info.report_bytes // 16 + 1, np.complex128)
        self.expect("scope_report_read, at an odd address", 0, "", lambda: self.lib.report_read(self.plan.handle, report.ctypes.data + 1, api.CallStats(), self.plan.head_stats()))
        self.expect("scope_report_read, null", INVALID, "report", lambda: self.lib.report_read(self.plan.handle, None, None, None))

    def threads(self):
        """Two threads on one plan: each call either runs or is busy, and the result is what one thread gets."""
        self.plan.run(**self.args())
        wanted, seen = self.out.copy(), []

        def work():
            out = np.empty_like(self.out)
            for _ in range(30):
                try:
                    self.plan.run(**self.args(out=tensor(out)))
                    seen.append(0 if np.array_equal(out, wanted) else "another result")
                except api.ScopeError as error:
                    seen.append(0 if error.status == BUSY else str(error))

        workers = [threading.Thread(target=work) for _ in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        if any(seen) or len(seen) != 60:
            self.wrong.append(f"two threads on a plan: {[x for x in seen if x][:3]}, {len(seen)} calls")
        self.run("after two threads", 0, "")
