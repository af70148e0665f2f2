"""The attention backend SCOPE of vllm-omni: a ScopeImpl for each layer, and a Run that a served model's layers share.

vllm-omni says the step, where the video's tokens are, and a layer's name. The n-th call of a layer in a step is the
n-th branch of guidance. A step that falls begins another video.
"""
from __future__ import annotations

import collections
import functools
import json
import math
import os
import re
import weakref
from typing import Any, Optional

import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadata
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend
from vllm_omni.diffusion.attention.selector import get_attn_backend_for_role
from vllm_omni.diffusion.config import get_current_diffusion_config_or_none
from vllm_omni.diffusion.forward_context import get_forward_context, is_forward_context_available

from ... import _c_api, _functions
from ..._receipt import Receipt
from .. import rotations
from ..session import DenseCall, Place, Session, Tokens, Video
from . import logger

VARIABLE = "SCOPE_VLLM_OMNI"
OWN = "method", "model", "min_tokens", "strict"  # settings of ours that are none of the library's
SAID_BY_BLOCK_SPARSE = {"target_density": "sparsity", "density": "sparsity", "density_steps": "sparsity",
                        "dense_last_steps": "end_step", "dense_layers": "skip_layers", "warm_prefix": "start_step"}
EXAMPLE = '{"backend": "SCOPE", "block_sparse": {"sparsity": 0.8, "start_step": 10}}'


def read_settings() -> dict[str, Any]:
    """SCOPE_VLLM_OMNI: a JSON object, or name=value with commas between; one before a digit belongs to the value."""
    text, found = os.environ.get(VARIABLE, "").strip(), {}
    if text.startswith("{"):
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{VARIABLE}: it begins like JSON and is none: {error}") from None
    else:
        for part in re.split(r",(?!\s*\d)", text) if text else ():
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not (name and equals and value):
                raise ValueError(f'{VARIABLE}: got "{part}", expected name=value')
            found[name] = value
    known = *OWN, *(row.name for row in _functions.settings() if row.name not in SAID_BY_BLOCK_SPARSE)
    for name in found:
        if name in SAID_BY_BLOCK_SPARSE:
            raise ValueError(f"{VARIABLE}: {name} is said by {SAID_BY_BLOCK_SPARSE[name]} in block_sparse: {EXAMPLE}")
        if name not in known:
            raise ValueError(f'{VARIABLE}: there is no setting "{name}"; there are {", ".join(known)}')
    if "min_tokens" in found:
        try:
            found["min_tokens"] = int(found["min_tokens"])
        except ValueError:
            raise ValueError(f'{VARIABLE}: min_tokens: got "{found["min_tokens"]}", expected a whole number') from None
    if "strict" in found:
        text = str(found["strict"]).lower()
        if text not in ("yes", "no", "true", "false"):
            raise ValueError(f'{VARIABLE}: strict: got "{text}", expected yes or no')
        found["strict"] = text in ("yes", "true")
    return found


def family_of(pipeline: str) -> str:
    """How the names of a pipeline's models() begin; a pipeline that never says where its video is, is refused."""
    if pipeline.startswith("MiniMaxH3"):
        return "minimax-h3"
    if pipeline.startswith("Wan") and "S2V" not in pipeline:
        return "wan"
    raise ValueError(f"SCOPE: {pipeline or 'this pipeline'} does not tell its attention the step and where the video's "
                     "tokens are; expected Wan2.2 or MiniMax-H3; leave the backend SCOPE out of "
                     "--diffusion-attention-config for this model")


