"""Stored images: one format, decoded alike by every decoder, and kept unchanged if already in it."""

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from shards.image_check import UndecodableImage, decode_rgb
from shards.image_store import CONVERSIONS, LONGEST_SIDE, convert_image, fit_size
from tests.support.pictures import encoded, picture, smooth


def _turned(orientation: int, kind: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(smooth(40, 26), kind, exif=exif)


def _rgb_coded() -> bytes:
    return encoded(smooth(40, 26), "JPEG", keep_rgb=True, quality=95)


def _deep(mode: str) -> bytes:
    """A PNG of 16 bits: gray, or RGB, which Pillow reads and does not write."""
    gray = np.asarray(smooth(40, 26).convert("L")).astype(np.uint16) * 257
    if mode == "gray":
        return encoded(Image.fromarray(gray), "PNG")
    lines = np.repeat(gray[:, :, None], 3, axis=2).astype(">u2")
    body = b"".join(b"\0" + line.tobytes() for line in lines)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 40, 26, 16, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


def _translucent() -> Image.Image:
    image = smooth(40, 26)
    image.putalpha(90)
    return image


def _with_alpha(mode: str) -> bytes:
    image = smooth(40, 26).convert(mode)
    image.putalpha(90)
    return encoded(image, "PNG")


KEPT = {
    "jpeg": encoded(smooth(40, 26), "JPEG"),
    "jpeg without subsampling": encoded(smooth(40, 26), "JPEG", subsampling=0),
    "gray jpeg": encoded(smooth(40, 26).convert("L"), "JPEG"),
    "progressive jpeg": encoded(smooth(40, 26), "JPEG", progressive=True),
    "jpeg with upright exif": _turned(1, "JPEG"),
    "png": encoded(smooth(40, 26), "PNG"),
    "gray png": encoded(smooth(40, 26).convert("L"), "PNG"),
}
CONVERTED = {
    "cmyk": (encoded(smooth(40, 26).convert("CMYK"), "JPEG"), ("cmyk",)),
    "rgb coded": (_rgb_coded(), ("rgb_coded",)),
    "palette": (encoded(smooth(40, 26).quantize(200), "PNG"), ("palette",)),
    "small palette": (encoded(smooth(40, 26).quantize(4), "PNG"), ("bit_depth", "palette")),
    "transparent palette": (
        encoded(smooth(40, 26).quantize(200), "PNG", transparency=bytes(range(200))),
        ("palette", "alpha"),
    ),
    "transparent color": (encoded(smooth(40, 26), "PNG", transparency=(9, 9, 9)), ("alpha",)),
    "transparent gray": (encoded(smooth(40, 26).convert("L"), "PNG", transparency=9), ("alpha",)),
    "rgba": (_with_alpha("RGB"), ("alpha",)),
    "gray alpha": (_with_alpha("L"), ("alpha",)),
    "16-bit gray": (_deep("gray"), ("bit_depth",)),
    "16-bit rgb": (_deep("rgb"), ("bit_depth",)),
    "1 bit": (encoded(smooth(40, 26).convert("1"), "PNG"), ("bit_depth",)),
    "turned jpeg": (_turned(6, "JPEG"), ("upright",)),
    "mirrored png": (_turned(2, "PNG"), ("upright",)),
}


def _frames(kind: str) -> bytes:
    return encoded(smooth(40, 26), kind, save_all=True, append_images=[Image.new("RGB", (40, 26), "red")])


OTHER = {  # name: (file, conversions, suffix without resizing)
    "lossy webp": (encoded(smooth(40, 26), "WEBP", quality=95), ("webp",), "jpg"),
    "lossless webp": (encoded(smooth(40, 26), "WEBP", lossless=True), ("webp",), "png"),
    "webp with alpha": (encoded(_translucent(), "WEBP", lossless=True), ("alpha", "webp"), "png"),
    "turned webp": (_turned(6, "WEBP"), ("upright", "webp"), "jpg"),
    "animated webp": (_frames("WEBP"), ("webp", "first_frame"), "jpg"),
    "gif": (encoded(smooth(40, 26), "GIF"), ("gif",), "png"),
    "gray gif": (encoded(smooth(40, 26).convert("L"), "GIF"), ("gif",), "png"),
    "animated gif": (_frames("GIF"), ("gif", "first_frame"), "png"),
    "bmp": (encoded(smooth(40, 26), "BMP"), ("bmp",), "png"),
    "bmp with a palette": (encoded(smooth(40, 26).quantize(16, dither=Image.Dither.NONE), "BMP"), ("bmp",), "png"),
    "tiff": (encoded(smooth(40, 26), "TIFF"), ("tiff",), "png"),
    "deflated tiff": (encoded(smooth(40, 26), "TIFF", compression="tiff_adobe_deflate"), ("tiff",), "png"),
    "16-bit tiff": (
        encoded(Image.fromarray(np.asarray(smooth(40, 26).convert("L")).astype(np.uint16) * 257), "TIFF"),
        ("tiff",),
        "png",
    ),
    "tiff of a jpeg": (encoded(smooth(40, 26), "TIFF", compression="jpeg"), ("tiff",), "jpg"),
    "cmyk tiff": (encoded(smooth(40, 26).convert("CMYK"), "TIFF"), ("tiff",), "png"),
    "tiff of pages": (_frames("TIFF"), ("tiff", "first_frame"), "png"),
    "turned tiff": (_turned(6, "TIFF"), ("tiff",), "png"),
}


@pytest.mark.parametrize("resize", [None, 13])
@pytest.mark.parametrize("name", OTHER)
def test_other_formats_are_stored_as_jpeg_or_png(name, resize):
    data, kinds, suffix = OTHER[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stored = convert_image(data, resize)
    assert stored.verdict == "ok"
    assert set(stored.converted) - {"resized"} == set(kinds)
    assert stored.suffix == (suffix if resize is None else "jpg")
    again = Image.open(io.BytesIO(stored.data))
    assert again.format == {"jpg": "JPEG", "png": "PNG"}[stored.suffix]
    assert again.size == (stored.width, stored.height)
    assert not again.getexif()
    wanted = decode_rgb(data)
    if "turned" in name:
        assert wanted.shape == (40, 26, 3)
    if resize is not None:
        assert min(again.size) == resize
        wanted = np.asarray(Image.fromarray(wanted).resize(again.size, Image.Resampling.BICUBIC))
    assert np.abs(np.asarray(again.convert("RGB")).astype(int) - wanted).mean() < (5 if stored.suffix == "jpg" else 1)
    picture_itself = np.asarray(smooth(40, 26).resize((26, 40)) if "turned" in name else smooth(40, 26))
    assert np.abs(decode_rgb(data).mean() - picture_itself.mean()) < 12  # the first frame, not black or inverted
    assert convert_image(stored.data, resize).converted == ()


@pytest.mark.parametrize("name", KEPT)
def test_an_image_that_needs_nothing_keeps_its_bytes(name):
    stored = convert_image(KEPT[name])
    assert stored.data == KEPT[name]
    assert (stored.verdict, stored.width, stored.height, stored.converted) == ("ok", 40, 26, ())
    assert stored.suffix == ("jpg" if "jpeg" in name else "png")


@pytest.mark.parametrize("name", CONVERTED)
def test_what_decoders_read_differently_is_written_anew(name):
    data, kinds = CONVERTED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stored = convert_image(data)
    assert stored.converted == kinds
    assert set(kinds) <= set(CONVERSIONS)
    assert stored.suffix == ("png" if data.startswith(b"\x89PNG") else "jpg")
    again = Image.open(io.BytesIO(stored.data))
    assert again.mode in ("RGB", "L")
    assert (again.width, again.height) == (stored.width, stored.height)
    assert not again.getexif()
    before, after = decode_rgb(data).astype(int), decode_rgb(stored.data).astype(int)
    if stored.suffix == "png":
        np.testing.assert_array_equal(after, before)
    else:
        assert np.abs(after - before).mean() < 4
    assert convert_image(stored.data).converted == ()  # once is enough


def _dali_rgb(images: list[bytes]) -> list[np.ndarray]:
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=len(images), num_threads=1, device_id=None)
    def decoding():
        files = fn.external_source(source=lambda: [np.frombuffer(one, np.uint8) for one in images])
        return fn.decoders.image(files, device="cpu", output_type=types.RGB)

    pipeline = decoding()
    pipeline.build()
    (decoded,) = pipeline.run()
    return [np.asarray(decoded.at(place)) for place in range(len(images))]


@pytest.mark.parametrize("resize", [None, 32])
def test_every_decoder_sees_the_same_picture(resize):
    from torchvision.io import ImageReadMode, decode_image

    originals = [*KEPT.values(), *(data for data, *_ in (*CONVERTED.values(), *OTHER.values()))]
    stored = [convert_image(data, resize) for data in originals]
    dali = _dali_rgb([one.data for one in stored])
    for one, seen_by_dali in zip(stored, dali, strict=True):
        ours = decode_rgb(one.data).astype(int)
        assert ours.shape == (one.height, one.width, 3)
        encoded_bytes = torch.frombuffer(bytearray(one.data), dtype=torch.uint8)
        vision = decode_image(encoded_bytes, ImageReadMode.RGB).permute(1, 2, 0).numpy()
        for other in (vision, seen_by_dali):  # decoders may round the colours of a JPEG otherwise
            assert other.shape == ours.shape
            assert np.abs(other.astype(int) - ours).max() <= (0 if one.suffix == "png" else 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("resize", [None, 13])
def test_turned_images_are_stored_upright(orientation, kind, resize):
    data = _turned(orientation, kind)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    stored = convert_image(data, resize)
    pixels = Image.open(io.BytesIO(stored.data))
    assert 0x0112 not in pixels.getexif() or orientation == 1
    if resize is not None:
        upright = upright.resize(pixels.size, Image.Resampling.BICUBIC)
    assert pixels.size == upright.size == (stored.width, stored.height)
    assert np.abs(np.asarray(pixels).astype(int) - np.asarray(upright)).mean() < 4


@given(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), st.integers(1, 600))
def test_the_shorter_side_is_the_one_asked_for(size, resize):
    (width, height), (left, top, right, bottom) = fit_size(size, resize)
    assert min(width, height) == resize
    assert max(width, height) <= LONGEST_SIDE * resize
    assert (width >= height) == (size[0] >= size[1]) or width == height
    assert 0 <= left < right <= size[0]
    assert 0 <= top < bottom <= size[1]
    assert (left, top) == (size[0] - right, size[1] - bottom)  # the middle
    assert abs(width * (bottom - top) - height * (right - left)) <= max(size) / 2 + 1e-6  # less than half a pixel


def test_no_resize_is_no_change_of_size():
    assert fit_size((30, 500), None) == ((30, 500), (0, 0, 30, 500))


@pytest.mark.parametrize(
    "size", [(100, 60), (60, 100), (20, 12), (400, 24), (23, 700), (1, 1), (900, 1), (1600, 1200)]
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_resized_images_are_baseline_jpegs_of_the_shorter_side(size, kind):
    stored = convert_image(
        encoded(smooth(*size), kind, progressive=True, comment=b"hello", icc_profile=b"x" * 200), 24
    )
    assert (stored.verdict, stored.suffix, min(stored.width, stored.height)) == ("ok", "jpg", 24)
    assert ("cut" in stored.converted) == (max(size) > 8 * min(size))
    assert ("format" in stored.converted) == (kind == "PNG")
    assert ("coding" in stored.converted) == (kind == "JPEG")
    image = Image.open(io.BytesIO(stored.data))
    assert image.size == (stored.width, stored.height)
    assert b"\xff\xc0" in stored.data  # baseline
    assert {"progressive", "exif", "icc_profile", "comment"}.isdisjoint(image.info)
    assert convert_image(stored.data, 24).data == stored.data


def test_resizing_is_antialiased_and_keeps_the_picture():
    image = smooth(1024, 640)
    whole = encoded(image, "JPEG", quality=95)
    stored = decode_rgb(convert_image(whole, 64).data).astype(int)
    wanted = np.asarray(image.resize((102, 64), Image.Resampling.BICUBIC)).astype(int)
    assert np.abs(stored - wanted).mean() < 2
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (640, 1024, 3), dtype=np.uint8))
    assert decode_rgb(convert_image(encoded(noise, "PNG"), 64).data).std() < 20  # 73 without antialiasing


