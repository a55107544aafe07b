"""The names of folders into which a split was packed again."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.errors import DataError
from shards.repacked import is_packed_again, latest_folder, list_folders, next_folder, set_latest_folder


def test_a_folder_is_the_latest_until_it_is_packed_again(tmp_path):
    folder = tmp_path / "mine"
    assert latest_folder(folder) == folder
    assert next_folder(folder) == tmp_path / "mine-2"
    set_latest_folder(folder, tmp_path / "mine-9")
    assert latest_folder(folder) == tmp_path / "mine-9"
    assert latest_folder(tmp_path / "other") == tmp_path / "other"
    for _ in range(2):
        set_latest_folder(folder, folder)
        assert latest_folder(folder) == folder
    assert list(tmp_path.iterdir()) == []


@given(st.sets(st.integers(1, 12)), st.integers(1, 12))
def test_all_folders_are_listed_from_the_latest_on(tmp_path_factory, numbers, latest):
    parent = tmp_path_factory.mktemp("shards")
    folder = parent / "mine"
    named = {number: folder.with_name("mine" if number == 1 else f"mine-{number}") for number in range(1, 13)}
    for number in numbers:
        named[number].mkdir()
    for other in ("mine-2-2", "mine-x", "other-2", "min"):
        (parent / other).mkdir()
    set_latest_folder(folder, named[latest])
    order = sorted(numbers, key=lambda number: (number != latest, -number))
    assert list_folders(folder) == [named[number] for number in order]
    assert next_folder(folder).name == f"mine-{max(numbers, default=1) + 1}"
    assert list_folders(parent / "nowhere" / "mine") == []


@pytest.mark.parametrize("content", [{"folder": "../secret-2"}, {"folder": "other-2"}, {"folder": 2}, [], {}])
def test_a_note_that_names_something_else_is_refused(tmp_path, content):
    (tmp_path / "mine.latest.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"mine\.latest\.json"):
        latest_folder(tmp_path / "mine")


@given(st.text("ab-12", min_size=1, max_size=4), st.integers(2, 2000))
def test_exactly_the_next_folders_are_known_as_such(name, number):
    folder = Path("data") / name
    assert is_packed_again(folder, folder.with_name(f"{name}-{number}"))
    assert not is_packed_again(folder, folder)
    assert not is_packed_again(folder, Path("elsewhere") / f"{name}-{number}")
    for other in (f"{name}-1", f"{name}-0{number}", f"{name}{number}", f"{name}-", f"{name}-{number}x"):
        assert not is_packed_again(folder, folder.with_name(other))