class Run:
    """What the layers of one served model share: a session, the schedule, and where each layer stands."""

    def __init__(self, config: Any, heads: int, dim: int, given: dict[str, Any]):
        pipeline, parallel = config.model_class_name, config.parallel_config
        family, settings = family_of(pipeline), read_settings()
        if not given:
            raise ValueError(f"SCOPE: block_sparse is missing in --diffusion-attention-config, expected {EXAMPLE}")
        if given["sparsity"] >= 1:
            raise ValueError(f"block_sparse: sparsity: got {given['sparsity']}, expected less than 1: the share of "
                             "keys that is left out")
        if given.get("precision", "bf16") != "bf16":
            raise ValueError(f"block_sparse: precision: got {given['precision']}, expected bf16; for 8-bit products "
                             f'set {VARIABLE}="products=qk8"')
        self.config = weakref.ref(config)
        self.start, self.end = given.get("start_step", 0), given.get("end_step", 0)
        self.skipped = given.get("skip_layers") or ()
        if self.start and "dense_steps" in settings:
            raise ValueError(f"{VARIABLE}: dense_steps: start_step of block_sparse says it too; give one of them")
        own = {name: settings.pop(name) for name in OWN if name in settings}
        tensor, ulysses = (getattr(parallel, name, None) or 1 for name in ("tensor_parallel_size", "ulysses_degree"))
        self.ranks = tensor * ulysses
        self.session = Session(
            family=family, layers=0, heads=heads * tensor, dim=dim, rope=(rotations.wan if family == "wan" else rotations.minimax_h3)(dim),
            experts=2 if family == "wan" else 1, from_image="ImageToVideo" in pipeline or "I2V" in pipeline,
            target_density=1 - given["sparsity"], warn=logger.warning, **own,
            settings={"dense_layers?": 0, "dense_last_steps?": 0, **({"dense_steps?": 0, "warm_prefix?": False} if self.start else {}),
                      **settings})
        self.share = float(self.session.schedule["dense_steps"])  # of dense first steps: the known model's, unless another is said
        self.needs_total = ("end_step" if self.end else "reuse_steps" if settings.get("reuse_steps") else
                            "dense_steps" if "dense_steps" in settings and self.share else "")
        self.layers: dict[str, int] = {}  # by prefix
        self.made: collections.Counter = collections.Counter()  # by prefix, which Wan2.2's experts share
        self.context: Any = None  # of the latest call, weak
        self.told: set[str] = set()
        logger.info("SCOPE: %s at density %.3f, for %s", self.session.method, 1 - given["sparsity"],
                    self.session.why_model)

    def place(self, prefix: str) -> tuple[int, str]:
        """The layer and the expert of a layer that is made now."""
        self.made[prefix] += 1
        return (self.layers.setdefault(prefix, len(self.layers)),
                "transformer" if self.made[prefix] == 1 else f"transformer_{self.made[prefix]}")

    def video(self, context: Any) -> Video:
        """That runs in this step. The same step in another context is another video's: one has a context for all its
        steps, or one for each."""
        session, step = self.session, context.denoise_step_idx
        last = session.video
        if last is not None and step == last.step and self.context() is not context:
            session.video = None
        self.context = weakref.ref(context)
        if self.share and context.total_denoise_steps is None:
            self.tell("no first steps are dense: this model does not tell how many steps there are, so give their number by start_step")
        video = session.video_at(step, context.total_denoise_steps or 0)
        if video is not last:
            if last is not None:
                logger.info("SCOPE: the video before this one: %s", last.receipt)
            if self.ranks > 1:
                video.receipt.settings.update(ranks=self.ranks, rank=torch.distributed.get_rank(),
                                              rho_of_each_rank=session.density_over_heads)
        return video

    def tell(self, line: str):
        """The log has each line once, since a server's user sees no receipt."""
        if line not in self.told:
            self.told.add(line)
            logger.info("SCOPE: %s", line)


def refuse_parallel(config: Any):
    for name in ("ring_degree", "allgather_degree"):
        degree = getattr(config.parallel_config, name, None) or 1
        if degree > 1:
            raise ValueError(f"{name}: got {degree}, expected 1: SCOPE chooses among all keys of a video; use "
                             "ulysses_degree")
    requests = getattr(config, "max_num_seqs", None) or 1
    if getattr(config, "step_execution", False) and requests > 1:
        raise ValueError(f"max_num_seqs: got {requests} with step_execution, expected 1: SCOPE cannot tell whose turn "
                         "a step is")


_runs: list[Run] = []


def run_of(config: Any, *shape: Any) -> Run:
    """Of a served model, which is named by its configuration."""
    _runs[:] = [run for run in _runs if run.config() is not None]
    for run in _runs:
        if run.config() is config:
            return run
    _runs.append(Run(config, *shape))
    return _runs[-1]


def receipt() -> Receipt:
    """What every self-attention call of the latest video in this process did."""
    if not _runs or _runs[-1].session.video is None:
        raise RuntimeError("SCOPE: no video ran in this process yet")
    return _runs[-1].session.video.receipt


def used_length(metadata: Optional[AttentionMetadata], tokens: int) -> int:
    """From there on is padding, which comes without a mask where a backend says that it cuts keys itself."""
    if metadata is None:
        return tokens
    layout, used = metadata.video_layout, metadata.extra.get("valid_kv_length")
    if used is None and layout is not None:
        used = layout.used_len
        if used is None and layout.prefix_len is not None and layout.latent_grid is not None:
            used = layout.prefix_len + math.prod(layout.latent_grid)
    return tokens if used is None else int(used)


def video_spans(layout: Any) -> tuple[tuple[int, int], ...]:
    """Start and length of the video's tokens."""
    if layout.video_spans:
        return tuple((span.start, math.prod(span.latent_grid)) for span in layout.video_spans)
    if layout.prefix_len is None or layout.latent_grid is None:
        raise DenseCall("the call does not say where the video's tokens are")
    return ((layout.prefix_len, math.prod(layout.latent_grid)),)


@functools.lru_cache(maxsize=16)
def tokens_of(batch: int, tokens: int, used: int, spans: tuple[tuple[int, int], ...]) -> Tokens:
    """All but the spans is text, audio or images, until the padding."""
    if not spans or any(start < 0 or start + length > used for start, length in spans) or used > tokens:
        raise ValueError(f"video_layout: got spans {spans} in {used} tokens of {tokens}, expected spans within them")
    others = torch.zeros(batch, tokens, dtype=torch.bool)
    others[:, :used] = True
    for start, length in spans:
        others[:, start:start + length] = False
    count = int(others[0].sum())
    return Tokens(count, _functions.pack_bits(others) if count else None, [used] * batch if used < tokens else None)


