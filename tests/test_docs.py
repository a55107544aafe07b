"""The documentation names files, headings and functions that exist."""

import importlib
import re
import shlex
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pytest

from shards.durable import read_json
from tests.support import REPOSITORY
from tests.support.documentation import PAGES, shell_blocks
from trainer.cli import build_parser
from trainer.incv.predictions import Predictions
from trainer.theory import noise_from_accuracy

_FOLDERS = r"(?:trainer|shards|docs|recipes|slurm|tests|benchmarks|\.ci|\.github)"
# A path from the root of the repository: not the end of a longer one, such as data/shards/webvision.
_PATH = re.compile(rf"(?<![\w./<>-]){_FOLDERS}/[\w./*-]*")
_ROOT_FILE = re.compile(r"`(Makefile|pyproject\.toml|constraints\.txt|[A-Z]+\.(?:md|cff))`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_IMPORT = re.compile(r"^from (trainer[\w.]*|shards[\w.]*) import ([\w, ]+)$", re.MULTILINE)

_INLINE_COMMAND = re.compile(r"`incv ([^`]+)`")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@each_page
def test_paths_exist(page: Path) -> None:
    text = page.read_text()
    named = {path.rstrip(".,") for path in _PATH.findall(text)}
    missing = {path for path in named if not list(REPOSITORY.glob(path))}
    missing |= {name for name in _ROOT_FILE.findall(text) if not (REPOSITORY / name).exists()}
    assert not missing, f"{page.name} names paths that do not exist"


@each_page
def test_links_resolve(page: Path) -> None:
    broken = []
    for link in _LINK.findall(_FENCE.sub("", page.read_text())):
        if re.match(r"\w+:", link):
            continue  # of the web
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert not broken, f"{page.name} has links that lead nowhere"


@each_page
def test_imports_in_examples_work(page: Path) -> None:
    for module, names in _IMPORT.findall(page.read_text()):
        for name in names.split(","):
            assert hasattr(importlib.import_module(module), name.strip()), f"from {module} import {name}"


@each_page
def test_commands_in_examples_are_accepted(page: Path) -> None:
    """Commands and options exist; what they name need not."""
    for block in shell_blocks(page):
        for command in block.commands():
            words = shlex.split(command)
            if words[0] == "incv" and "|" not in words:
                build_parser().parse_known_args(words[1:])  # exits if it does not accept them


@each_page
def test_commands_named_in_the_text_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`incv clean --as shards`: the command and its options exist; arguments that it requires may be left out."""
    for span in _INLINE_COMMAND.findall(_FENCE.sub("", page.read_text())):
        with suppress(SystemExit):
            build_parser().parse_known_args(shlex.split(span.partition(" > ")[0]))
        said = capsys.readouterr().err
        assert not said or "are required" in said or "expected one argument" in said, f"incv {span}: {said}"


def test_links_are_found() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    assert "docs/architecture.md" in _LINK.findall(readme)
    assert "trainer/run/runner.py" in _PATH.findall((REPOSITORY / "docs" / "architecture.md").read_text())
    assert "on-a-laptop" in _anchors(REPOSITORY / "README.md")


def test_the_page_of_recipes_lists_every_recipe() -> None:
    page = (REPOSITORY / "docs" / "recipes.md").read_text()
    listed = re.findall(r"\[(\w+)\]\(\.\./recipes/(\w+)\.yaml\)", page)
    assert all(name == file for name, file in listed)
    assert {name for name, _ in listed} == {path.stem for path in (REPOSITORY / "recipes").glob("*.yaml")}


def test_the_accuracies_of_the_readme_and_of_the_recipes_are_the_recorded_ones() -> None:
    """Rows of README.md: | symmetric 20 % | standard | Co-teaching | INCV + Co-teaching | paper |."""
    recorded = read_json(REPOSITORY / "results" / "table1.json")
    readme, recipes = ((REPOSITORY / name).read_text() for name in ("README.md", "docs/recipes.md"))
    settings = {
        "sym20": "symmetric 20 %", "sym50": "symmetric 50 %", "sym80": "symmetric 80 %", "asym40": "asymmetric 40 %",
    }  # fmt: skip
    for setting, name in settings.items():
        mine = recorded["coteaching_incv"][setting]
        methods = ("standard", "coteaching", "coteaching_incv")
        cells = [*(recorded[method][setting] for method in methods), mine["paper"]]
        expected = [cell[key] for cell in cells for key in ("mean", "std") if cell[key] is not None]
        row = re.findall(rf"^\| {name} \|(.+)$", readme, re.MULTILINE)[0]
        assert [float(number) for number in re.findall(r"[\d.]+", row)] == pytest.approx(expected, abs=0.0501), name
        row = re.findall(rf"^\| \[cifar10_{setting}\]\S+ \|.+\| (.+?) %", recipes, re.MULTILINE)[0]
        assert [float(number) for number in row.split(" ± ")] == pytest.approx(
            [mine["mean"], mine["std"]], abs=0.0501
        ), setting


def test_the_page_of_the_method_states_the_papers_estimate() -> None:
    """| agreement | 0.95 | ... and below it | ε | 0.025 | ..., for 10 classes."""
    page = (REPOSITORY / "docs" / "method.md").read_text()
    agreements, ratios = (
        [float(cell) for cell in re.findall(rf"^\| {name} \|(.+)\|$", page, re.MULTILINE)[0].split("|")]
        for name in ("agreement", "ε")
    )
    assert len(ratios) == 7
    assert ratios == [round(noise_from_accuracy(agreement, 10), 3) for agreement in agreements]


def test_the_page_of_files_lists_the_columns_of_predictions() -> None:
    page = (REPOSITORY / "docs" / "files.md").read_text()
    section = page[page.index("## predictions.parquet") : page.index("## metrics.jsonl")]
    rows = re.findall(r"^\| (`.+?`) \|", section, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {
        column.name for column in fields(Predictions)
    }
