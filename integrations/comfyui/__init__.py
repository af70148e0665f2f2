"""SCOPE Attention for ComfyUI; docs: README.md."""
from .scope_attention import comfy_entrypoint

__all__ = ["comfy_entrypoint"]
