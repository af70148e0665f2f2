"""What every host needs: a method for one model, and the states, schedule, text and receipt of each of its videos.

A Session is one model with one method. A Video lives from its first call to its last. For each self-attention call the host
says where it stands (Place) and which tokens are not the video's (Tokens), and hands in its own attention, which runs every
call that stays dense.
"""
from __future__ import annotations

import collections
import contextlib
import difflib
import functools
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple, Optional

from .. import _c_api, _functions
from .._plan import Handle, Plan, Reason, State, Stats, ranges_of, text_of
from .._receipt import Call, Receipt
from .._selector import Grid, Place, Selector, name_of

# Below this many tokens dense attention is as fast, at density 0.2 (docs/notebook/when_it_pays.md).
MIN_TOKENS = {"cpu": 4096, "cuda": 12288}
CAREFUL_DENSITY = 0.2  # of scope-mean where nothing says how many keys to keep
SAYS_HOW_MANY = {"density", "density_steps", "rho", "rule"}
OF_HOSTS = "method", "min_tokens", "model", "selector", "strict", "target_density", "window"  # what enable() takes beside settings
OF_A_DEVICE = {"kernel", "products"}
SCHEDULE = "dense_layers", "dense_steps", "dense_last_steps"  # settings that say which calls are dense
WHY_DENSE = {
    Reason.DENSE_METHOD: "the method is dense",
    Reason.DENSE_LAYER: "the layer is below dense_layers",
    Reason.DENSE_STEP: "the step is within dense_steps",
    Reason.DENSE_LAST_STEP: "the step is within dense_last_steps",
    Reason.DENSE_NOTHING: "no query or no key takes part in selection",
    Reason.DENSE_OTHER: "the library says so",
}


class Tokens(NamedTuple):
    """Which tokens of a call are not the video's, and which are padding."""

    others: int = 0  # tokens of text, audio or images in each sample
    bits: Any = None  # where they are, packed: every query sees them, and they see every valid key
    lengths: Optional[Sequence[int]] = None  # of each sample: from there on is padding
    valid_keys: Any = None  # packed: False is padding, before the lengths too


class DenseCall(Exception):
    """A call that the host's own attention has to run, for a reason that is no error."""


def packed_range(batch: int, tokens: int, first: int, count: int) -> Any:
    """Tokens first .. first + count of each sample, as bits."""
    return _packed_range(batch, tokens, first, count)


@functools.lru_cache(maxsize=16)
def _packed_range(batch, tokens, first, count):
    import torch
    bits = torch.zeros(batch, tokens, dtype=torch.bool)
    bits[:, first:first + count] = True
    return _functions.pack_bits(bits)


