"""SVOO's profile of a dense video, as `scope generate --profile-out` has it: how dense each step, layer and head is."""
from __future__ import annotations

import torch

MASS = 0.95  # SVOO's share of a query's softmax
QUERIES = 64  # of a head, one from each of as many stretches of the video


def densities(q: torch.Tensor, k: torch.Tensor, queries: int = QUERIES) -> torch.Tensor:
    """Of each head of [tokens, heads, dim]: the fewest keys that hold MASS of a query, over all keys, as a mean over queries."""
    tokens = len(q)
    queries = min(queries, tokens)
    edges = torch.arange(queries + 1) * tokens // queries
    chosen = edges[:-1] + (torch.rand(queries, generator=torch.Generator().manual_seed(0)) * edges.diff()).long()
    q = q[chosen.to(q.device)]
    found = []
    for head in range(q.shape[1]):  # one by one: 64 x 75,600 scores at 720p
        scores = (q[:, head].float() @ k[:, head].float().T) / q.shape[2]**0.5
        held = scores.softmax(1).sort(1, descending=True).values.double().cumsum(1)
        fewest = (held < MASS * held[:, -1:]).sum(1) + 1
        found.append(fewest.double().mean() / len(k))
    return torch.stack(found)


class Profile:
    """Watches an enabled pipeline that makes one video."""

    def __init__(self, pipe):
        from ..hosts import diffusers as host
        self.rows: dict[tuple[int, int], torch.Tensor] = {}  # by step and layer, on the device: nothing waits for it
        for _, processor in host.processors_of(pipe):
            processor.attend_heads = self.watched(processor)  # type: ignore[method-assign]

    def watched(self, processor):
        own = processor.attend_heads

        def attend_heads(q, k, v, mask, scale, parallel):
            expert = processor.expert
            if expert.branch_now != "uncond":
                video = slice(q.shape[1] - expert.text[0])  # text stands behind it
                self.rows[processor.run.session.video.step, processor.depth] = densities(q[0, video], k[0, video])
            return own(q, k, v, mask, scale, parallel)

        return attend_heads

    def csv(self) -> str:
        rows = [(step, layer, head, density) for (step, layer), heads in sorted(self.rows.items())
                for head, density in enumerate(heads.tolist())]
        return "step,layer,head,density\n" + "".join(f"{step},{layer},{head},{density:.6f}\n" for step, layer, head, density in rows)
