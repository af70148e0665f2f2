"""Writes PNG pictures and sheets of clips, and measures PSNR, with nothing but zlib and PyTorch."""

import struct
import zlib

import torch


def write_png(path, rgb):
    """rgb: [3, H, W] in [0, 1]."""
    pixels = (rgb.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().cpu()
    height, width, _ = pixels.shape
    rows = pixels.view(height, -1).clone()
    rows[1:] -= pixels.view(height, -1)[:-1]  # PNG's filter 2, the difference to the row above: enlarged pictures pack well
    rows = torch.cat([torch.full((height, 1), 2, dtype=torch.uint8), rows], 1)

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(rows.numpy().data), 9)
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b""))


def sheet(rows, zoom=2, gap=4):
    """rows: a list of lists of [3, H, W] pictures of one size -> one picture, nearest-neighbour enlarged."""
    height, width = rows[0][0].shape[1:]
    out = torch.ones(3, len(rows) * (height * zoom + gap) + gap, max(map(len, rows)) * (width * zoom + gap) + gap)
    for r, row in enumerate(rows):
        for c, picture in enumerate(row):
            big = picture.float().cpu().repeat_interleave(zoom, 1).repeat_interleave(zoom, 2)
            y, x = gap + r * (height * zoom + gap), gap + c * (width * zoom + gap)
            out[:, y : y + height * zoom, x : x + width * zoom] = big
    return out


def psnr(a, b, first=0):
    """Mean over clips and frames >= first of 10 log10(1 / MSE); a, b: [clips, 3, T, H, W] in [0, 1]."""
    mse = (a.float() - b.float())[:, :, first:].square().mean((1, 3, 4)).clamp_min(1e-12)
    return (-10 * mse.log10()).mean().item()


def pooled_psnr(a, b, first=0):
    """PSNR of the MSE pooled over all clips and frames >= first."""
    return -10 * (a.float() - b.float())[:, :, first:].square().mean().clamp_min(1e-12).log10().item()
