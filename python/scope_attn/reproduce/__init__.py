"""python -m scope_attn.reproduce: the paper's tables from your own weights, through diffusers."""
