"""The C ABI through ctypes: the structs of scope.h and a checked library handle. All ctypes of the package live here."""
import ctypes as c
import functools
import os
import pathlib
import threading
from typing import Any

byref, pointer = c.byref, c.pointer
F32, F16, BF16 = 0, 1, 2
SPARSE, DENSE_METHOD, DENSE_LAYER, DENSE_STEP, DENSE_LAST_STEP, DENSE_NOTHING = range(6)  # reasons


class Sized(c.Structure):
    """A struct that begins with its own size."""

    def __init__(self, **fields):
        super().__init__(struct_size=c.sizeof(type(self)), **fields)


def fields(*groups):
    """struct_size, then the names in each (type, "names") group."""
    return [("struct_size", c.c_size_t)] + [(name, kind) for kind, names in groups for name in names.split()]


class ContextOptions(Sized):
    _fields_ = fields((c.c_char_p, "backend"), (c.c_int32, "threads device"), (c.c_char_p, "instruction_set"),
                      (c.c_void_p, "run_tasks run_tasks_pool"))


class SettingInfo(Sized):
    _fields_ = fields((c.c_char_p, "name stage values help"))


class MethodInfo(Sized):
    _fields_ = fields((c.c_char_p, "name help"), (c.c_int32, "shares_branches reserved morton reserved_2"))


class ModelInfo(Sized):
    _fields_ = fields((c.c_char_p, "name help"), (c.c_int64, "layers heads dim"), (c.c_int64 * 3, "rope grid"), (c.c_int64, "steps"),
                      (c.c_double, "rho dense_steps"), (c.c_int32, "warm_prefix reserved"))


class ModelQuery(Sized):
    _fields_ = fields((c.c_char_p, "family"), (c.c_int64, "layers heads dim"), (c.c_int64 * 3, "rope"),
                      (c.c_int32, "from_image experts nearest reserved"))


class ModelAnswer(Sized):
    _fields_ = fields((c.c_int32, "index exact"), (c.c_char_p, "why"))


class Shape(Sized):
    _fields_ = fields((c.c_int64, "batch heads q_tokens k_tokens dim"), (c.c_int32, "dtype dense_queries"), (c.c_int64 * 3, "rope"),
                      (c.c_int64, "subspaces"), (c.c_void_p, "subspace_sizes subspace_channels"))


class PlanInfo(Sized):
    _fields_ = fields((c.c_int64, "workspace_bytes state_bytes report_bytes groups codes subspaces selection_groups mask_words"),
                      (c.c_char_p, "kernel"), (c.c_int32, "host_memory reserved"))


class Tensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("batch_stride", c.c_int64), ("head_stride", c.c_int64), ("token_stride", c.c_int64)]


class Selection(Sized):
    _fields_ = fields((c.c_void_p, "labels sizes counts mask keep centroids codebooks codes"))


class HeadStats(Sized):
    _fields_ = fields((c.c_double, "density total_density rho alpha"),
                      (c.c_int64, "k_head queries keys groups codes empty_groups empty_codes min_count max_count"))


class CallStats(Sized):
    _fields_ = fields((c.c_int32, "reason warm iterations reserved"), (c.c_char_p, "arithmetic"), (c.c_double, "density total_density"),
                      (c.c_double, "check_seconds group_seconds encode_seconds score_seconds select_seconds attend_seconds total_seconds"))


class RunArgs(Sized):
    _fields_ = fields((Tensor, "q k v out"), (c.c_void_p, "lse"), (c.c_float, "scale"), (c.c_int32, "reserved"),
                      (c.c_void_p, "q_lengths k_lengths valid_queries valid_keys keep dense_queries"), (c.c_int64, "layer step steps"),
                      (c.c_void_p, "state workspace"), (c.c_int64, "workspace_bytes"), (c.c_void_p, "report"),
                      (c.POINTER(Selection), "selection"), (c.POINTER(CallStats), "stats"), (c.POINTER(HeadStats), "head_stats"),
                      (c.c_void_p, "stream"))


STATUS = object()  # what a function returns that raises instead


