"""Decodes untrusted images; size limits are checked before any pixel is decoded."""

import io
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import numpy as np
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from shards.image_formats import DECODED, is_other_image, recognise_format
from shards.image_header import (
    bmp_is_run_length_encoded,
    gif_frames,
    jpeg_frame,
    png_is_whole,
    tiff_header,
    webp_header,
)

MAX_BYTES: Final = 64 * 2**20
MAX_PIXELS: Final = 50_000_000

# The sample index stores positions in this tuple: append new verdicts, never reorder them.
VERDICTS: Final = ("ok", "truncated", "oversized", "not_an_image", "unsupported")

_PLUGINS: Final[dict[str, type[ImageFile.ImageFile]]] = {
    "JPEG": JpegImagePlugin.JpegImageFile,
    "PNG": PngImagePlugin.PngImageFile,
    "WebP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "TIFF": TiffImagePlugin.TiffImageFile,
}
_TIFF_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "I;16", "I;16B", "I;16L", "I;16N")
_ORIENTATION, _SHORT = 0x0112, 3  # EXIF: the orientation tag and the type of its value
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# corrupt EXIF is common in web images; only its orientation is used, by `_orientation`
warnings.filterwarnings("ignore", r"(Possibly c|C)orrupt EXIF", UserWarning)
warnings.filterwarnings("ignore", r"(Metadata Warning, t|T)ag ", UserWarning)  # the same for the tags of a TIFF


class UndecodableImage(Exception):
    """The data is not a usable image; `verdict`, one of VERDICTS, says why."""

    def __init__(self, verdict: str) -> None:
        super().__init__(verdict)
        self.verdict = verdict


def decode_rgb(data: bytes) -> np.ndarray:
    """Decode to uint8 [height, width, 3]: turned upright by EXIF, without alpha, gray and CMYK converted to RGB."""
    image = open_image(data)
    with decoder_errors():
        image.load()
        pixels = rgb_or_gray(upright(image))
        return np.array(pixels if pixels.mode == "RGB" else pixels.convert("RGB"))


@contextmanager
def decoder_errors() -> Iterator[None]:
    """Convert any exception of a decoder to UndecodableImage: `oversized` if out of memory, else `truncated`."""
    try:
        yield
    except UndecodableImage:
        raise
    except MemoryError:
        raise UndecodableImage("oversized") from None
    except Exception:
        raise UndecodableImage("truncated") from None


def open_image(data: bytes) -> ImageFile.ImageFile:
    """Read only the header and check it against the size limits, so that no decompression bomb is decoded."""
    if len(data) > MAX_BYTES:
        raise UndecodableImage("oversized")
    name = recognise_format(data)
    if name not in DECODED:
        raise UndecodableImage("unsupported" if is_other_image(name) else "not_an_image")
    _check_header(name, data)
    try:
        # not Image.open, which would try other parsers and apply its own size limit
        image = _PLUGINS[name](io.BytesIO(data))
    except Exception:
        raise UndecodableImage("unsupported" if name in ("TIFF", "BMP") else "truncated") from None
    _check_size(image.width, image.height)
    if name == "PNG" and getattr(image, "is_animated", False):
        raise UndecodableImage("unsupported")
    if name == "TIFF" and image.mode not in _TIFF_MODES:
        raise UndecodableImage("unsupported")
    return image


def _check_header(name: str, data: bytes) -> None:
    """Raise UndecodableImage if the file is not whole, or if Pillow would need much time or memory to open it."""
    if name == "JPEG":
        is_whole = jpeg_frame(data) is not None
    elif name == "PNG":
        is_whole = png_is_whole(data)
    elif name == "GIF":
        is_whole = gif_frames(data) is not None
    elif name == "WebP":
        webp = webp_header(data)
        is_whole = webp is not None
        if webp is not None:
            _check_size(webp.width, webp.height)
    elif name == "TIFF":
        tiff = tiff_header(data)
        is_whole = tiff is not None
        if tiff is not None and tiff.is_thumbnail:
            raise UndecodableImage("unsupported")
    else:
        is_whole = len(data) >= 26
        if bmp_is_run_length_encoded(data):
            raise UndecodableImage("unsupported")
    if not is_whole:
        raise UndecodableImage("truncated")


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise UndecodableImage("truncated")
    if width * height > MAX_PIXELS:
        raise UndecodableImage("oversized")


def upright(image: Image.Image) -> Image.Image:
    turn = turn_of(image)
    return image if turn is None else image.transpose(turn)


def turn_of(image: Image.Image) -> Image.Transpose | None:
    """Return the transposition that turns a loaded image upright, by its EXIF data; None if it is already upright."""
    return _TURNS.get(_orientation(image.info.get("exif", b"")))


def _orientation(exif: bytes) -> int:
    """Return the EXIF orientation, 1 to 8; 1 (upright) if it is missing or unreadable."""
    block = exif.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(block[:2], "<")
    with suppress(struct.error):
        (directory,) = struct.unpack_from(order + "I", block, 4)
        (entries,) = struct.unpack_from(order + "H", block, directory)
        for entry in range(entries):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", block, directory + 2 + 12 * entry)
            if (tag, kind) == (_ORIENTATION, _SHORT):
                return value
    return 1


def rgb_or_gray(image: Image.Image) -> Image.Image:
    """Convert a loaded image to mode RGB or L: drop alpha, scale 16 bits to 8, convert CMYK and palettes to RGB."""
    if image.mode in ("RGB", "L") and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):  # 16-bit gray: PIL would clip the values instead of scaling them
        return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode in ("1", "L", "LA"):
        return image.convert("LA").convert("L") if "transparency" in image.info else image.convert("L")
    if "transparency" in image.info:  # a transparent palette entry: PIL warns unless converted via RGBA
        image = image.convert("RGBA")
    return image.convert("RGB")
