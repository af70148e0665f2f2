"""attention and its parts as functions that make and keep plans by themselves, and the library's tables."""
from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional, TypeVar

from . import _c_api
from ._plan import DTYPES, Plan, Selection, State, Stats, arrays_of, device_name, ranges_of, text_of, token_major, tokens_given

Array = TypeVar("Array")  # numpy.ndarray or torch.Tensor: what goes in comes out
DTYPE_NAMES = {code: name for name, code in DTYPES.items()}


def attention(q: Array, k: Array, v: Array, *, rope: Optional[Sequence[int]] = None, method: str = "scope",
              target_density: Optional[float] = None, state: Optional[State] = None, layout: str = "BHND", model: Optional[str] = None,
              scale: float = 0.0, layer: int = -1, step: int = -1, steps: int = 0, q_lengths: Any = None, k_lengths: Any = None,
              valid_queries: Any = None, valid_keys: Any = None, keep: Any = None, dense_queries: Any = None,
              stats: Optional[Stats] = None, return_lse: bool = False, **settings: Any) -> Any:
    """Sparse attention: softmax(scale q k) v over the keys that `method` keeps for each query.

    q, k, v: numpy arrays or PyTorch tensors on one device, float32, float16 or bfloat16 (a GPU takes the last two), [batch,
    heads, tokens, dim] with layout "BHND" or [batch, tokens, heads, dim] with "BNHD". Any strides but the last, no copies.
    On a GPU the call only enqueues work on the current stream.

    rope: the channels along T, H and W, in that order, as the video model rotates them.
    method, model: rows of methods() and models(); a model brings its rho and schedule. A method whose row says `morton`
        expects tokens in Morton order: the caller sees to it, since a call does not know the grid of its tokens.
    target_density: the share of keys to keep, whatever the method's rule: on average over the heads of each sample, or with
        target_scope="head" in each of them (the defaults of the methods differ: settings()).
    state: warm starts; one State per layer and CFG branch.
    layer, step, steps: where the call stands in a generation, for the schedule of dense layers and steps; -1: none.
    scale: of q k; 0: 1 / sqrt(dim).
    q_lengths, k_lengths: [batch]; tokens from there on are padding. Padding queries give zeros.
    valid_queries, valid_keys: [batch, tokens] booleans; False: padding before the length too.
    keep, dense_queries: [batch, tokens] booleans: keys that every query sees, queries that see every valid key (text).
    stats: a Stats that the call fills.
    return_lse: returns a pair, out and the natural log-sum-exp of the scores behind each of its rows, float32 [batch, heads,
        tokens] in either layout, by which results over parts of the keys merge; -inf for a query without keys.
    settings: any setting by its own name, such as rho=0.8 or tail="first_order"; settings() lists them.

    Lengths and masks are the host's, whatever the device of q. A mask that many calls share can be packed once by pack_bits.

    >>> import numpy, scope_attn
    >>> q, k, v = numpy.random.default_rng(0).standard_normal((3, 1, 2, 512, 64), numpy.float32)
    >>> out = scope_attn.attention(q, k, v, rope=(24, 20, 20), target_density=0.2)
    >>> out.shape, out.dtype
    ((1, 2, 512, 64), dtype('float32'))
    >>> dense = scope_attn.attention(q, k, v, method="dense")
    >>> everything = scope_attn.attention(q, k, v, rope=(24, 20, 20), rho=1)
    >>> bool(abs(everything - dense).max() < 1e-5)
    True

    Two halves of the keys, merged:

    >>> halves = [scope_attn.attention(q, k[:, :, part], v[:, :, part], method="dense", return_lse=True)
    ...           for part in (slice(256), slice(256, None))]
    >>> weight = [numpy.exp(lse)[..., None] for _, lse in halves]
    >>> merged = sum(w * out for w, (out, _) in zip(weight, halves)) / sum(weight)
    >>> bool(abs(merged - dense).max() < 1e-5)
    True
    """
    if target_density is not None:
        settings["target_density"] = target_density
    if state is not None and not isinstance(state, State):
        raise TypeError(f"state: got {type(state).__name__}, expected a State")
    texts = [f"{name}={text_of(value)}" for name, value in settings.items()]
    tokens_first = token_major(layout)
    tokens = tokens_given(q_lengths, k_lengths, valid_queries, valid_keys, keep, dense_queries)
    if hasattr(q, "requires_grad"):
        from . import _torch
        return _torch.attention(q, k, v, state, method, model, texts, rope, tokens_first, scale, layer, step, steps, tokens, stats,
                                return_lse)
    return run(q, k, v, state, method, model, texts, rope, tokens_first, scale, layer, step, steps, tokens, stats, return_lse)


