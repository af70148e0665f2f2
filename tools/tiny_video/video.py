"""Makes seeded procedural video clips on any device, and the condition tokens that describe their motion.

A clip is a wallpaper background that pans, zooms inward and spins, with 3 to 6 textured sprites that cross it,
rotate and hide one another while the light changes. Everything is a function of (seed, grid): nothing is loaded.
Lengths are in pixels from the frame's centre; time s runs from 0 (first frame) to 1 (last frame).
"""

import math
import sys

import torch

PATCH = 4  # pixels per token side: 2x2 unshuffle, then Wan's 1x2x2 patch
UNIT = 64.0  # pixels per unit of the condition and of the guide channels, the same for every grid
SPRITES = 6
TOKENS, FEATURES = 2 + SPRITES, 32  # camera, light, sprites
LATENT_SCALE = 4.0  # latent = (rgb - 0.5) * LATENT_SCALE has a standard deviation near that of the noise
HELD_OUT = 1 << 40  # seeds from here on are never trained on


def parse_grid(text):
    """"13x20x32" -> (13, 20, 32): frames, rows and columns of tokens."""
    grid = tuple(int(n) for n in text.split("x"))
    if len(grid) != 3 or min(grid) < 1:
        raise ValueError(f"a grid is three positive numbers such as 13x20x32, not {text}")
    return grid


def uniform(seeds, count):
    """[clips] int64 -> [clips, count] in [0, 1): mixed from (seed, index) as in splitmix64, the same on every device."""
    index = torch.arange(1, count + 1, device=seeds.device)
    x = seeds[:, None] * -7046029254386353131 + index * -4658895280553007687
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return ((x >> 40) & 0xFFFFFF).float() / (1 << 24)


def scene(seeds, grid):
    """Draws every parameter of the clips: a dict of tensors that start with [clips]."""
    _, rows, cols = grid
    height, width = rows * PATCH, cols * PATCH
    numbers, used = uniform(seeds, 256), 0

    def draw(*shape, low=0.0, high=1.0):
        nonlocal used
        n = math.prod(shape)
        out = numbers[:, used : used + n].view(-1, *shape) * (high - low) + low
        used += n
        return out

    def sign(*shape):
        return torch.where(draw(*shape) < 0.5, -1.0, 1.0)

    p = {}
    # Camera: the background is periodic, so whatever a pan or spin brings in was visible somewhere in frame 0.
    p["pan"] = torch.stack([draw(low=0.1, high=0.4) * width * sign(), draw(low=0.0, high=0.25) * height * sign()], -1)
    p["zoom"] = draw(low=0.0, high=0.25)  # natural log of the final magnification
    p["spin"] = draw(low=-0.15, high=0.15)
    p["light"] = draw(low=-0.35, high=0.3)[:, None] + draw(3, low=-0.08, high=0.08)
    # Background: two fields of four plane waves with whole periods in (width / 2, height).
    length, angle = draw(8, low=14.0, high=44.0), draw(8, high=2 * math.pi)
    kx = torch.round(width / 2 / length * torch.cos(angle))
    ky = torch.round(height / length * torch.sin(angle))
    kx = torch.where((kx == 0) & (ky == 0), 1.0, kx)
    p["wave"] = 2 * math.pi * torch.stack([kx / (width / 2), ky / height], -1)
    p["phase"] = draw(8, high=2 * math.pi)
    p["colours"] = draw(3, 3, low=0.1, high=0.7)
    # Sprites, painted in order: a later one hides an earlier one.
    start = torch.stack([draw(SPRITES, low=-0.42, high=0.42) * width, draw(SPRITES, low=-0.38, high=0.38) * height], -1)
    travel, slope = draw(SPRITES, low=0.2, high=0.6) * width, draw(SPRITES, low=0.0, high=0.6)
    inward = -torch.where(start < 0, -1.0, 1.0)  # paths cross the frame, so sprites meet
    p["start"] = start
    p["move"] = torch.stack([travel * torch.cos(slope), travel * torch.sin(slope)], -1) * inward
    p["radius"] = draw(SPRITES, low=0.10, high=0.17) * height
    p["turn"] = draw(SPRITES, low=-0.8, high=0.8)
    p["lobes"], p["lobe_depth"] = torch.floor(draw(SPRITES, low=2, high=6)), draw(SPRITES, high=0.22)
    angle, length = draw(SPRITES, high=2 * math.pi), draw(SPRITES, low=9.0, high=18.0)
    p["stripe"] = 2 * math.pi * torch.stack([torch.cos(angle), torch.sin(angle)], -1) / length[..., None]
    p["stripe_phase"] = draw(SPRITES, 2, high=2 * math.pi)
    p["checked"] = (draw(SPRITES) < 0.5).float()
    p["sprite_colours"] = draw(SPRITES, 2, 3, low=0.05, high=0.75)
    p["present"] = (torch.arange(SPRITES, device=seeds.device) < 3 + torch.floor(draw()[:, None] * 4)).float()
    return p


