"""Opens files below a root folder and refuses links that point outside it."""

import os
import stat
from pathlib import Path
from typing import IO

from shards.errors import DataError
from shards.image_check import MAX_BYTES


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