def run(q, k, v, state, method, model, texts, rope, tokens_first, scale, layer, step, steps, tokens, stats, return_lse):
    """attention with the plan from the cache."""
    arrays = arrays_of(q)
    plan = plan_for(arrays, q, k, tokens_first, "dense_queries" in tokens, method, model, rope, texts)
    out, lse = arrays.empty_like(q), arrays.empty_floats(plan._q_shape[0][:3], q) if return_lse else None
    plan._launch(plan._plan.libscope.run, arrays, tokens_first, q, k, v, out, state, scale, layer, step, steps, tokens,
                 None, stats, lse)
    return (out, lse) if return_lse else out


def plan_for(arrays, q, k, tokens_first, dense_queries, method, model, rope, texts) -> Plan:
    """The plan of these arrays; they are kept."""
    dtype = arrays.dtype_of(q)
    if dtype is None:
        raise TypeError(f"q: got {q.dtype}, expected {', '.join(DTYPES)}")
    if not hasattr(k, "shape"):
        raise TypeError(f"k: got {type(k).__name__}, expected {arrays.KIND}, as q is")
    return kept_plan(q.shape, k.shape, dtype, arrays.index_of(q), tokens_first, dense_queries, method, model,
                     None if rope is None else tuple(rope), tuple(texts))


@functools.lru_cache(maxsize=64)
def kept_plan(q_shape, k_shape, dtype, index, tokens_first, dense_queries, method, model, rope, texts) -> Plan:
    for name, shape in (("q", q_shape), ("k", k_shape)):
        if len(shape) != 4:
            raise ValueError(f"{name}: got shape {list(shape)}, expected four dimensions, {'BNHD' if tokens_first else 'BHND'}")
    batch, heads, tokens, dim = (q_shape[i] for i in ((0, 2, 1, 3) if tokens_first else (0, 1, 2, 3)))
    return Plan(batch=batch, heads=heads, q_tokens=tokens, k_tokens=k_shape[2 - tokens_first], dim=dim, dtype=DTYPE_NAMES[dtype],
                **ranges_of(rope), dense_queries=dense_queries, method=method, model=model, device=device_name(index),
                **dict(text.split("=", 1) for text in texts))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=kept_plan.cache_clear)


