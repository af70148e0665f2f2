"""Tests the clip generator: seeded, the same alone and in a batch, described by its tokens, and moving enough."""

import torch

import images
import video

SMALL = (5, 10, 16)


def test_random_numbers_are_fixed_for_ever():
    numbers = video.uniform(torch.tensor([0, 1, video.HELD_OUT]), 3)
    again = video.uniform(torch.tensor([video.HELD_OUT]), 3)
    assert torch.equal(numbers[2:], again)
    expected = torch.tensor([[0.9492, 0.16499, 0.4223], [0.89348, 0.02128, 0.2043]])
    torch.testing.assert_close(numbers[:2], expected, atol=1e-5, rtol=0)


def test_random_numbers_are_uniform():
    numbers = video.uniform(torch.arange(4096), 64)
    assert numbers.min() >= 0 and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.005 and abs(numbers.var() - 1 / 12) < 0.002
    assert abs(torch.corrcoef(numbers[:, :8].T) - torch.eye(8)).max() < 0.08


def test_clip_alone_equals_itself_in_a_batch():
    batch, tokens = video.clips([3, 4, 5], SMALL)
    alone, token = video.clips([4], SMALL)
    torch.testing.assert_close(batch[1:2], alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(tokens[1:2], token)
    assert (batch[0] - batch[1]).abs().max() > 0.1


def test_clips_are_finite_rgb_at_every_grid():
    for grid in ((1, 2, 2), (2, 3, 5), SMALL):
        rgb, tokens = video.clips(range(4), grid)
        assert rgb.shape == (4, 3, grid[0], grid[1] * 4, grid[2] * 4) and tokens.shape == (4, 8, 32)
        assert rgb.isfinite().all() and tokens.isfinite().all() and rgb.min() >= 0 and rgb.max() <= 1


def test_latent_round_trip():
    rgb, _ = video.clips([0], SMALL)
    torch.testing.assert_close(video.to_rgb(video.to_latent(rgb)), rgb, atol=1e-6, rtol=0)


def test_latent_channel_order():
    rgb = torch.zeros(1, 3, 1, 4, 4)
    rgb[0, 2, 0, 1, 2] = 1  # blue, row 1, column 2 -> channel 4*2 + 2*1 + 0 at (0, 1)
    latent = video.to_latent(rgb) / video.LATENT_SCALE + 0.5
    assert latent[0, 10, 0, 0, 1] == 1 and latent.sum() == 1


def test_tokens_hold_the_motion():
    p = video.scene(torch.tensor([9]), SMALL)
    tokens = video.condition(p)[0]
    torch.testing.assert_close(tokens[0, 20:22] * video.UNIT, p["pan"][0])
    torch.testing.assert_close(tokens[1, 24:27], p["light"][0])
    torch.testing.assert_close(tokens[2, 11:13] * video.UNIT, p["move"][0, 0])
    assert torch.equal(tokens[2:, 8], p["present"][0]) and 3 <= p["present"].sum() <= 6


def test_image_condition_shows_only_the_first_frame():
    latent = torch.randn(2, 12, 4, 6, 8)
    out = video.image_condition(latent)
    assert out.shape == (2, 16, 4, 6, 8)
    assert torch.equal(out[:, 4:, 0], latent[:, :, 0]) and out[:, 4:, 1:].abs().max() == 0
    assert (out[:, 0, 0] == 1).all() and (out[:, 0, 1:] == 0).all()


def test_clips_move_enough():
    rgb, _ = video.clips([video.HELD_OUT + i for i in range(8)], (13, 20, 32))
    assert images.psnr(rgb[:, :, :1].expand_as(rgb), rgb, 1) < 22


def test_psnr_of_a_known_error():
    a = torch.zeros(1, 3, 2, 4, 4)
    assert abs(images.psnr(a, a + 0.1) - 20) < 1e-4 and abs(images.pooled_psnr(a, a + 0.1) - 20) < 1e-4
