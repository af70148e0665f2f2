"""One line for pipelines of diffusers; neither it nor PyTorch is needed to import this."""
from __future__ import annotations

from typing import Any, Optional

from ._receipt import Receipt


def enable(pipe: Any, method: str = "scope-mean", *, target_density: Optional[float] = None, min_tokens: int = 4096, strict: bool = True,
           model: Optional[str] = None, **settings: Any) -> None:
    """Makes the video self-attention of a diffusers pipeline sparse: Wan2.1, Wan2.2, VACE, HunyuanVideo, HunyuanVideo 1.5, CogVideoX
    and MiniMax-H3.

    target_density: the share of keys that attention is to keep; None: what the method's own rule keeps.
    min_tokens: shorter videos attend densely, since choosing keys would take longer than it saves.
    strict: what cannot run sparse, other than by the schedule and min_tokens, is an error; False: the pipeline's own attention
        runs, with one warning.
    model: a row of models(), whose rho and schedule are taken; None: the one that fits the transformer.
    settings: any setting by its own name, such as dense_steps=0.1 or tail="mean"; settings() lists them.

    Dense calls are the pipeline's own attention, whatever its backend. receipt(pipe) says what every call did.
    """
    from . import _diffusers
    _diffusers.enable(pipe, method, target_density, min_tokens, strict, model, settings)


def disable(pipe: Any) -> None:
    """Undoes enable(): the pipeline has its own processors again, and gives the bits that it gave before."""
    from . import _diffusers
    _diffusers.disable(pipe)


def receipt(pipe: Any) -> Receipt:
    """What every self-attention call of an enabled pipeline's latest video did. Print it, or call its to_json(path) or report(path)."""
    from . import _diffusers
    return _diffusers.receipt(pipe)
