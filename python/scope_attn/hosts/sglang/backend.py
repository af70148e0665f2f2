"""sglang's attention backend "scope_attn": which layers are a video's, and where a call stands in its video."""
from __future__ import annotations

import functools
import os
import pkgutil
import re
import weakref
from collections.abc import Mapping
from typing import Any, Callable, NamedTuple, Optional

import torch
from sglang.multimodal_gen.runtime.distributed import parallel_state
from sglang.multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionBackend, AttentionImpl
from sglang.multimodal_gen.runtime.managers.forward_context import DENOISING_LOOP_STATE, get_forward_context_or_none
from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum
from sglang.multimodal_gen.runtime.server_args import get_global_server_args

from ... import _functions
from ..._receipt import Receipt
from .. import rotations
from ..session import Place, Session, Tokens, Video, packed_range
from . import NAME, NEW_WAY, OLD_VARIABLE, RUNTIME, dense_backends, hooks, log, not_as_expected

KEY = "scope_attn"  # of a request's video, in what sglang keeps for one denoising loop
OPTION = "--attention-backend-config"
CHOICES = "method", "target_density", "model", "window", "min_tokens", "strict"  # beside the settings


class Family(NamedTuple):
    """One transformer of sglang's, by what it calls its self-attentions. To add one: a row in FAMILIES."""

    name: str  # a regular expression; its group: the layer
    rows: str  # how the names of its models() begin
    rope: Callable[[int], Any]  # of a head's channels: how many turn along T, H and W, or which; None: heads mix the axes
    tokens: Callable[[Any, int], Tokens] = lambda q, used: Tokens()  # of queries and the tokens before padding
    without_codes: str = ""
    anonymous: bool = False  # its passes name no request
    packed: bool = False  # it hands over tokens without a batch, in forward_varlen
    hooks: tuple[tuple[str, str, Callable], ...] = ()  # kind, what is hooked, and the hook


class Now:
    """What our hooks were told of the pass that runs, and of the transformers that were made."""

    text: Optional[int] = None  # HunyuanVideo's tokens of text
    h3: Any = None  # MiniMax-H3's denoise branch
    request: Any = None  # LTX-2's request: a weak reference
    steps = 0  # of LTX-2's denoising loop
    made = 0  # transformers
    last_layer = 0  # that was made

    def transformer(self, layer: int) -> str:
        """The transformer that a new layer belongs to, as diffusers names them.

        The two experts of Wan 2.2 have layers of the same names, each from first to last: a layer that does not come after
        the last one begins another transformer.
        """
        self.made += layer <= self.last_layer or not self.made
        self.last_layer = layer
        return f"transformer_{self.made}" if self.made > 1 else "transformer"


now = Now()
sessions: dict[tuple, Session] = {}
missing: dict[str, str] = {}  # by family: why its hooks are not there
last_receipt: Optional[Receipt] = None  # of the video that began last in this process


def note_text(result: Any, *args: Any, **kwargs: Any):
    """After HunyuanVideo's text refiner, which every pass begins with."""
    now.text = result.shape[1]


def hunyuan_tokens(q: torch.Tensor, used: int) -> Tokens:
    """Text behind the video; padding is text, since HunyuanVideo's own attention in sglang does not mask it."""
    if now.text is None:
        raise ValueError("HunyuanVideo's text refiner has not run, expected a pass through the whole transformer")
    return Tokens(now.text, hunyuan_text(*q.shape[:2], now.text, parallel_state.get_sp_world_size()))


