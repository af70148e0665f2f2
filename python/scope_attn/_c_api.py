"""The C ABI through ctypes: the structs of scope.h and a checked library handle. All ctypes of the package live here."""
import ctypes as c

F32, F16, BF16 = 0, 1, 2
START_AUTO, START_FIRST, START_WARM = 0, 1, 2


class Shape(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("batch", c.c_int64), ("heads", c.c_int64), ("q_tokens", c.c_int64),
                ("k_tokens", c.c_int64), ("dim", c.c_int64), ("dtype", c.c_int), ("dense_queries", c.c_int32),
                ("rope", c.c_int64 * 3), ("subspaces", c.c_int64), ("subspace_sizes", c.c_void_p), ("subspace_channels", c.c_void_p)]


class Info(c.Structure):
    _fields_ = [("struct_size", c.c_size_t)] + [(name, c.c_int64) for name in (
        "workspace_bytes", "state_bytes", "groups", "codes", "subspaces", "selection_groups", "mask_words")] + [("kernel", c.c_char_p)]


class Tensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("batch_stride", c.c_int64), ("head_stride", c.c_int64), ("token_stride", c.c_int64)]


class Selection(c.Structure):
    _fields_ = [(name, c.c_void_p) for name in ("labels", "sizes", "counts", "mask", "keep", "centroids", "codebooks", "codes")]


class Stats(c.Structure):
    _fields_ = [("reason", c.c_int), ("warm", c.c_int32), ("iterations", c.c_int32), ("bf16_dots", c.c_int32)] + [
        (name, c.c_double) for name in ("density", "total_density", "check", "group", "encode", "score", "select", "attend", "total")]


class HeadStats(c.Structure):
    _fields_ = [(name, c.c_double) for name in ("density", "total_density", "rho", "alpha")] + [(name, c.c_int64) for name in (
        "k_head", "queries", "keys", "groups", "codes", "empty_groups", "empty_codes", "min_count", "max_count")]


class Args(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("q", Tensor), ("k", Tensor), ("v", Tensor), ("out", Tensor)] + [
        (name, c.c_void_p) for name in ("lse", "q_lengths", "k_lengths", "keep", "dense_queries")] + [
        (name, c.c_int64) for name in ("layer", "step", "steps")] + [("state", c.c_void_p), ("workspace", c.c_void_p),
        ("workspace_bytes", c.c_int64), ("selection", Selection), ("stats", c.c_void_p), ("head_stats", c.c_void_p),
        ("stream", c.c_void_p), ("start", c.c_int32), ("reserved", c.c_int32)]


class ScopeError(RuntimeError):
    """A call failed; `status` is its scope_status."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class LibScope:
    """libscope.so, with every status checked."""

    VERSION = "0.1.0"

    def __init__(self, path):
        self.lib = c.CDLL(path)
        self.lib.scope_last_error.restype = c.c_char_p
        self.lib.scope_version.restype = c.c_char_p
        found = self.lib.scope_version().decode()
        if found != self.VERSION:
            raise ImportError(f"{path} is version {found}, this package needs {self.VERSION}")

    def check(self, status):
        if status:
            raise ScopeError(status, self.lib.scope_last_error().decode())

    def plan(self, method="scope", settings=None, threads=0, gpu=None, **shape):
        """A plan on the CPU, or on the GPU with index `gpu`."""
        return Plan(self, method, settings or {}, threads, gpu, shape)


class Plan:
    """A context, a method and a plan. On the CPU it has a workspace of its own; a GPU caller brings device memory."""

    def __init__(self, libscope, method, settings, threads, gpu, shape):
        self.libscope, lib = libscope, libscope.lib
        self.context, self.method, self.handle = c.c_void_p(), c.c_void_p(), c.c_void_p()
        if gpu is None:
            libscope.check(lib.scope_context_create(threads, None, c.byref(self.context)))
        else:
            libscope.check(lib.scope_context_create_cuda(gpu, c.byref(self.context)))
        libscope.check(lib.scope_method_create(method.encode(), c.byref(self.method)))
        for name, value in settings.items():
            libscope.check(lib.scope_method_set(self.method, name.encode(), str(value).encode()))
        rope = shape.pop("rope", (0, 0, 0))
        self.shape = Shape(struct_size=c.sizeof(Shape), rope=(c.c_int64 * 3)(*rope), **shape)
        libscope.check(lib.scope_plan_create(self.context, self.method, c.byref(self.shape), c.byref(self.handle)))
        self.info = Info(c.sizeof(Info))
        libscope.check(lib.scope_plan_get_info(self.handle, c.byref(self.info)))
        self.workspace = c.create_string_buffer(self.info.workspace_bytes) if gpu is None else None

    def init_state(self, address):
        self.libscope.check(self.libscope.lib.scope_state_init(self.handle, c.c_void_p(address)))

    def arguments(self, **fields):
        """scope_run_args from its fields by name."""
        if self.workspace is not None:
            fields = {"workspace": c.addressof(self.workspace), **fields}
        return Args(**{"struct_size": c.sizeof(Args), "layer": -1, "step": -1, "workspace_bytes": self.info.workspace_bytes,
                       **fields})

    def run(self, **fields):
        """One call; returns its statistics. On a GPU densities and times are NaN: use launch and read_stats there."""
        stats = Stats()
        self.launch(self.arguments(stats=c.addressof(stats), **fields))
        return stats

    def launch(self, arguments):
        self.libscope.check(self.libscope.lib.scope_run(self.handle, c.byref(arguments)))

    def launch_selection(self, arguments):
        self.libscope.check(self.libscope.lib.scope_run_selection(self.handle, c.byref(arguments)))

    def read_stats(self, arguments):
        self.libscope.check(self.libscope.lib.scope_read_stats(self.handle, c.byref(arguments)))

    def __del__(self):
        lib = self.libscope.lib
        lib.scope_plan_destroy(self.handle)
        lib.scope_method_destroy(self.method)
        lib.scope_context_destroy(self.context)
