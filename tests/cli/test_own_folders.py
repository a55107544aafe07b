"""`incv` on folders of images: paths with `~`, classes that differ between splits, the share of unusable images."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command_line import TINY, Answer
from tests.support.pictures import picture
from trainer.cli import recipe_path
from trainer.config.argument_types import path_argument
from trainer.run.recipe import load_recipe

Incv = Callable[..., Answer]
PLAIN = ("labels.noise=none", "labels.ratio=0", "execution.threads=1")


def photos(root: Path, split: str, **classes: int) -> Path:
    """ROOT/<split>/<class>/<i>.png"""
    for name, count in classes.items():
        folder = root / split / name
        folder.mkdir(parents=True)
        for number in range(count):
            (folder / f"{number}.png").write_bytes(picture(100 * len(list(root.rglob("*"))) + number))
    return root


def of_folders(root: object, **evaluation: str) -> list[str]:
    """The overrides of recipes/tiny.yaml for a run on ROOT/train and the named evaluation splits."""
    sets = ", ".join(f"{name}: {{{given}}}" for name, given in evaluation.items())
    train = f"{{source: image_folder, split: train, root: '{root}', shards: packed}}"
    return [f"data={{train: {train}, eval: {{{sets}}}}}", "batch.global=2"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


PATH_KEYS = {
    "data.train.root": lambda recipe: recipe.data.train.root,
    "data.train.shards": lambda recipe: recipe.data.train.shards,
    "data.eval.test.shards": lambda recipe: recipe.data.eval["test"].shards,
    "labels.file": lambda recipe: recipe.labels.file,
    "labels.corrections": lambda recipe: recipe.labels.corrections,
    "model.weights": lambda recipe: recipe.model.weights,
}


@pytest.mark.parametrize("key", PATH_KEYS)
def test_a_tilde_in_a_recipe_means_the_home_folder(key: str, home: Path) -> None:
    recipe = load_recipe(Path(TINY), [f"{key}=~/there", *PLAIN])
    assert PATH_KEYS[key](recipe) == str(home / "there")
    assert PATH_KEYS[key](load_recipe(Path(TINY), [f"{key}=a~/b", *PLAIN])) == "a~/b"


def test_a_tilde_on_the_command_line_means_the_home_folder(incv: Incv, home: Path) -> None:
    assert path_argument("~/a") == home / "a"
    assert path_argument("a/~") == Path("a/~")
    assert incv("cp", "tiny", "~/mine.yaml").code == 0
    assert (home / "mine.yaml").is_file()
    assert recipe_path("~/mine.yaml") == home / "mine.yaml"
    assert incv("run", "-c", "~/mine.yaml", "--run-dir=~/runs/x", "--print-run-dir").out.strip() == str(
        home / "runs/x"
    )
    photos(home / "photos", "train", cat=2, dog=2)
    assert incv("shards", "pack", "image_folder", "--root=~/photos", "--out=~/packed", "--workers=1").code == 0
    assert incv("shards", "verify", "~/packed").code == 0
    assert incv("shards", "download", "~/packed", "~/copy").code == 0
    assert (home / "copy" / "dataset.json").is_file()


def test_classes_that_only_one_split_has_are_named(incv: Incv, home: Path) -> None:
    photos(home, "train", cat=2, dog=2, emu=2)
    photos(home, "val", cat=1, dog=1, fox=1, gnu=1)
    recipe = of_folders(home, val=f"source: image_folder, split: val, root: '{home}', shards: packed-val")
    plan = incv("run", "-c", TINY, "--dry-run", *recipe, *PLAIN)
    assert plan.code == 0
    differences = "(only in training: emu; only in val: fox, gnu)"
    named = f"the evaluation set val has different classes than the training set {differences}"
    assert f"would be refused: {named}" in plan.out
    refused = incv("run", "-c", TINY, *recipe, *PLAIN)
    assert refused.code == 3
    assert named in refused.err
    packed = incv("run", "-c", TINY, "--dry-run", *recipe, *PLAIN)  # as the refused run packed them
    assert f"would be refused: {named}" in packed.out


def test_equal_classes_are_not_refused(incv: Incv, home: Path) -> None:
    photos(home, "train", cat=2, dog=2)
    photos(home, "val", cat=1, dog=1)
    recipe = of_folders(home, val=f"source: image_folder, split: val, root: '{home}', shards: packed-val")
    assert "refused" not in incv("run", "-c", TINY, "--dry-run", *recipe, *PLAIN).out


def test_the_share_of_unusable_images_is_a_recipe_key(incv: Incv, home: Path) -> None:
    photos(home, "train", cat=4, dog=4)
    (home / "train" / "cat" / "0.png").write_bytes(b"not an image")
    refused = incv("labels", "-c", TINY, *of_folders(home), *PLAIN)
    assert refused.code == 3
    assert "data.max_rejected" in refused.err
    assert "--max-rejected" not in refused.err
    allowed = incv("labels", "-c", TINY, *of_folders(home), *PLAIN, "data.max_rejected=0.2")
    assert allowed.code == 0, allowed.err
    printed = incv("run", "-c", TINY, *of_folders(home), "data.max_rejected=0.2", "--print-splits").out
    assert "--max-rejected=0.2" in printed
