"""Converts images to the stored form, which all decoders decode alike: upright, 8-bit, RGB or gray, JPEG or PNG.

| input                                              | no resize                    | resize=R                    |
|----------------------------------------------------|------------------------------|-----------------------------|
| truncated, oversized, not an image                 | rejected                     | rejected                    |
| AVIF, HEIC, animated PNG, TIFF with unusual pixels | rejected (`unsupported`)     | rejected (`unsupported`)    |
| lossy WebP, TIFF that contains JPEG                | JPEG (`webp`, `tiff`)        | JPEG                        |
| lossless WebP, GIF, BMP, other TIFF                | PNG (`gif`, `bmp`, ...)      | JPEG                        |
| several frames or pages                            | the first (`first_frame`)    | the first (`first_frame`)   |
| PNG named .jpg, or the reverse                     | suffix corrected             | suffix corrected            |
| CMYK or YCCK JPEG, JPEG stored as RGB, not YCbCr   | RGB (`cmyk`, `rgb_coded`)    | RGB                         |
| PNG of another bit depth than 8                    | 8 bits (`bit_depth`)         | 8 bits                      |
| PNG with a palette                                 | RGB (`palette`)              | RGB                         |
| PNG with alpha                                     | alpha dropped (`alpha`)      | alpha dropped               |
| rotated or mirrored according to EXIF              | turned upright (`upright`)   | turned upright              |
| progressive JPEG                                   | bytes kept                   | baseline (`coding`)         |
| arithmetic or lossless JPEG                        | baseline (`coding`)          | baseline (`coding`)         |
| PNG                                                | PNG                          | JPEG (`format`)             |
| shorter side not R                                 | unchanged                    | scaled to R (`resized`)     |
| longer side above 8 R                              | unchanged                    | central 8 R kept (`cut`)    |

If no conversion applies, the original bytes are stored. Re-encoded images have no metadata.
"""

import io
from dataclasses import dataclass
from typing import Final

from PIL import Image, ImageFile

from shards.image_check import MAX_BYTES, UndecodableImage, decoder_errors, open_image, rgb_or_gray, turn_of
from shards.image_header import gif_frames, jpeg_frame, tiff_header, webp_header

CONVERSIONS: Final = (
    "cmyk",
    "rgb_coded",
    "bit_depth",
    "palette",
    "alpha",
    "upright",
    "coding",
    "format",
    "resized",
    "cut",
    "webp",
    "gif",
    "bmp",
    "tiff",
    "first_frame",
)
LONGEST_SIDE: Final = 8  # in multiples of the shorter side; a network sees only the middle of a longer strip anyway
DEFAULT_QUALITY: Final = 90

_LONGEST_JPEG = 65_500
_SPARE = 2  # decode at no less than this multiple of the target size
_BASELINE, _EXTENDED, _PROGRESSIVE = 0xC0, 0xC1, 0xC2  # start-of-frame markers that all decoders support
_PALETTE, _GRAY_ALPHA, _RGB_ALPHA = 3, 4, 6  # PNG colour types
_PNG_DEPTH, _PNG_COLOR = 24, 25  # byte offsets in a PNG file
_RGB_IDS = [82, 71, 66]  # component ids "R", "G", "B": a JPEG that stores RGB instead of YCbCr


@dataclass(frozen=True)
class StoredImage:
    """One image as stored in a shard; `data` is empty if the verdict is not `ok`."""

    verdict: str
    suffix: str = ""
    data: bytes = b""
    width: int = 0
    height: int = 0
    converted: tuple[str, ...] = ()  # some of CONVERSIONS, in their order


def convert_image(data: bytes, resize: int | None = None, quality: int = DEFAULT_QUALITY) -> StoredImage:
    """Decode `data` completely and convert it as the module docstring describes. Never raises: see `verdict`."""
    try:
        image = open_image(data)
        with decoder_errors():
            return _convert(image, data, resize, quality)
    except UndecodableImage as problem:
        return StoredImage(problem.verdict)


def _convert(image: ImageFile.ImageFile, data: bytes, resize: int | None, quality: int) -> StoredImage:
    if image.format not in ("JPEG", "PNG"):
        return _convert_other(image, data, resize, quality)
    is_png = image.format == "PNG"
    kinds = _png_kinds(image, data, resize) if is_png else _jpeg_kinds(image, data, resize)
    size, box = fit_size(image.size, resize)
    kinds |= {"resized"} if min(size) != min(image.size) else set()
    kinds |= {"cut"} if box[:2] != (0.0, 0.0) else set()
    pixels = load_resized(image, size, box)
    turn = turn_of(image)
    if turn is not None:
        kinds.add("upright")
        pixels = pixels.transpose(turn)  # after the crop, which is central and therefore unaffected
    if not kinds:
        return StoredImage("ok", "png" if is_png else "jpg", data, *pixels.size)
    return _encode(pixels, is_png and resize is None, quality, kinds)


