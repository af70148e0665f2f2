"""Linear layers in fp8 (e4m3): one scale for each row of weights and one for each token of activations.

This is what torchao's Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()) does, by PyTorch alone: tests/hosts compares the
two. A layer whose sides are no multiples of 16 stays as it is, as there.
"""
import math

import torch
import torch.nn.functional as F

E4M3 = torch.float8_e4m3fn
MOST = torch.finfo(E4M3).max  # 448; what lies beyond it would become NaN
LEAST = 1e-12  # of a row's largest number, so that a row of zeros has a scale
PRODUCTS = "scaled_mm", "exact"


def quantised(x):
    """e4m3 values of x, and the scale of each of its rows: the row's largest number becomes 448."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min(LEAST) / MOST
    return (x.float() / scale).clamp(-MOST, MOST).to(E4M3), scale


class Fp8Linear(torch.nn.Module):
    """In the place of a Linear, with the same output type.

    products: "scaled_mm" multiplies in fp8 by PyTorch's kernel, whose sums keep 13 bits on sm_90 (fast accumulation, torchao's default);
    "exact" multiplies the same values in the activations' own type, which holds every e4m3 number, and sums in f32 on any device.
    """

    def __init__(self, linear, products):
        super().__init__()
        weight, scale = quantised(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias, self.products = linear.bias, products

    def forward(self, x):
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        values, scale = quantised(x)
        if self.products == "scaled_mm":
            bias = None if self.bias is None else self.bias.to(dtype)
            out = torch._scaled_mm(values.flatten(0, -2).contiguous(), self.weight.t(), scale_a=scale.flatten(0, -2),
                                   scale_b=self.scale.t(), bias=bias, out_dtype=dtype, use_fast_accum=True)
            return out.unflatten(0, x.shape[:-1])
        out = F.linear(values.to(dtype), self.weight.to(dtype)) * scale * self.scale[:, 0]
        return (out if self.bias is None else out + self.bias).to(dtype)


def linears(blocks):
    """(name, layer) of every linear layer inside the blocks."""
    return [(f"blocks.{index}.{name}", linear) for index, block in enumerate(blocks) for name, linear in block.named_modules()
            if isinstance(linear, torch.nn.Linear)]


def quantise(blocks, products):
    """Puts every linear layer inside the blocks into fp8. Returns how many, and the names of those that stay as they are."""
    found, left = linears(blocks), []
    for name, linear in found:
        if not math.isfinite(linear.weight.detach().float().abs().max()):
            raise ValueError(f"{name}: its weights hold a NaN or an infinity, expected finite numbers")
        if linear.in_features % 16 or linear.out_features % 16:
            left.append(name)
        else:
            _, index, inside = name.split(".", 2)
            blocks[int(index)].set_submodule(inside, Fp8Linear(linear, products))
    return len(found) - len(left), left
