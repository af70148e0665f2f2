"""The Wan image-to-video DiT in plain PyTorch, with diffusers' tensor names and the same function as its WanTransformer3DModel."""

import math

import torch
import torch.nn.functional as F
from torch import nn

# config.json of the bundled model, in diffusers' form. 28 channels = 12 noisy + 4 guide + 12 first frame.
CONFIG = {
    "patch_size": [1, 2, 2],
    "num_attention_heads": 2,
    "attention_head_dim": 128,
    "in_channels": 28,
    "out_channels": 12,
    "text_dim": 32,
    "freq_dim": 256,
    "ffn_dim": 1024,
    "num_layers": 6,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
    "image_dim": None,
    "added_kv_proj_dim": None,
    "rope_max_seq_len": 1024,
    "pos_embed_seq_len": None,
}


def rope_table(grid, head_dim, device):
    """cos, sin [tokens, head_dim / 2] of the T, H and W angles of each token in raster order."""
    side = 2 * (head_dim // 6)
    angles = []
    for axis, dim in enumerate((head_dim - 2 * side, side, side)):
        frequency = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
        angle = torch.arange(grid[axis], device=device)[:, None] * frequency
        shape = [1, 1, 1, dim // 2]
        shape[axis] = grid[axis]
        angles.append(angle.view(shape).expand(*grid, -1))
    angle = torch.cat(angles, -1).flatten(0, 2)
    return angle.cos().float(), angle.sin().float()


def rotate(x, cos, sin):
    """x [batch, tokens, heads, head_dim], pairs of neighbouring channels turned by the token's angles."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, dim, heads, eps):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(dim, dim)])
        self.norm_q, self.norm_k = nn.RMSNorm(dim, eps), nn.RMSNorm(dim, eps)

    def forward(self, x, context=None, rope=None, attend=None):
        source = x if context is None else context
        q = self.norm_q(self.to_q(x)).unflatten(-1, (self.heads, -1))
        k = self.norm_k(self.to_k(source)).unflatten(-1, (self.heads, -1))
        v = self.to_v(source).unflatten(-1, (self.heads, -1))
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        q, k, v = (t.to(v.dtype).transpose(1, 2) for t in (q, k, v))  # [batch, heads, tokens, dim]
        if context is not None:  # 8 keys: two small products beat a fused kernel made for long rows
            out = torch.softmax((q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1]), -1).to(v.dtype) @ v
        elif attend is not None:
            out = attend(q, k, v)
        else:
            out = F.scaled_dot_product_attention(q, k, v)
        return self.to_out[0](out.transpose(1, 2).flatten(2).to(v.dtype))


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        expand = nn.Module()
        expand.proj = nn.Linear(dim, hidden)
        self.net = nn.ModuleList([expand, nn.Identity(), nn.Linear(hidden, dim)])  # indices 0 and 2 are diffusers'

    def forward(self, x):
        return self.net[2](F.gelu(self.net[0].proj(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, dim, heads, ffn_dim, eps, cross_attn_norm):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps, elementwise_affine=False)
        self.attn1 = Attention(dim, heads, eps)
        self.norm2 = nn.LayerNorm(dim, eps) if cross_attn_norm else nn.Identity()
        self.attn2 = Attention(dim, heads, eps)
        self.norm3 = nn.LayerNorm(dim, eps, elementwise_affine=False)
        self.ffn = FeedForward(dim, ffn_dim)
        self.scale_shift_table = nn.Parameter(torch.randn(1, 6, dim) / dim**0.5)

    def forward(self, x, context, time, rope, attend=None):
        shift1, scale1, gate1, shift3, scale3, gate3 = (self.scale_shift_table + time.float()).chunk(6, 1)
        x = x + gate1 * self.attn1(self.norm1(x) * (1 + scale1) + shift1, rope=rope, attend=attend)
        x = x + self.attn2(self.norm2(x), context)
        return x + gate3 * self.ffn(self.norm3(x) * (1 + scale3) + shift3)


class TwoLinears(nn.Module):
    def __init__(self, inputs, dim):
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(inputs, dim), nn.Linear(dim, dim)


class ConditionEmbedder(nn.Module):
    def __init__(self, dim, freq_dim, text_dim):
        super().__init__()
        self.time_embedder, self.time_proj = TwoLinears(freq_dim, dim), nn.Linear(dim, 6 * dim)
        self.text_embedder = TwoLinears(text_dim, dim)
        half = freq_dim // 2
        self.register_buffer("frequency", 10000.0 ** (-torch.arange(half) / half), persistent=False)

    def forward(self, timestep, tokens):
        angle = timestep.float()[:, None] * self.frequency
        time = torch.cat([angle.cos(), angle.sin()], -1)
        time = self.time_embedder.linear_2(F.silu(self.time_embedder.linear_1(time)))
        text = F.gelu(self.text_embedder.linear_1(tokens), approximate="tanh")
        return time, self.time_proj(F.silu(time)).unflatten(1, (6, -1)), self.text_embedder.linear_2(text)


class TinyWan(nn.Module):
    def __init__(self, config=CONFIG):
        super().__init__()
        self.config = dict(config)
        self.head_dim = config["attention_head_dim"]
        dim, self.patch = config["num_attention_heads"] * self.head_dim, tuple(config["patch_size"])
        self.patch_embedding = nn.Conv3d(config["in_channels"], dim, self.patch, self.patch)
        self.condition_embedder = ConditionEmbedder(dim, config["freq_dim"], config["text_dim"])
        make = lambda: Block(dim, config["num_attention_heads"], config["ffn_dim"], config["eps"], config["cross_attn_norm"])
        self.blocks = nn.ModuleList(make() for _ in range(config["num_layers"]))
        self.norm_out = nn.LayerNorm(dim, config["eps"], elementwise_affine=False)
        self.proj_out = nn.Linear(dim, config["out_channels"] * math.prod(self.patch))
        self.scale_shift_table = nn.Parameter(torch.randn(1, 2, dim) / dim**0.5)
        self.rope_cache = {}

    def init_weights(self):
        """Starts the net as a plain residual stack: gates at one, modulation and output at zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.zeros_(self.condition_embedder.time_proj.weight)
        nn.init.zeros_(self.proj_out.weight)
        with torch.no_grad():
            self.scale_shift_table.zero_()
            for block in self.blocks:
                block.scale_shift_table.zero_()[:, [2, 5]] = 1
                for last in (block.attn1.to_out[0], block.attn2.to_out[0], block.ffn.net[2]):
                    last.weight /= math.sqrt(3 * len(self.blocks))
        return self

    def rope(self, grid, device):
        if (grid, device) not in self.rope_cache:
            self.rope_cache[grid, device] = rope_table(grid, self.head_dim, device)
        return self.rope_cache[grid, device]

    def forward(self, latent, timestep, tokens, attend=None):
        """latent [batch, 28, T, H, W], timestep [batch] in 0..1000, tokens [batch, 8, 32] -> velocity [batch, 12, T, H, W].

        attend(layer, q, k, v) replaces self-attention when given; q, k, v are [batch, heads, tokens, dim] after norm and RoPE.
        """
        b, c, t, h, w = latent.shape
        grid = (t, h // 2, w // 2)
        patches = latent.view(b, c, t, h // 2, 2, w // 2, 2).permute(0, 2, 3, 5, 1, 4, 6).reshape(b, -1, c * 4)
        x = F.linear(patches, self.patch_embedding.weight.flatten(1), self.patch_embedding.bias).float()
        embedded, time, context = self.condition_embedder(timestep, tokens)
        rope = self.rope(grid, latent.device)
        for layer, block in enumerate(self.blocks):
            own = None if attend is None else lambda q, k, v, layer=layer: attend(layer, q, k, v)
            x = block(x, context, time, rope, own)
        shift, scale = (self.scale_shift_table + embedded.float()[:, None]).chunk(2, 1)
        x = self.proj_out(self.norm_out(x) * (1 + scale) + shift)
        x = x.view(b, *grid, 2, 2, -1).permute(0, 6, 1, 2, 4, 3, 5)
        return x.reshape(b, -1, t, h, w).float()