def prototypes():
    """(name, what it returns, its arguments), for every function of scope.h."""
    handle, made, text, i32, i64 = c.c_void_p, c.POINTER(c.c_void_p), c.c_char_p, c.c_int32, c.c_int64
    p = c.POINTER
    return [
        ("version", text, []),
        ("commit", text, []),
        ("status_name", text, [c.c_int]),
        ("last_error", text, []),
        ("supports", i32, [text, i32, i64]),
        ("context_create", STATUS, [p(ContextOptions), made]),
        ("context_destroy", None, [handle]),
        ("context_instruction_set", text, [handle]),
        ("method_create", STATUS, [text, made]),
        ("method_destroy", None, [handle]),
        ("method_set", STATUS, [handle, text, text]),
        ("method_set_default", STATUS, [handle, text, text]),
        ("method_get", STATUS, [handle, text, c.c_void_p, c.c_size_t, p(c.c_size_t)]),
        ("method_apply_model", STATUS, [handle, text]),
        ("setting_at", STATUS, [i32, p(SettingInfo)]),
        ("method_at", STATUS, [i32, p(MethodInfo)]),
        ("model_at", STATUS, [i32, p(ModelInfo)]),
        ("model_fit", STATUS, [p(ModelQuery), p(ModelAnswer)]),
        ("plan_create", STATUS, [handle, handle, p(Shape), made]),
        ("plan_destroy", None, [handle]),
        ("plan_get_info", STATUS, [handle, p(PlanInfo)]),
        ("plan_reason", STATUS, [handle, i64, i64, i64, p(i32), p(i32)]),
        ("state_create", STATUS, [handle, c.c_void_p, made]),
        ("state_destroy", None, [handle]),
        ("state_reset", STATUS, [handle]),
        ("state_filled", STATUS, [handle, p(i32)]),
        ("state_set_filled", STATUS, [handle, i32]),
        ("state_save", STATUS, [handle, c.c_void_p, c.c_void_p, c.c_size_t, p(c.c_size_t)]),
        ("state_load", STATUS, [handle, c.c_void_p, c.c_void_p, c.c_size_t]),
        ("run", STATUS, [handle, p(RunArgs)]),
        ("run_selection", STATUS, [handle, p(RunArgs)]),
        ("read_stats", STATUS, [handle, p(RunArgs)]),
        ("report_read", STATUS, [handle, c.c_void_p, p(CallStats), p(HeadStats)]),
        ("head_budget", STATUS, [c.c_void_p, c.c_void_p, i64, p(i64)]),
    ]


class ScopeError(Exception):
    """A call of the library failed; the message is the library's, `status` its scope_status."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class ScopeValueError(ScopeError, ValueError):
    """An argument's value, shape, alignment or size is refused."""


class ScopeTypeError(ScopeError, TypeError):
    """A dtype is refused."""


class ScopeRuntimeError(ScopeError, RuntimeError):
    """This build, machine or moment cannot do it: unsupported, busy, out of memory, a failing device."""


# By scope_status; the others are runtime errors.
ERRORS = {1: ScopeValueError, 2: ScopeValueError, 3: ScopeTypeError, 4: ScopeValueError, 6: ScopeValueError, 7: ScopeValueError,
          9: ScopeValueError, 10: ScopeValueError, 11: ScopeValueError}