def test_a_baseline_jpeg_of_the_right_size_keeps_its_bytes():
    for data in (encoded(smooth(50, 32), "JPEG", quality=40), encoded(smooth(32, 50).convert("L"), "JPEG")):
        assert convert_image(data, 32).data == data
    progressive = encoded(smooth(50, 32), "JPEG", progressive=True)
    assert convert_image(progressive, 32).converted == ("coding",)
    assert convert_image(encoded(smooth(50, 32), "PNG"), 32).converted == ("format",)
    assert convert_image(encoded(smooth(40, 32).convert("CMYK"), "JPEG"), 32).converted == ("cmyk",)


def test_gray_stays_gray():
    stored = convert_image(encoded(smooth(50, 40).convert("L"), "JPEG"), 32)
    assert Image.open(io.BytesIO(stored.data)).mode == "L"


def test_quality_is_that_of_what_is_written_anew():
    data = encoded(smooth(300, 200), "PNG")
    assert len(convert_image(data, 100, 30).data) < len(convert_image(data, 100, 95).data)


@pytest.mark.parametrize("resize", [None, 16])
@pytest.mark.parametrize("end", [8, 200, -40, -3, -2, -1])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_cut_file_is_rejected(kind, end, resize):
    stored = convert_image(picture(width=60, height=60, kind=kind)[:end], resize)
    assert (stored.verdict, stored.data, stored.width) == ("truncated", b"", 0)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 10**6),
    st.binary(min_size=1, max_size=3),
    st.sampled_from([*KEPT, *CONVERTED, *OTHER]),
    st.sampled_from([None, 16]),
)
def test_a_changed_byte_gives_a_verdict_or_a_good_image(place, noise, name, resize):
    data = bytearray(KEPT.get(name) or (CONVERTED.get(name) or OTHER[name])[0])
    place %= len(data)
    data[place : place + len(noise)] = noise
    stored = convert_image(bytes(data), resize)
    if stored.verdict == "ok":
        assert decode_rgb(stored.data).shape == (stored.height, stored.width, 3)
        assert decode_rgb(bytes(data)).ndim == 3
    else:
        with pytest.raises(UndecodableImage, match=stored.verdict):
            decode_rgb(bytes(data))
