"""Tests the net against diffusers' WanTransformer3DModel, the selector against dense attention, and the shipped files."""

import math

import pytest
import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from safetensors import safe_open

import images
import net as net_module
import video
from sample import load, noise_levels, sample_seeds
from selector import Selector, kmeans


def inputs(grid=(3, 4, 6), batch=2):
    torch.manual_seed(1)
    t, h, w = grid
    return torch.randn(batch, 28, t, 2 * h, 2 * w), torch.tensor([500.0, 37.5])[:batch], torch.randn(batch, 8, 32)


@torch.no_grad()
def test_random_weights_give_the_output_of_diffusers():
    ours, theirs = net_module.TinyWan(), WanTransformer3DModel(**net_module.CONFIG)
    for p in ours.parameters():
        torch.nn.init.normal_(p, std=0.06)
    theirs.load_state_dict(ours.state_dict())
    a, b = ours(*inputs()), theirs(*inputs()).sample
    assert (a - b).norm() / b.norm() < 1e-5


@torch.no_grad()
def test_shipped_model_loads_into_diffusers_and_gives_our_output(bundled):
    ours = load(bundled)
    theirs, report = WanTransformer3DModel.from_pretrained(bundled, torch_dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    a, b = ours(*inputs((13, 5, 8))), theirs(*inputs((13, 5, 8))).sample
    assert (a - b).norm() / b.norm() < 1e-4


def test_shipped_model_is_small(bundled):
    assert (bundled / "diffusion_pytorch_model.safetensors").stat().st_size <= 16_000_000


def test_shipped_model_makes_a_held_out_clip(bundled):
    truth, out = sample_seeds(load(bundled), [video.HELD_OUT + 100], (13, 20, 32), steps=2)
    assert images.psnr(out, truth, 1) > 24


def test_examples_hold_a_clean_sample(bundled):
    with safe_open(bundled / "examples.safetensors", "pt") as file:
        truth = file.get_tensor("truth").permute(0, 4, 1, 2, 3).float() / 255
        tokens, dense = file.get_tensor("prompt_embeds"), video.to_rgb(file.get_tensor("dense").float())
        seeds = [int(s) for s in file.metadata()["seeds"].split(",")]
    assert images.psnr(dense, truth[:1], 1) > 24
    rgb, again = video.clips(seeds, (13, 20, 32))
    torch.testing.assert_close(tokens, again, atol=1e-5, rtol=0)
    assert (rgb - truth).abs().max() < 0.01


def test_real_heads_are_committed_and_small(data):
    paths = sorted(data.glob("tiny_wan_*.safetensors"))
    assert len(paths) >= 2 and sum(p.stat().st_size for p in paths) <= 8_000_000
    for path in paths:
        with safe_open(path, "pt") as file:
            tokens = math.prod(int(n) for n in file.metadata()["grid"].split("x"))
            assert file.metadata()["rope"] == "44,42,42"
            for name in ("q", "k", "v"):
                tensor = file.get_tensor(name)
                assert tensor.shape[1:] == (tokens, 128) and tensor.dtype == torch.bfloat16 and tensor.isfinite().all()


def test_noise_levels_run_from_one_to_zero():
    levels = noise_levels(20)
    assert len(levels) == 21 and levels[0] == 1 and levels[-1] == 0 and levels == sorted(levels, reverse=True)
    assert abs(levels[10] - 0.75) < 1e-9  # shift 3 takes one half to three quarters


def test_kmeans_centroids_are_the_means_of_their_labels():
    torch.manual_seed(0)
    x = torch.randn(2, 50, 4)
    labels, centroids = kmeans(x, x[:, :5], 3)
    for head in range(2):
        for c in range(5):
            if (labels[head] == c).any():
                torch.testing.assert_close(centroids[head, c], x[head, labels[head] == c].mean(0))


@pytest.mark.parametrize("kind", ["thw", "random"])
def test_selector_keeps_exactly_k_keys_and_density_one_is_dense(kind):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 192, 128) for _ in range(3))
    keep = Selector(0.2, 10, kind).select(1, q[0], k[0])
    assert (keep.sum(-1) == math.ceil(0.2 * 192)).all()
    dense = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(Selector(1.0, 10, kind)(5, 1, q, k, v), dense, atol=1e-5, rtol=1e-5)
    assert torch.equal(Selector(0.2, 10, kind)(0, 1, q, k, v), dense)  # dense prefix


def test_selector_recalls_more_mass_than_random_on_a_real_head(data):
    path = next(p for p in sorted(data.glob("*.safetensors")) if "13x10x16" in p.name)
    with safe_open(path, "pt") as file:
        q, k = file.get_tensor("q").float(), file.get_tensor("k").float()
    p = torch.softmax(q @ k.mT / math.sqrt(128), -1)
    recall = {kind: (p * Selector(0.2, 10, kind).select(1, q, k)).sum(-1).mean().item() for kind in ("thw", "random")}
    assert recall["thw"] > recall["random"] + 0.2, recall


@torch.no_grad()
def test_a_net_without_a_norm_before_cross_attention_gives_the_output_of_diffusers():
    config = net_module.CONFIG | dict(cross_attn_norm=False, eps=1e-5)
    ours, theirs = net_module.TinyWan(config), WanTransformer3DModel(**config)
    for p in ours.parameters():
        torch.nn.init.normal_(p, std=0.06)
    theirs.load_state_dict(ours.state_dict())
    a, b = ours(*inputs()), theirs(*inputs()).sample
    assert (a - b).norm() / b.norm() < 1e-5
