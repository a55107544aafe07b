"""The default of `data.*.shards`: recipes that pack something else never share a folder."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import RECIPES
from trainer.config.data import DataConfig
from trainer.config.recipe_file import recipe_yaml
from trainer.run.recipe import load_recipe

SPLITS = st.fixed_dictionaries(
    {"source": st.sampled_from(["image_folder", "webvision", "digits"])},
    optional={
        "root": st.sampled_from([None, "photos", "/photos", "other/photos", "Fotos für Oma/2024", "/", "."]),
        "split": st.sampled_from(["train", "val", "", "a/b"]),
        "subset": st.sampled_from([None, "google"]),
        "classes": st.sampled_from([None, 2, 3]),
        "resize": st.sampled_from([None, 64]),
        "limit": st.sampled_from([None, 5]),
    },
)


def config_of(keys: dict[str, object]) -> DataConfig:
    return DataConfig.model_validate_json(json.dumps(keys))


@given(SPLITS, SPLITS)
def test_folders_are_shared_exactly_if_the_packing_is_the_same(one, other):
    first, second = config_of(one), config_of(other)
    alike = first.model_dump(exclude={"limit", "shards"}) == second.model_dump(exclude={"limit", "shards"})
    assert (first.shards == second.shards) == alike


@given(SPLITS)
def test_a_folder_is_one_plain_name_under_data_shards(keys):
    folder = Path(config_of(keys).shards)
    assert folder.parent == Path("data/shards")
    assert re.fullmatch(r"[\w.-]+-[0-9a-f]{8}", folder.name)
    assert not folder.name.startswith((".", "-"))


def test_the_name_says_what_it_holds():
    keys = {"source": "image_folder", "root": "/data/my photos", "split": "val"}
    assert config_of(keys).shards.startswith("data/shards/my_photos-val-")
    assert config_of({"source": "digits"}).shards.startswith("data/shards/digits-train-")


def test_a_relative_root_is_that_of_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = {"source": "image_folder", "root": "photos"}
    assert config_of(keys).shards == config_of({**keys, "root": str(tmp_path / "photos")}).shards
    assert (
        config_of({**keys, "root": "~/photos"}).shards
        == config_of({**keys, "root": str(Path.home() / "photos")}).shards
    )


def test_a_folder_that_is_given_is_kept():
    assert config_of({"source": "digits", "shards": "mine"}).shards == "mine"


@pytest.mark.parametrize("name", ["image_folder", "image_folder_finetune"])
def test_a_resolved_recipe_names_its_folders(name, tmp_path, monkeypatch):
    overrides = ["image.size=32"]  # without weights, which the finetuning recipe would look up
    recipe = load_recipe(RECIPES / f"{name}.yaml", overrides)
    assert recipe.data.train.shards != recipe.data.eval["val"].shards
    (tmp_path / "resolved.yaml").write_text(recipe_yaml(recipe))
    monkeypatch.chdir(tmp_path)
    assert load_recipe(tmp_path / "resolved.yaml").data == recipe.data
