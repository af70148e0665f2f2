"""SCOPE: sparse attention for video diffusion transformers, on CPUs and NVIDIA GPUs.

    >>> import numpy, scope_attn
    >>> q, k, v = numpy.random.default_rng(0).standard_normal((3, 1, 2, 1024, 64), numpy.float32)  # or PyTorch tensors
    >>> state = scope_attn.State()                                                     # one per layer and CFG branch
    >>> out = scope_attn.attention(q, k, v, rope=(24, 20, 20), target_density=0.2, state=state)

attention() is all that most callers need; Plan is what it makes of a shape and a method. enable(pipe) does it all for a
pipeline of diffusers. `python -m scope_attn.doctor` says what this machine can do.
"""
from ._c_api import ScopeError, ScopeRuntimeError, ScopeTypeError, ScopeValueError
from ._compare import Comparison, compare
from ._functions import (
    Method,
    Model,
    Setting,
    attend_selected,
    attention,
    head_budget,
    methods,
    models,
    pack_bits,
    select,
    settings,
    supports,
    unpack_bits,
)
from ._pipelines import disable, enable, receipt
from ._plan import Context, HeadStats, Plan, Reason, Selection, State, Stats
from ._receipt import Call, Receipt
from ._selector import Place, SelectorError

__all__ = ["Call", "Comparison", "Context", "HeadStats", "Method", "Model", "Place", "Plan", "Reason", "Receipt",
           "ScopeError", "ScopeRuntimeError", "ScopeTypeError", "ScopeValueError", "Selection", "SelectorError", "Setting",
           "State", "Stats", "attend_selected", "attention", "compare", "disable", "enable", "head_budget", "methods",
           "models", "pack_bits", "receipt", "select", "settings", "supports", "unpack_bits"]
