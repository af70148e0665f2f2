"""comfy-kitchen as it is: its Sol-Attn runs on the CPU, as a peer at the same density."""
from __future__ import annotations

import comfy_kitchen
import pytest
import torch

BLOCK, BLOCKS, HEADS, DIM = 64, 10, 2, 128


@pytest.fixture
def qkv():
    return torch.randn(3, 1, BLOCK * BLOCKS, HEADS, DIM, generator=torch.Generator().manual_seed(1))


def dense(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def density(q, k, **given) -> float:
    """Share of key blocks that are attended exactly: channel j of the values marks block j, and without the tail only kept blocks show."""
    marks = torch.eye(BLOCKS, DIM).repeat_interleave(BLOCK, 0)[None, :, None].expand(q.shape).contiguous()
    seen = comfy_kitchen.sol_attn(q, k, marks, tail=False, **given)[..., :BLOCKS] > 0
    assert (seen.unflatten(1, (BLOCKS, BLOCK)).float().std(2) == 0).all(), "the queries of a block share their keys"
    return seen.float().mean().item()


def test_the_cpu_takes_the_reference():
    assert not comfy_kitchen.sol_attn_is_available(torch.device("cpu"))
    assert comfy_kitchen.registry.get_implementation("sol_attn").__module__.endswith("eager.sol_attn")


def test_all_blocks_are_dense_attention(qkv):
    assert (comfy_kitchen.sol_attn(*qkv, tau=-100.0) - dense(*qkv)).abs().max() < 1e-5
    assert (comfy_kitchen.sol_attn(*qkv, tau=100.0, sink_q=[0, BLOCKS]) - dense(*qkv)).abs().max() < 1e-5


def test_density(qkv):
    """tau and topk_ratio set it; the block itself and its two neighbours are always kept."""
    q, k, v = qkv
    forced = (3 * BLOCKS - 2) / BLOCKS**2
    assert density(q, k, tau=100.0) == pytest.approx(forced) and density(q, k, tau=-100.0) == 1
    assert forced < density(q, k, tau=1.0) < density(q, k, tau=0.0) < 1
    assert 0.5 <= density(q, k, topk_ratio=0.5) < 0.5 + forced
    errors = [(comfy_kitchen.sol_attn(q, k, v, tau=tau) - dense(q, k, v)).abs().max() for tau in (-1.0, 100.0)]
    assert 1e-4 < errors[0] < errors[1]
