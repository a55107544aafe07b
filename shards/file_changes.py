"""Compares the files of a source with those that were packed: a pure function of two lists of files."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shards.errors import list_some


class PackedFile(NamedTuple):
    """A file as it was when it was packed."""

    path: str
    """Relative to the root of its source, or absolute if it is outside."""
    nbytes: int
    times: tuple[int, ...]
    """The modification times, in ns, at which the file is known to have had this content."""
    content: bytes
    """Hash of its bytes."""
    label: str
    """The name of its class."""


class FoundFile(NamedTuple):
    """A file as the source lists it now."""

    path: str
    nbytes: int
    mtime_ns: int
    label: str


@dataclass(frozen=True)
class Changes:
    """How the files of a source differ from those that were packed, by key; true if they differ at all."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    moved: tuple[tuple[str, str], ...] = ()
    """(key when packed, key now) of files with the same content."""
    changed: tuple[str, ...] = ()
    """Files with other content."""
    relabelled: tuple[str, ...] = ()
    """Files in another class, under the same key."""
    touched: tuple[str, ...] = ()
    """Files with another modification time and the same content, which do not count as a difference."""

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.moved or self.changed or self.relabelled)

    def describe(self) -> str:
        """Return the number of files of each kind, with a few names."""
        kinds = {
            "added": self.added,
            "removed": self.removed,
            "moved": tuple(f"{before} -> {now}" for before, now in self.moved),
            "changed": self.changed,
            "given another label": self.relabelled,
        }
        texts = [f"{_count(names)} {kind} ({list_some(names)})" for kind, names in kinds.items() if names]
        return ", ".join(texts) or "no file differs"


def compare_files(
    packed: Mapping[str, PackedFile], found: Mapping[str, FoundFile], hash_content: Callable[[str], bytes]
) -> Changes:
    """Compare the files by key. hash_content: returns the hash of a found file's bytes; called for few files."""
    added = [key for key in found if key not in packed]
    removed = [key for key in packed if key not in found]
    moved: list[tuple[str, str]] = []
    changed, relabelled, touched = [], [], []
    for key in [key for key in packed if key in found]:
        before, now = packed[key], found[key]
        if before.label != now.label:
            relabelled.append(key)
        if before.nbytes != now.nbytes:
            changed.append(key)
        elif before.path != now.path or now.mtime_ns not in before.times:
            if hash_content(key) != before.content:
                changed.append(key)
            elif before.path != now.path:
                moved.append((before.path, now.path))
            else:
                touched.append(key)
    renamed = _match_moved(packed, found, removed, added, hash_content)
    return Changes(
        added=tuple(key for key in added if key not in set(renamed.values())),
        removed=tuple(key for key in removed if key not in renamed),
        moved=(*moved, *renamed.items()),
        changed=tuple(changed),
        relabelled=tuple(relabelled),
        touched=tuple(touched),
    )


def _match_moved(
    packed: Mapping[str, PackedFile],
    found: Mapping[str, FoundFile],
    removed: Iterable[str],
    added: Iterable[str],
    hash_content: Callable[[str], bytes],
) -> dict[str, str]:
    """Return the new key of each removed file whose content is in an added file; each file is used once."""
    waiting: dict[tuple[int, bytes], list[str]] = {}
    for key in removed:
        waiting.setdefault((packed[key].nbytes, packed[key].content), []).append(key)
    sizes = {nbytes for nbytes, _ in waiting}
    matched = {}
    for key in added:
        if found[key].nbytes in sizes:
            candidates = waiting.get((found[key].nbytes, hash_content(key)))
            if candidates:
                matched[candidates.pop(0)] = key
    return matched


def _count(names: tuple[str, ...]) -> str:
    return "1 file" if len(names) == 1 else f"{len(names):,} files"