def _convert_other(image: ImageFile.ImageFile, data: bytes, resize: int | None, quality: int) -> StoredImage:
    """Convert the first frame of a WebP, GIF, BMP or TIFF image."""
    kinds, is_lossy = _other_kinds(image, data)
    image.load()  # first: Pillow turns a TIFF upright when it loads it, which may change its size
    if image.mode in ("LA", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        kinds.add("alpha")
    turn = turn_of(image)
    pixels = rgb_or_gray(image if turn is None else image.transpose(turn))
    size, box = fit_size(pixels.size, resize)
    kinds |= {"resized"} if min(size) != min(pixels.size) else set()
    kinds |= {"cut"} if box[:2] != (0.0, 0.0) else set()
    if size != pixels.size or "cut" in kinds:
        pixels = pixels.resize(size, Image.Resampling.BICUBIC, box)
    kinds |= set() if turn is None else {"upright"}
    as_png = resize is None and (not is_lossy or max(size) > _LONGEST_JPEG)
    return _encode(pixels, as_png, quality, kinds)


def _other_kinds(image: ImageFile.ImageFile, data: bytes) -> tuple[set[str], bool]:
    """Return the conversions that the format of an opened image needs, and whether its coding is lossy."""
    if image.format == "WEBP":
        webp = webp_header(data)
        assert webp is not None, "open_image has checked it"
        return {"webp"} | ({"first_frame"} if webp.is_animated else set()), not webp.is_lossless
    if image.format == "GIF":
        return {"gif"} | ({"first_frame"} if gif_frames(data) == 2 else set()), False
    if image.format == "TIFF":
        tiff = tiff_header(data)
        assert tiff is not None, "open_image has checked it"
        return {"tiff"} | ({"first_frame"} if tiff.has_pages else set()), tiff.is_jpeg
    return {"bmp"}, False


def _encode(pixels: Image.Image, as_png: bool, quality: int, kinds: set[str]) -> StoredImage:
    converted = tuple(kind for kind in CONVERSIONS if kind in kinds)
    written = _encode_png(pixels) if as_png else _encode_jpeg(pixels, quality)
    if len(written) > MAX_BYTES:  # readers refuse larger images
        raise UndecodableImage("oversized")
    return StoredImage("ok", "png" if as_png else "jpg", written, *pixels.size, converted)


def fit_size(size: tuple[int, int], resize: int | None) -> tuple[tuple[int, int], tuple[float, float, float, float]]:
    """Return the stored (width, height) and the box of the original to scale to it; `resize` is the shorter side."""
    if resize is None:
        return size, (0.0, 0.0, *size)
    shorter, longer = min(size), max(size)
    used = min(longer, LONGEST_SIDE * shorter)
    margin = (longer - used) / 2
    across = (2 * used * resize + shorter) // (2 * shorter)  # integer division that rounds to nearest
    if size[0] >= size[1]:
        return (across, resize), (margin, 0.0, margin + used, size[1])
    return (resize, across), (0.0, margin, size[0], margin + used)


def load_resized(
    image: ImageFile.ImageFile, size: tuple[int, int], box: tuple[float, float, float, float]
) -> Image.Image:
    """Decode an opened image and resize its `box` to `size` with antialiasing; returns RGB or gray."""
    if size == image.size and box[:2] == (0.0, 0.0):
        image.load()
        return rgb_or_gray(image)
    # JPEG can be decoded at 1/2, 1/4 or 1/8 size: no visible loss if that is at least twice the target size
    wide = image.width
    drafted = image.draft(None, (size[0] * _SPARE, size[1] * _SPARE))
    scale = 1.0 if drafted is None else drafted[1][2] / wide
    image.load()
    left, top, right, bottom = (side * scale for side in box)
    return rgb_or_gray(image).resize(size, Image.Resampling.BICUBIC, (left, top, right, bottom))


def _jpeg_kinds(image: ImageFile.ImageFile, data: bytes, resize: int | None) -> set[str]:
    kinds = set()
    if image.mode == "CMYK":
        kinds.add("cmyk")
    elif image.mode == "RGB" and _codes_rgb(image):
        kinds.add("rgb_coded")
    if jpeg_frame(data) not in ((_BASELINE, _EXTENDED, _PROGRESSIVE) if resize is None else (_BASELINE,)):
        kinds.add("coding")
    return kinds


def _codes_rgb(image: ImageFile.ImageFile) -> bool:
    """Whether a JPEG stores RGB, by the rules of libjpeg; other decoders know only some of these rules."""
    if "jfif" in image.info:
        return False
    if "adobe_transform" in image.info:
        return image.info["adobe_transform"] == 0
    return [layer[0] for layer in getattr(image, "layer", [])] == _RGB_IDS


def _png_kinds(image: ImageFile.ImageFile, data: bytes, resize: int | None) -> set[str]:
    kinds = set() if resize is None else {"format"}
    if data[_PNG_DEPTH] != 8:
        kinds.add("bit_depth")
    if data[_PNG_COLOR] == _PALETTE:
        kinds.add("palette")
    if data[_PNG_COLOR] in (_GRAY_ALPHA, _RGB_ALPHA) or "transparency" in image.info:
        kinds.add("alpha")
    return kinds


def _encode_jpeg(pixels: Image.Image, quality: int) -> bytes:
    stream = io.BytesIO()
    # set explicitly: Pillow would copy these from the decoded image
    pixels.save(stream, "JPEG", quality=quality, subsampling="4:2:0", exif=b"", icc_profile=None, comment=b"")
    return stream.getvalue()


def _encode_png(pixels: Image.Image) -> bytes:
    stream = io.BytesIO()
    Image.frombytes(pixels.mode, pixels.size, pixels.tobytes()).save(stream, "PNG")
    return stream.getvalue()
