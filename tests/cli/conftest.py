"""A folder with packed digits to run commands in, and a finished run of recipes/tiny.yaml."""

import contextlib
import io
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shards.pack import pack
from shards.sources import open_source
from tests.support.command_line import THREADS, TINY, Answer, exit_code
from tests.support.made_once import make_once


@pytest.fixture(scope="session")
def packed_digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def pack_splits(folder: Path) -> None:
        for split in ("train", "test"):
            pack(open_source("digits", None, split), folder / f"digits-{split}")

    return make_once(tmp_path_factory, "packed-digits", pack_splits)


@pytest.fixture
def playground(tmp_path: Path, packed_digits: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: recipes/tiny.yaml finds its shards there, and nothing else is in it."""
    folder = tmp_path / "playground"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "shards").symlink_to(packed_digits)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def incv(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """incv("run", "-c", ...) -> its exit code and what it printed."""

    def command(*arguments: object) -> Answer:
        capsys.readouterr()
        code = exit_code([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return Answer(code, printed.out, printed.err)

    return command


@pytest.fixture(scope="session")
def finished_once(tmp_path_factory: pytest.TempPathFactory, packed_digits: Path) -> Path:
    """A finished run; do not write to it."""

    def finish(folder: Path) -> None:
        (folder / "data").mkdir()
        (folder / "data" / "shards").symlink_to(packed_digits)
        error = io.StringIO()
        with (
            contextlib.chdir(folder),
            contextlib.redirect_stderr(error),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            code = exit_code(["run", "-c", TINY, "--run-dir", "run", THREADS])
        assert code == 0, error.getvalue()

    return make_once(tmp_path_factory, "finished", finish) / "run"


@pytest.fixture
def finished(finished_once: Path, playground: Path) -> Path:
    """A finished run of one's own, with the times of its files; the current folder is `playground`."""
    folder = playground / "run"
    shutil.copytree(finished_once, folder)
    return folder
