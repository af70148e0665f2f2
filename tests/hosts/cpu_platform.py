"""A CPU platform for vllm-omni, which has none: backends come from vllm-omni's own registry, SDPA by default."""
from __future__ import annotations

from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


def plugin() -> str:
    """What the group vllm_omni.platform_plugins asks for."""
    return f"{__name__}.CpuPlatform"


class CpuPlatform(OmniPlatform):
    _omni_enum = OmniPlatformEnum.OOT
    device_name = device_type = "cpu"

    @classmethod
    def get_diffusion_attn_backend_cls(cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False) -> str:
        from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum
        if selected_backend is None:
            return "cpu_sdpa.CpuBackend"
        cls.validate_diffusion_attn_backend(selected_backend)  # what the platforms of vllm-omni do first
        return DiffusionAttentionBackendEnum[selected_backend.upper()].get_path()

    @classmethod
    def get_device_count(cls) -> int:
        return 0  # vllm-omni then looks for no flash attention