class Session(Handle):
    """One model with one method, checked once: what cannot work is refused here, in words.

    family: how the names of its rows in models() begin. rope: how many channels turn along T, H and W, or lists of channels,
    or None. without_codes: why this model takes no method with codebooks; "": it takes them. target_density None: the
    method's own; of scope-mean the careful default, unless a setting says how many keys to keep. window: the part of the
    schedule that may be sparse, as shares (from, to) of its steps; from None: after the model's dense steps. permanent: a
    context for memory that outlives a call (states, statistics), for hosts that follow their allocations. selector: chooses
    the keys in the place of a method.
    """

    def __init__(self, *, family: str, layers: int, heads: int, dim: int, rope: Any, from_image: bool = False, experts: int = 1,
                 method: Optional[str] = None, target_density: Optional[float] = None, model: Optional[str] = None,
                 window: Optional[Sequence[Optional[float]]] = None, min_tokens: Optional[int] = None, strict: bool = True,
                 without_codes: str = "", settings: Mapping[str, Any] = {}, warn: Callable[[str], None] = warnings.warn,
                 permanent: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
                 selector: Optional[Selector] = None):
        if selector is not None:
            from .selected import refuse_idle
            if not callable(selector):
                raise TypeError(f"selector: got {type(selector).__name__}, expected a function of q, k, the grid and the place")
            refuse_idle(method, target_density, settings)
        self.selector = selector
        method = method or "scope-mean"  # beside a selector it makes the schedule alone
        _functions.refuse_morton(method)
        if min_tokens is not None and min_tokens < 0:
            raise ValueError(f"min_tokens: got {min_tokens}, expected 0 or more")
        self.method, self.rope, self.min_tokens, self.strict = method, rope, min_tokens, strict
        self.warn, self.permanent = warn, permanent
        if model is None:
            row, self.why_model = _functions.model_fit(family, layers=layers, heads=heads, dim=dim, rope=rope_counts(rope),
                                                       from_image=from_image, experts=experts)
            self.model = row.name
        else:
            self.model, self.why_model = model, f"{model}: named by the caller"
        refuse_mistyped(settings, method)
        # A "?" marks what the caller did not set: it is not refused where another setting makes it idle.
        given = {"state_dtype?": "bf16", **settings, **window_settings(window, settings)}
        defaults = {row.name: row.default for row in _functions.settings(method)}
        self.careful = selector is None and target_density is None and method == "scope-mean" and not SAYS_HOW_MANY & set(settings)
        if self.careful:
            given["target_density?"] = CAREFUL_DENSITY
        elif target_density is not None:
            given["target_density"] = target_density
        elif defaults["target_density"] != "none":  # a preset's, for the receipt
            given.setdefault("target_density?", defaults["target_density"])
        self.texts = tuple(f"{name}={text_of(value)}" for name, value in given.items())
        self.settings = {name.rstrip("?"): value for name, value in given.items()}
        chosen = {**defaults, **self.settings}
        self.idle_products = dim <= 64 and chosen["products"] != "bf16"
        if without_codes and (chosen["proxy"], chosen["partition"]) == ("codes", "rope") and method != "dense":
            raise ValueError(f'method: got "{method}", which codes keys along time, height and width; {without_codes}; choose '
                             "scope-mean, fast or quality")
        # Both refuse what cannot work. Which products and kernels there are is the device's to say, in the first call.
        _c_api.Method(_c_api.library(), method, {name: text_of(value) for name, value in given.items()}, self.model)
        plan = Plan(batch=1, heads=heads, q_tokens=32768, k_tokens=32768, dim=dim, method=method, model=self.model, **ranges_of(rope),
                    **{name: value for name, value in given.items() if name not in OF_A_DEVICE})
        self.shown, self.schedule = method, {name: plan.setting(name) for name in SCHEDULE}
        if selector is not None:
            self.shown, self.settings = f"selector {name_of(selector)}", dict(self.schedule)
        self.density_over_heads = selector is None and plan.setting("target_scope") == "sample" and (
            plan.setting("rule") == "target" or any(plan.setting(name) != "none" for name in ("target_density", "density_steps")))
        self.shares_branches = any(row.name == method and row.shares_branches for row in _functions.methods())
        self.warned = False
        self.video: Optional[Video] = None  # that runs now, for hosts that keep it here

    def begin(self, steps: int, **about: Any) -> Video:
        """A new video, which is the one that runs from now on."""
        self.video = Video(self, steps, about)
        return self.video

    def video_at(self, step: int, steps: int) -> Video:
        """The video that runs, for hosts that say no more than a step: one that falls begins another video.

        steps 0: the host does not say how many there are.
        """
        if self.video is None or step < self.video.step or steps != self.video.steps:
            self.begin(steps)
        self.video.step = step
        return self.video

    def refuse(self, error: Exception):
        """Raises it, or in lenient mode warns of the first."""
        if self.strict:
            raise error
        if not self.warned:
            self.warned = True
            self.warn(f"scope_attn: the host's own attention runs in the place of sparse calls: {error}")

    def least_tokens(self, q: Any) -> int:
        return self.min_tokens if self.min_tokens is not None else MIN_TOKENS["cuda" if q.is_cuda else "cpu"]


def refuse_mistyped(settings: Mapping[str, Any], method: str):
    """Raises for a name that is nearer to one of a host's own than to a setting; of the others the library says which is near."""
    known = [row.name for row in _functions.settings(method)]
    for name in settings:
        meant = [] if name in known else difflib.get_close_matches(name, [*OF_HOSTS, *known], n=1)
        if meant and meant[0] in OF_HOSTS:
            raise ValueError(f'setting: there is no "{name}" (did you mean "{meant[0]}"?)')


def rope_counts(rope: Any) -> tuple[int, int, int]:
    """How many channels turn along T, H and W, as the known models have them; zeros: it is not said.

    The row of MiniMax-H3, whose axes are lists of channels, does not say it either.
    """
    return (0, 0, 0) if not rope or isinstance(rope[0], tuple) else tuple(rope)


