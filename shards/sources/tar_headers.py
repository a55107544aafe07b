"""Reads the headers of an uncompressed tar (ustar, GNU or pax) and skips the file data."""

import os
from collections.abc import Iterator
from typing import NamedTuple

_BLOCK = 512
_LARGEST_EXTRA = 2**20  # bytes of a long name, or of one member's pax attributes
_ZEROS = bytes(_BLOCK)
_LONG_NAME, _LONG_LINK, _ATTRIBUTES, _GLOBAL_ATTRIBUTES = b"L", b"K", b"x", b"g"
_REGULAR, _OLD_REGULAR, _CONTIGUOUS, _FOLDER = b"0", b"\0", b"7", b"5"
_KINDS = {b"1": "a hard link", b"2": "a link", b"3": "a device", b"4": "a device", b"6": "a named pipe"}


class BadTar(Exception):
    """The file is not a tar, or is incomplete; the message says what is wrong and where."""


class Header(NamedTuple):
    """One member of a tar. kind: "file", "folder", or a description such as "a hard link"."""

    kind: str
    name: bytes
    offset: int  # of its data
    nbytes: int


def read_headers(descriptor: int) -> Iterator[Header]:
    """Yield the members of an open tar in order; raises BadTar if it is damaged or has no end marker."""
    size, place = os.fstat(descriptor).st_size, 0
    long_name: bytes | None = None
    attributes: dict[bytes, bytes] = {}
    while place < size:
        block = os.pread(descriptor, _BLOCK, place)
        if block == _ZEROS:
            return
        kind, name, nbytes = _parse_block(block, place)
        data = place + _BLOCK
        if kind in (_LONG_NAME, _ATTRIBUTES, _GLOBAL_ATTRIBUTES):
            extra = _read_extra(descriptor, data, nbytes, size)
            if kind == _LONG_NAME:
                long_name = extra.split(b"\0")[0]
            elif kind == _ATTRIBUTES:
                attributes = _parse_records(extra, place)
            elif {b"path", b"size"} & _parse_records(extra, place).keys():
                raise BadTar(f"a global header at byte {place:,} sets one path or size for all members")
        elif kind != _LONG_LINK:
            nbytes = _parse_number(attributes[b"size"], 10, place) if b"size" in attributes else nbytes
            name = attributes.get(b"path", name if long_name is None else long_name)
            what = _describe_kind(kind, name, attributes)
            nbytes = 0 if what == "folder" else nbytes  # no data follows a folder, whatever its size field says
            if data + nbytes > size:
                raise BadTar(f"it ends inside the member {name.decode('utf-8', 'backslashreplace')!r}")
            yield Header(what, name, data, nbytes)
            long_name, attributes = None, {}
        place = data + -(-nbytes // _BLOCK) * _BLOCK
    raise BadTar("it has no end marker")


def _parse_block(block: bytes, place: int) -> tuple[bytes, bytes, int]:
    """Check the checksum of a header block and return (type, name, size)."""
    if len(block) < _BLOCK:
        raise BadTar("it ends inside a header")
    checksum = sum(block) - sum(block[148:156]) + 8 * ord(" ")
    if checksum != _parse_number(block[148:156], 8, place):
        raise BadTar(f"wrong header checksum at byte {place:,}")
    name = block[:100].split(b"\0")[0]
    if block[257:263] == b"ustar\0" and block[345]:
        name = block[345:500].split(b"\0")[0] + b"/" + name
    size = block[124:136]
    # GNU: sizes from 8 GiB on are binary, with the top bit set
    nbytes = int.from_bytes(size[1:], "big") if size[0] == 0x80 else _parse_number(size, 8, place)
    return block[156:157], name, nbytes


def _parse_number(field: bytes, base: int, place: int) -> int:
    digits = field.split(b"\0")[0].strip(b" ")
    if not digits:
        return 0
    if not digits.isdigit():
        raise BadTar(f"invalid number in the header at byte {place:,}")
    try:
        return int(digits[:20], base)
    except ValueError:
        raise BadTar(f"invalid number in the header at byte {place:,}") from None


def _read_extra(descriptor: int, place: int, nbytes: int, size: int) -> bytes:
    """Read the data of a header that describes the next member, such as a long name."""
    if nbytes > _LARGEST_EXTRA:
        raise BadTar(f"the header at byte {place:,} is too large ({nbytes:,} bytes)")
    if place + nbytes > size:
        raise BadTar("it ends inside a header")
    return os.pread(descriptor, nbytes, place)


def _parse_records(data: bytes, place: int) -> dict[bytes, bytes]:
    """Parse pax records. Each is `LENGTH KEY=VALUE` and a newline; LENGTH counts the whole record."""
    records: dict[bytes, bytes] = {}
    start = 0
    while start < len(data):
        length, _, _ = data[start : start + 8].partition(b" ")
        if not length.isdigit() or len(length) > 7:
            raise BadTar(f"invalid attributes at byte {place:,}")
        stop = start + int(length)
        key, equals, value = data[start + len(length) + 1 : stop].partition(b"=")
        if not equals or not value.endswith(b"\n"):
            raise BadTar(f"invalid attributes at byte {place:,}")
        records[key] = value[:-1]
        start = stop
    return records


def _describe_kind(flag: bytes, name: bytes, attributes: dict[bytes, bytes]) -> str:
    if any(key.startswith(b"GNU.sparse") for key in attributes):
        return "a sparse file"
    if flag == _FOLDER or (flag == _OLD_REGULAR and name.endswith(b"/")):
        return "folder"
    if flag in (_REGULAR, _OLD_REGULAR, _CONTIGUOUS):
        return "file"
    return _KINDS.get(flag, f"of the unknown type {flag!r}")
