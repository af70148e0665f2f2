"""Contexts, plans, states, statistics and selections: the C ABI's objects, over numpy arrays and PyTorch tensors."""
from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from . import _c_api

DTYPES = {"float32": _c_api.F32, "float16": _c_api.F16, "bfloat16": _c_api.BF16}
LAYOUTS = {"BHND": False, "BNHD": True}  # whether tokens come before heads


class Reason(enum.IntEnum):
    """What a call ran, and why."""

    SPARSE = 0
    DENSE_METHOD = 1  # the method is dense
    DENSE_LAYER = 2  # layer < dense_layers
    DENSE_STEP = 3  # within dense_steps
    DENSE_LAST_STEP = 4  # within dense_last_steps
    DENSE_NOTHING = 5  # no query or no key takes part in selection
    DENSE_OTHER = 255  # for a reason that a newer library knows

    @classmethod
    def _missing_(cls, value):
        return cls.DENSE_OTHER


class HeadStats(NamedTuple):
    """What one head of one sample kept."""

    density: float  # kept pairs / (queries x keys) among tokens that take part in selection; 1: ran dense
    total_density: float  # with always-kept keys and dense queries, over all valid pairs
    rho: float
    alpha: float
    k_head: int  # the head's online budget
    queries: int
    keys: int
    groups: int
    codes: int
    empty_groups: int
    empty_codes: int
    min_count: int
    max_count: int


class Handle:
    """Something that lives in the library: it can be neither copied nor pickled."""

    def __reduce_ex__(self, protocol):
        raise TypeError(f"a {type(self).__name__} belongs to this process and its device: make a new one "
                        "(a State's contents travel through save() and load())")


_contexts: weakref.WeakSet[Context] = weakref.WeakSet()


class Context(Handle, _c_api.Context):
    """What calls run on: CPU threads and an instruction set, or a GPU. Plans share the one of their device unless given another.

    >>> import scope_attn
    >>> context = scope_attn.Context(threads=1, instruction_set="portable")
    >>> context.instruction_set
    'portable'
    """

    def __init__(self, device: Any = "cpu", threads: int = 0, instruction_set: Optional[str] = None):
        self.index = device_index(device)
        self.device = device_name(self.index)
        on_gpu = self.index >= 0
        super().__init__(_c_api.library(), backend=b"cuda" if on_gpu else b"cpu", device=max(self.index, 0),
                         threads=threads or int(on_gpu), instruction_set=instruction_set and instruction_set.encode())
        _contexts.add(self)


def device_index(device: Any) -> int:
    """-1: the CPU; else which GPU, as torch.Tensor.get_device counts them."""
    backend, _, index = str(device).partition(":")
    if backend == "cpu":
        return -1
    if backend != "cuda" or not (index or "0").isdigit():
        raise ValueError(f'device: got "{device}", expected "cpu", "cuda" or "cuda:N"')
    return int(index or 0)


def device_name(index: int) -> str:
    return "cpu" if index < 0 else f"cuda:{index}"


@functools.cache
def default_context(index: int) -> Context:
    return Context(device_name(index))


def forget_parent():
    """In a forked child: its own contexts, and locks that no thread of the parent holds."""
    default_context.cache_clear()
    for context in list(_contexts):
        context.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget_parent)


_modules: dict[type, Any] = {}  # that know arrays, by the arrays' types


def arrays_of(x: Any):
    """The module that knows arrays of x's kind."""
    return _modules.get(type(x)) or _module_for(x)


def _module_for(x: Any):
    if hasattr(x, "requires_grad"):
        from . import _torch
        return _modules.setdefault(type(x), _torch)
    if hasattr(x, "__array_interface__"):
        from . import _numpy
        return _modules.setdefault(type(x), _numpy)
    raise TypeError(f"q: got {type(x).__name__}, expected a numpy array or a PyTorch tensor")


def text_of(value: Any) -> str:
    """A setting's value as the library reads it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def ranges_of(rope: Any) -> dict[str, Any]:
    """A Plan's argument for how many channels turn along T, H and W, or for which do."""
    return dict(subspaces=rope) if rope and isinstance(rope[0], tuple) else dict(rope=rope)


def token_major(layout: str) -> bool:
    if layout not in LAYOUTS:
        raise ValueError(f'layout: got "{layout}", expected "BHND" or "BNHD"')
    return LAYOUTS[layout]


