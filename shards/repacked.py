"""The folders of a split that was packed more than once: FOLDER, FOLDER-2, ..., and which of them is the latest.

The others are kept, because other runs may use them. FOLDER.latest.json names the latest, unless it is FOLDER.
"""

import re
from pathlib import Path

from shards.durable import disk_errors, read_json, write_json
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
    """Record that new runs use `latest`: FOLDER-2, FOLDER-3, ..., or `folder` itself again."""
    if latest == folder:
        with disk_errors(_note_of(folder)):
            _note_of(folder).unlink(missing_ok=True)
        return
    assert is_packed_again(folder, latest), latest
    write_json(_note_of(folder), {"folder": latest.name})


def list_folders(folder: Path) -> list[Path]:
    """Return those of FOLDER, FOLDER-2, ... that exist: the latest first, then the others from the last one on."""
    found = [other for other in folder.parent.glob("*") if other == folder or is_packed_again(folder, other)]
    latest = latest_folder(folder)
    return sorted(found, key=lambda other: (other != latest, -_number_of(folder, other)))


def next_folder(folder: Path) -> Path:
    """Return the first of FOLDER-2, FOLDER-3, ... after all that exist."""
    last = max((_number_of(folder, other) for other in list_folders(folder)), default=1)
    return folder.with_name(f"{folder.name}-{last + 1}")


def is_packed_again(folder: Path, other: Path) -> bool:
    """Whether `other` is one of FOLDER-2, FOLDER-3, ..."""
    number = other.name.removeprefix(f"{folder.name}-")
    return other.parent == folder.parent and other.name != number and bool(re.fullmatch("[2-9]|[1-9][0-9]+", number))


def _number_of(folder: Path, other: Path) -> int:
    """Return N of FOLDER-N; 1 for FOLDER itself."""
    return 1 if other == folder else int(other.name.rpartition("-")[2])


def _note_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.latest.json")
