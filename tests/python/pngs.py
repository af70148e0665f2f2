"""Reads and writes 8-bit RGB .png with numpy and zlib alone, independently of libpng."""
import os
import struct
import zlib

import numpy as np


def read(data):
    """[height, width, 3]; all five filters."""
    at, packed = 8, b""
    while at < len(data):
        size, name = struct.unpack(">I4s", data[at:at + 8])
        if name == b"IHDR":
            width, height, depth, colour = struct.unpack(">IIBB", data[at + 8:at + 18])
            assert (depth, colour) == (8, 2)
        if name == b"IDAT":
            packed += data[at + 8:at + 8 + size]
        at += size + 12
    raw = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, 1 + width * 3)
    rows = np.zeros((height + 1, width * 3 + 3), np.int64)  # a row and a pixel of zeros in front
    for y in range(height):
        kind = raw[y, 0]
        for i in range(width * 3):
            left, up, corner = rows[y + 1, i], rows[y, i + 3], rows[y, i]
            guess = left + up - corner
            paeth = min((abs(guess - left), 0, left), (abs(guess - up), 1, up), (abs(guess - corner), 2, corner))[2]
            rows[y + 1, i + 3] = (raw[y, 1 + i] + (0, left, up, (left + up) // 2, paeth)[kind]) % 256
    return rows[1:, 3:].reshape(height, width, 3)


def write(path, image):
    height, width, _ = image.shape
    lines = b"".join(b"\0" + row.astype(np.uint8).tobytes() for row in image)

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)) +
                   chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b""))


def clip(folder, frames, first=0):
    """A folder of frames, numbered from the first on."""
    os.makedirs(folder)
    for number, frame in enumerate(frames, first):
        write(os.path.join(folder, f"frame_{number:03}.png"), frame)
    return folder


def slopes(height=16, width=24, shade=0):
    """An image that differs everywhere; of this size, a first frame for the bundled model at a grid of 5x4x6."""
    return ((7 * np.arange(3 * width) + 3 * np.arange(height)[:, None] + shade) % 256).reshape(height, width, 3)
