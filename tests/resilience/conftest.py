"""Packed digits and an undisturbed run that every test of this folder compares with."""

from pathlib import Path

import processes
import pytest

from shards.pack import pack
from shards.sources import open_source


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to start commands in: recipes/tiny.yaml finds its shards there."""
    folder = tmp_path_factory.mktemp("workplace")
    for split in ("train", "test"):
        pack(open_source("digits", None, split), folder / "data" / "shards" / f"digits-{split}")
    return folder


@pytest.fixture(scope="session")
def undisturbed(workplace: Path) -> Path:
    """A run that nothing interrupted."""
    run_dir = workplace / "undisturbed"
    log = workplace / "undisturbed.log"
    assert processes.finish(processes.start(workplace, run_dir, log)) == 0, log.read_text()
    return run_dir
