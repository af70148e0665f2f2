"""One line for pipelines of diffusers; neither it nor PyTorch is needed to import this."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from ._receipt import Receipt
from ._selector import Selector


def enable(pipe: Any, method: Optional[str] = None, *, target_density: Optional[float] = None, window: Optional[Sequence[float]] = None,
           min_tokens: Optional[int] = None, strict: bool = True, model: Optional[str] = None, selector: Optional[Selector] = None,
           **settings: Any) -> None:
    """Makes the video self-attention of a diffusers pipeline sparse: Wan2.1, Wan2.2, VACE, Wan-Animate, SkyReels-V2, ChronoEdit, AnyFlow,
    HunyuanVideo, HunyuanVideo 1.5, Framepack, CogVideoX, MiniMax-H3, LTX-Video, LTX-2 and Kandinsky 5.

    method: a row of methods(); None: scope-mean.
    target_density: the share of keys that attention is to keep; None: 0.2 with scope-mean unless rho, rule or another setting
        says how many, and what the method's own rule keeps with the others.
    window: the part of the schedule that may be sparse, as shares (from, to) of its steps; None: after the model's dense steps.
    min_tokens: shorter videos attend densely, since choosing keys would take longer than it saves; None: 4,096 on a CPU and
        12,288 on a GPU.
    strict: what cannot run sparse, other than by the schedule and min_tokens, is an error; False: the pipeline's own attention
        runs, with one warning.
    model: a row of models(), whose rho and schedule are taken; None: the one that fits the transformer.
    selector: a function of yours in the place of a method. selector(q, k, grid, place) returns a Selection. q and k are
        [batch, heads, tokens, dim], the video's tokens alone: text is always seen, and sees everything. grid: frames, rows and
        columns in tokens, or None where the pipeline does not say them. place: a Place.
    settings: any setting by its own name, such as dense_steps=0.1 or tail="mean"; settings() lists them.

    Dense calls are the pipeline's own attention, whatever its backend. receipt(pipe) says what every call did.
    """
    host().enable(pipe, method=method, target_density=target_density, window=window, min_tokens=min_tokens, strict=strict, model=model,
                  selector=selector, settings=settings)


def disable(pipe: Any) -> None:
    """Undoes enable(): the pipeline has its own processors again, and gives the bits that it gave before."""
    host().disable(pipe)


def receipt(pipe: Any) -> Receipt:
    """What every self-attention call of an enabled pipeline's latest video did. Print it, or call its to_json(path) or report(path)."""
    return host().receipt(pipe)


def host() -> Any:
    """hosts.diffusers, which needs PyTorch and a diffusers as we know it."""
    try:
        from .hosts import diffusers
    except (ImportError, AttributeError) as error:
        raise ImportError(f"scope_attn: diffusers is not here as 0.36 to 0.42 have it: {error}; install one of these versions") from error
    return diffusers
