"""How long dense and sparse attention take on this machine, for python -m scope_attn.doctor --measure."""
from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any, Callable, Optional

DENSITIES = 0.05, 0.1, 0.2, 0.3, 0.5
REPEAT = 5


def break_even(dense: float, sparse: Sequence[tuple[float, float]]) -> Optional[float]:
    """The density at which a sparse call takes as long as the dense one, on the line through (density, time) of ascending
    densities; inf: every one is faster; None: none is."""
    if sparse[0][1] >= dense:
        return None
    for (low, before), (high, after) in zip(sparse, sparse[1:]):
        if after >= dense:
            return low + (high - low) * (dense - before) / (after - before)
    return float("inf")


def verdict(dense: float, sparse: Sequence[tuple[float, float]]) -> str:
    density = break_even(dense, sparse)
    if density is None:
        return f"Sparse attention does not pay at this length: dense is as fast as density {sparse[0][0]:g}."
    if density == float("inf"):
        return f"Sparse attention pays here at every density up to {sparse[-1][0]:g}."
    return f"Sparse attention pays here below density {density:.2f}."


def median_ms(call: Callable[[], Any], device: Any) -> float:
    """Of REPEAT calls, after one that is not counted."""
    import torch
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    taken = []
    for _ in range(1 + REPEAT):
        wait()
        start = time.perf_counter()
        call()
        wait()
        taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(taken[1:])


def measure(tokens: int, heads: Optional[int], dim: int, on: str, say: Callable[[str, str], None]):
    """Says what dense attention and scope-mean take at some densities, and from which one on it pays."""
    import torch

    import scope_attn
    device = torch.device(on)
    dtype, heads = (torch.bfloat16, heads or 8) if device.type == "cuda" else (torch.float32, heads or 1)
    q, k, v = torch.randn(3, 1, heads, tokens, dim, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    say("measure", f"{tokens:,} tokens, {heads} heads of {dim} channels, {str(dtype).removeprefix('torch.')}, {on}; random q, k, v; "
        f"medians of {REPEAT} warm calls")
    with torch.no_grad():
        dense = median_ms(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v), device)
        say("dense", f"{dense:9.2f} ms, PyTorch's scaled_dot_product_attention")
        sparse = []
        for density in DENSITIES:
            state = scope_attn.State()
            taken = median_ms(functools.partial(scope_attn.attention, q, k, v, method="scope-mean", target_density=density,
                                                state=state), device)
            say(f"density {density:g}", f"{taken:9.2f} ms, {dense / taken:.2f} times as fast")
            sparse.append((density, taken))
    say("so", verdict(dense, sparse))
