"""Recognises file formats by their first bytes, and says in words why a file is not a usable image.

This is the only table of such words: packing, `incv predict` and the report all use it.
"""

from typing import Final

DECODED: Final = {"JPEG": "jpg", "PNG": "png", "WebP": "webp", "GIF": "gif", "BMP": "bmp", "TIFF": "tif"}
"""The formats that are decoded, with the suffix that stands for each."""

SUFFIXES: Final = {
    **{f".{suffix}": suffix for suffix in DECODED.values()},
    ".jpeg": "jpg",
    ".jpe": "jpg",
    ".jfif": "jpg",
    ".dib": "bmp",
    ".tiff": "tif",
}
"""The suffixes of image files, each with the one that stands for its format."""

REASONS: Final = {
    "truncated": "damaged or truncated image",
    "oversized": "larger than 64 MiB or 50 megapixels",
    "not_an_image": "not an image",
    "unsupported": "unsupported image format",
}
"""Every verdict of `image_check` except `ok`, in words."""

_MAGIC = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"II+\0", "BigTIFF"),
    (b"MM\0+", "BigTIFF"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"8BPS", "Photoshop"),
    (b"\0\0\1\0", "ICO"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"%PDF", "PDF"),
    (b"PK\3\4", "ZIP"),
    (b"version https://git-lfs", "Git LFS pointer"),
)
_NO_IMAGES = ("PDF", "ZIP", "HTML", "SVG", "Git LFS pointer")  # known, but not as pixel images
_BRANDS = {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIC", b"msf1": "HEIC"}
_BMP_HEADERS = (12, 40, 52, 56, 64, 108, 124)  # sizes of the second header
_TEXT_SHOWN = 256
_UNSUPPORTED = {  # forms of decoded formats that are not
    "PNG": "animated PNG",
    "TIFF": "TIFF with an unusual pixel format, or raw camera image",
    "BMP": "run-length encoded BMP",
}
_OTHER_SUFFIXES = {
    ".avif": "AVIF",
    ".heic": "HEIC",
    ".heif": "HEIC",
    ".jxl": "JPEG XL",
    ".jp2": "JPEG 2000",
    ".svg": "SVG",
    ".psd": "Photoshop",
    ".ico": "ICO",
    **dict.fromkeys((".dng", ".nef", ".cr2", ".cr3", ".arw"), "raw"),
}


def recognise_format(data: bytes) -> str:
    """Return the name of the format of a file by its first bytes; "" if it is unknown."""
    for magic, name in _MAGIC:
        if data.startswith(magic):
            return "raw" if name == "TIFF" and data[8:10] == b"CR" else name
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WebP"
    if data[4:8] == b"ftyp":
        return _BRANDS.get(data[8:12], "MP4")
    if data.startswith(b"BM") and int.from_bytes(data[14:18], "little") in _BMP_HEADERS:
        return "BMP"
    text = data[:_TEXT_SHOWN].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head")):
        return "HTML"
    return "SVG" if text.startswith(b"<svg") or (text.startswith(b"<?xml") and b"<svg" in text) else ""


def is_other_image(name: str) -> bool:
    """Whether a name returned by `recognise_format` is that of an image or video format that is not decoded."""
    return bool(name) and name not in DECODED and name not in _NO_IMAGES


def explain_verdict(verdict: str, data: bytes = b"", suffix: str = "") -> str:
    """Say why an image is unusable. data: its first bytes; suffix: that of its name, as in SUFFIXES, if known."""
    if verdict == "not_an_image" and not data:
        return "empty file"
    name = recognise_format(data)
    if not name or verdict == "oversized":
        return REASONS.get(verdict, verdict)
    misnamed = bool(suffix) and DECODED.get(name) != suffix
    bytes_in = f"{name} bytes in a .{suffix}"
    if verdict == "truncated":
        return f"{bytes_in}, damaged or truncated" if misnamed else f"damaged or truncated {name} image"
    if verdict == "not_an_image":
        return f"{bytes_in}, not an image" if misnamed else f"{name} file, not an image"
    what = bytes_in if misnamed else _UNSUPPORTED.get(name, f"{name} format")
    return f"{what}, which is not supported: convert it to PNG or JPEG"


def explain_misnamed(data: bytes, suffix: str) -> str:
    """Say that a usable image has another format than its name says; "" if it has not."""
    name = recognise_format(data)
    return f"{name} bytes in a .{suffix}" if suffix and DECODED.get(name, suffix) != suffix else ""


def explain_ignored(name: str) -> str:
    """Say why a file was not read, by its name."""
    base = name.rpartition("/")[2]
    if base.startswith("."):
        return "hidden file"
    suffix = base[base.rfind(".") :].lower() if "." in base else ""
    if suffix in _OTHER_SUFFIXES:
        return f"{_OTHER_SUFFIXES[suffix]} format, which is not supported: convert it to PNG or JPEG"
    return f"not an image by its suffix ({suffix})" if suffix else "not an image: its name has no suffix"
