"""Parses the headers of untrusted image files in a bounded number of steps, without decoding pixels.

Pillow reads some of them byte by byte in Python: 64 MB of padding or of comments would take minutes.
"""

from typing import Final, Literal, NamedTuple

MAX_STEPS: Final = 20_000  # segments plus stray bytes; real files have a few hundred

_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_NO_FRAME = (0xC4, 0xC8, 0xCC)  # in C0..CF, but not frames: tables, reserved, arithmetic conditioning
_PNG_SIGNATURE_BYTES, _PNG_CHUNK_BYTES = 8, 12
_GIF_HEADER_BYTES = 13
_GIF_EXTENSION, _GIF_FRAME, _GIF_END = 0x21, 0x2C, 0x3B
_MAX_GIF_BLOCKS = 400_000  # 64 MiB of full blocks are 263,000
_TIFF_SUBFILE, _TIFF_COMPRESSION = 254, 259
_TIFF_SIZES = {3: 2, 4: 4, 5: 8, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}  # bytes of a value by its type
_TIFF_BYTES = (1, 2, 6, 7)  # types whose values are single bytes


def jpeg_frame(data: bytes) -> int | None:
    """Return the start-of-frame marker of a JPEG, which tells how it is coded; None if it has no frame and scan."""
    frame, place = None, 2
    for _ in range(MAX_STEPS):
        if place + 4 > len(data):
            return None
        marker = data[place + 1]
        if data[place] != 0xFF or marker in (0x00, 0xFF):
            place += 1
            continue
        if marker in (_START_OF_SCAN, _END_OF_IMAGE):
            return frame if marker == _START_OF_SCAN else None
        if 0xC0 <= marker <= 0xCF and marker not in _NO_FRAME:
            frame = marker
        stands_alone = marker == 0x01 or 0xD0 <= marker <= 0xD8
        place += 2 if stands_alone else 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    return None


def png_is_whole(data: bytes) -> bool:
    """Whether a PNG has all its chunks, up to the end chunk; some decoders fail without one."""
    place = _PNG_SIGNATURE_BYTES
    for _ in range(MAX_STEPS):
        length, name = int.from_bytes(data[place : place + 4], "big"), data[place + 4 : place + 8]
        place += _PNG_CHUNK_BYTES + length
        if place > len(data):
            return False
        if name == b"IEND":
            return True
    return False


def gif_frames(data: bytes) -> int | None:
    """Return the number of frames of a GIF, counting to 2; None if its first frame is not whole."""
    frames, steps = 0, 0
    place = _GIF_HEADER_BYTES + _gif_palette_bytes(data[10:11])
    while place < len(data) and data[place] != _GIF_END and frames < 2:
        kind = data[place]
        if kind == _GIF_EXTENSION:
            place += 2
        elif kind == _GIF_FRAME:
            place += 10 + _gif_palette_bytes(data[place + 9 : place + 10]) + 1  # and the size of a code
        else:
            break
        while place < len(data) and data[place]:  # blocks of up to 255 bytes; an empty block ends them
            place += 1 + data[place]
            steps += 1
            if steps > (MAX_STEPS if not frames and kind == _GIF_EXTENSION else _MAX_GIF_BLOCKS):
                return None
        if place >= len(data):
            break
        place += 1
        frames += kind == _GIF_FRAME
    return frames or None


def _gif_palette_bytes(flags: bytes) -> int:
    return 3 << ((flags[0] & 7) + 1) if flags and flags[0] & 0x80 else 0


class WebpHeader(NamedTuple):
    width: int
    height: int
    is_lossless: bool
    is_animated: bool


def webp_header(data: bytes) -> WebpHeader | None:
    """Parse the chunks of a WebP file; None if it is not whole."""
    if len(data) < 30 or 8 + int.from_bytes(data[4:8], "little") > len(data) + 1:  # some writers omit the padding
        return None
    size, place = _webp_size(data), 12
    for _ in range(MAX_STEPS):
        name, length = data[place : place + 4], int.from_bytes(data[place + 4 : place + 8], "little")
        if name in (b"VP8 ", b"VP8L", b"ANMF") or len(name) < 4:
            is_lossless = name == b"VP8L" or (name == b"ANMF" and data[place + 24 : place + 28] == b"VP8L")
            return None if size is None or len(name) < 4 else WebpHeader(*size, is_lossless, name == b"ANMF")
        place += 8 + length + length % 2
    return None


def _webp_size(data: bytes) -> tuple[int, int] | None:
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
    if kind == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return None


class TiffHeader(NamedTuple):
    is_thumbnail: bool
    """Whether the first image is a reduced version of another, as in the raw files of cameras."""
    is_jpeg: bool
    has_pages: bool


def tiff_header(data: bytes) -> TiffHeader | None:
    """Parse the first directory of a TIFF file; None if it is not whole, or has very long lists of numbers."""
    order: Literal["little", "big"] = "little" if data.startswith(b"II") else "big"
    start = int.from_bytes(data[4:8], order)
    entries = int.from_bytes(data[start : start + 2], order)
    after = start + 2 + 12 * entries
    if start < 8 or not entries or after + 4 > len(data):
        return None
    values = {}
    for place in range(start + 2, after, 12):
        tag, kind = int.from_bytes(data[place : place + 2], order), int.from_bytes(data[place + 2 : place + 4], order)
        count = int.from_bytes(data[place + 4 : place + 8], order)
        size = _TIFF_SIZES.get(kind, 1)
        if kind not in _TIFF_BYTES and count > MAX_STEPS * 5:
            return None
        if count * size > 4 and int.from_bytes(data[place + 8 : place + 12], order) + count * size > len(data):
            return None
        values[tag] = int.from_bytes(data[place + 8 : place + 8 + min(size, 4)], order)
    return TiffHeader(
        is_thumbnail=bool(values.get(_TIFF_SUBFILE, 0) & 1),
        is_jpeg=values.get(_TIFF_COMPRESSION) in (6, 7),
        has_pages=data[after : after + 4] != bytes(4),
    )


def bmp_is_run_length_encoded(data: bytes) -> bool:
    """Whether a BMP is compressed; Pillow would decode it byte by byte in Python."""
    is_modern = int.from_bytes(data[14:18], "little") >= 40
    return is_modern and int.from_bytes(data[30:34], "little") in (1, 2)
