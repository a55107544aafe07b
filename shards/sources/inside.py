"""Opens and lists files below a root folder; refuses links that leave it or lead back."""

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from shards.errors import DataError, Fix
from shards.image_check import MAX_BYTES
from shards.regular_file import find_kind


def open_inside(root: Path, path: str, origin: str, allow_outside: bool = False) -> IO[bytes]:
    """Open the regular file ROOT/path. origin: its description in errors; root: absolute, without links.

    allow_outside: it may be behind a link that leaves `root`, and `path` may be absolute.
    """
    place = os.path.join(root, path)
    location = f"{place} ({origin})" if origin not in (path, place) else place
    try:
        real = os.path.realpath(place, strict=True)
        if not allow_outside and not real.startswith(f"{str(root).rstrip('/')}/"):
            raise DataError(f"{location} is behind a link that leaves {root} (to {real}); copy the files instead")
        # without O_NONBLOCK, opening a named pipe would block
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise DataError(f"{location} is missing; extract or download it again") from None
    except OSError as error:
        raise DataError(f"{location} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError(f"{location} is not a regular file")
    return os.fdopen(descriptor, "rb")


def is_there(path: Path) -> bool:
    """Whether the path exists; also true if it is not accessible, so that opening it reports the error."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def refuse_undecodable_name(path: str, root: Path) -> None:
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode("utf-8", "backslashreplace")
        raise DataError(f"{root} contains a file whose name is not UTF-8: {shown}; rename it") from None


class FolderImages:
    """Reads images from a folder, by their paths relative to `root` or to its subfolder `folder`."""

    def __init__(self, root: Path, folder: str = "") -> None:
        self._root, self._folder = root, folder

    def read(self, row: int, path: str, origin: str) -> bytes:
        """Read one image, up to one byte more than the size limit, to detect oversized images. `row` is ignored."""
        place = f"{self._folder}/{path}" if self._folder else path
        with open_inside(self._root, place, origin) as file:
            try:
                return file.read(MAX_BYTES + 1)
            except OSError as error:
                raise DataError(f"{self._root / place} ({origin}) cannot be read: {error.strerror}") from error


_log = logging.getLogger(__name__)


def walk_files(folder: str, root: Path, allow_outside: bool = False) -> Iterator[str]:
    """Yield all files below ROOT/folder as paths relative to `root`. allow_outside: links may leave `root`.

    folder: relative to `root`; "" for `root` itself. root: absolute, without links.
    """
    check_link(folder, root, allow_outside)
    yield from _walk(folder, root, allow_outside, ())


def check_link(path: str, root: Path, allow_outside: bool = False) -> None:
    """Raise DataError if ROOT/path is a link that is broken or leads back, or that leaves `root` without leave."""
    link = root / path
    if not link.is_symlink():
        return
    target = link.resolve()
    if not allow_outside and not target.is_relative_to(root):
        raise DataError(
            f"{link} is a link that leaves {root} (to {target})",
            fix=["copy the images instead", Fix("allow such links with {}", "allow_outside")],
        )
    if not target.exists():
        raise DataError(f"{link} is a link to {target}, which does not exist; remove it or restore the file")
    if link.is_relative_to(target):
        raise DataError(f"{link} is a link to {target}, which contains it; remove it")


def _walk(folder: str, root: Path, allow_outside: bool, above: tuple[str, ...]) -> Iterator[str]:
    """above: the folders that contain this one, without links, as found on the way."""
    real = os.path.realpath(root / folder)
    if real in above:
        raise DataError(f"{root / folder} is behind a link that leads back to {real}; remove the link")
    try:
        entries = list(os.scandir(root / folder))
    except OSError as error:
        raise DataError(f"{root / folder} cannot be read: {error.strerror}") from error
    for entry in entries:
        path = f"{folder}/{entry.name}" if folder else entry.name
        refuse_undecodable_name(path, root)
        if entry.is_symlink():
            check_link(path, root, allow_outside)
        if entry.is_dir():
            if not entry.name.startswith("."):
                yield from _walk(path, root, allow_outside, (*above, real))
        elif entry.is_file():
            yield path
        else:
            kind = find_kind(root / path, follow=True)
            _log.warning("%s is left out: it is %s, not a regular file", root / path, kind)
