"""Parses the segments of an untrusted JPEG or PNG file in a bounded number of steps, without decoding pixels.

Pillow skips padding byte by byte in Python: 64 MB of it would take minutes.
"""

from typing import Final

MAX_STEPS: Final = 20_000  # segments plus stray bytes; real files have a few hundred

_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_NO_FRAME = (0xC4, 0xC8, 0xCC)  # in C0..CF, but not frames: tables, reserved, arithmetic conditioning
_PNG_SIGNATURE_BYTES, _PNG_CHUNK_BYTES = 8, 12


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