def select(q: Any, k: Any, v: Any = None, *, rope: Optional[Sequence[int]] = None, method: str = "scope",
           target_density: Optional[float] = None, state: Optional[State] = None, layout: str = "BHND", model: Optional[str] = None,
           scale: float = 0.0, q_lengths: Any = None, k_lengths: Any = None, valid_queries: Any = None, valid_keys: Any = None,
           keep: Any = None, dense_queries: Any = None, stats: Optional[Stats] = None, **settings: Any) -> Selection:
    """Which keys each query would attend to: attention()'s stages before attend.

    v: for tails and rules that look at it, such as those of scope-mean; the call then attends as well.

    >>> import numpy, scope_attn
    >>> q, k, v = numpy.random.default_rng(0).standard_normal((3, 1, 2, 512, 64), numpy.float32)
    >>> selection = scope_attn.select(q, k, rope=(24, 20, 20), target_density=0.2)
    >>> selection.labels.shape, selection.mask.shape
    ((1, 2, 512), (1, 2, 16, 16))
    >>> kept = scope_attn.unpack_bits(selection.mask, 512)
    >>> bool((kept.sum(-1) == selection.counts).all())
    True
    >>> out = scope_attn.attend_selected(q, k, v, selection)
    >>> bool((out == scope_attn.attention(q, k, v, rope=(24, 20, 20), target_density=0.2)).all())
    True
    """
    if target_density is not None:
        settings["target_density"] = target_density
    texts = [f"{name}={text_of(value)}" for name, value in settings.items()]
    plan = plan_for(arrays_of(q), q, k, token_major(layout), dense_queries is not None, method, model, rope, texts)
    return plan.select(q, k, v, state=state, layout=layout, scale=scale, q_lengths=q_lengths, k_lengths=k_lengths,
                       valid_queries=valid_queries, valid_keys=valid_keys, keep=keep, dense_queries=dense_queries, stats=stats)


def attend_selected(q: Array, k: Array, v: Array, selection: Selection, *, layout: str = "BHND", scale: float = 0.0, q_lengths: Any = None,
                    k_lengths: Any = None, valid_queries: Any = None, valid_keys: Any = None) -> Array:
    """attend alone, on a selection from select() or from anywhere else.

    >>> import numpy, scope_attn
    >>> q, k, v = numpy.random.default_rng(0).standard_normal((3, 1, 1, 64, 16), numpy.float32)
    >>> half = numpy.arange(64) < 32                      # one group, which attends to the first half of the keys
    >>> mine = scope_attn.Selection(labels=numpy.zeros((1, 1, 64), numpy.int32), mask=scope_attn.pack_bits(half[None, None, None]))
    >>> out = scope_attn.attend_selected(q, k, v, mine)
    >>> exact = scope_attn.attention(q, k[:, :, :32], v[:, :, :32], method="dense")
    >>> bool(abs(out - exact).max() < 1e-5)
    True
    """
    groups = selection.mask.shape[-2] if len(selection.mask.shape) == 4 else 1
    # A method without encode, whose groups are as many as the selection's.
    plan = plan_for(arrays_of(q), q, k, token_major(layout), False, "scope-exact", None, None, (f"groups={groups}",))
    return plan.attend_selected(q, k, v, selection, layout=layout, scale=scale, q_lengths=q_lengths, k_lengths=k_lengths,
                                valid_queries=valid_queries, valid_keys=valid_keys)


def pack_bits(mask: Array) -> Array:
    """Booleans [..., tokens] as 32-bit words, token j in bit j % 32 of word j / 32: the form of masks and selections.

    >>> import numpy, scope_attn
    >>> scope_attn.pack_bits(numpy.arange(40) % 2 == 0)
    array([1431655765,         85], dtype=uint32)
    """
    return arrays_of(mask).pack_bits(mask)


def unpack_bits(words: Array, tokens: int) -> Array:
    """The opposite of pack_bits.

    >>> import numpy, scope_attn
    >>> scope_attn.unpack_bits(numpy.array([5], numpy.uint32), 4)
    array([ True, False,  True, False])
    """
    return arrays_of(words).unpack_bits(words, tokens)


def head_budget(sizes: Sequence[int], base_counts: Sequence[int]) -> int:
    """The online per-head budget: the mean of base_counts over queries, ceil(sum sizes[c] base_counts[c] / sum sizes[c]).

    >>> import scope_attn
    >>> scope_attn.head_budget(sizes=[10, 30], base_counts=[100, 20])
    40
    """
    if len(sizes) != len(base_counts):
        raise ValueError(f"base_counts: got {len(base_counts)} of them, expected one per group, {len(sizes)}")
    return _c_api.head_budget(_c_api.library(), sizes, base_counts)