class ScopeBackend(AttentionBackend):
    supports_prefix_kv_slicing = True  # no mask is made for padding: used_length() finds it

    @classmethod
    def validate_available(cls):
        """Before the model is loaded."""
        _c_api.library()
        read_settings()

    @classmethod
    def supports_attention_mask(cls, attention_spec: Any = None) -> bool:
        return True

    @staticmethod
    def get_name() -> str:
        return "SCOPE"

    @staticmethod
    def get_impl_cls() -> type:
        return ScopeImpl

    @staticmethod
    def get_metadata_cls() -> type:
        return AttentionMetadata

    @staticmethod
    def get_builder_cls() -> None:
        return None

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return []  # all


class ScopeImpl(AttentionImpl):
    """One layer."""

    def __init__(self, num_heads: int, head_size: int, softmax_scale: float, causal: bool = False,
                 num_kv_heads: Optional[int] = None, prefix: str = "", qkv_layout: Optional[str] = None,
                 backend_kwargs: Optional[dict] = None, role: str = "self", **extra: Any):
        config = get_current_diffusion_config_or_none()
        if config is None:
            raise RuntimeError("SCOPE: a layer is made outside set_current_diffusion_config, which says the model")
        family_of(config.model_class_name or "")
        refuse_parallel(config)
        self.scale = softmax_scale
        platform, _ = get_attn_backend_for_role(role=role, head_size=head_size)  # what runs without us
        shape = dict(num_heads=num_heads, head_size=head_size, softmax_scale=softmax_scale, causal=causal,
                     num_kv_heads=num_kv_heads, prefix=prefix, qkv_layout=qkv_layout, role=role)
        self.dense = platform.get_impl_cls()(**shape)
        self.masked = self.dense if platform.supports_attention_mask() else SDPABackend.get_impl_cls()(**shape)
        block = re.fullmatch(r"(?:\w*_)?blocks\.(\d+)\.attn1?", prefix)
        self.run: Optional[Run] = None  # of a layer that may be sparse
        if role != "self":
            return
        if block is None:
            logger.warning('SCOPE: the layer "%s" is dense: its name has no number of a block', prefix)
            return
        if causal or num_kv_heads not in (None, num_heads) or (qkv_layout or "BSND").upper() != "BSND":
            raise ValueError(f"SCOPE: {prefix}: got causal={causal}, {num_kv_heads or num_heads} heads of keys, "
                             f"qkv_layout={qkv_layout}, expected a layer whose tokens all see each other, {num_heads} "
                             "heads of keys and BSND")
        self.run = run_of(config, num_heads, head_size, backend_kwargs or {})
        self.layer, self.expert = self.run.place(prefix)
        self.skipped = int(block[1]) in self.run.skipped

    @torch.compiler.disable
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                attn_metadata: Optional[AttentionMetadata] = None) -> torch.Tensor:
        """softmax(scale q k) v for [batch, tokens, heads, dim]."""
        run, tokens = self.run, key.shape[1]
        mask, layout = getattr(attn_metadata, "attn_mask", None), getattr(attn_metadata, "video_layout", None)
        used = used_length(attn_metadata, tokens)
        # A layout says that a mask of keys hides no more than the padding at the end, as the length does.
        hides = mask is not None and (layout is None or mask.ndim != 2)

        def dense():
            if hides:
                return self.masked.forward(query, key, value, attn_metadata)
            return self.dense.forward(query, key[:, :used], value[:, :used], None)

        context = get_forward_context() if is_forward_context_available() else None
        if run is None:
            return dense()
        if context is None or context.denoise_step_idx is None:
            run.tell("dense calls: outside the steps of a video")
            return dense()
        video = run.video(context)
        step, total = context.denoise_step_idx, context.total_denoise_steps

        def told_tokens() -> Tokens:
            if self.skipped:
                raise DenseCall("the layer is one of skip_layers")
            if step < run.start:
                raise DenseCall(f"the step is within the first {run.start} (start_step)")
            if run.needs_total and total is None:
                raise ValueError(f"{run.needs_total}: it needs the number of steps, which this model does not tell; "
                                 "leave it out")
            if run.end and step >= total - run.end:
                raise DenseCall(f"the step is within the last {run.end} (end_step)")
            if layout is None:
                raise DenseCall("the call does not say where the video's tokens are")
            if hides:
                raise DenseCall("the call has a mask")
            if query.shape != key.shape:
                raise DenseCall("the call has other keys than queries")
            return tokens_of(query.shape[0], tokens, used, video_spans(layout))

        place = Place(self.layer, step, f"call {video.turn(self.expert, self.layer)}", self.expert)
        out = video.attend(query, key, value, place, dense, told_tokens, scale=self.scale)
        why = video.receipt.calls[-1].why
        run.tell(f"dense calls: {why}" if why else "the first sparse call ran")
        if total is not None and step == total - 1:
            video.drop_state(place, query)  # the VAE, which comes next, needs the memory
        return out
