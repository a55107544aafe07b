"""The parts of error messages: lists that are cut off, and near matches."""

from hypothesis import given
from hypothesis import strategies as st

from shards.errors import did_you_mean, list_some, suggest_near

NAMES = st.lists(st.text("abc", min_size=1), max_size=8)


@given(NAMES, st.integers(1, 9))
def test_a_list_names_the_first_items_and_counts_the_others(names, most):
    shown, _, rest = list_some(names, most, "; ").partition(" and ")
    assert shown == "; ".join(names[:most])
    assert rest == (f"{len(names) - most} more" if len(names) > most else "")


def test_a_list_that_is_cut_off():
    assert list_some(["a", "b", "c"]) == "a, b, c"
    assert list_some([str(number) for number in range(2003)]) == "0, 1, 2 and 2,000 more"


def test_near_matches_are_suggested_nearest_first():
    known = ("labels", "label", "model")
    assert suggest_near("lable", known, most=2) == "did you mean label or labels?"
    assert suggest_near("lable", known, most=1, show=repr) == "did you mean 'label'?"
    assert suggest_near("xyz", known) == ""


def test_an_unknown_name_is_answered_with_near_and_known_names():
    assert did_you_mean("lable", ("model", "label")) == "did you mean label? known: label, model"
    assert did_you_mean("xyz", ("model", "label")) == "known: label, model"
    assert did_you_mean("xyz", ()) == "known: none"
