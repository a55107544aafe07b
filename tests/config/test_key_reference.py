"""The description of recipe keys: types in words, and docs/recipe.md, which is written from the schema."""

from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, TypeAdapter

from tests.support import REPOSITORY
from trainer.config.key_reference import (
    PAGE_COMMAND,
    describe_schema,
    describe_type,
    find_key,
    format_page,
    format_text,
    select_section,
)
from trainer.config.recipe_file import all_keys
from trainer.config.schema import Recipe
from trainer.config.section import Positive, Ratio
from trainer.methods.registry import METHODS, get_method
from trainer.run.recipe import recipe_schema

SECTIONS = {name: get_method(name).section for name in METHODS.built_in}


def test_the_page_of_all_keys_is_up_to_date() -> None:
    written = (REPOSITORY / "docs" / "recipe.md").read_text()
    assert format_page(describe_schema(Recipe, SECTIONS)) == written, f"write it again: {PAGE_COMMAND}"


def test_every_key_is_described() -> None:
    missing = [
        f"{section.names[0]}.{key.name}"
        for section in describe_schema(Recipe, SECTIONS)
        for key in section.keys
        if not key.text
    ]
    assert missing == [], "write a docstring under each key"


def test_no_key_is_left_out() -> None:
    described = {
        f"{name}.{key.name}".removeprefix(".").replace("eval.<name>.", "eval.")
        for section in describe_schema(Recipe, SECTIONS)
        for name in section.names
        for key in section.keys
    }
    assert {key for key in all_keys(recipe_schema()) if key.split(".")[0] not in SECTIONS or "." in key} <= described


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (Positive, "integer ≥ 1"),
        (Positive | None, "integer ≥ 1, or null"),
        (Ratio, "number from 0 to 1"),
        (Annotated[float, Field(gt=0)] | None, "number > 0, or null"),
        (Annotated[float, Field(ge=0, lt=1)], "number ≥ 0, < 1"),
        (Literal["auto", "cpu", "cuda"], "`auto`, `cpu` or `cuda`"),
        (Literal["estimate", "true_ratio"] | Ratio, "`estimate` or `true_ratio`, or number from 0 to 1"),
        (Literal["auto"] | bool, "`auto`, or true or false"),
        (tuple[float, float, float], "[number, number, number]"),
        (tuple[tuple[int, float], ...], "list of [integer, number]"),
        (tuple[tuple[float, ...], ...] | None, "list of lists of numbers, or null"),
        (dict[str, Any], "mapping"),
        (str, "string"),
    ],
)
def test_a_type_in_words(annotation: Any, words: str) -> None:
    assert describe_type(annotation) == words


@given(st.integers(-5, 5), st.integers(0, 5))
def test_the_bounds_in_words_are_those_that_hold(low: int, width: int) -> None:
    bounded = Annotated[int, Field(ge=low, le=low + width)]
    assert describe_type(bounded) == f"integer from {low} to {low + width}"
    assert TypeAdapter(bounded).validate_python(low) == low


class Inner(BaseModel):
    """An inner section."""

    rate: float = 0.5


class Outer(BaseModel):
    one: Inner
    other: Inner = Inner()
    named: dict[str, Inner] = Field(default_factory=dict)
    size: int


def test_sections_of_one_schema_are_described_once() -> None:
    outer, inner = describe_schema(Outer)
    assert outer.names == ("",)
    assert [(key.name, key.type, key.default) for key in outer.keys] == [
        ("one", "section", "required"),
        ("other", "section", "its defaults"),
        ("named", "sections by name", "{}"),
        ("size", "integer", "required"),
    ]
    assert inner.names == ("one", "other", "named.<name>")
    assert [(key.name, key.default) for key in inner.keys] == [("rate", "0.5")]


def test_one_section_or_one_key_can_be_selected() -> None:
    sections = describe_schema(Outer)
    assert [section.names for section in select_section(sections, "other")] == [("other",)]
    assert select_section(sections, "oth") == []
    found = find_key(sections, "other.rate")
    assert found is not None
    assert "rate   number; default: 0.5" in format_text([found])
    assert find_key(sections, "size") is not None
    assert find_key(sections, "other.size") is None
