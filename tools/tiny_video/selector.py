"""A plain PyTorch reference of the T/H/W selector and of random keys, for the sanity figures of the tiny video model.

Five stages for every head: group queries by K-means, encode keys with one codebook per RoPE axis, score by table
look-up, select the k best keys per group, attend. Only the fixed rule (k = density * tokens) is here.
"""

import math

import torch
import torch.nn.functional as F

RANGES = ((0, 44), (44, 86), (86, 128))


def kmeans(x, centroids, iterations):
    """x [heads, tokens, dim], centroids [heads, count, dim] -> labels, and centroids that are the means of those labels."""
    for _ in range(iterations):
        distance = centroids.square().sum(-1)[:, None] - 2 * x @ centroids.mT
        labels = distance.argmin(-1)
        index = labels[..., None].expand_as(x)
        sums = torch.zeros_like(centroids).scatter_add_(1, index, x)
        counts = torch.zeros_like(centroids[..., :1]).scatter_add_(1, labels[..., None], torch.ones_like(x[..., :1]))
        centroids = torch.where(counts > 0, sums / counts.clamp_min(1), centroids)
    return labels, centroids


class Selector:
    """attend(step, layer, q, k, v) for one sampling run of one batch; keeps warm K-means state per layer."""

    def __init__(self, density, steps, kind="thw", dense_share=0.2, first_iterations=50, iterations=2):
        self.density, self.kind = density, kind
        self.dense_steps = int(dense_share * steps)
        self.first_iterations, self.iterations = first_iterations, iterations
        self.state = {}

    def cluster(self, key, x, count, seed):
        """Warm-started K-means of x [heads, tokens, dim]; first centroids are seeded rows of x."""
        if key in self.state:
            centroids, iterations = self.state[key], self.iterations
        else:
            rows = torch.randint(x.shape[1], (count,), generator=torch.Generator().manual_seed(seed)).to(x.device)
            centroids, iterations = x[:, rows], self.first_iterations
        labels, self.state[key] = kmeans(x, centroids, iterations)
        return labels, self.state[key]

    def scores(self, layer, q, k):
        """Group labels [heads, tokens] and proxy logits [heads, groups, tokens]."""
        tokens = q.shape[1]
        groups = min(max(math.ceil(tokens / 96), 16), 300)
        codes = min(max(math.ceil(tokens / 64), 16), 333)
        labels, means = self.cluster((layer, "q"), q, groups, 0)
        if self.kind == "random":
            noise = torch.rand((*means.shape[:2], tokens), generator=torch.Generator().manual_seed(layer))
            return labels, noise.to(q.device)
        logits = 0
        for axis, (low, high) in enumerate(RANGES):
            code, book = self.cluster((layer, axis), k[..., low:high].contiguous(), codes, 1 + axis)
            table = means[..., low:high] @ book.mT
            logits = logits + table.gather(2, code[:, None].expand(-1, groups, -1))
        return labels, logits

    def select(self, layer, q, k):
        """Bool [heads, tokens, tokens]: the keys that each query reads."""
        labels, logits = self.scores(layer, q, k)
        count = math.ceil(self.density * k.shape[1])
        keep = torch.zeros_like(logits, dtype=torch.bool).scatter_(2, logits.topk(count, -1).indices, True)
        return keep.gather(1, labels[..., None].expand(-1, -1, k.shape[1]))

    def __call__(self, step, layer, q, k, v):
        if step < self.dense_steps or layer == 0:
            return F.scaled_dot_product_attention(q, k, v)
        with torch.autocast(q.device.type, enabled=False):  # K-means and scores stay in float32
            mask = self.select(layer, q.float().flatten(0, 1), k.float().flatten(0, 1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.unflatten(0, q.shape[:2]))
