"""Lists the files below a folder, without hidden folders, and refuses links that leave the root or lead back."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from shards.errors import DataError, Fix
from shards.regular_file import find_kind
from shards.sources.inside import refuse_undecodable_name

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
