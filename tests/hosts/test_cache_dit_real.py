"""cache-dit as it is, with enable(), in either order."""
from __future__ import annotations

import cache_dit
import pytest
import torch

import scope_attn
import tiny_pipelines as tiny


def cached(pipe):
    """A cache that skips blocks: without a warm-up, with a wide threshold."""
    cache_dit.enable_cache(pipe, cache_config=cache_dit.DBCacheConfig(
        Fn_compute_blocks=1, Bn_compute_blocks=0, max_warmup_steps=2, residual_diff_threshold=0.5, num_inference_steps=tiny.STEPS))
    return pipe


@pytest.mark.parametrize("cache_first", [True, False])
def test_stacks(cache_first):
    """At density 1 the cached video to rounding, with the calls that the cache leaves; at 0.2 another."""
    plain = tiny.make_wan(tiny.wan())
    expected = tiny.make_wan(cached(tiny.wan()))
    assert (expected - plain).abs().max() > 1e-4, "blocks are skipped"
    for density, least, most in ((1, 0, tiny.ROUNDING), (0.2, 1e-3, 10)):
        pipe = tiny.wan()
        given = dict(target_density=density, min_tokens=0)
        if cache_first:
            scope_attn.enable(cached(pipe), **given)
        else:
            scope_attn.enable(pipe, **given)
            cached(pipe)
        difference = (tiny.make_wan(pipe) - expected).abs().max()
        assert least <= difference < most
        calls = scope_attn.receipt(pipe).calls
        assert any(call.sparse for call in calls) and len(calls) < 2 * 3 * tiny.STEPS


RANKS = 2
OF_EACH_HEAD = dict(target_density=0.2, target_scope="head", min_tokens=256)  # which a rank's share of the tokens is below


def work(rank, folder, enabled_first):
    """One rank of cache-dit's context parallelism: a video, and what is said of a ring."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch._C._get_accelerator = lambda *given: torch.device("cpu")
    said = []
    for degrees in (dict(ulysses_size=RANKS), dict(ring_size=RANKS)):
        pipe = tiny.wan(heads=4)
        try:
            if enabled_first:
                scope_attn.enable(pipe, **OF_EACH_HEAD)
            cache_dit.enable_cache(pipe, parallelism_config=cache_dit.ParallelismConfig(**degrees))
            if not enabled_first:
                scope_attn.enable(pipe, **OF_EACH_HEAD)
            said.append((tiny.make_wan(pipe, text_tokens=32), scope_attn.receipt(pipe).to_dict()))
        except RuntimeError as error:
            said.append(str(error))
    torch.save(said, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("enabled_first", [True, False])  # in processes of their own, since cache-dit changes diffusers' classes
def test_context_parallelism(tmp_path, enabled_first):
    """Ranks of cache-dit's Ulysses give the bits of one, and a ring is refused."""
    torch.multiprocessing.spawn(work, (str(tmp_path), enabled_first), nprocs=RANKS)
    pipe = tiny.wan(heads=4)
    scope_attn.enable(pipe, **OF_EACH_HEAD)
    expected = tiny.make_wan(pipe, text_tokens=32)
    for rank in range(RANKS):
        (latents, receipt), ring = torch.load(tmp_path / f"{rank}.pt")
        assert (latents == expected).all()
        assert (receipt["ranks"], receipt["rank"]) == (RANKS, rank) and any(call["sparse"] for call in receipt["calls"])
        assert "context parallelism: got ring_degree=2, expected ulysses_degree alone" in ring
