"""Images built to exhaust memory or time, or to pose as another format: rejected at little cost."""

import io
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from shards.image_store import convert_image

SIGNATURE = b"\x89PNG\r\n\x1a\n"
MEGABYTE = 2**20


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _png(width: int, height: int, *extra: bytes, body: bytes = b"\0") -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [_chunk(b"IHDR", header), *extra, _chunk(b"IDAT", zlib.compress(body)), _chunk(b"IEND", b"")]
    return SIGNATURE + b"".join(chunks)


def _jpeg(width: int, height: int, **options: object) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(stream, "JPEG", **options)
    data = bytearray(stream.getvalue())
    frame = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
    data[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def _encoded(kind: str, **options: object) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(stream, kind, **options)
    return stream.getvalue()


def _gif(width: int, height: int, *blocks: bytes) -> bytes:
    """A GIF whose screen and frame claim any size, with `blocks` before the frame."""
    data = _encoded("GIF")
    frame = data.index(b",\0\0\0\0\x08\0\x08\0")
    size = struct.pack("<HH", width, height)
    return data[:6] + size + data[10:frame] + b"".join(blocks) + b",\0\0\0\0" + size + data[frame + 9 :]


def _webp(width: int, height: int) -> bytes:
    """A WebP file whose canvas claims any size."""
    canvas = bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    chunks = b"WEBPVP8X" + struct.pack("<I", 10) + canvas + _encoded("WEBP")[12:]
    return b"RIFF" + struct.pack("<I", len(chunks)) + chunks


def _tiff(width: int, height: int, *entries: bytes, body: bytes = b"") -> bytes:
    """A TIFF of one gray strip whose directory claims any size."""
    tags = {256: width, 257: height, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: height, 279: 64}
    lines = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items() if value is not None]
    lines += entries
    directory = struct.pack("<H", len(lines)) + b"".join(sorted(lines)) + bytes(4)
    return b"II*\0" + struct.pack("<I", 8 + len(body)) + body + directory


BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "png header": (lambda: _png(60_000, 60_000), "oversized"),
    "png header beyond 32 bits of pixels": (lambda: _png(2**31 - 1, 2**31 - 1), "oversized"),
    "one line": (lambda: _png(2**31 - 1, 1), "oversized"),
    "jpeg header": (lambda: _jpeg(60_000, 60_000), "oversized"),
    "progressive jpeg header": (lambda: _jpeg(60_000, 60_000, progressive=True), "oversized"),
    "no height": (lambda: _jpeg(60_000, 0), "truncated"),
    "text that unfolds": (
        lambda: _png(8, 8, _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(200 * MEGABYTE))), body=bytes(200)),
        "truncated",
    ),
    "pixels that unfold": (lambda: _png(8, 8, body=bytes(200 * MEGABYTE)), "ok"),
    "gif": (lambda: _encoded("GIF"), "ok"),
    "webp": (lambda: _encoded("WEBP"), "ok"),
    "bmp": (lambda: _encoded("BMP"), "ok"),
    "tiff": (lambda: _encoded("TIFF"), "ok"),
    "avif": (lambda: b"\0\0\0\x20ftypavif\0\0\0\0avifmif1miaf" + bytes(100), "unsupported"),
    "heic": (lambda: b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100), "unsupported"),
    "svg": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not_an_image"),
    "postscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n", "not_an_image"),
    "script behind a jpeg mark": (lambda: b"\xff\xd8\xff#!/bin/sh\nrm -r /\n", "truncated"),
    "endless markers": (lambda: b"\xff\xd8" + b"\xff\xe0\0\2" * 100_000, "truncated"),
    "endless fill bytes": (lambda: b"\xff\xd8" + b"\xff" * MEGABYTE, "truncated"),
    "endless chunks": (lambda: _png(8, 8, _chunk(b"tEXt", b"a\0b") * 100_000), "truncated"),
    "gif header": (lambda: _gif(60_000, 60_000), "oversized"),
    "gif comments of single bytes": (lambda: _gif(8, 8, b"!\xfe" + b"\1a" * MEGABYTE + b"\0"), "truncated"),
    "gif of empty extensions": (lambda: _gif(8, 8, b"!\xfe\1a\0" * 100_000), "truncated"),
    "webp canvas": (lambda: _webp(16_384, 16_384), "oversized"),
    "webp canvas beyond the format": (lambda: _webp(2**24, 2**24), "oversized"),
    "bmp header": (
        lambda: _encoded("BMP")[:18] + struct.pack("<II", 60_000, 60_000) + _encoded("BMP")[26:],
        "oversized",
    ),
    "run-length encoded bmp": (
        lambda: _encoded("BMP")[:30] + b"\1\0\0\0" + _encoded("BMP")[34:] + b"\xff\0" * MEGABYTE,
        "unsupported",
    ),
    "tiff directory": (lambda: _tiff(60_000, 60_000, body=bytes(64)), "oversized"),
    "tiff of endless strips": (
        lambda: _tiff(8, 8, struct.pack("<HHII", 273, 4, MEGABYTE, 8), body=bytes(4 * MEGABYTE)),
        "truncated",
    ),
    "tiff that lacks its strip": (lambda: _tiff(800, 800), "truncated"),
    "raw camera file": (lambda: _tiff(8, 8, struct.pack("<HHII", 254, 4, 1, 1), body=bytes(64)), "unsupported"),
    "jpeg xl": (lambda: b"\xff\x0a" + bytes(100), "unsupported"),
    "apng": (
        lambda: _encoded("PNG", save_all=True, append_images=[Image.new("RGB", (8, 8), "red")]),
        "unsupported",
    ),
}


@pytest.mark.parametrize("resize", [None, 8])
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_gets_its_verdict_for_little(name, resize):
    make, verdict = BOMBS[name]
    data = make()
    tracemalloc.start()
    start = time.process_time()
    stored = convert_image(data, resize)
    spent = time.process_time() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert stored.verdict == verdict
    assert peak < 8 * MEGABYTE + 3 * len(data)
    assert spent < 2
