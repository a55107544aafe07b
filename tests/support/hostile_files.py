"""What may be in the place of an output or of an input: devices, FIFOs, sockets, links, folders, files of others."""

import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

TREASURE = b"the only copy"
_ZERO = os.makedev(1, 5)  # /dev/zero: an endless file


def _make_socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # the path of a socket has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(before)


def _make_folder(path: Path) -> None:
    path.mkdir()
    (path / "treasure").write_bytes(TREASURE)


def _make_link(path: Path, target: Path) -> None:
    target.write_bytes(TREASURE)
    path.symlink_to(target)


def _outside(path: Path) -> Path:
    folder = path.parent / "outside"
    folder.mkdir(exist_ok=True)
    return folder


def _make_link_to_folder(path: Path) -> None:
    (_outside(path) / "treasure").write_bytes(TREASURE)
    path.symlink_to("outside")


IRREGULAR: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "socket": _make_socket,
    "folder": _make_folder,
    "link out": lambda path: _make_link(path, _outside(path) / "treasure"),
    "link beside": lambda path: _make_link(path, path.with_name("treasure")),
    "dangling link": lambda path: path.symlink_to(path.parent / "nowhere" / "file"),
    "dangling link beside": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path.name),
    "link to a folder": _make_link_to_folder,
    "link to a FIFO": lambda path: (os.mkfifo(path.with_name("fifo")), path.symlink_to("fifo")),
}
if os.geteuid() == 0:
    IRREGULAR |= {
        "character device": lambda path: os.mknod(path, stat.S_IFCHR | 0o666, _ZERO),
        "block device": lambda path: os.mknod(path, stat.S_IFBLK | 0o666, os.makedev(240, 250)),  # no driver has it
        "link to a device": lambda path: (
            os.mknod(path.with_name("device"), stat.S_IFCHR | 0o666, _ZERO),
            path.symlink_to("device"),
        ),
    }
"""Makes something at a path that is no regular file, by name."""

FOREIGN: dict[str, bytes] = {
    "photo": b"\xff\xd8\xff\xe0" + TREASURE,
    "text": TREASURE,
    "empty": b"",
    "labels": b"key,label\ncat/1.jpg,dog\n",
    "predictions": b"path,predicted_label,probability\n",
    "page": b"<!doctype html>\n<html>",
    "json": b'{"recipe": 1}\n',
    "binary": bytes(range(256)) * 40,
}
"""Files of others, by name."""


def state_of(folder: Path) -> dict[str, tuple[int, object]]:
    """Return the type and the content of everything below a folder; nothing is opened but regular files."""
    found: dict[str, tuple[int, object]] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        kind = stat.S_IFMT(status.st_mode)
        content: object = status.st_rdev
        if stat.S_ISREG(kind):
            content = path.read_bytes()
        elif stat.S_ISLNK(kind):
            content = os.readlink(path)
        found[str(path.relative_to(folder))] = kind, content
    return found


@contextmanager
def nothing_lost(folder: Path) -> Iterator[None]:
    """All that is below a folder must stay as it is, and nothing may be added."""
    before = state_of(folder)
    yield
    assert state_of(folder) == before
