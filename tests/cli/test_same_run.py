"""A run that another directory already holds: forgetting --run-dir does not start it again without a word."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shards.durable import write_json
from tests.support.command_line import TINY, Answer
from trainer.config.recipe_file import recipe_yaml
from trainer.run.default_directory import find_same_run
from trainer.run.recipe import load_recipe

Incv = Callable[..., Answer]
PHOTOS = "data={train: {source: image_folder, root: photos}, eval: {}}"


def test_a_forgotten_run_directory_is_named(incv: Incv, playground: Path) -> None:
    words = "runs/my run already holds a run of this recipe"
    first = incv("labels", "-c", TINY, "seed=3", "--run-dir", "runs/my run")
    assert first.code == 0, first.err
    assert words not in first.err
    other = incv("labels", "-c", TINY)
    assert words not in other.err, "another seed"
    again = incv("labels", "-c", TINY, "seed=3")
    assert again.code == 0, again.err
    (new,) = Path("runs").glob("tiny-*")
    (line,) = (line for line in again.err.splitlines() if words in line)
    assert f"starts another in {new}" in line
    assert line.endswith("add --run-dir 'runs/my run'")
    assert "already holds" not in incv("labels", "-c", TINY, "seed=3").err, "it resumes its own"
    chosen = incv("labels", "-c", TINY, "seed=3", "--run-dir", "runs/third")
    assert "already holds" not in chosen.err, "another directory was asked for"


def test_the_run_of_a_resolved_recipe_is_found_anywhere(incv: Incv, playground: Path) -> None:
    assert incv("labels", "-c", TINY, "--run-dir", "elsewhere/mine").code == 0
    again = incv("labels", "-c", "elsewhere/mine/config.resolved.yaml")
    assert "elsewhere/mine already holds a run" in again.err
    assert "starts another in runs/mine" in again.err


def make_run(root: Path, name: str = "tiny", overrides: tuple[str, ...] = ()) -> Path:
    """The two files of a run that tell which one it is."""
    root.mkdir(parents=True)
    (root / "config.resolved.yaml").write_text(recipe_yaml(load_recipe(Path(TINY), overrides)))
    write_json(root / "manifest.json", {"recipe": name, "stages": {}, "starts": []})
    return root


def find(overrides: tuple[str, ...] = (), root: str = "runs/tiny") -> Path | None:
    return find_same_run(Path(TINY), load_recipe(Path(TINY), overrides), Path(root))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("held", "asked", "same"),
    [
        ((), (), True),
        ((), ("execution.log_every=7",), True),
        ((), ("seed=5",), False),
        ((), ("standard.epochs=9",), False),
        ((), ("labels.corrections=mine.csv",), False),
        (("labels.corrections=mine.csv",), ("labels.corrections=mine.csv",), True),
        (("batch.global=16",), ("batch.global=auto",), True),
        (("batch.global=16",), ("batch.global=32",), False),
        ((PHOTOS,), (PHOTOS,), True),
        ((PHOTOS,), (PHOTOS, "data.train.root=others"), False),
        ((PHOTOS, "data.train.shards=packed-2"), (PHOTOS, "data.train.shards=packed"), True),
        ((PHOTOS, "data.train.shards=packed-x"), (PHOTOS, "data.train.shards=packed"), False),
    ],
)
def test_a_run_is_the_same_if_keys_and_data_are(folder: Path, held, asked, same: bool) -> None:
    run = make_run(Path("runs/mine"), overrides=held)
    assert find(asked) == (run if same else None)


def test_other_directories_are_no_runs_of_the_recipe(folder: Path) -> None:
    make_run(Path("runs/a"), name="another")
    (make_run(Path("runs/b")) / "manifest.json").unlink()
    (make_run(Path("runs/c")) / "config.resolved.yaml").write_text("no: recipe")
    (make_run(Path("runs/d")) / "config.resolved.yaml").write_text("{")
    (make_run(Path("runs/e")) / "manifest.json").write_text("{")
    Path("runs/f").write_text("a file")
    assert find() is None
    run = make_run(Path("runs/g"))
    assert find() == run
    make_run(Path("runs/tiny"))
    assert find() is None, "the default directory holds a run, too"
    shutil.rmtree("runs")
    assert find() is None
