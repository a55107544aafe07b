"""The comparison of a source with what was packed from it, over made-up folders and edits."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shards.file_changes import Changes, FoundFile, PackedFile, compare_files

LABELS = ("cat", "dog")
KEYS = st.sampled_from([f"{label}/{number}" for label in LABELS for number in range(6)])
CONTENTS = st.binary(min_size=1, max_size=2)  # few, so that files of equal size and equal content occur
FOLDERS = st.dictionaries(KEYS, CONTENTS, max_size=8)
HOUR = 3600


def packed_from(folder: dict[str, bytes], time: int = 0) -> dict[str, PackedFile]:
    return {key: PackedFile(key, len(data), (time,), data, key[:3]) for key, data in folder.items()}


def found_in(folder: dict[str, bytes], times: dict[str, int]) -> dict[str, FoundFile]:
    return {key: FoundFile(key, len(data), times.get(key, 0), key[:3]) for key, data in folder.items()}


def never(key: str) -> bytes:
    raise AssertionError(f"{key} was read")


@st.composite
def edits(draw: st.DrawFn) -> tuple[dict[str, bytes], dict[str, bytes], dict[str, int]]:
    """A folder, the folder after some edits, and the new times of files that were written or touched."""
    before = draw(FOLDERS)
    after, times = dict(before), {}
    for clock in range(1, draw(st.integers(0, 6)) + 1):
        edit = draw(st.sampled_from(["add", "remove", "move", "write", "touch"]))
        if edit == "add" and (key := draw(KEYS)) not in after:
            after[key], times[key] = draw(CONTENTS), clock
        elif after and edit != "add":
            key = draw(st.sampled_from(sorted(after)))
            if edit == "move" and (new := draw(KEYS)) not in after:  # keeps the time, as `mv` does
                after[new], times[new] = after.pop(key), times.pop(key, 0)
            elif edit == "remove":
                del after[key]
                times.pop(key, None)
            elif edit in ("write", "touch"):
                times[key] = clock
                after[key] = draw(CONTENTS) if edit == "write" else after[key]
    return before, after, times


@given(FOLDERS)
def test_an_unchanged_folder_has_no_changes_and_no_file_is_read(folder):
    assert compare_files(packed_from(folder), found_in(folder, {}), never) == Changes()


@given(edits())
def test_there_are_changes_exactly_if_a_key_or_a_content_differs(edited):
    before, after, times = edited
    assume_times_tell(before, after, times)
    changes = compare_files(packed_from(before), found_in(after, times), after.__getitem__)
    assert bool(changes) == (before != after)
    assert set(changes.changed) == {key for key in before.keys() & after.keys() if before[key] != after[key]}
    assert set(changes.touched) <= {key for key in before.keys() & after.keys() if before[key] == after[key]}


def assume_times_tell(before: dict[str, bytes], after: dict[str, bytes], times: dict[str, int]) -> None:
    """`mv a b` over equal sizes keeps a time that b had before: give such files a time of their own."""
    for key in before.keys() & after.keys():
        if before[key] != after[key] and len(before[key]) == len(after[key]) and not times.get(key):
            times[key] = HOUR


@given(edits())
def test_the_changes_lead_from_one_set_of_keys_to_the_other(edited):
    before, after, times = edited
    changes = compare_files(packed_from(before), found_in(after, times), after.__getitem__)
    old, new = [one for one, _ in changes.moved], [one for _, one in changes.moved]
    assert Counter([*changes.removed, *old]) == Counter(before.keys() - after.keys())
    assert Counter([*changes.added, *new]) == Counter(after.keys() - before.keys())
    assert all(before[one] == after[other] for one, other in changes.moved)
    left = Counter(before[key] for key in changes.removed) & Counter(after[key] for key in changes.added)
    assert not left, "a removed file with the content of an added one has been moved"


@given(edits())
def test_only_files_that_may_have_changed_are_read(edited):
    before, after, times = edited
    read = []

    def read_one(key: str) -> bytes:
        read.append(key)
        return after[key]

    compare_files(packed_from(before), found_in(after, times), read_one)
    assert len(read) == len(set(read))
    assert {key for key in read if key in before} <= times.keys()


def test_a_time_at_which_the_content_was_seen_is_known():
    file = PackedFile("a", 1, (5, 9), b"x", "cat")
    for time in (5, 9):
        assert not compare_files({"a": file}, {"a": FoundFile("a", 1, time, "cat")}, never).touched
    assert compare_files({"a": file}, {"a": FoundFile("a", 1, 7, "cat")}, lambda _: b"x").touched == ("a",)


def test_another_class_and_another_path_under_the_same_key():
    before = {"1": PackedFile("a.jpg", 1, (0,), b"x", "cat"), "2": PackedFile("b.jpg", 1, (0,), b"y", "cat")}
    now = {"1": FoundFile("a.jpg", 1, 0, "dog"), "2": FoundFile("c/b.jpg", 1, 0, "cat")}
    changes = compare_files(before, now, lambda _: b"y")
    assert changes == Changes(relabelled=("1",), moved=(("b.jpg", "c/b.jpg"),))
    assert changes.describe() == "1 file moved (b.jpg -> c/b.jpg), 1 file given another label (1)"


def test_the_description_counts_all_and_names_a_few():
    changes = Changes(added=tuple("abcde"), removed=("f",), changed=("g", "h"))
    assert changes.describe() == "5 files added (a, b, c and 2 more), 1 file removed (f), 2 files changed (g, h)"
