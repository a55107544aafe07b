"""Errors have parts that a front end names; messages have lists that are cut off, and near matches."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.errors import ConfigError, DataError, Fix, did_you_mean, list_some, renamed_fields, suggest_near

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


def _error() -> DataError:
    fixes = ["restore it", Fix("name another with {}", "csv"), Fix("fetch it again with {}", "task")]
    return DataError("list.csv is damaged", field="csv", fix=fixes)


def test_without_a_front_end_fields_are_flags_and_recipe_keys():
    assert str(ConfigError("plain text")) == "plain text"
    error = _error()
    assert (error.problem, error.field, error.exit_code) == ("list.csv is damaged", "csv", 3)
    assert str(error) == (
        "--csv: list.csv is damaged; restore it, or name another with --csv, or fetch it again with --task"
    )
    assert str(ConfigError("no such file", field="model.weights")) == "model.weights: no such file"
    assert (
        str(ConfigError("must be 1 or more", field="samples_per_shard")) == "--samples-per-shard: must be 1 or more"
    )


def test_each_front_end_names_the_fields_and_hides_what_it_lacks():
    """The recipe's layer names options; the audit's, around it, names recipe keys."""
    with pytest.raises(DataError) as raised, renamed_fields({"csv": "data.train.csv", "task": None}):
        raise _error()
    error = raised.value
    assert str(error) == "data.train.csv: list.csv is damaged; restore it, or name another with data.train.csv"
    error.rename_fields({"data.train.csv": "the list", "task": "--task"})
    assert str(error) == "the list: list.csv is damaged; restore it, or name another with the list"
    error.rename_fields({"the list": None})
    assert str(error) == "list.csv is damaged; restore it"


def test_an_error_of_another_process_keeps_its_parts():
    error = _error()
    error.rename_fields({"csv": "data.train.csv"})
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
