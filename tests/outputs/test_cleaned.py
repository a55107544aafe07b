import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.incv.selection_index import SelectionIndex, State
from trainer.outputs.cleaned import choose_samples, name_class_folders, name_files

CLASSES = 3
SAMPLE = st.tuples(
    st.sampled_from(list(State)),
    st.integers(-1, CLASSES - 1),
    st.floats(0, 1, width=32) | st.just(float("nan")),
    st.integers(0, CLASSES - 1),
)


def selection_of(samples: list[tuple[State, int, float, int]]) -> tuple[SelectionIndex, np.ndarray]:
    states, predicted, probability, labels = zip(*samples, strict=True)
    size = len(samples)
    index = SelectionIndex(
        state=np.array(states, np.int8),
        round=np.zeros(size, np.int16),
        predicted=np.array(predicted, np.int32),
        loss=np.zeros(size, np.float32),
        given_probability=np.zeros(size, np.float32),
        predicted_probability=np.array(probability, np.float32),
    )
    return index, np.array(labels, np.int64)


@given(st.lists(SAMPLE, min_size=1, max_size=30), st.none() | st.floats(0, 1), st.randoms())
def test_the_chosen_samples(samples, least, random):
    """Against a loop that states the rule once more."""
    expected = []
    checked = np.array([random.random() < 0.3 for _ in samples])
    for sample_id, (state, predicted, probability, label) in enumerate(samples):
        suggested = (
            least is not None
            and not checked[sample_id]
            and state in (State.CANDIDATE, State.REMOVED, State.HELD_OUT)
            and predicted not in (-1, label)
            and np.float32(probability) >= least
        )
        if state == State.SELECTED or (state == State.HELD_OUT and (checked[sample_id] or predicted == label)):
            expected.append((sample_id, label, False))
        elif suggested:
            expected.append((sample_id, predicted, True))
    index, labels = selection_of(samples)
    before = labels.copy()
    chosen = choose_samples(index, labels, checked, least)
    rows = zip(chosen.ids.tolist(), chosen.labels.tolist(), chosen.relabelled.tolist(), strict=True)
    assert list(rows) == expected
    assert np.array_equal(labels, before)


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(st.lists(NAMES, min_size=1, max_size=12, unique=True))
def test_class_folders_are_safe_and_distinct(names):
    folders = name_class_folders(names)
    assert len({folder.casefold() for folder in folders}) == len(names)
    for name, folder in zip(names, folders, strict=True):
        assert folder
        assert "/" not in folder
        assert "\0" not in folder
        assert folder not in (".", "..")
        if name.isalnum() and sum(name.casefold() == other.casefold() for other in names) == 1:
            assert folder == name or folder.endswith(f"-{names.index(name)}")


def test_a_plain_class_name_is_its_folder():
    assert name_class_folders(["cat", "dog", "a/b", "Dog", "dog-1"]) == ["cat", "dog-1-1", "a_b", "Dog-3", "dog-1"]


KEYS = st.lists(st.text("ab./-1é", min_size=1, max_size=8), min_size=1, max_size=15)


@given(KEYS, st.data())
def test_file_names_are_safe_and_distinct(keys, data):
    folders = data.draw(st.lists(st.sampled_from(["x", "y"]), min_size=len(keys), max_size=len(keys)))
    names = name_files(keys, ["jpg"] * len(keys), np.arange(len(keys)), folders)
    assert len({name.casefold() for name in names}) == len(keys)
    for name, folder in zip(names, folders, strict=True):
        first, _, rest = name.partition("/")
        assert first == folder
        assert rest
        assert "/" not in rest
        assert not rest.startswith(".")


def test_a_unique_base_name_is_kept():
    names = name_files(["train/cat/1.jpg", "train/dog/1.jpg", "a/2.png"], ["jpg", "jpg", "png"], np.arange(3), "xxx")
    assert names == ["x/1-0.jpg", "x/1-1.jpg", "x/2.png"]
