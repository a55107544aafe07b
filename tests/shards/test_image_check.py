"""Verdicts on untrusted bytes, and the one decode."""

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from shards.image_check import MAX_BYTES, VERDICTS, UndecodableImage, decode_rgb
from tests.support.pictures import encoded, picture


def _verdict(data: bytes) -> str:
    try:
        decode_rgb(data)
    except UndecodableImage as problem:
        return problem.verdict
    return "ok"


def _png_of_size(width: int, height: int) -> bytes:
    """A small PNG whose header claims any size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body + chunk(b"IEND", b"")


def _animated() -> bytes:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    return encoded(frames[0], "PNG", save_all=True, append_images=frames[1:])


@pytest.mark.parametrize(
    ("data", "verdict"),
    [
        (picture(), "ok"),
        (picture(kind="JPEG"), "ok"),
        (picture()[:-40], "truncated"),
        (picture(kind="JPEG")[:-40], "truncated"),
        (picture(kind="JPEG")[:8], "truncated"),
        (picture()[:20], "truncated"),
        (_png_of_size(30, 40), "truncated"),
        (_png_of_size(10_000, 10_000), "oversized"),
        (_png_of_size(2**31 - 1, 2**31 - 1), "oversized"),
        (_png_of_size(5001, 10_000), "oversized"),
        (picture() + bytes(MAX_BYTES), "oversized"),
        (b"", "not_an_image"),
        (b"<!DOCTYPE html><html>404</html>", "not_an_image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "not_an_image"),
        (picture(kind="GIF"), "ok"),
        (picture(kind="WEBP"), "ok"),
        (picture(kind="BMP"), "ok"),
        (picture(kind="TIFF"), "ok"),
        (_animated(), "unsupported"),
        (b"RIFF\x24\0\0\0WAVEfmt ", "not_an_image"),
        (b"BMW is a car, and this is a text about it", "not_an_image"),
        (encoded(Image.fromarray(np.ones((4, 6), np.float32)), "TIFF"), "unsupported"),
        (encoded(Image.new("LAB", (6, 4)), "TIFF"), "unsupported"),
        *((picture(width=60, height=60, kind=kind)[:-40], "truncated") for kind in ("GIF", "WEBP", "BMP")),
    ],
)
def test_verdicts(data, verdict):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _verdict(data) == verdict


STARTS = [
    b"",
    b"\xff\xd8\xff",
    b"\x89PNG\r\n\x1a\n",
    b"GIF89a",
    b"RIFF\0\0\0\0WEBP",
    b"II*\0",
    b"MM\0*\0\0\0\x08",
    b"BM",
]


@given(st.binary(max_size=200), st.sampled_from(STARTS))
def test_any_bytes_get_a_verdict(data, start):
    assert _verdict(start + data) in VERDICTS


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 255), st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"]))
def test_a_changed_byte_never_raises(place, value, kind):
    data = bytearray(picture(kind=kind))
    data[place % len(data)] = value
    assert _verdict(bytes(data)) in VERDICTS


def test_a_png_decodes_to_its_pixels_and_they_are_writable():
    pixels = np.random.default_rng(3).integers(0, 256, (5, 9, 3), dtype=np.uint8)
    decoded = decode_rgb(encoded(Image.fromarray(pixels), "PNG"))
    np.testing.assert_array_equal(decoded, pixels)
    assert decoded.flags.writeable


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_as_pillow_applies_it(orientation, kind):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(decode_rgb(picture()))
    data = encoded(image, kind, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    np.testing.assert_array_equal(decode_rgb(data), np.asarray(upright))
    assert decode_rgb(data).shape == ((20, 14, 3) if orientation > 4 else (14, 20, 3))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_broken_exif_turns_nothing():
    data = encoded(Image.new("RGB", (6, 4)), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xffgarbage")
    assert _verdict(data) == "ok"


def test_every_mode_becomes_rgb():
    rgb = decode_rgb(picture())
    image = Image.fromarray(rgb)
    alpha = image.copy()
    alpha.putalpha(7)
    np.testing.assert_array_equal(decode_rgb(encoded(alpha, "PNG")), rgb)
    gray = image.convert("L")
    np.testing.assert_array_equal(decode_rgb(encoded(gray, "PNG"))[:, :, 2], np.asarray(gray))
    wide = Image.fromarray(np.asarray(gray).astype(np.uint16) * 257)
    np.testing.assert_array_equal(decode_rgb(encoded(wide, "PNG"))[:, :, 1], np.asarray(gray))
    palette = image.quantize(16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoded = decode_rgb(encoded(palette, "PNG", transparency=bytes(range(16))))
    np.testing.assert_array_equal(decoded, np.asarray(palette.convert("RGB")))
    assert decode_rgb(encoded(image.convert("1"), "PNG")).max() == 255
    assert _verdict(encoded(image.convert("CMYK"), "JPEG")) == "ok"


def test_decoding_says_why_it_cannot():
    with pytest.raises(UndecodableImage) as caught:
        decode_rgb(b"<html>")
    assert caught.value.verdict == "not_an_image"
