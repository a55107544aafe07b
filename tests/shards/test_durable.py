"""Folders that a refused command leaves behind: none that did not exist before."""

from pathlib import Path

import pytest

from shards.durable import list_missing, remove_on_error, write_bytes
from shards.errors import ConfigError, DataError


def fill(folder: Path, error: type[Exception]) -> None:
    with pytest.raises(error):
        _fill_and_raise(folder, error)


def _fill_and_raise(folder: Path, error: type[Exception]) -> None:
    with remove_on_error(list_missing(folder), DataError):
        (folder / "inner").mkdir(parents=True)
        (folder / "inner" / "file").touch()
        raise error("refused")


def test_new_folders_are_removed_with_the_parents_that_they_needed(tmp_path: Path) -> None:
    fill(tmp_path / "a" / "b", DataError)
    assert list(tmp_path.iterdir()) == []


def test_folders_that_existed_stay(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    fill(folder, DataError)
    assert (folder / "inner" / "file").is_file()
    fill(tmp_path / "a" / "c", DataError)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_other_errors_and_success_remove_nothing(tmp_path: Path) -> None:
    fill(tmp_path / "a", ConfigError)
    assert (tmp_path / "a" / "inner" / "file").is_file()
    with remove_on_error(list_missing(tmp_path / "b"), DataError):
        (tmp_path / "b").mkdir()
    assert (tmp_path / "b").is_dir()


@pytest.mark.parametrize("target", ["file/x", "file/x/y"])
def test_a_file_in_the_way_is_named(tmp_path: Path, target: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot write .*choose another folder"):
        write_bytes(tmp_path / target, b"")
