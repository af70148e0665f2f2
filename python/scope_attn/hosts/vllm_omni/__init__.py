"""vllm-omni's plug-in: register() adds the diffusion attention backend SCOPE, whose classes are in backend.py."""
from __future__ import annotations

import importlib
import logging

# vllm-omni shows what loggers of its own name say.
logger = logging.getLogger("vllm_omni.scope_attn")
DIFFUSION = "vllm_omni.diffusion"
# By module: the names that we take, and of dataclasses the fields that we read.
NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    f"{DIFFUSION}.attention.backends.registry": {"DiffusionAttentionBackendEnum": ()},
    f"{DIFFUSION}.attention.backends.abstract": {
        "AttentionBackend": (), "AttentionImpl": (), "AttentionMetadata": ("attn_mask", "extra", "video_layout"),
        "VideoTokenLayout": ("prefix_len", "latent_grid", "used_len", "video_spans")},
    f"{DIFFUSION}.attention.backends.sdpa": {"SDPABackend": ()},
    f"{DIFFUSION}.attention.selector": {"get_attn_backend_for_role": ()},
    f"{DIFFUSION}.config": {"get_current_diffusion_config_or_none": ()},
    f"{DIFFUSION}.data": {"BLOCK_SPARSE_BACKENDS": ()},
    f"{DIFFUSION}.forward_context": {"ForwardContext": ("denoise_step_idx", "total_denoise_steps"),
                                     "get_forward_context": (), "is_forward_context_available": ()},
}


def missing() -> str:
    """What this vllm-omni lacks of what we need, in a few words; "": nothing."""
    try:
        import aenum  # noqa: F401
        for name, wanted in NEEDED.items():
            module = importlib.import_module(name)
            for part, fields in wanted.items():
                found = getattr(module, part, None)
                if found is None:
                    return f"{name} has no {part}"
                lost = [field for field in fields if field not in getattr(found, "__dataclass_fields__", {})]
                if lost:
                    return f"{part} has no {', '.join(lost)}"
    except ImportError as error:
        return str(error)
    return ""


def register():
    """What vllm-omni calls in each of its processes, also more than once (entry-point group vllm_omni.general_plugins).

    It raises nothing, since a server that does not ask for SCOPE must start in any case.
    """
    why = missing()
    if why:
        logger.warning("scope_attn: there is no backend SCOPE here, since this vllm-omni lacks what 0.30 has: %s", why)
        return
    import aenum
    from vllm_omni.diffusion import data
    from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum
    if "SCOPE" not in DiffusionAttentionBackendEnum.__members__:
        aenum.extend_enum(DiffusionAttentionBackendEnum, "SCOPE", f"{__name__}.backend.ScopeBackend")
    data.BLOCK_SPARSE_BACKENDS |= {"SCOPE"}
