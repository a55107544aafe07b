"""Every shipped recipe loads, plans without data, and opens with its command, its cost and its known result."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from command_line import REPOSITORY, Answer, unchanged

from trainer.recipe_file import check_recipe, load_recipe, recipe_yaml
from trainer.stages import stages_of

Incv = Callable[..., Answer]
RECIPES = sorted((REPOSITORY / "recipes").glob("*.yaml"))
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)


def test_there_are_recipes() -> None:
    assert {"tiny", "demo"} <= {recipe.stem for recipe in RECIPES}


@each_recipe
def test_a_recipe_resolves_to_itself(recipe: Path) -> None:
    """config.resolved.yaml, with every default written out, says the same."""
    loaded = load_recipe(recipe)
    assert check_recipe(yaml.safe_load(recipe_yaml(loaded)), "resolved") == loaded


@each_recipe
def test_a_recipe_is_valid(recipe: Path, incv: Incv) -> None:
    answer = incv("validate", "-c", recipe)
    assert answer.code == 0, answer.err


@each_recipe
def test_a_recipe_plans_without_data_and_writes_nothing(
    recipe: Path, incv: Incv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with unchanged(tmp_path):
        answer = incv("run", "-c", recipe, "--dry-run")
    assert answer.code == 0, answer.err
    assert f"into runs/{recipe.stem}" in answer.out
    for stage in stages_of(load_recipe(recipe)):
        assert re.search(rf"^ +{stage} +(to do|made anew)", answer.out, re.MULTILINE), stage


@each_recipe
def test_a_recipe_opens_with_command_cost_and_result(recipe: Path) -> None:
    lines = recipe.read_text().splitlines()
    header = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    text = " ".join(line.lstrip("# ") for line in header)
    assert len(header[0].lstrip("# ")) > 10, "the first line says what it is; `incv ls` prints it"
    assert f"incv run -c recipes/{recipe.name}" in text
    cost = re.search(r"Cost: (.+?)\.? Known result: (.+)", text)
    assert cost, "the header has `Cost: ...` and then `Known result: ...`"
    result = cost[2]
    assert re.search(r"not yet run|none|\d %", result), f"neither a figure nor `not yet run`: {result}"