class LibScope:
    """libscope.so: its functions by their names without scope_, every status checked."""

    VERSION = "0.2."  # any library of this MINOR serves
    # Those of its functions that are called in here.
    last_error: Any
    setting_at: Any
    method_at: Any
    model_at: Any
    model_fit: Any

    def __init__(self, path):
        self.path = str(path)
        try:
            lib = c.CDLL(self.path)
        except OSError as error:
            raise ImportError(f"{path} cannot be loaded: {error}") from error
        if not hasattr(lib, "scope_version"):
            raise ImportError(f"{path} is not libscope: it has no scope_version")
        lib.scope_version.restype = c.c_char_p
        found = lib.scope_version().decode()
        if not found.startswith(self.VERSION):
            raise ImportError(f"{path} is libscope {found}, and this package speaks {self.VERSION}x: reinstall scope-attn, or name a "
                              f"library of {self.VERSION}x in SCOPE_LIBRARY")
        for name, returns, arguments in prototypes():
            if not hasattr(lib, f"scope_{name}"):
                raise ImportError(f"{path} is libscope {found}, which has no scope_{name}: it is older than this package; update it")
            function = getattr(lib, f"scope_{name}")
            function.restype, function.argtypes = c.c_int if returns is STATUS else returns, arguments
            setattr(self, name, self._checked(function) if returns is STATUS else function)

    def _checked(self, function):
        def call(*arguments):
            status = function(*arguments)
            if status:
                raise ERRORS.get(status, ScopeRuntimeError)(status, self.last_error().decode(errors="backslashreplace"))
        return call

    def _rows(self, at, info):
        index = 0
        while True:
            row = info()
            try:
                at(index, row)
            except ScopeError:
                return
            yield row
            index += 1

    def settings(self):
        return list(self._rows(self.setting_at, SettingInfo))

    def methods(self):
        return list(self._rows(self.method_at, MethodInfo))

    def models(self):
        return list(self._rows(self.model_at, ModelInfo))

    def fit(self, rope=None, **query):
        """The answer to a ModelQuery of these fields."""
        answer = ModelAnswer()
        self.model_fit(ModelQuery(rope=(c.c_int64 * 3)(*(rope or (0, 0, 0))), **query), answer)
        return answer

    def plan(self, method="scope", settings=None, model=None, backend="cpu", device=0, threads=0, **shape):
        """A plan on a context of its own; `model` is applied to the method before `settings`."""
        context = Context(self, backend=backend.encode(), device=device, threads=threads)
        return Plan(context, method, settings or {}, model, shape)


@functools.cache
def library():
    """The library beside this file, or the one that SCOPE_LIBRARY names."""
    path = pathlib.Path(os.environ.get("SCOPE_LIBRARY") or pathlib.Path(__file__).with_name("libscope.so"))
    if not path.exists():
        raise ImportError(f"{path} is not there: `pip install .` puts it beside the package; or name a built one in SCOPE_LIBRARY")
    return LibScope(path)


