"""A line chart as a PNG, without a plotting library: enough to see whether a curve rises."""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]
INK, GRID, PAPER = (30, 30, 30), (225, 225, 225), (255, 255, 255)
COLOURS = ((31, 90, 180), (214, 96, 20), (40, 140, 60))

# 3 x 5 dots per character, rows from the top, three bits each.
_GLYPHS = {
    "0": (7, 5, 5, 5, 7), "1": (2, 6, 2, 2, 7), "2": (7, 1, 7, 4, 7), "3": (7, 1, 7, 1, 7), "4": (5, 5, 7, 1, 1),
    "5": (7, 4, 7, 1, 7), "6": (7, 4, 7, 5, 7), "7": (7, 1, 1, 2, 2), "8": (7, 5, 7, 5, 7), "9": (7, 5, 7, 1, 7),
    ".": (0, 0, 0, 0, 2), "-": (0, 0, 7, 0, 0), " ": (0, 0, 0, 0, 0), "/": (1, 1, 2, 4, 4), "@": (7, 5, 5, 4, 7),
    "a": (2, 5, 7, 5, 5), "b": (6, 5, 6, 5, 6), "c": (7, 4, 4, 4, 7), "d": (6, 5, 5, 5, 6), "e": (7, 4, 6, 4, 7),
    "f": (7, 4, 6, 4, 4), "g": (7, 4, 5, 5, 7), "h": (5, 5, 7, 5, 5), "i": (7, 2, 2, 2, 7), "j": (1, 1, 1, 5, 7),
    "k": (5, 5, 6, 5, 5), "l": (4, 4, 4, 4, 7), "m": (5, 7, 7, 5, 5), "n": (7, 5, 5, 5, 5), "o": (7, 5, 5, 5, 7),
    "p": (7, 5, 7, 4, 4), "q": (7, 5, 5, 7, 1), "r": (6, 5, 6, 5, 5), "s": (7, 4, 7, 1, 7), "t": (7, 2, 2, 2, 2),
    "u": (5, 5, 5, 5, 7), "v": (5, 5, 5, 5, 2), "w": (5, 5, 7, 7, 5), "x": (5, 5, 2, 5, 5), "y": (5, 5, 7, 2, 2),
    "z": (7, 1, 2, 4, 7),
}  # fmt: skip


def line_chart(
    file: str | Path, curves: dict[str, Sequence[tuple[float, float]]], *, title: str, width: int = 720, height: int = 400
) -> Path:
    """Draw named curves of (x, y) points into a PNG file."""
    points = [point for curve in curves.values() for point in curve]
    if not points:
        raise ValueError(f"{title}: there are no points to draw.")
    xs, ys = [x for x, _ in points], [y for _, y in points]
    left, right = min(xs), max(*xs, min(xs) + 1e-09)
    low, high = min(0.0, *ys), max(*ys, min(0.0, *ys) + 1e-09)
    image = np.full((height, width, 3), PAPER, dtype=np.uint8)
    x0, y0, x1, y1 = 60, 40, width - 20, height - 40

    def place(x: float, y: float) -> tuple[int, int]:
        return round(x0 + (x - left) / (right - left) * (x1 - x0)), round(y1 - (y - low) / (high - low) * (y1 - y0))

    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = left + share * (right - left), low + share * (high - low)
        column, row = place(x, y)
        image[row, x0:x1] = GRID
        image[y0:y1, column] = GRID
        _write(image, f"{y:.2f}", 12, row - 5)
        _write(image, f"{x:.0f}", column - 8, y1 + 10)
    _write(image, title.lower(), x0, 12, scale=3)
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        for before, after in itertools.pairwise(curve):
            _line(image, place(*before), place(*after), colour)
        _write(image, name.lower(), x1 - 9 * len(name), y1 - 20 - 16 * number, colour=colour)
    return _save(image, Path(file))


def _line(image: Image, start: tuple[int, int], end: tuple[int, int], colour: tuple[int, int, int]) -> None:
    count = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1) + 1
    columns = np.linspace(start[0], end[0], count).round().astype(int)
    rows = np.linspace(start[1], end[1], count).round().astype(int)
    for shift in (0, 1):
        image[np.clip(rows + shift, 0, image.shape[0] - 1), columns] = colour


def _write(image: Image, text: str, column: int, row: int, *, scale: int = 2, colour: tuple[int, int, int] = INK) -> None:
    for character in text:
        for down, bits in enumerate(_GLYPHS.get(character, _GLYPHS["-"])):
            for across in range(3):
                if bits >> (2 - across) & 1:
                    y, x = row + down * scale, column + across * scale
                    image[max(y, 0) : y + scale, max(x, 0) : x + scale] = colour
        column += 4 * scale


def _save(image: Image, file: Path) -> Path:
    """An 8-bit RGB PNG: signature, header, one compressed block of rows (each after a filter byte), end."""
    height, width, _ = image.shape
    rows = b"".join(b"\0" + image[row].tobytes() for row in range(height))

    def block(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + block(b"IHDR", header) + block(b"IDAT", zlib.compress(rows)) + block(b"IEND", b""))
    return file
