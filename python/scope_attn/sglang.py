"""sglang-diffusion's plug-in: SCOPE_SGLANG="target_density=0.2" makes its attention backend sparse_video_gen_2_attn ours.

That backend's metadata carries what a call must know: the layer, the schedule, the text and its padding, and a cache that lives
as long as the video. Only its two methods and the search for its package are replaced, by the hooks that sglang has for it.
"""
from __future__ import annotations

import functools
import os
import re
from typing import Any

from ._functions import attention, methods, models, pack_bits, plan_for, refuse_morton
from ._functions import settings as known_settings
from ._plan import State, text_of

MODULE = "sglang.multimodal_gen.runtime.layers.attention.backends.sparse_video_gen_2_attn"
VARIABLE = "SCOPE_SGLANG"


def register():
    """What sglang calls in each of its processes (entry-point group sglang.multimodal_gen.plugins)."""
    if not os.environ.get(VARIABLE):
        return
    read_settings()
    from sglang.multimodal_gen.plugins import HookRegistry
    from sglang.srt.plugins.hook_registry import HookType
    for target, hook in ((f"{MODULE}.SparseVideoGen2AttentionImpl.__init__", begin),
                         (f"{MODULE}.SparseVideoGen2AttentionImpl.forward", forward),
                         ("sglang.multimodal_gen.runtime.platforms.cuda._SparseVideoGen2AttentionBackendResolver.resolve", resolve)):
        HookRegistry.register(target, hook, HookType.REPLACE)


def read_settings() -> tuple[str, dict[str, str]]:
    """The method and the settings of SCOPE_SGLANG, name=value with commas between them; one before a digit belongs to the value."""
    found = {}
    for part in re.split(r",(?!\s*\d)", os.environ[VARIABLE]):
        name, equals, value = (text.strip() for text in part.partition("="))
        if not (name and equals and value):
            raise ValueError(f'{VARIABLE}: got "{part}", expected name=value')
        found[name] = value
    method = found.pop("method", "scope-mean")
    for what, name, known in [("method", method, methods())] + [("setting", name, known_settings()) for name in found]:
        if name not in [row.name for row in known]:
            raise ValueError(f'{VARIABLE}: there is no {what} "{name}"; there are {", ".join(row.name for row in known)}')
    refuse_morton(method)
    for name in ("dense_layers", "dense_steps", "dense_last_steps", "warm_prefix"):
        if name in found:
            raise ValueError(f"{VARIABLE}: {name} is sglang's to say: svg2_first_layers_fp, svg2_first_times_fp, svg2_zero_step_kmeans_init "
                             "in --attention-backend-config")
    return method, found


def resolve(cls: Any, platform: Any) -> str:
    """In the place of the search for the package svg, which is not needed."""
    return f"{MODULE}.SparseVideoGen2AttentionBackend"


def begin(self: Any, num_heads: int, head_size: int, causal: bool = False, softmax_scale: float = 0.0, num_kv_heads: Any = None,
          prefix: str = "", **extra_impl_args: Any):
    """__init__ of one layer's attention."""
    place = re.fullmatch(r"(?:.*\.)?(?:(double|single)_)?blocks\.(\d+)\..*", prefix)
    if place is None:
        raise ValueError(f'SCOPE: got a layer named "{prefix}", expected one of the blocks of Wan or HunyuanVideo')
    if causal:
        raise ValueError(f"SCOPE: {prefix} is causal, expected a layer whose tokens all see each other")
    if num_kv_heads not in (None, num_heads):
        raise ValueError(f"SCOPE: {prefix} has {num_kv_heads} heads of keys, expected as many as of queries, {num_heads}")
    family = "hunyuanvideo" if place[1] else "wan"
    self.row = next(row for row in models() if row.name.startswith(family))
    if head_size != self.row.dim:
        raise ValueError(f"SCOPE: {prefix} has heads of {head_size} channels, expected {self.row.dim}")
    self.layer_idx, self.softmax_scale = int(place[2]), softmax_scale
    self.method, self.settings = read_settings()
    self.share_branches = next(row.shares_branches for row in methods() if row.name == self.method)


@functools.lru_cache(maxsize=16)
def text_at_end(batch: int, tokens: int, count: int) -> Any:
    import torch
    return pack_bits((torch.arange(tokens) >= tokens - count).expand(batch, tokens).contiguous())


def forward(self: Any, query: Any, key: Any, value: Any, attn_metadata: Any) -> Any:
    """[batch, tokens, heads, dim], the video's tokens before the text's."""
    import torch
    from sglang.multimodal_gen.runtime.managers.forward_context import get_forward_context
    if attn_metadata is None:
        raise ValueError("SCOPE: attn_metadata is missing, expected that of sparse_video_gen_2_attn")
    batch, tokens = query.shape[:2]
    text = attn_metadata.context_length
    expected = text + attn_metadata.num_frame * attn_metadata.frame_size
    if tokens != expected or key.shape != query.shape:
        raise ValueError(f"SCOPE: got {tokens} queries and {key.shape[1]} keys, expected {expected}: {attn_metadata.num_frame} frames of "
                         f"{attn_metadata.frame_size} tokens and {text} of text")
    padded = text and attn_metadata.prompt_length is not None and attn_metadata.prompt_length < text
    length = tokens - text + attn_metadata.prompt_length if padded else tokens
    # The cache is new for each video, and the two experts of Wan 2.2 are two of us.
    negative = not self.share_branches and bool(getattr(get_forward_context().forward_batch, "is_cfg_negative", False))
    states = vars(attn_metadata.cache).setdefault("scope_states", {})
    state = states.setdefault((self, negative, tuple(query.shape)), State())
    bits = text_at_end(batch, tokens, text) if text else None
    call = dict(layout="BNHD", scale=self.softmax_scale, state=state, k_lengths=[length] * batch if padded else None,
                keep=bits, dense_queries=bits)
    if self.layer_idx < attn_metadata.first_layers_fp or attn_metadata.current_timestep > attn_metadata.first_times_fp:
        if attn_metadata.zero_step_kmeans_init:
            from . import _torch
            settings = {"dense_layers?": 0, "dense_steps?": 1, "warm_prefix?": True, **self.settings}
            plan = plan_for(_torch, query, key, True, bits is not None, self.method, self.row.name, self.row.rope,
                            [f"{name}={text_of(setting)}" for name, setting in settings.items()])
            if plan.clusters(step=0, steps=1):  # method dense does not
                plan.cluster(query, key, step=0, steps=1, **call)
        q, k, v = (x.transpose(1, 2) for x in (query, key[:, :length], value[:, :length]))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=self.softmax_scale or None).transpose(1, 2).contiguous()
    schedule = {"dense_layers?": 0, "dense_steps?": 0, "warm_prefix?": False}  # sglang's
    return attention(query, key, value, rope=self.row.rope, method=self.method, model=self.row.name, **call, **schedule,
                     **self.settings).contiguous()