def window_settings(window: Optional[Sequence[Optional[float]]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A sparse window, as the shares of dense steps before and after it."""
    if window is None:
        return {}
    start, end = window
    if not 0 <= (start or 0) < end <= 1:
        raise ValueError(f"window: got {start} to {end}, expected shares of the steps, 0 <= from < to <= 1")
    shares = {"dense_steps": start, "dense_last_steps": 1 - end}
    for name, share in shares.items():
        if share is not None and name in settings:
            raise ValueError(f"window, {name}: both say which steps are dense; give one of them")
    return {f"{name}?": share for name, share in shares.items() if share is not None}


class Video(Handle):
    """One video: its states by expert, branch and layer, and its receipt."""

    def __init__(self, session: Session, steps: int, about: Mapping[str, Any]):
        self.session, self.steps, self.step = session, steps, 0
        self.states: dict[str, dict[tuple, State]] = {}  # by expert, of which one at a time has some
        self.turns: collections.Counter = collections.Counter()
        self.selected: Any = None  # the calls of a selector
        if session.selector is not None:
            from .selected import Selected
            self.selected = Selected(session.selector)
        self.receipt = Receipt(**{**dict(
            method=session.shown, model=session.model, why_model=session.why_model, rope=session.rope, settings=dict(session.settings),
            careful=session.careful, idle_products=session.idle_products, min_tokens=session.min_tokens, steps=steps, ranks=1, rank=0,
            rho_of_each_rank=False), **about})

    def turn(self, *key: Any) -> int:
        """How often this was asked before in the current step, for hosts that do not name branches."""
        if self.turns["step"] != self.step:
            self.turns.clear()
            self.turns["step"] = self.step
        self.turns[key] += 1
        return self.turns[key] - 1

    def attend(self, q: Any, k: Any, v: Any, place: Place, dense: Callable[[], Any], tokens: Callable[[], Tokens] = Tokens,
               layout: str = "BNHD", scale: Optional[float] = None, grid: Grid = None) -> Any:
        """softmax(scale q k) v: sparse, or by `dense`, the host's own attention. The receipt notes it.

        `tokens` may raise DenseCall, and what it refuses. `grid`: of the video's tokens, for a selector.
        """
        began, out, stats = now(q), None, None
        try:
            out, why, stats = self.sparse(q, k, v, place, tokens(), layout, scale, grid)
        except DenseCall as reason:
            why = str(reason)
        except (ValueError, TypeError, RuntimeError) as error:
            self.session.refuse(error)
            why = f"refused: {error}"
        clustered = began
        if out is None:
            clustered = now(q)
            out = dense()
        self.receipt.calls.append(Call(place.expert, place.layer, place.step, place.branch, why, stats, (began, clustered, now(q))))
        return out

    def sparse(self, q, k, v, place: Place, tokens: Tokens, layout: str, scale: Optional[float], grid: Grid):
        """The output, why the call is dense, and statistics. Output None: the host's attention is to run it."""
        session, axis = self.session, 1 if layout == "BNHD" else 2
        count, least = q.shape[axis] - tokens.others, session.least_tokens(q)
        if count < least:
            raise DenseCall(f"{count:,} tokens, min_tokens is {least:,}")
        from .. import _torch
        plan = _functions.plan_for(_torch, q, k, layout == "BNHD", tokens.bits is not None, session.method, session.model, session.rope,
                                   session.texts)
        at = dict(layer=place.layer if place.depth is None else place.depth, step=place.step, steps=self.steps or place.step + 1)
        reason = plan.reason(**at)
        if self.selected is not None and count == 0:
            reason = Reason.DENSE_NOTHING
        if reason is not Reason.SPARSE and (self.selected is not None or not plan.clusters(**at)):
            return None, WHY_DENSE[reason], None
        if self.selected is not None:
            heads_first = [x.transpose(1, 2) if layout == "BNHD" else x for x in (q, k, v)]
            out, stats = self.selected.attend(*heads_first, place._replace(steps=self.steps), grid, tokens, scale)
            return out.transpose(1, 2) if layout == "BNHD" else out, "", stats
        given = dict(state=self.state(place, plan, q), layout=layout, scale=scale or 0.0, q_lengths=tokens.lengths,
                     k_lengths=tokens.lengths, valid_keys=tokens.valid_keys, keep=tokens.bits, dense_queries=tokens.bits, **at)
        if reason is not Reason.SPARSE:
            plan.cluster(q, k, **given)
            return None, WHY_DENSE[reason], None
        with session.permanent():
            stats = Stats(plan)
        out = plan.run(q, k, v, stats=stats, **given)
        if stats.reason is not Reason.SPARSE:
            return None, WHY_DENSE[stats.reason], None
        return out, "", stats

    def state(self, place: Place, plan: Plan, q: Any) -> State:
        """The state of a layer and branch; another shape or device has another."""
        if place.expert not in self.states:
            self.states = {place.expert: {}}  # experts run one after the other, and their states would not fit beside each other
        states, key = self.states[place.expert], self.key(place, q)
        if key not in states:
            try:
                with self.session.permanent():
                    states[key] = State(plan if plan.state_bytes else None)
            except Exception:
                self.states.clear()  # memory ran out: those that are there would keep it from what comes next
                raise
        return states[key]

    def key(self, place: Place, q: Any) -> tuple:
        return "" if self.session.shares_branches else place.branch, place.layer, tuple(q.shape[:-1]), q.device

    def drop_state(self, place: Place, q: Any):
        """After a layer's last call, for hosts that need the memory before the video ends; shared states stay."""
        if not self.session.shares_branches:
            self.states.get(place.expert, {}).pop(self.key(place, q), None)

    def drop_branch(self, branch: str):
        """All states of a branch that does not come back."""
        for states in self.states.values():
            for key in [key for key in states if key[0] == branch]:
                del states[key]


def now(q: Any) -> Any:
    """Seconds on the CPU, an event on a GPU, which nobody waits for."""
    if not getattr(q, "is_cuda", False):  # numpy's arrays have none
        return time.perf_counter()
    import torch
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(q.device))
    return event
