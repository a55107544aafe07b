"""Packed digits and an uninterrupted run as this folder's reference."""

from pathlib import Path

import pytest

from tests.support import processes
from tests.support.made_once import make_once


@pytest.fixture(scope="session")
def playground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to start commands in: recipes/tiny.yaml finds its shards there."""
    folder = tmp_path_factory.mktemp("playground")
    processes.pack_digits(folder)
    return folder


@pytest.fixture(scope="session")
def uninterrupted(playground: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted; do not write to it."""

    def finish(folder: Path) -> None:
        log = folder / "log"
        assert processes.finish(processes.start(playground, folder / "run", log)) == 0, log.read_text()

    return make_once(tmp_path_factory, "undisturbed", finish) / "run"
