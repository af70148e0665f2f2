"""vllm-omni's SDPA on the CPU: its own code for CUDA, which needs no GPU; the base's forward knows no CPU."""
from __future__ import annotations

from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CpuImpl(SDPAImpl):
    forward = SDPAImpl.forward_cuda


class CpuBackend(SDPABackend):
    @staticmethod
    def get_impl_cls() -> type:
        return CpuImpl
