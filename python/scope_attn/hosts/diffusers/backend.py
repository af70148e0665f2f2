"""The attention backend "scope" of diffusers, and the processors that lead an enabled layer's calls to it.

A layer keeps its own processor, inside one of ours. A copy of its own attends through the backend, and carries the layer's
ticket, a tensor of one number, where diffusers has the configuration of context parallelism, which it hands on untouched.
The backend, or in a compiled graph one operator, finds the layer by its ticket.
"""
from __future__ import annotations

import copy
import functools
import inspect
import itertools
import weakref
from typing import Any

import torch
from diffusers.models import attention_dispatch

from ... import _torch
from ..session import DenseCall, Place, Tokens
from . import parallel


class Enabled:
    """What hangs on an enabled pipeline: it can be neither copied nor pickled."""

    def __reduce_ex__(self, protocol):
        raise TypeError("an enabled pipeline holds states of this process: call scope_attn.disable(pipe), copy or pickle it, and enable "
                        "both again")


_numbers = itertools.count()
processors: weakref.WeakValueDictionary[int, Processor] = weakref.WeakValueDictionary()


class Processor(Enabled):
    """In the place of a layer's own processor, which it calls with our backend; processor_for() makes one."""

    # set_attention_backend and enable_parallelism look for these two, and set them: the backend is that of dense calls.
    _attention_backend = None
    _parallel_config = None

    def __init__(self, own: Any, run: Any, expert: Any, layer: int, depth: int):
        self.own, self.run, self.expert, self.layer, self.depth = own, run, expert, layer, depth
        replaced = run.family.replaced
        self.routed = replaced[type(own).__name__]() if replaced else copy.copy(own)
        self._attention_backend, self._parallel_config = (getattr(own, name, None) for name in ("_attention_backend", "_parallel_config"))
        number = next(_numbers)
        processors[number] = self
        self.ticket = _torch.ticket(number)
        self.routed._attention_backend, self.routed._parallel_config = BACKEND, self.ticket

    def restored(self) -> Any:
        """The layer's own processor, with the backend that was chosen meanwhile."""
        for name in ("_attention_backend", "_parallel_config"):
            if getattr(self, name) is not getattr(self.own, name, None):
                setattr(self.own, name, getattr(self, name))
        return self.own

    def attend(self, q, k, v, mask, scale):
        """softmax(scale q k) v for [batch, tokens, heads, dim], of which Ulysses gives this rank a share of the tokens.

        Dense calls attend between the exchanges too, so that ranks of which one falls back to dense exchange alike.
        """
        config = self._parallel_config
        if config is None or parallel.why_not(self.run.family.splits, config):
            return self.attend_heads(q, k, v, mask, scale, config)
        return parallel.exchange(q, k, v, mask, scale, config, lambda q, k, v, mask: self.attend_heads(q, k, v, mask, scale, None))

    def attend_heads(self, q, k, v, mask, scale, config):
        """Sparse, or by the pipeline's own attention; `config`: the tokens are a share, which only the latter can do."""
        video, expert, family = self.run.session.video, self.expert, self.run.family
        if expert.branch_now is None:
            raise RuntimeError(f"{expert.name}: its layers were called without it; call the transformer itself")
        place = Place(self.layer, video.step, expert.branch_now, expert.name, self.depth)

        def dense():
            return attention_dispatch.dispatch_attention_fn(q, k, v, attn_mask=mask, scale=scale, backend=self._attention_backend,
                                                            parallel_config=config)

        def tokens() -> Tokens:
            if self.run.foreign:
                raise RuntimeError(self.run.foreign)
            if config is not None:
                raise RuntimeError(parallel.why_not(family.splits, config))
            if family.text:
                return expert.tokens(q, family.text_first)
            if mask is None:
                return Tokens()
            if family.masks_are_dense:
                raise DenseCall("the call has a mask")
            raise ValueError(f"attention_mask: layer {self.layer} got one, and {type(self.own).__name__} has none when it is not causal")

        out = video.attend(q, k, v, place, dense, tokens, scale=scale, grid=expert.grid)
        if place.step == video.steps - 1:
            video.drop_state(place, q)  # the VAE, which comes next, needs the memory
        return out


@functools.cache
def processor_class(kind: type, routed: type) -> type:
    """Of processors around a `kind`: with its parameters, since diffusers passes those alone that it finds in the signature.

    cache-dit's context parallelism wraps a kind's call in one of its own, which knows neither our backend nor tickets: we
    call what it wraps, and exchange around our backend instead.
    """
    call = inspect.unwrap(routed.__call__, stop=lambda call: not call.__globals__["__name__"].startswith("cache_dit."))

    def __call__(self, *args, **kwargs):
        return call(self.routed, *args, **kwargs)

    __call__.__signature__ = inspect.signature(kind.__call__)  # type: ignore[attr-defined]
    return type(f"Scope{kind.__name__}", (Processor,), {"__call__": __call__})


def processor_for(own: Any, run: Any, expert: Any, layer: int, depth: int) -> Processor:
    kind: type = type(own)
    return processor_class(kind, run.family.replaced.get(kind.__name__, kind))(own, run, expert, layer, depth)


def processor_of(ticket: torch.Tensor) -> Processor:
    return processors[ticket.item()]


def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, _parallel_config=None):
    """The attention backend "scope"."""
    ticket = _parallel_config
    if not isinstance(ticket, torch.Tensor):
        raise RuntimeError('the attention backend "scope" is for layers that scope_attn.enable(pipe) found: choose the backend of dense '
                           'calls by set_attention_backend("native"), and call scope_attn.enable(pipe)')
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise RuntimeError("q, k, v: they require gradients, and sparse attention has no backward pass; use torch.no_grad(), or "
                           "scope_attn.disable(pipe) to train")
    if is_causal or dropout_p:
        raise ValueError(f"is_causal, dropout_p: got {is_causal}, {dropout_p}, expected neither: every token of a video sees all others")
    if torch.compiler.is_compiling():
        return _operator(query, key, value, ticket, attn_mask, scale)
    return processor_of(ticket).attend(query, key, value, attn_mask, scale)


def register_backend():
    """A name of ours in diffusers' list of backends, which is an enumeration."""
    names = attention_dispatch.AttentionBackendName
    name = str.__new__(names, "scope")
    name._name_, name._value_ = "SCOPE", "scope"
    names._member_map_["SCOPE"] = names._value2member_map_["scope"] = name
    attention_dispatch._AttentionBackendRegistry.register(name)(attend)
    return name


BACKEND = register_backend()

# The ticket is said to change, so that torch.compile neither drops, repeats nor reorders calls.
_torch._library.define("layer_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) ticket, Tensor? mask, float? scale) -> Tensor",
                       tags=_torch._tags)


@torch.library.impl(_torch._library, "layer_attention", "CompositeExplicitAutograd")
def _layer_attention(q, k, v, ticket, mask, scale):
    out, like = processor_of(ticket).attend(q, k, v, mask, scale), torch.empty_like(q)
    return out if out.stride() == like.stride() else like.copy_(out)


torch.library.register_fake("scope_attn::layer_attention", lambda q, *rest: torch.empty_like(q), lib=_torch._library)
_operator = torch.ops.scope_attn.layer_attention.default