def render(p, grid):
    """Paints the clips: [clips, 3, frames, height, width] in [0, 1]."""
    frames, rows, cols = grid
    device = p["pan"].device
    s = torch.arange(frames, device=device).view(-1, 1, 1) / max(frames - 1, 1)
    y = (torch.arange(rows * PATCH, device=device) + 0.5 - rows * PATCH / 2).view(1, -1, 1)
    x = (torch.arange(cols * PATCH, device=device) + 0.5 - cols * PATCH / 2).view(1, 1, -1)

    def per_clip(value):  # [clips] -> broadcast over frames, height, width
        return value.view(-1, 1, 1, 1)

    def rotate(angle, x, y):
        cos, sin = torch.cos(angle), torch.sin(angle)
        return cos * x + sin * y, cos * y - sin * x

    shrink = torch.exp(-per_clip(p["zoom"]) * s)
    bx, by = rotate(per_clip(p["spin"]) * s, x, y)
    bx = bx * shrink - per_clip(p["pan"][:, 0]) * s
    by = by * shrink - per_clip(p["pan"][:, 1]) * s
    fields = []
    for first in (0, 4):
        waves = [
            torch.cos(per_clip(p["wave"][:, k, 0]) * bx + per_clip(p["wave"][:, k, 1]) * by + per_clip(p["phase"][:, k]))
            for k in range(first, first + 4)
        ]
        fields.append(sum(waves) / math.sqrt(2))
    blend, tone = torch.sigmoid(2 * fields[0]), 0.3 * fields[1]
    one, two, three = (p["colours"][:, i].view(-1, 3, 1, 1, 1) for i in range(3))
    image = one + (two - one) * blend[:, None] + (three - 0.4) * tone[:, None]

    for i in range(SPRITES):
        u = x - per_clip(p["start"][:, i, 0]) - per_clip(p["move"][:, i, 0]) * s
        v = y - per_clip(p["start"][:, i, 1]) - per_clip(p["move"][:, i, 1]) * s
        u, v = rotate(per_clip(p["turn"][:, i]) * s, u, v)
        outline = 1 + per_clip(p["lobe_depth"][:, i]) * torch.cos(per_clip(p["lobes"][:, i]) * torch.atan2(v, u))
        inside = per_clip(p["radius"][:, i]) * outline - torch.sqrt(u * u + v * v + 1e-6)
        alpha = torch.sigmoid(2 * inside) * per_clip(p["present"][:, i])  # edge about two pixels wide
        ax, ay = per_clip(p["stripe"][:, i, 0]), per_clip(p["stripe"][:, i, 1])
        stripe = torch.sin(ax * u + ay * v + per_clip(p["stripe_phase"][:, i, 0]))
        across = torch.sin(ax * v - ay * u + per_clip(p["stripe_phase"][:, i, 1]))
        checked = per_clip(p["checked"][:, i])
        blend = torch.sigmoid(4 * stripe * (checked * across + 1 - checked))
        dark, bright = (p["sprite_colours"][:, i, j].view(-1, 3, 1, 1, 1) for j in range(2))
        image = image + alpha[:, None] * (dark + (bright - dark) * blend[:, None] - image)

    return (image * (1 + p["light"].view(-1, 3, 1, 1, 1) * s)).clamp(0, 1)


