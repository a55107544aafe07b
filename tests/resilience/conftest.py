"""Packed digits and an uninterrupted run as this folder's reference."""

from pathlib import Path

import pytest

from tests.support import processes


@pytest.fixture(scope="session")
def playground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to start commands in: recipes/tiny.yaml finds its shards there."""
    folder = tmp_path_factory.mktemp("playground")
    processes.pack_digits(folder)
    return folder


@pytest.fixture(scope="session")
def uninterrupted(playground: Path) -> Path:
    """A run that nothing interrupted."""
    run_dir = playground / "undisturbed"
    log = playground / "undisturbed.log"
    assert processes.finish(processes.start(playground, run_dir, log)) == 0, log.read_text()
    return run_dir