def memory(size):
    """Host memory at a multiple of 16: what keeps it alive, and its address."""
    held = c.create_string_buffer(size + 15)
    return held, -(-c.addressof(held) // 16) * 16


def int64s(values):
    """An array of them: what keeps it alive, and its address."""
    held = (c.c_int64 * len(values))(*values)
    return held, c.addressof(held)


def subspaces(sets):
    """The fields of Shape that name channel sets."""
    sizes = (c.c_int64 * len(sets))(*map(len, sets))
    channels = [channel for each in sets for channel in each]
    return dict(subspaces=len(sets), subspace_sizes=c.cast(sizes, c.c_void_p),
                subspace_channels=c.cast((c.c_int32 * len(channels))(*channels), c.c_void_p))


def head_budget(libscope, sizes, base_counts):
    groups, budget = len(sizes), c.c_int64()
    libscope.head_budget((c.c_int32 * groups)(*sizes), (c.c_int32 * groups)(*base_counts), groups, budget)
    return budget.value


class Context:
    """What calls run on. Calls of one context must not overlap: whoever shares it holds `lock` around each."""

    handle = None

    def __init__(self, libscope, **options):
        self.libscope, self.handle, self.lock = libscope, c.c_void_p(), threading.Lock()
        self._workspace, self._workspace_bytes = (None, 0), -1
        libscope.context_create(ContextOptions(**options), self.handle)

    @property
    def instruction_set(self):
        return self.libscope.context_instruction_set(self.handle).decode()

    def workspace(self, size):
        """The address of host memory that all calls of this context use in turn; a larger request moves it."""
        if size > self._workspace_bytes:
            self._workspace, self._workspace_bytes = memory(size), size
        return self._workspace[1]

    def __del__(self):
        if self.handle:
            self.libscope.context_destroy(self.handle)


class Method:
    """A method's handle; `model` is applied before `settings`."""

    def __init__(self, libscope, name, settings=None, model=None):
        self.libscope, self.handle = libscope, c.c_void_p()
        libscope.method_create(name.encode(), self.handle)
        if model is not None:
            libscope.method_apply_model(self.handle, model.encode())
        for setting, value in (settings or {}).items():
            # A host's own choice ends with "?": it is not refused where it does nothing, as its user's would be.
            set_it = libscope.method_set_default if setting.endswith("?") else libscope.method_set
            set_it(self.handle, setting.rstrip("?").encode(), str(value).encode())

    def get(self, name):
        """A setting, as text."""
        needed = c.c_size_t()
        self.libscope.method_get(self.handle, name.encode(), None, 0, needed)
        text = c.create_string_buffer(needed.value)
        self.libscope.method_get(self.handle, name.encode(), text, needed.value, None)
        return text.value.decode()

    def __del__(self):
        self.libscope.method_destroy(self.handle)


class Plan:
    """A method and a plan. On the CPU its calls use the context's workspace; a GPU caller brings device memory."""

    def __init__(self, context, method, settings, model, shape):
        self.context, self.libscope, self.handle = context, context.libscope, c.c_void_p()
        self.method = Method(self.libscope, method, settings, model)
        self.shape = Shape(**{**shape, "rope": (c.c_int64 * 3)(*shape.get("rope", (0, 0, 0)))})
        self.libscope.plan_create(context.handle, self.method.handle, self.shape, self.handle)
        self.info = PlanInfo()
        self.libscope.plan_get_info(self.handle, self.info)

    def setting(self, name):
        """A setting of the plan's method, as text."""
        return self.method.get(name)

    def reason(self, layer=-1, step=-1, steps=0):
        """Why a call at this place runs as it does, and whether a dense one clusters all the same."""
        reason, clusters = c.c_int32(), c.c_int32()
        self.libscope.plan_reason(self.handle, layer, step, steps, reason, clusters)
        return reason.value, bool(clusters.value)

    def state(self, address=None):
        """A state over `state_bytes` at `address`, which outlive it; on the CPU it can have memory of its own."""
        return State(self, address)

    def arguments(self, **values):
        """scope_run_args from its fields by name."""
        if self.info.host_memory:
            values = {"workspace": self.context.workspace(self.info.workspace_bytes), **values}
        if isinstance(values.get("state"), State):
            values["state"] = values["state"].handle
        for name in ("selection", "stats"):
            if isinstance(values.get(name), Sized):
                values[name] = c.pointer(values[name])
        return RunArgs(**{"layer": -1, "step": -1, "workspace_bytes": self.info.workspace_bytes, **values})

    def run(self, **values):
        """One call; returns its statistics. On a GPU densities and times are NaN: use launch and read_stats there."""
        stats = CallStats()
        self.launch(self.arguments(stats=stats, **values))
        return stats

    def launch(self, arguments):
        self.libscope.run(self.handle, arguments)

    def launch_selection(self, arguments):
        self.libscope.run_selection(self.handle, arguments)

    def read_stats(self, arguments):
        self.libscope.read_stats(self.handle, arguments)

    def head_stats(self):
        """An array that a call can fill, one element per sample and head."""
        count = self.shape.batch * self.shape.heads
        return (HeadStats * count)(*(HeadStats() for _ in range(count)))

    def read_report(self, report, stats):
        """Completes the statistics of a call from the host's copy of its report; returns those of its heads."""
        heads = self.head_stats()
        self.libscope.report_read(self.handle, report, stats, heads)
        return heads

    def __del__(self):
        self.libscope.plan_destroy(self.handle)


class State:
    """What one layer and CFG branch hands from call to call."""

    def __init__(self, plan, address):
        self.libscope, self.handle = plan.libscope, c.c_void_p()
        if address is None:
            self.memory, address = memory(plan.info.state_bytes)
        self.libscope.state_create(plan.handle, address, self.handle)

    @property
    def filled(self):
        filled = c.c_int32()
        self.libscope.state_filled(self.handle, filled)
        return bool(filled.value)

    @filled.setter
    def filled(self, value):
        self.libscope.state_set_filled(self.handle, int(value))

    def reset(self):
        self.libscope.state_reset(self.handle)

    def save(self, stream=None):
        needed = c.c_size_t()
        self.libscope.state_save(self.handle, stream, None, 0, needed)
        saved = c.create_string_buffer(needed.value)
        self.libscope.state_save(self.handle, stream, saved, needed.value, None)
        return saved.raw

    def load(self, saved, stream=None):
        self.libscope.state_load(self.handle, stream, saved, len(saved))

    def __del__(self):
        self.libscope.state_destroy(self.handle)