def condition(p):
    """Motion as tokens [clips, 8, 32]; docs/notebook/tiny_video.md lists the features. Appearance is not in them."""
    clips = p["pan"].shape[0]
    out = torch.zeros(clips, TOKENS, FEATURES, device=p["pan"].device)
    out[:, :, :TOKENS] = torch.eye(TOKENS, device=out.device)
    out[:, 0, 20:22] = p["pan"] / UNIT
    out[:, 0, 22], out[:, 0, 23] = p["zoom"], p["spin"]
    out[:, 1, 24:27] = p["light"]
    start, move, radius = p["start"] / UNIT, p["move"] / UNIT, p["radius"] / UNIT
    # Squares and products let attention compare a place with start + s * move in one dot product.
    features = [start, move, radius, p["turn"], (start * start).sum(-1), (move * move).sum(-1), (start * move).sum(-1)]
    features = torch.cat([f if f.ndim == 3 else f[..., None] for f in features], -1)
    out[:, 2:, 8] = p["present"]
    out[:, 2:, 9:18] = features * p["present"][..., None]
    return out


def to_latent(rgb):
    """[clips, 3, T, H, W] -> [clips, 12, T, H/2, W/2], channel = 4 * colour + 2 * row + column."""
    b, c, t, h, w = rgb.shape
    x = rgb.view(b, c, t, h // 2, 2, w // 2, 2).permute(0, 1, 4, 6, 2, 3, 5)
    return (x.reshape(b, c * 4, t, h // 2, w // 2) - 0.5) * LATENT_SCALE


def to_rgb(latent):
    """The inverse of to_latent, clamped to [0, 1]."""
    b, c, t, h, w = latent.shape
    x = latent.view(b, c // 4, 2, 2, t, h, w).permute(0, 1, 4, 5, 2, 6, 3)
    return (x.reshape(b, c // 4, t, h * 2, w * 2) / LATENT_SCALE + 0.5).clamp(0, 1)


def image_condition(latent):
    """What is concatenated to the noisy latent: 4 guide channels (first-frame mask, s, y, x) and the clean first frame.

    Wan's image-to-video has four mask channels at this place; the three spare ones carry coordinates, because a purely
    relative RoPE does not tell the net where in the frame a token is, and the condition speaks of places.
    """
    b, _, t, h, w = latent.shape
    guide = torch.zeros(4, t, h, w, device=latent.device)
    guide[0, 0] = 1
    guide[1] = (torch.arange(t, device=latent.device) / max(t - 1, 1)).view(-1, 1, 1)
    guide[2] = ((torch.arange(h, device=latent.device) + 0.5 - h / 2) * 2 / UNIT).view(1, -1, 1)
    guide[3] = ((torch.arange(w, device=latent.device) + 0.5 - w / 2) * 2 / UNIT).view(1, 1, -1)
    first = torch.zeros_like(latent)
    first[:, :, 0] = latent[:, :, 0]
    return torch.cat([guide.expand(b, -1, -1, -1, -1).to(latent.dtype), first], 1)


def clips(seeds, grid, device="cpu"):
    """(rgb [clips, 3, T, H, W], tokens [clips, 8, 32]) of the seeds."""
    p = scene(torch.tensor(list(seeds), dtype=torch.int64, device=device), grid)
    return render(p, grid), condition(p)


if __name__ == "__main__":  # python video.py clips.png: a contact sheet of eight held-out clips at five times
    from images import sheet, write_png

    rgb, _ = clips(range(HELD_OUT, HELD_OUT + 8), (13, 20, 32))
    write_png(sys.argv[1], sheet([[clip[:, t] for t in (0, 3, 6, 9, 12)] for clip in rgb]))
