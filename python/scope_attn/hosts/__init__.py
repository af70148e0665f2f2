"""Adapters for programs that make videos: diffusers, ComfyUI, sglang and vllm-omni, over one session.py."""
