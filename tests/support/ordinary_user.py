"""Permission checks as an unprivileged user, even if the tests run as root."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOBODY = 65534


@contextmanager
def ordinary_user(*folders: Path) -> Iterator[None]:
    """Inside, this process has no privileges; `folders` and what leads to them stay open to everyone."""
    if os.geteuid() != 0:
        yield
        return
    opened = {path: path.stat().st_mode for folder in folders for path in (folder, *folder.parents)}
    for path, mode in opened.items():
        path.chmod(mode | 0o555)
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        for path, mode in opened.items():
            path.chmod(mode)
