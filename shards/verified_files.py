"""Records which files of a folder are verified, so that unchanged files need not be hashed again."""

import json
from contextlib import suppress
from pathlib import Path

from shards.durable import disk_errors
from shards.regular_file import open_to_append, read_regular


class VerifiedFiles:
    """A log file with one JSON line per verified file: name, size, mtime and checksum."""

    def __init__(self, folder: Path, notes: str) -> None:
        self._folder, self._notes = folder, folder / notes
        self._known: dict[str, list[object]] = {}
        with suppress(FileNotFoundError):
            for line in read_regular(self._notes).decode(errors="replace").splitlines():
                with suppress(ValueError, TypeError):  # a killed process may leave an incomplete line
                    name, *facts = json.loads(line)
                    self._known[name] = facts

    def is_verified(self, name: str, checksum: str) -> bool:
        """Whether the file exists and is unchanged since it was verified against `checksum`."""
        return name in self._known and self._known[name] == self._facts(name, checksum)

    def add(self, name: str, checksum: str) -> None:
        facts = self._facts(name, checksum)
        if facts is not None:
            self._known[name] = facts
            with disk_errors(self._notes), open_to_append(self._notes) as file:
                # newline first: the last line may be incomplete
                file.write(b"\n" + json.dumps([name, *facts]).encode())

    def _facts(self, name: str, checksum: str) -> list[object] | None:
        try:
            status = (self._folder / name).stat()
        except FileNotFoundError:
            return None
        return [status.st_size, status.st_mtime_ns, checksum]
