"""timm's weights from the cache of the Hugging Face hub, without a network connection."""

import pytest
import torch
from huggingface_hub import constants

from shards.errors import ConfigError
from tests.support.saved_weights import fill_hub_cache, lived_in
from trainer.models.pretrained import find_pretrained, input_settings
from trainer.models.weights import load_weights

NAME = "test_resnet.r160_in1k"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a hub that cannot be reached."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return tmp_path / "hub"


OFFLINE = pytest.param(True, id="offline mode")
NO_CONNECTION = pytest.param(False, id="no connection", marks=pytest.mark.slow)  # huggingface_hub tries for 24 s


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("name", [NAME, "test_resnet"])
def test_cached_weights_are_found_without_the_hub_and_fit(cache, name, file):
    saved = lived_in("test_resnet", 1000)
    path = fill_hub_cache(cache, NAME, saved, file)
    assert find_pretrained(name) == path
    loaded = load_weights(path, name, {}, is_timms=True).tensors
    assert torch.equal(loaded["conv1.0.weight"], saved.conv1[0].weight)
    assert loaded.keys() == {key for key in saved.state_dict() if not key.startswith("fc.")}


def test_safetensors_are_preferred(cache):
    fill_hub_cache(cache, NAME, lived_in("test_resnet", 1000), "pytorch_model.bin")
    path = fill_hub_cache(cache, NAME, lived_in("test_resnet", 1000))
    assert find_pretrained(NAME) == path


@pytest.mark.parametrize("offline", [OFFLINE, NO_CONNECTION])
def test_without_a_connection_the_cache_and_the_other_way_are_named(cache, monkeypatch, offline):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(ConfigError) as error:
        find_pretrained(NAME)
    for words in (NAME, "timm/test_resnet.r160_in1k", str(cache), "HF_HUB_CACHE", "model.weights"):
        assert words in str(error.value)
    assert find_pretrained(NAME, download=False) is None
    assert not cache.exists() or not list(cache.rglob("*.safetensors"))


@pytest.mark.parametrize("name", ["digits_cnn", "cifar_resnet32", "resnet18.no_such_tag", "gcvit_base", "resnet200"])
def test_models_without_weights_on_the_hub_are_refused(name):
    with pytest.raises(ConfigError, match=rf"{name.partition('.')[0]}"):
        find_pretrained(name)
    with pytest.raises(ConfigError):
        input_settings(name, None)


def test_a_model_that_timm_does_not_know_is_refused():
    with pytest.raises(ConfigError, match="did you mean"):
        find_pretrained("resnet1O")


def test_the_expected_input_is_timms():
    assert input_settings(NAME, None) == {"size": 160, "mean": [0.5] * 3, "std": [0.5] * 3}
    assert input_settings("resnet10t", None)["size"] == 176
