"""The folders of a split that was packed more than once: FOLDER, FOLDER-2, ..., and which of them is the latest.

An earlier folder is kept, because other runs may use it. FOLDER.latest.json names the latest.
"""

import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from shards.durable import read_json, write_json
from shards.errors import DataError


def latest_folder(folder: Path) -> Path:
    """Return the folder into which `folder` was last packed: itself, or FOLDER-N."""
    note = _note_of(folder)
    if not note.is_file():
        return folder
    content = read_json(note)
    name = content.get("folder") if isinstance(content, dict) else None
    if not isinstance(name, str) or not is_packed_again(folder, folder.parent / name):
        raise DataError(
            f"{note} does not name a folder {folder.name}-2, {folder.name}-3, ...: correct it, or remove it to use "
            f"{folder}"
        )
    return folder.parent / name


def set_latest_folder(folder: Path, latest: Path) -> None:
    """Record that `latest`, one of `next_folders(folder)`, replaces `folder`."""
    assert is_packed_again(folder, latest), latest
    write_json(_note_of(folder), {"folder": latest.name})


def next_folders(folder: Path) -> Iterator[Path]:
    """Yield FOLDER-2, FOLDER-3, ..., from the one after the latest."""
    latest = latest_folder(folder)
    first = 2 if latest == folder else int(latest.name.rpartition("-")[2]) + 1
    for number in count(first):
        yield folder.with_name(f"{folder.name}-{number}")


def is_packed_again(folder: Path, other: Path) -> bool:
    """Whether `other` is one of FOLDER-2, FOLDER-3, ..."""
    number = other.name.removeprefix(f"{folder.name}-")
    return other.parent == folder.parent and other.name != number and bool(re.fullmatch("[2-9]|[1-9][0-9]+", number))


def _note_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.latest.json")
