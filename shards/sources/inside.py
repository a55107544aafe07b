"""Files under a root that is not trusted: links may lead elsewhere in it, but not out of it."""

import os
import stat
from pathlib import Path
from typing import IO

from shards.errors import DataError
from shards.image_check import MAX_BYTES


def open_inside(root: Path, path: str, origin: str) -> IO[bytes]:
    """The regular file ROOT/path; `origin` says who asked for it. `root` is absolute and has no links."""
    place = f"{root}/{path}"
    said = f"{place} ({origin})" if origin not in (path, place) else place
    try:
        real = os.path.realpath(place, strict=True)
        if not real.startswith(f"{str(root).rstrip('/')}/"):
            raise DataError(f"{said} is reached by a link that leaves {root} (to {real}); copy the images into it")
        # without O_NONBLOCK a named pipe in place of the file would be waited for
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise DataError(f"{said} is missing; extract or download it again") from None
    except OSError as error:
        raise DataError(f"{said} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError(f"{said} is not a file; a file is expected there")
    return os.fdopen(descriptor, "rb")


def is_there(path: Path) -> bool:
    """Whether something has that name; also where it may not be looked at, so that opening it can say why."""
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
        raise DataError(f"{root} holds a file whose name is not UTF-8: {path!r}; rename it") from None


class FolderImages:
    """The images of an extracted folder, by their paths under `root`."""

    def __init__(self, root: Path, folder: str = "") -> None:
        self._root, self._folder = root, folder

    def read(self, row: int, path: str, origin: str) -> bytes:
        """At most one byte more than an image may have: enough to be found oversized."""
        place = f"{self._folder}/{path}" if self._folder else path
        with open_inside(self._root, place, origin) as file:
            try:
                return file.read(MAX_BYTES + 1)
            except OSError as error:
                raise DataError(f"{self._root / place} ({origin}) cannot be read: {error.strerror}") from error
