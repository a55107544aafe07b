"""The parts of error messages: lists that are cut off, and near matches."""

from hypothesis import given
from hypothesis import strategies as st

from shards.errors import list_some

NAMES = st.lists(st.text("abc", min_size=1), max_size=8)


@given(NAMES, st.integers(1, 9))
def test_a_list_names_the_first_items_and_counts_the_others(names, most):
    shown, _, rest = list_some(names, most, "; ").partition(" and ")
    assert shown == "; ".join(names[:most])
    assert rest == (f"{len(names) - most} more" if len(names) > most else "")


def test_a_list_that_is_cut_off():
    assert list_some(["a", "b", "c"]) == "a, b, c"
    assert list_some([str(number) for number in range(2003)]) == "0, 1, 2 and 2,000 more"