@functools.lru_cache(maxsize=16)
def hunyuan_text(batch: int, tokens: int, text: int, ranks: int) -> Any:
    """Where the text is. Of several ranks each brings a share of the video and a share of the text, the first ranks one more."""
    if ranks == 1 or text < ranks:
        return packed_range(batch, tokens, tokens - text, text)
    video = torch.zeros((tokens - text) // ranks, dtype=torch.bool)
    shares = [torch.ones(text // ranks + (rank < text % ranks), dtype=torch.bool) for rank in range(ranks)]
    return _functions.pack_bits(torch.cat([part for share in shares for part in (video, share)]).expand(batch, -1).contiguous())


def note_layer(block: Any, *args: Any, **kwargs: Any):
    """Before a pass through a block of LTX-2, whose layers all have the same name."""
    if isinstance(block.attn1.attn.attn_impl, ScopeImpl):
        block.attn1.attn.attn_impl.layer = block.idx


def note_request(stage: Any, ctx: Any, batch: Any, server_args: Any, step_index: int, t_int: int, timesteps_cpu: Any):
    """Before each step of LTX-2, whose passes do not name their request."""
    now.request, now.steps = weakref.ref(batch), len(timesteps_cpu)


def note_branch(branch: Any, *args: Any, **kwargs: Any):
    """Before each pass of MiniMax-H3."""
    now.h3 = weakref.ref(branch)


def h3_tokens(q: torch.Tensor, used: int) -> Tokens:
    """Everything but the rows of the video that is made: text, audio, and the images and sounds that it follows."""
    branch = now.h3 and now.h3()
    if branch is None:
        raise ValueError("MiniMax-H3's denoise branch was not seen, expected sglang's own denoising loop")
    known = vars(branch).setdefault("scope_tokens", {})
    if used not in known:
        others = torch.ones(1, used, dtype=torch.bool)
        others[0, branch.img_pos[branch.update_mask]] = False
        known[used] = Tokens(int(others.sum()), _functions.pack_bits(others))
    return known[used]


def end_video(result: Any, stage: Any, batch: Any, *args: Any, **kwargs: Any):
    """After MiniMax-H3's denoising stage, which leaves what was kept for its loop."""
    batch.extra.get(DENOISING_LOOP_STATE, {}).pop(KEY, None)


H3_STAGES = f"{RUNTIME}.pipelines_core.stages.model_specific_stages.minimax_h3"
FAMILIES = (
    Family(r"blocks\.(\d+)\.attn1\.impl", "wan", rotations.wan),
    Family(r"Hunyuan\.(?:double|single)_blocks\.(\d+)\.attn\.impl", "hunyuanvideo-13b",
           lambda dim: (16, 56, 56) if dim == 128 else None, hunyuan_tokens,
           hooks=(("AFTER", f"{RUNTIME}.models.dits.hunyuanvideo.SingleTokenRefiner.forward", note_text),)),
    Family(r"ltx2\.attn1\.attn\.impl", "ltx-2", lambda dim: None, without_codes=rotations.MIXED_IN_LTX, anonymous=True, hooks=(
        ("BEFORE", f"{RUNTIME}.models.dits.ltx_2.LTX2TransformerBlock.forward", note_layer),
        ("BEFORE", f"{RUNTIME}.pipelines_core.stages.model_specific_stages.ltx_2.denoising.LTX2DenoisingStage."
                   "_prepare_step_attn_metadata", note_request))),
    Family(r"blocks\.(\d+)\.attn", "minimax-h3", rotations.minimax_h3, h3_tokens, packed=True, hooks=(
        ("BEFORE", f"{H3_STAGES}.denoise_loop.MiniMaxH3DenoiseBranch.forward_kwargs", note_branch),
        ("AFTER", f"{H3_STAGES}.stages.denoising.MiniMaxH3DenoisingStage.forward", end_video))),
)


@functools.cache
def install_hooks():
    """Those of the families, when the backend is first chosen: before, they would import every model."""
    registry, kinds = hooks()
    for family in FAMILIES:
        for kind, target, hook in family.hooks:
            try:
                pkgutil.resolve_name(target)
                registry.register(target, hook, kinds[kind])
            except (ImportError, AttributeError) as error:
                missing[family.rows] = not_as_expected(error)
    registry.apply_hooks()


def read_settings() -> dict[str, Any]:
    """What --attention-backend-config says, as parameters of Session."""
    if os.environ.get(OLD_VARIABLE):
        raise ValueError(f"{OLD_VARIABLE}: it is set and has no effect; {NEW_WAY}")
    given = dict(get_global_server_args().attention_backend_config or {})
    known = [row.name for row in _functions.settings()]
    for name in given:
        if name not in (*CHOICES, *known):
            raise ValueError(f'{OPTION}: there is no setting "{name}"; there are {", ".join((*CHOICES, *known))}')
    chosen = {name: given.pop(name) for name in CHOICES if name in given}
    if chosen.get("method", "scope-mean") not in [row.name for row in _functions.methods()]:
        names = ", ".join(row.name for row in _functions.methods())
        raise ValueError(f'{OPTION}: there is no method "{chosen["method"]}"; there are {names}')
    if not isinstance(chosen.get("strict", True), bool):
        raise ValueError(f'{OPTION}: strict: got "{chosen["strict"]}", expected true or false')
    if "window" in chosen:
        chosen["window"] = read_window(chosen["window"])
    return dict(chosen, settings=given)


def read_window(window: Any) -> tuple[float, ...]:
    """A list of two, or "0.2:1", since sglang cuts name=value,name=value at every comma."""
    try:
        start, end = map(float, window.split(":") if isinstance(window, str) else window)
    except (TypeError, ValueError):
        raise ValueError(f'{OPTION}: window: got "{window}", expected [from, to] or "from:to", shares of the steps') from None
    return start, end


def session_for(family: Family, heads: int, dim: int, given: Mapping[str, Any]) -> Session:
    """One for all layers of a transformer's shape."""
    config = getattr(getattr(get_global_server_args(), "pipeline_config", None), "dit_config", None)
    channels = getattr(config, "in_channels", None), getattr(config, "out_channels", None)
    about = dict(heads=heads * parallel_state.get_tp_world_size(), dim=dim, from_image=channels[0] != channels[1],
                 experts=2 if getattr(config, "boundary_ratio", None) is not None else 1)
    key = family.rows, repr(about), repr(given)
    if key not in sessions:
        sessions[key] = Session(family=family.rows, layers=0, rope=family.rope(dim), without_codes=family.without_codes,
                                warn=log.warning, **about, **given)
    return sessions[key]


@functools.cache
def warn_once(text: str):
    log.warning(text)


class ScopeBackend(AttentionBackend):
    """What sglang asks for implementations. It cannot serve ring attention, which sglang therefore refuses."""

    @staticmethod
    def get_enum() -> AttentionBackendEnum:
        return AttentionBackendEnum[NAME]

    @staticmethod
    def get_impl_cls() -> type[ScopeImpl]:
        return ScopeImpl

    @staticmethod
    def get_metadata_cls() -> None:
        return None

    @staticmethod
    def get_builder_cls() -> None:
        return None


class ScopeImpl(AttentionImpl):
    """One attention layer. Layers of text encoders, refiners and audio are dense."""

    def __init__(self, num_heads: int, head_size: int, softmax_scale: float, causal: bool = False, num_kv_heads: Optional[int] = None,
                 prefix: str = "", **extra: Any):
        given = read_settings()
        self.dense = pkgutil.resolve_name(dense_backends[head_size]).get_impl_cls()(
            num_heads=num_heads, head_size=head_size, softmax_scale=softmax_scale, causal=causal, num_kv_heads=num_kv_heads,
            prefix=prefix, **extra)
        self.prefix, self.scale, self.strict = prefix, softmax_scale, given.get("strict", True)
        self.session: Optional[Session] = None  # None: not a video's layer
        for family in FAMILIES:
            found = re.fullmatch(family.name, prefix)
            if found and not causal and num_kv_heads in (None, num_heads):
                self.family, self.session = family, session_for(family, num_heads, head_size, given)
                self.layer = int(found[1]) if found.groups() else 0  # LTX-2's comes with each pass
                self.expert = now.transformer(self.layer) if found.groups() else "transformer"

    @torch.compiler.disable
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_metadata: Any = None) -> torch.Tensor:
        """[batch, tokens, heads, channels]"""
        return self.attend(query, key, value, query.shape[1], lambda: self.dense.forward(query, key, value, attn_metadata))

    @torch.compiler.disable
    def forward_varlen(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, cu_seqlens: torch.Tensor,
                       max_seqlen: int, cu_seqlens_host: Optional[tuple[int, ...]] = None) -> torch.Tensor:
        """[tokens, heads, channels]: one sequence, which padding may follow, or several, which stay dense."""
        def dense() -> torch.Tensor:
            return self.dense.forward_varlen(query, key, value, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen,
                                             cu_seqlens_host=cu_seqlens_host)

        if self.session is None:
            return self.outside(dense)
        bounds = tuple(cu_seqlens.tolist()) if cu_seqlens_host is None else cu_seqlens_host
        if not self.family.packed or len(bounds) not in (2, 3) or bounds[0] != 0:
            self.session.refuse(ValueError(f"{self.prefix}: got sequences from {bounds} in one call, expected one video"))
            return dense()
        used = bounds[1]
        q, k, v = (x[None, :used] for x in (query, key, value))
        out = self.attend(q, k, v, used, lambda: dense()[None, :used])[0]
        if used == len(query):
            return out
        whole = torch.zeros_like(query)
        whole[:used] = out
        return whole

    def outside(self, dense: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A layer that is not a video's. A model without any that is would run dense unnoticed."""
        context = get_forward_context_or_none()
        if not sessions and getattr(context, "forward_batch", None) is not None:
            text = (f'scope_attn: this transformer has a layer named "{self.prefix}" and none of Wan\'s, HunyuanVideo\'s, LTX-2\'s or '
                    "MiniMax-H3's; choose another --attention-backend")
            if self.strict:
                raise ValueError(text)
            warn_once(text)
        return dense()

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, used: int, dense: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self.session is None:
            return self.outside(dense)
        try:
            video, place = self.find_video(self.session)
        except ValueError as error:
            self.session.refuse(error)
            return dense()

        def tokens() -> Tokens:
            if q.shape != k.shape:
                raise ValueError(f"{self.prefix}: got {q.shape[1]} queries and {k.shape[1]} keys, expected as many of both")
            return self.family.tokens(q, used)

        out = video.attend(q, k, v, place, dense, tokens, scale=self.scale)
        if place.step == video.steps - 1:
            video.drop_state(place, q)  # the VAE, which comes next, needs the memory
        return out

    def find_video(self, session: Session) -> tuple[Video, Place]:
        """The video of the request that runs, which begins with its first call, and where the call stands in it."""
        if self.family.rows in missing:
            raise ValueError(missing[self.family.rows])
        context = get_forward_context_or_none()
        step, request = getattr(context, "current_timestep", None), getattr(context, "forward_batch", None)
        anonymous = self.family.anonymous
        if anonymous:
            request = now.request and now.request()
        if request is None or step is None:
            raise ValueError(f"{self.prefix}: sglang names no request or no step in this pass, expected a denoising loop")
        steps = now.steps if anonymous else steps_of(request)
        step = min(step, steps - 1)
        kept = request.extra.setdefault(DENOISING_LOOP_STATE, {})
        video = kept.get(KEY)
        if video is None or video.session is not session or step < video.step or steps != video.steps:
            video = kept[KEY] = begin_video(session, steps)
        video.step = step
        if anonymous:  # and without a name: passes come in the same order in each step
            branch = f"pass {video.turn(self.layer)}"
        else:
            branch = "negative" if request.is_cfg_negative else "positive"
        return video, Place(self.layer, step, branch, self.expert)


def steps_of(request: Any) -> int:
    """Of its denoising loop. Distilled models have theirs in the pipeline's configuration, whatever the request says."""
    distilled = getattr(getattr(get_global_server_args(), "pipeline_config", None), "dmd_denoising_steps", None)
    timesteps = distilled or request.timesteps
    return request.num_inference_steps if timesteps is None else len(timesteps)


def begin_video(session: Session, steps: int) -> Video:
    """The request alone holds it, so that its states are gone when sglang drops what it kept for the loop."""
    global last_receipt
    ranks = parallel_state.get_sp_world_size()
    about = dict(ranks=ranks, rank=parallel_state.get_sp_parallel_rank(), rho_of_each_rank=session.density_over_heads) if ranks > 1 else {}
    video = Video(session, steps, about)
    last_receipt = video.receipt
    weakref.finalize(video, tell, video.receipt)
    return video


def tell(receipt: Receipt):
    """At the end of a video: what its calls did."""
    (log.info if any(call.sparse for call in receipt.calls) else log.warning)("scope_attn: %s", receipt.line())
