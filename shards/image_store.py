"""Converts an image to what is stored: upright, 8-bit, RGB or gray, JPEG or PNG, which all decoders decode alike.

| input                                              | no resize                    | resize=R                    |
|----------------------------------------------------|------------------------------|-----------------------------|
| truncated, oversized, not an image                 | rejected                     | rejected                    |
| GIF, WebP, BMP, TIFF, AVIF, animated PNG           | rejected (`unsupported`)     | rejected (`unsupported`)    |
| PNG named .jpg, or the reverse                     | suffix by content            | suffix by content           |
| CMYK or YCCK JPEG, JPEG that codes RGB itself      | RGB (`cmyk`, `rgb_coded`)    | RGB                         |
| PNG not of 8 bits                                  | 8 bits (`bit_depth`)         | 8 bits                      |
| PNG with a palette                                 | RGB (`palette`)              | RGB                         |
| PNG with alpha                                     | alpha dropped (`alpha`)      | alpha dropped               |
| turned or mirrored by its EXIF                     | turned upright (`upright`)   | turned upright              |
| progressive JPEG                                   | bytes kept                   | baseline (`coding`)         |
| arithmetic or lossless JPEG                        | baseline (`coding`)          | baseline (`coding`)         |
| PNG                                                | PNG                          | JPEG (`format`)             |
| shorter side not R                                 | as it is                     | R, up or down (`resized`)   |
| longer side beyond 8 R                             | as it is                     | its middle 8 R (`cut`)      |

If no rule applies, the bytes are kept exactly. Re-encoded images carry no metadata.
"""

import io
from dataclasses import dataclass
from typing import Final

from PIL import Image, ImageFile

from shards.image_check import MAX_BYTES, UndecodableImage, decoder_errors, open_image, rgb_or_gray, turn_of
from shards.image_header import jpeg_frame

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
)
LONGEST_SIDE: Final = 8  # times the shorter one; of a longer strip a network sees only the middle anyway
DEFAULT_QUALITY: Final = 90

_SPARE = 2  # times the wanted side
_BASELINE, _EXTENDED, _PROGRESSIVE = 0xC0, 0xC1, 0xC2  # the start-of-frame markers that decoders agree on
_PALETTE, _GRAY_ALPHA, _RGB_ALPHA = 3, 4, 6  # colour types of PNG
_PNG_DEPTH, _PNG_COLOR = 24, 25  # places in the file
_RGB_IDS = [82, 71, 66]  # components named "R", "G", "B": a JPEG without the usual YCbCr


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
    """Check `data` by a full decode and convert it by the table above. Never raises."""
    try:
        image = open_image(data)
        with decoder_errors():
            return _convert(image, data, resize, quality)
    except UndecodableImage as problem:
        return StoredImage(problem.verdict)


def _convert(image: ImageFile.ImageFile, data: bytes, resize: int | None, quality: int) -> StoredImage:
    is_png = image.format == "PNG"
    kinds = _png_kinds(image, data, resize) if is_png else _jpeg_kinds(image, data, resize)
    size, box = fit_size(image.size, resize)
    kinds |= {"resized"} if min(size) != min(image.size) else set()
    kinds |= {"cut"} if box[:2] != (0.0, 0.0) else set()
    pixels = load_resized(image, size, box)
    turn = turn_of(image)
    if turn is not None:
        kinds.add("upright")
        pixels = pixels.transpose(turn)  # the cut is central, so it may come before
    if not kinds:
        return StoredImage("ok", "png" if is_png else "jpg", data, *pixels.size)
    converted = tuple(kind for kind in CONVERSIONS if kind in kinds)
    stays_png = is_png and resize is None
    written = _encode_png(pixels) if stays_png else _encode_jpeg(pixels, quality)
    if len(written) > MAX_BYTES:  # readers refuse it
        raise UndecodableImage("oversized")
    return StoredImage("ok", "png" if stays_png else "jpg", written, *pixels.size, converted)


def fit_size(size: tuple[int, int], resize: int | None) -> tuple[tuple[int, int], tuple[float, float, float, float]]:
    """(width, height) as stored, and the box of the original it shows; the shorter side becomes `resize`."""
    if resize is None:
        return size, (0.0, 0.0, *size)
    shorter, longer = min(size), max(size)
    used = min(longer, LONGEST_SIDE * shorter)
    margin = (longer - used) / 2
    across = (2 * used * resize + shorter) // (2 * shorter)  # rounded, in integers
    if size[0] >= size[1]:
        return (across, resize), (margin, 0.0, margin + used, size[1])
    return (resize, across), (0.0, margin, size[0], margin + used)


def load_resized(
    image: ImageFile.ImageFile, size: tuple[int, int], box: tuple[float, float, float, float]
) -> Image.Image:
    """Decode an opened image and resize its `box` to `size`, antialiased; RGB or gray."""
    if size == image.size and box[:2] == (0.0, 0.0):
        image.load()
        return rgb_or_gray(image)
    # JPEG can be decoded at 1/2, 1/4 or 1/8: invisible as long as twice the wanted pixels are left
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
    """Whether a JPEG stores RGB, by the rules of libjpeg; other decoders know fewer of them."""
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
    # set explicitly what Pillow would copy from the decoded image
    pixels.save(stream, "JPEG", quality=quality, subsampling="4:2:0", exif=b"", icc_profile=None, comment=b"")
    return stream.getvalue()


def _encode_png(pixels: Image.Image) -> bytes:
    stream = io.BytesIO()
    Image.frombytes(pixels.mode, pixels.size, pixels.tobytes()).save(stream, "PNG")
    return stream.getvalue()
