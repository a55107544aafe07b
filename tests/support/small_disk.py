"""A file system small enough to fill up."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted_disk(folder: Path, size: str) -> Iterator[Path]:
    """`folder`, made and mounted with so much room ("64k"); skips the test where that is not allowed."""
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system that is small enough to fill up")
    mounted = _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    if mounted.returncode:
        pytest.skip(f"this machine does not let us mount a tmpfs: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def enlarge(folder: Path, size: str) -> None:
    assert _mount("-o", f"remount,size={size}", str(folder)).returncode == 0


def _mount(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
