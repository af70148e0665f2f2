"""sglang-diffusion's plug-in: `--attention-backend scope_attn`, a name of ours among sglang's attention backends.

sglang calls register() in each of its processes, before it reads its arguments. What needs sglang's layers is in backend.py,
which is imported when the backend is chosen.
"""
from __future__ import annotations

import logging
import os
import sys
from typing import Any, Callable

log = logging.getLogger(__name__)
RUNTIME = "sglang.multimodal_gen.runtime"
PLATFORMS = "cuda.CudaPlatformBase", "cpu.CpuPlatform"
NAME = "SCOPE_ATTN"
OLD_VARIABLE = "SCOPE_SGLANG"
NEW_WAY = ('use --attention-backend scope_attn --attention-backend-config \'{"target_density": 0.2}\' in the place of '
           f"{OLD_VARIABLE} and sparse_video_gen_2_attn, and unset {OLD_VARIABLE}")
dense_backends: dict[int, str] = {}  # by channels of a head: the backend that sglang takes without us


def register():
    """Adds the name. An error is one line of the log: sglang would go on behind a traceback."""
    if os.environ.get(OLD_VARIABLE):
        log.error("scope_attn: %s is set and has no effect: %s", OLD_VARIABLE, NEW_WAY)
    try:
        registry, kinds = hooks()
        from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum
        if NAME not in AttentionBackendEnum.__members__:
            add_member(AttentionBackendEnum)
        for platform in PLATFORMS:
            registry.register(f"{RUNTIME}.platforms.{platform}.get_attn_backend_cls_str", choose, kinds.AROUND)
        loaded = sys.modules.get(f"{RUNTIME}.layers.attention.selector")
        if loaded:  # it remembers what it chose, and may have been asked for our name before
            loaded._cached_get_attn_backend.cache_clear()
    except (ImportError, AttributeError, TypeError) as error:
        log.error("scope_attn: there is no --attention-backend scope_attn: %s", not_as_expected(error))


def hooks() -> tuple[Any, Any]:
    """sglang's registry of hooks and its kinds of hooks."""
    try:
        from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry
    except ImportError:
        from sglang.multimodal_gen.plugins import HookRegistry  # before 0.5.23
    from sglang.srt.plugins.hook_registry import HookType
    return HookRegistry, HookType


def not_as_expected(error: Exception) -> str:
    import sglang
    version = getattr(sglang, "__version__", "of an unknown version")
    return f"sglang {version} is not as 0.5.23, for which this plug-in is made ({error}); install another sglang or a newer scope-attn"


def add_member(names: Any):
    """Adds our name to the enumeration. It counts as sparse: sglang then keeps cross-attention dense and hands over whole sequences."""
    member = object.__new__(names)
    member._name_, member._value_, member._sort_order_ = NAME, max(name.value for name in names) + 1, len(names)
    member.__objclass__ = names
    sparse = names.is_sparse.fget
    names._member_names_.append(NAME)
    names._member_map_[NAME] = names._value2member_map_[member._value_] = member
    type.__setattr__(names, NAME, member)
    names.is_sparse = property(lambda self: self is member or sparse(self))


def choose(original: Callable, cls: Any, selected_backend: Any, head_size: int, dtype: Any) -> str:
    """Around a platform's get_attn_backend_cls_str."""
    if getattr(selected_backend, "name", None) != NAME:
        return original(cls, selected_backend, head_size, dtype)
    dense_backends[head_size] = original(cls, None, head_size, dtype)
    try:
        from . import backend
    except (ImportError, AttributeError) as error:
        raise ValueError(f"scope_attn: {not_as_expected(error)}") from None
    backend.install_hooks()
    return f"{backend.__name__}.ScopeBackend"
