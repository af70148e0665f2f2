"""Context parallelism of diffusers: which kinds a sparse layer can run under, and the exchange around its attention."""
from __future__ import annotations

from typing import Any, Callable

from diffusers.models import attention_dispatch


def why_not(splits: bool, config: Any) -> str:
    """Why layers with this configuration of diffusers cannot be sparse; "": they can."""
    if not splits:
        return "context parallelism: it is for Wan's plain transformers alone; run this one on one rank, or leave it dense"
    ring = config.context_parallel_config.ring_degree
    if ring > 1:
        return (f"context parallelism: got ring_degree={ring}, expected ulysses_degree alone: in a ring a rank sees the keys piece by "
                "piece, and choosing among them takes all; use ContextParallelConfig(ulysses_degree=...), or leave the pipeline dense")
    return ""


def exchange(q: Any, k: Any, v: Any, mask: Any, scale: Any, config: Any, attend: Callable[..., Any]) -> Any:
    """attend(q, k, v, mask) with all tokens and a share of the heads, between two exchanges of Ulysses."""
    def forward(context, q, k, v, mask, *rest, **options):
        return attend(q, k, v, mask)

    return attention_dispatch._templated_context_parallel_attention(q, k, v, mask, scale=scale, forward_op=forward, backward_op=None,
                                                                    _parallel_config=config)


def ranks(config: Any) -> dict[str, int]:
    """For the receipt."""
    ulysses = config and config.context_parallel_config
    return dict(ranks=ulysses.ulysses_degree, rank=ulysses._ulysses_local_rank) if ulysses else {}