class Method(NamedTuple):
    name: str
    help: str
    shares_branches: bool  # the CFG branches of a layer share one State
    morton: bool  # its blocks are meant for tokens in Morton order: enable() and the other hosts refuse it


class Setting(NamedTuple):
    name: str
    stage: str  # whose choice it is
    takes: str  # what it takes, for people
    help: str
    default: str  # of the method that was asked about


class Model(NamedTuple):
    name: str
    help: str
    layers: int
    heads: int
    dim: int
    rope: tuple[int, int, int]  # channels along T, H, W; (0, 0, 0): its heads have no such ranges
    grid: tuple[int, int, int]  # tokens along T, H, W at the usual size
    steps: int
    rho: float
    dense_steps: float  # share of the steps
    warm_prefix: bool  # its dense steps cluster


def methods() -> list[Method]:
    """Every method.

    >>> import scope_attn
    >>> [method.name for method in scope_attn.methods()][:3]
    ['scope', 'scope-paper', 'scope-exact']
    """
    return [Method(row.name.decode(), row.help.decode(), bool(row.shares_branches), bool(row.morton))
            for row in _c_api.library().methods()]


def refuse_morton(method: str):
    """Raises where a host cannot run a method, because its tokens come in raster order."""
    if any(row.name == method and row.morton for row in methods()):
        raise ValueError(f'method: got "{method}", whose blocks are of tokens in Morton order, and here they come in '
                         f"raster order; choose another method, or make the video with `scope generate --method {method}`")


def settings(method: str = "scope") -> list[Setting]:
    """Every setting, with its default in a method.

    >>> import scope_attn
    >>> {setting.name: setting.default for setting in scope_attn.settings("svg2")}["groups"]
    '300'
    """
    library = _c_api.library()
    made = _c_api.Method(library, method)
    return [Setting(row.name.decode(), row.stage.decode(), row.values.decode(), row.help.decode(), made.get(row.name.decode()))
            for row in library.settings()]


def models() -> list[Model]:
    """Every video model that the library knows.

    >>> import scope_attn
    >>> wan = scope_attn.models()[0]
    >>> wan.name, wan.rope
    ('wan2.1-t2v-14b', (44, 42, 42))
    """
    return [Model(row.name.decode(), row.help.decode(), row.layers, row.heads, row.dim, tuple(row.rope), tuple(row.grid), row.steps,
                  row.rho, row.dense_steps, bool(row.warm_prefix)) for row in _c_api.library().models()]


def model_fit(family: Optional[str], *, layers: int = 0, heads: int = 0, dim: int = 0, rope: Optional[Sequence[int]] = None,
              from_image: bool = False, experts: int = 1, nearest: bool = True) -> tuple[Optional[Model], str]:
    """The row of models() whose settings fit a transformer, and why, in one sentence.

    family: how the names of its rows begin; None: any. What is 0 or None is not said. experts: 2 where two transformers
    share the steps. nearest: where no row has the shape, the most alike one is taken, otherwise none.
    """
    answer = _c_api.library().fit(family=None if family is None else family.encode(), layers=layers, heads=heads, dim=dim,
                                  rope=rope, from_image=from_image, experts=experts, nearest=nearest)
    return None if answer.index < 0 else models()[answer.index], answer.why.decode(errors="replace")


def supports(device: Any, dtype: str, dim: int) -> bool:
    """Whether the library runs on this kind of device ("cpu" or "cuda") here, with this dtype and head dimension.

    >>> import scope_attn
    >>> scope_attn.supports("cpu", "bfloat16", 128), scope_attn.supports("cpu", "float32", 512)
    (True, False)
    """
    if dtype not in DTYPES:
        raise TypeError(f'dtype: got "{dtype}", expected one of {", ".join(DTYPES)}')
    return bool(_c_api.library().supports(str(device).partition(":")[0].encode(), DTYPES[dtype], dim))
