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
    "gif named jpg": (lambda: _encoded("GIF"), "unsupported"),
    "webp": (lambda: _encoded("WEBP"), "unsupported"),
    "bmp": (lambda: _encoded("BMP"), "unsupported"),
    "tiff": (lambda: _encoded("TIFF"), "unsupported"),
    "avif": (lambda: b"\0\0\0\x20ftypavif\0\0\0\0avifmif1miaf" + bytes(100), "unsupported"),
    "heic": (lambda: b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100), "unsupported"),
    "svg": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not_an_image"),
    "postscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n", "not_an_image"),
    "script behind a jpeg mark": (lambda: b"\xff\xd8\xff#!/bin/sh\nrm -r /\n", "truncated"),
    "endless markers": (lambda: b"\xff\xd8" + b"\xff\xe0\0\2" * 100_000, "truncated"),
    "endless fill bytes": (lambda: b"\xff\xd8" + b"\xff" * MEGABYTE, "truncated"),
    "endless chunks": (lambda: _png(8, 8, _chunk(b"tEXt", b"a\0b") * 100_000), "truncated"),
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
    start = time.perf_counter()
    stored = convert_image(data, resize)
    spent = time.perf_counter() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert stored.verdict == verdict
    assert peak < 8 * MEGABYTE + 3 * len(data)
    assert spent < 2
