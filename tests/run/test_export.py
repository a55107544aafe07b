"""Exported networks give the same logits: all through our loader, timm's networks through timm."""

import json

import pytest
import torch

from shards.errors import ConfigError, DataError
from trainer.models.factory import create_model, import_timm
from trainer.run.export import export_network, load_network
from trainer.run.recipe import check_recipe

NAMES = ("cat", "dog", "élan")


def recipe_of(name, size, resize=None, **options):
    return check_recipe(
        {
            "data": {"train": {"source": "digits", "shards": "x"}},
            "image": {"size": size, "resize": resize, "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]},
            "model": {"name": name, "options": options},
            "batch": {"global": 4},
            "methods": ["standard"],
            "standard": {"epochs": 1},
        },
        "a test",
    )


def trained(recipe):
    """Random weights and BatchNorm statistics that are no longer the initial ones."""
    network = create_model(recipe.model.name, len(NAMES), seed=3, **recipe.model.options).train()
    network(torch.randn(4, 3, recipe.image.size, recipe.image.size) * 2 + 1)
    return network.eval()


def images_of(size):
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))


CASES = [("digits_cnn", 8, {}), ("test_resnet", 32, {}), ("test_vit", 32, {"img_size": 32, "drop_rate": 0.1})]


@pytest.mark.parametrize(("name", "size", "options"), CASES)
def test_an_exported_network_comes_back(tmp_path, name, size, options):
    recipe = recipe_of(name, size, **options)
    network = trained(recipe)
    export_network(network, recipe, NAMES, tmp_path / "model_a")
    loaded = load_network(tmp_path / "model_a")
    assert not loaded.training
    with torch.no_grad():
        assert torch.equal(loaded(images_of(size)), network(images_of(size)))
    assert sorted(path.name for path in (tmp_path / "model_a").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(("name", "size", "options"), CASES[1:])
def test_timm_loads_what_was_exported(tmp_path, name, size, options):
    timm = import_timm()
    recipe = recipe_of(name, size, resize=40, **options)
    network = trained(recipe)
    export_network(network, recipe, NAMES, tmp_path / "model_a")
    loaded = timm.create_model(f"local-dir:{tmp_path / 'model_a'}", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(loaded(images_of(size)), network(images_of(size)))
    data = timm.data.resolve_data_config(model=loaded)
    described = {key: list(data[key]) for key in ("input_size", "mean", "std")}
    assert described == {"input_size": [3, size, size], "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    assert data["crop_pct"] == size / 40


def test_the_description_says_what_the_network_knows(tmp_path):
    recipe = recipe_of("digits_cnn", 8)
    export_network(trained(recipe), recipe, NAMES, tmp_path / "model_a")
    described = json.loads((tmp_path / "model_a" / "config.json").read_text())
    assert described["architecture"] == "digits_cnn"
    assert described["num_classes"] == 3
    assert described["label_names"] == list(NAMES)
    assert described["pretrained_cfg"]["crop_pct"] == 1.0


def test_an_export_replaces_an_older_one(tmp_path):
    recipe = recipe_of("digits_cnn", 8)
    (tmp_path / "model_a").mkdir()
    (tmp_path / "model_a" / "stale").write_text("")
    network = trained(recipe)
    export_network(network, recipe, NAMES, tmp_path / "model_a")
    assert not (tmp_path / "model_a" / "stale").exists()
    weights = load_network(tmp_path / "model_a").state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in network.state_dict().items())


def test_exporting_leaves_the_network_alone(tmp_path):
    recipe = recipe_of("digits_cnn", 8)
    network = trained(recipe).train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    export_network(network, recipe, NAMES, tmp_path / "model_a")
    assert network.training
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize(
    "change",
    [
        {"architecture": "hf-hub:someone/network"},
        {"model_args": {"checkpoint_path": "/tmp/evil.pt"}},
        {"model_args": {"pretrained": True}},
    ],
)
def test_a_description_cannot_fetch_or_unpickle(tmp_path, change):
    recipe = recipe_of("digits_cnn", 8)
    export_network(trained(recipe), recipe, NAMES, tmp_path / "model_a")
    path = tmp_path / "model_a" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError):
        load_network(tmp_path / "model_a")


def test_a_folder_without_a_network(tmp_path):
    with pytest.raises(DataError, match=r"config\.json is missing"):
        load_network(tmp_path)