_numbers = itertools.count()
states: weakref.WeakValueDictionary[int, State] = weakref.WeakValueDictionary()


class State(Handle):
    """What one layer and CFG branch hands from call to call. The first call with it decides its shape, method and device.

    Pass the same one to every call of its layer and branch, and reset() it before the next video. A call that is not told its
    layer or step takes the state's `layer`, `step` and `steps`, which a host may set: a compiled graph does not depend on them.

    >>> import numpy, scope_attn
    >>> q, k, v = numpy.random.default_rng(0).standard_normal((3, 1, 2, 256, 32), numpy.float32)
    >>> state = scope_attn.State()
    >>> for step in range(2):
    ...     stats = scope_attn.Stats()
    ...     out = scope_attn.attention(q, k, v, rope=(8, 12, 12), state=state, stats=stats)
    ...     print(stats.warm)
    False
    True
    >>> state.filled
    True
    """

    def __init__(self, plan: Optional[Plan] = None, *, layer: int = -1):
        self.layer, self.step, self.steps = layer, -1, 0
        self.number = next(_numbers)
        states[self.number] = self
        of_torch = sys.modules.get(f"{__package__}._torch")
        self.ticket = of_torch and of_torch.ticket(self.number)  # names it in a compiled graph
        self._state: Any = None
        self._memory: Any = None  # on a GPU: a tensor
        self._stream: Optional[int] = None  # that it was made on
        if plan is not None:
            with plan.context.lock:
                self._bind(plan)

    def _bind(self, plan: Plan):
        self._context = plan.context
        if plan.index >= 0:
            from . import _torch
            self._memory, self._stream = _torch.settled_memory(plan.state_bytes, plan.index)
        self._state = _c_api.State(plan._plan, None if self._memory is None else self._memory.data_ptr())

    def _handle_for(self, plan: Plan, stream: Optional[int]):
        """For a call with this plan on the current stream, under the lock of the plan's context."""
        if not plan.state_bytes:
            return None
        if self._state is None:
            self._bind(plan)
        if self._context.index != plan.index:
            raise ValueError(f"state: it is on {self._context.device}, the call on {plan.device}")
        if stream != self._stream:
            from . import _torch
            _torch.record_stream(self._memory, plan.index)
        return self._state.handle

    def _raw_stream(self):
        if self._memory is None:
            return None
        from . import _torch
        return _torch.raw_stream(self._context.index)

    def _used(self) -> _c_api.State:
        if self._state is None:
            raise ValueError("state: no call has used it yet; Plan.state() makes one that is ready")
        return self._state

    @property
    def filled(self) -> bool:
        """Whether calls have filled it, so that the next one starts from it. Set it to True after replaying a captured first call."""
        if self._state is None:
            return False
        with self._context.lock:
            return self._state.filled

    @filled.setter
    def filled(self, value: bool):
        state = self._used()
        with self._context.lock:
            state.filled = value

    def reset(self):
        """The next call clusters anew, as the first did: for the next video."""
        if self._state is not None:
            with self._context.lock:
                self._state.reset()

    def save(self) -> bytes:
        """Everything it holds, after waiting for the current stream."""
        state = self._used()
        with self._context.lock:
            return state.save(self._raw_stream())

    def load(self, saved: bytes):
        """What save() of a state of the same shape and method gave; anything else is refused and changes nothing."""
        state = self._used()
        with self._context.lock:
            state.load(saved, self._raw_stream())


