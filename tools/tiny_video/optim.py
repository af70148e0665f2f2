"""Muon for the block matrices and AdamW for the rest, as one pair of optimisers with a shared learning-rate factor.

Muon takes the momentum to its nearest orthogonal matrix before the step; on this net it reaches a given loss in
fewer steps than AdamW alone. Matrices of one shape are stepped in one batch, or launches would dominate.
"""

import math

import torch


def orthogonalise(m):
    """Five Newton-Schulz steps towards U V^T of m = U S V^T, over a batch of matrices."""
    x = m.bfloat16()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.95, weight_decay=0.01):
        shapes = {}
        for p in params:
            shapes.setdefault(tuple(p.shape), []).append(p)
        super().__init__([{"params": same} for same in shapes.values()], dict(lr=lr, momentum=momentum, decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = group["params"]
            for p in params:
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            gradient = torch.stack([p.grad for p in params])
            average = torch.stack([self.state[p]["momentum"] for p in params]).lerp_(gradient, 1 - group["momentum"])
            update = orthogonalise(gradient.lerp(average, group["momentum"])).float()
            size = 0.2 * math.sqrt(max(update.shape[-2:]))  # gives the update AdamW's typical size
            torch._foreach_mul_(params, 1 - group["lr"] * group["decay"])
            torch._foreach_add_(params, list((update * size).unbind(0)), alpha=-group["lr"])
            torch._foreach_copy_([self.state[p]["momentum"] for p in params], list(average.unbind(0)))


def make_optimisers(net, lr, kind="muon"):
    """A list of optimisers whose base learning rates are in each group's "base_lr"."""
    matrices, rest = [], []
    for name, p in net.named_parameters():
        (matrices if kind == "muon" and name.startswith("blocks.") and p.ndim == 2 else rest).append(p)
    decayed, plain = [p for p in rest if p.ndim >= 2], [p for p in rest if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    out = [torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=decayed[0].is_cuda)]
    if matrices:
        out.append(Muon(matrices, lr))
    for optimiser in out:
        for group in optimiser.param_groups:
            group["base_lr"] = lr
    return out