class Stats:
    """What one call did: pass an empty one to it. On a GPU, reading densities or heads waits for the call.

    plan: the call's, for a host that follows its allocations: the memory on a GPU is taken now, and not in the call.

    >>> import numpy, scope_attn
    >>> q, k, v = numpy.random.default_rng(0).standard_normal((3, 1, 2, 256, 32), numpy.float32)
    >>> stats = scope_attn.Stats()
    >>> out = scope_attn.attention(q, k, v, rope=(8, 12, 12), target_density=0.25, stats=stats)
    >>> stats.reason
    <Reason.SPARSE: 0>
    >>> round(stats.density, 2), len(stats.heads)
    (0.25, 2)
    """

    def __init__(self, plan: Optional[Plan] = None):
        self._stats = _c_api.CallStats()
        self._plan: Any = None
        self._report: Any = None  # (what keeps it alive, address) on the CPU, a tensor on a GPU
        self._report_for = plan  # whose call finds its memory ready
        self._heads: Any = None
        if plan is not None:
            self._take(plan)

    def _take(self, plan: Plan):
        if plan.index < 0:
            self._report = _c_api.memory(plan._plan.info.report_bytes)
        else:
            from . import _torch
            self._report = _torch.Report(plan._plan.info.report_bytes, plan.index)

    def _begin(self, plan: Plan) -> int:
        """For a call with this plan: the address of its report."""
        self._plan, self._heads = None, None
        if self._report_for is not plan:
            self._take(plan)
        self._report_for = None
        return self._report[1] if plan.index < 0 else self._report.address

    def _called(self) -> _c_api.CallStats:
        if self._plan is None:
            raise ValueError("stats: no call has filled them yet")
        return self._stats

    def read(self) -> Stats:
        """Completes them, waiting for the call; raises what only the device could find, such as NaN in q."""
        stats = self._called()
        if self._heads is None:
            _held, address = self._report if self._plan.index < 0 else self._report.on_host()
            heads = self._plan._plan.read_report(address, stats)
            self._heads = [HeadStats(*(getattr(head, name) for name in HeadStats._fields)) for head in heads]
        return self

    @property
    def reason(self) -> Reason:
        return Reason(self._called().reason)

    @property
    def warm(self) -> bool:
        """Every sample started from its state, or reused it."""
        return bool(self._called().warm)

    @property
    def iterations(self) -> int:
        """K-means iterations."""
        return self._called().iterations

    @property
    def arithmetic(self) -> str:
        """Of attend's products: f32, bf16, f16, or with 8 bits s8+bf16 and the like."""
        return self._called().arithmetic.decode()

    @property
    def density(self) -> float:
        """Mean over heads of kept pairs / (queries x keys)."""
        return self.read()._stats.density

    @property
    def total_density(self) -> float:
        """With always-kept keys and dense queries, over all valid pairs."""
        return self.read()._stats.total_density

    @property
    def heads(self) -> list[HeadStats]:
        """Sample after sample."""
        return self.read()._heads

    @property
    def seconds(self) -> dict[str, float]:
        """Of each stage; NaN for a call on a GPU, which nobody waited for."""
        stats = self._called()
        return {name: getattr(stats, f"{name}_seconds") for name in ("check", "group", "encode", "score", "select", "attend", "total")}


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which keys each group of queries attends to, in arrays of the kind and on the device of the q that it came from.

    Key j is bit j % 32 of word j / 32: unpack_bits(selection.mask, tokens) gives booleans. A query attends to its group's
    row of `mask` and to `keep`.
    """

    labels: Any  # [batch, heads, q_tokens] int32: group of each query; -1: attends to nothing
    mask: Any  # [batch, heads, groups, words] 32-bit
    keep: Any = None  # [batch, words] 32-bit: keys that every query sees; their mask bits are 0
    sizes: Any = None  # [batch, heads, groups] int32: queries of each group
    counts: Any = None  # [batch, heads, groups] int32: keys of each group


class Plan(Handle):
    """Everything about a shape and a method that is known before the call. attention() makes and keeps them by itself.

    `rope` is the channels along T, H and W; `subspaces` any other partition, as lists of channels. `model` names a row of
    models(), whose rho and schedule are set before `settings`. `dense_queries`: calls may name queries that attend densely.

    >>> import scope_attn
    >>> plan = scope_attn.Plan(batch=1, heads=40, q_tokens=75600, k_tokens=75600, dim=128, dtype="bfloat16", rope=(44, 42, 42),
    ...                        model="wan2.1-t2v-14b", state_dtype="bf16")
    >>> plan.groups, plan.codes
    (300, 333)
    >>> plan.setting("dense_steps")
    '0.2'
    >>> plan.reason(layer=3, step=0, steps=50)
    <Reason.DENSE_STEP: 3>
    """

    def __init__(self, *, batch: int, heads: int, q_tokens: int, k_tokens: int, dim: int, dtype: str = "float32",
                 rope: Optional[Sequence[int]] = None, subspaces: Optional[Sequence[Sequence[int]]] = None,
                 dense_queries: bool = False, method: str = "scope", model: Optional[str] = None, device: Any = "cpu",
                 context: Optional[Context] = None, **settings: Any):
        if dtype not in DTYPES:
            raise TypeError(f'dtype: got "{dtype}", expected one of {", ".join(DTYPES)}')
        if rope is not None and len(rope) != 3:
            raise ValueError(f"rope: got {list(rope)}, expected the channels along T, H and W")
        self.context = default_context(device_index(device)) if context is None else context
        self.index, self.device = self.context.index, self.context.device
        shape = dict(batch=batch, heads=heads, q_tokens=q_tokens, k_tokens=k_tokens, dim=dim, dtype=DTYPES[dtype],
                     dense_queries=dense_queries, rope=rope or (0, 0, 0))
        if subspaces is not None:
            shape.update(_c_api.subspaces(subspaces))
        self._plan = _c_api.Plan(self.context, method, {name: text_of(value) for name, value in settings.items()}, model, shape)
        self.dtype, self._dtype = dtype, DTYPES[dtype]
        # By whether tokens come before heads.
        self._q_shape = (batch, heads, q_tokens, dim), (batch, q_tokens, heads, dim)
        self._k_shape = (batch, heads, k_tokens, dim), (batch, k_tokens, heads, dim)
        self._batch, self._tokens = batch, {"queries": q_tokens, "keys": k_tokens}
        # One set of arguments for all calls, used under the context's lock; the views write into it.
        self._arguments = _c_api.RunArgs(workspace_bytes=self.workspace_bytes)
        self._by_reference = _c_api.byref(self._arguments)
        self._q, self._k, self._v, self._out = (getattr(self._arguments, name) for name in ("q", "k", "v", "out"))
        self._look: Any = None  # of the latest arrays that were accepted; their strides are in the arguments

    @functools.cached_property
    def workspace_bytes(self) -> int:
        """Memory of a call: of the context on the CPU, from PyTorch's allocator on a GPU."""
        return self._plan.info.workspace_bytes

    @functools.cached_property
    def state_bytes(self) -> int:
        """Memory of a State; 0: the method keeps none."""
        return self._plan.info.state_bytes

    @property
    def groups(self) -> int:
        """Query groups; 0 for dense."""
        return self._plan.info.groups

    @property
    def codes(self) -> int:
        """Codebook entries per subspace; 0 without encode."""
        return self._plan.info.codes

    @property
    def kernel(self) -> str:
        """Of attend: avx512, avx2 or portable; wgmma or portable on a GPU."""
        return self._plan.info.kernel.decode()

    def setting(self, name: str) -> str:
        """A setting of the plan's method, as text."""
        return self._plan.setting(name)

    def reason(self, layer: int = -1, step: int = -1, steps: int = 0) -> Reason:
        """What a call at this place would run, and why."""
        return Reason(self._plan.reason(layer, step, steps)[0])

    def clusters(self, layer: int = -1, step: int = -1, steps: int = 0) -> bool:
        """Whether a dense call at this place clusters all the same (setting warm_prefix), for a warm first sparse call.

        A host with a dense attention of its own calls cluster() there, beside it.
        """
        return self._plan.reason(layer, step, steps)[1]

    def state(self) -> State:
        """A State for this plan, ready to load() into."""
        return State(self)

    def run(self, q: Any, k: Any, v: Any, *, state: Optional[State] = None, layout: str = "BHND", scale: float = 0.0, layer: int = -1,
            step: int = -1, steps: int = 0, q_lengths: Any = None, k_lengths: Any = None, valid_queries: Any = None,
            valid_keys: Any = None, keep: Any = None, dense_queries: Any = None, stats: Optional[Stats] = None,
            return_lse: bool = False) -> Any:
        """One attention call; the arguments are attention()'s."""
        arrays = arrays_of(q)
        out, lse = arrays.empty_like(q), arrays.empty_floats(self._q_shape[0][:3], q) if return_lse else None
        self._launch(self._plan.libscope.run, arrays, token_major(layout), q, k, v, out, state, scale, layer, step, steps,
                     tokens_given(q_lengths, k_lengths, valid_queries, valid_keys, keep, dense_queries), None, stats, lse)
        return (out, lse) if return_lse else out

    def select(self, q: Any, k: Any, v: Any = None, *, state: Optional[State] = None, layout: str = "BHND", scale: float = 0.0,
               q_lengths: Any = None, k_lengths: Any = None, valid_queries: Any = None, valid_keys: Any = None, keep: Any = None,
               dense_queries: Any = None, stats: Optional[Stats] = None) -> Selection:
        """The stages before attend. Some tails and rules look at v too; a call that is given v attends as well."""
        arrays, info = arrays_of(q), self._plan.info
        batch, heads, tokens, _ = self._q_shape[0]
        rows = (batch, heads, info.selection_groups)
        of_rows = lambda *shape: arrays.empty_words(shape, q)
        found = Selection(of_rows(batch, heads, tokens), arrays.as_bits(of_rows(*rows, info.mask_words)),
                          arrays.as_bits(of_rows(batch, info.mask_words)), of_rows(*rows), of_rows(*rows))
        out = None if v is None else arrays.empty_like(q)
        self._launch(self._plan.libscope.run, arrays, token_major(layout), q, k, v, out, state, scale, -1, -1, 0,
                     tokens_given(q_lengths, k_lengths, valid_queries, valid_keys, keep, dense_queries), found, stats)
        return found

    def cluster(self, q: Any, k: Any, *, state: State, layout: str = "BHND", scale: float = 0.0, layer: int = -1,
                step: int = -1, steps: int = 0, q_lengths: Any = None, k_lengths: Any = None, valid_queries: Any = None,
                valid_keys: Any = None, keep: Any = None, dense_queries: Any = None, stats: Optional[Stats] = None):
        """Fills the state as a dense call does where clusters() is true, and leaves the attention to the caller."""
        at = dict(layer=state.layer if layer < 0 else layer, step=state.step if step < 0 else step,
                  steps=state.steps if step < 0 else steps)
        if not self.clusters(**at):
            raise ValueError(f"layer, step, steps: got {', '.join(map(str, at.values()))}, where no dense call "
                             "clusters; expected a step within dense_steps, and warm_prefix=True")
        tokens = tokens_given(q_lengths, k_lengths, valid_queries, valid_keys, keep, dense_queries)
        self._launch(self._plan.libscope.run, arrays_of(q), token_major(layout), q, k, None, None, state, scale,
                     at["layer"], at["step"], at["steps"], tokens, None, stats)

    def attend_selected(self, q: Any, k: Any, v: Any, selection: Selection, *, layout: str = "BHND", scale: float = 0.0,
                        q_lengths: Any = None, k_lengths: Any = None, valid_queries: Any = None, valid_keys: Any = None) -> Any:
        """attend alone, on a selection from anywhere."""
        arrays, info = arrays_of(q), self._plan.info
        batch, heads, tokens, _ = self._q_shape[0]
        for name, shape in dict(labels=(batch, heads, tokens), mask=(batch, heads, info.selection_groups, info.mask_words),
                                keep=(batch, info.mask_words)).items():
            given = getattr(selection, name)
            if given is not None:
                arrays.check_words(f"selection.{name}", given, shape, self.index)
        out = arrays.empty_like(q)
        self._launch(self._plan.libscope.run_selection, arrays, token_major(layout), q, k, v, out, None, scale, -1, -1, 0,
                     tokens_given(q_lengths, k_lengths, valid_queries, valid_keys, None, None),
                     dataclasses.replace(selection, sizes=None, counts=None), None)
        return out

    def _point_all(self, arrays: Any, tokens_first: bool, q: Any, k: Any, v: Any, out: Any):
        """Points the arguments at these arrays, after checking them unless they look as those of the call before.

        `out` was made like q, so that q's look is its own.
        """
        try:
            look = arrays.look(q, k, k if v is None else v), tokens_first, v is None, out is None
            if look == self._look:
                address = arrays.address
                self._q.data, self._k.data = address(q), address(k)
                self._v.data = None if v is None else address(v)
                self._out.data = None if out is None else address(out)
                return
        except AttributeError:
            look = None  # one of them is no such array: it is named below
        self._look = None
        self._v.data = self._out.data = None
        q_shape, k_shape = self._q_shape[tokens_first], self._k_shape[tokens_first]
        self._point(arrays, "q", q, q_shape, tokens_first, self._q)
        self._point(arrays, "k", k, k_shape, tokens_first, self._k)
        if v is not None:
            self._point(arrays, "v", v, k_shape, tokens_first, self._v)
        if out is not None:
            self._point(arrays, "out", out, q_shape, tokens_first, self._out)
        self._look = look

    def _point(self, arrays: Any, name: str, x: Any, shape: tuple, tokens_first: bool, to: _c_api.Tensor):
        """Points a tensor of the arguments at x."""
        try:
            if x.shape != shape:
                raise ValueError(f"{name}: got shape {list(x.shape)}, expected {list(shape)} ({'BNHD' if tokens_first else 'BHND'})")
            address, index, dtype, strides = arrays.describe(name, x)
        except AttributeError:
            raise TypeError(f"{name}: got {type(x).__name__}, expected {arrays.KIND}, as q is") from None
        if dtype != self._dtype:
            raise TypeError(f"{name}: got {x.dtype}, expected {self.dtype}")
        if index != self.index:
            raise ValueError(f"{name}: it is on {device_name(index)}, expected {self.device}")
        batch, head, token, channel = (strides[0], strides[2], strides[1], strides[3]) if tokens_first else strides
        if channel != 1 and shape[3] != 1:
            raise ValueError(f"{name}: its last dimension has stride {channel}, expected 1; make it contiguous")
        # The stride of a dimension of length 1 means nothing, and may be anything.
        to.data = address
        to.batch_stride = batch if shape[0] > 1 else 0
        to.head_stride = head if shape[1 + tokens_first] > 1 else 0
        to.token_stride = token if shape[2 - tokens_first] > 1 else 0

    def _launch(self, function, arrays, tokens_first, q, k, v, out, state, scale, layer, step, steps, tokens, selection, stats, lse=None):
        a = self._arguments
        with self.context.lock:
            self._point_all(arrays, tokens_first, q, k, v, out)
            stream = None
            if self.index < 0:
                a.workspace = self.context.workspace(self.workspace_bytes)
            else:
                # From the allocator's pool of this stream: freed below, and given to nobody but later work of the same stream.
                stream = a.stream = arrays.raw_stream(self.index)
                workspace = arrays.device_memory(self.workspace_bytes, self.index)
                a.workspace = workspace.data_ptr()
            if state is None:
                a.state = None
            else:
                a.state = state._handle_for(self, stream)
                layer = state.layer if layer < 0 else layer
                step, steps = (state.step, state.steps) if step < 0 else (step, steps)
            a.scale, a.layer, a.step, a.steps = scale, layer, step, steps
            if not tokens and selection is None and stats is None and lse is None:
                function(self._plan.handle, self._by_reference)
                return
            try:
                _held = [self._host_bits(name, x) for name, x in tokens.items()]  # until the call has read them
                if selection is not None:
                    a.selection = _c_api.pointer(_c_api.Selection(**{
                        field.name: arrays.address(x) for field in dataclasses.fields(selection)
                        for x in [getattr(selection, field.name)] if x is not None}))
                if lse is not None:
                    a.lse = arrays.address(lse)
                if stats is not None:
                    a.report, a.stats = stats._begin(self), _c_api.pointer(stats._stats)
                function(self._plan.handle, self._by_reference)
                if stats is not None:
                    stats._plan = self
            finally:
                a.q_lengths = a.k_lengths = a.valid_queries = a.valid_keys = a.keep = a.dense_queries = a.report = a.lse = None
                a.selection = a.stats = None

    def _host_bits(self, name: str, x: Any):
        """Puts lengths or a mask into the arguments; returns what keeps them alive."""
        if getattr(x, "is_cuda", False):
            raise ValueError(f"{name}: it is on a GPU, and the host reads it before the call: pass it on the CPU")
        if name.endswith("lengths"):
            values = x.tolist() if hasattr(x, "tolist") else list(x)
            if len(values) != self._batch:
                raise ValueError(f"{name}: got {len(values)} of them, expected one per sample, {self._batch}")
            held, address = _c_api.int64s(values)
        else:
            tokens = self._tokens["queries" if "queries" in name else "keys"]
            masks = arrays_of(x)
            if masks.is_bool(x) and x.shape != (self._batch, tokens):
                raise ValueError(f"{name}: got shape {list(x.shape)}, expected {[self._batch, tokens]}")
            held = masks.pack_bits(x) if masks.is_bool(x) else x
            masks.check_words(name, held, (self._batch, -(-tokens // 32)), -1)
            address = masks.address(held)
        setattr(self._arguments, name, address)
        return held


def tokens_given(q_lengths, k_lengths, valid_queries, valid_keys, keep, dense_queries) -> dict[str, Any]:
    """Those that are not None, by name."""
    if q_lengths is k_lengths is valid_queries is valid_keys is keep is dense_queries is None:
        return {}
    given = dict(q_lengths=q_lengths, k_lengths=k_lengths, valid_queries=valid_queries, valid_keys=valid_keys, keep=keep,
                 dense_queries=dense_queries)
    return {name: x for name, x in given.items() if x is not None}

