"""Features of the penultimate layer: the classifier maps them to the logits; networks without them are refused."""

import pytest
import torch
from torch import nn

from shards.errors import ConfigError
from tests.support import RECIPES
from trainer.models.cifar_resnets import SMALL_NETWORKS
from trainer.models.factory import create_model
from trainer.models.features import PenultimateFeatures, require_features
from trainer.run.network_check import check_network
from trainer.run.recipe import load_recipe


@pytest.mark.parametrize(
    "name", ["cifar_resnet20", "cifar_resnet110", "digits_cnn", "resnet18", "vit_tiny_patch16_224"]
)
def test_the_classifier_maps_features_to_logits(name):
    size = 224 if "224" in name else 32
    network, images = create_model(name, 5, 0).eval(), torch.randn(2, 3, size, size)
    with torch.no_grad():
        features = PenultimateFeatures(network)(images)
        assert features.shape == (2, network.num_features)
        torch.testing.assert_close(network.get_classifier()(features), network(images))
    require_features(network, size, name, "the method")


class Flat(nn.Module):
    """Without timm's functions."""

    def __init__(self, num_classes):
        super().__init__()
        self.fc = nn.Linear(3 * 8 * 8, num_classes)

    def forward(self, images):
        return self.fc(images.flatten(1))


def test_a_network_without_features_is_refused_if_a_method_reads_them(monkeypatch):
    monkeypatch.setitem(SMALL_NETWORKS, "flat", lambda num_classes: Flat(num_classes))
    check_network(load_recipe(RECIPES / "tiny.yaml", ["model.name=flat"]), 10)
    recipe = load_recipe(RECIPES / "tiny.yaml", ["model.name=flat", "methods=[d2l]", "d2l={epochs: 3}"])
    with pytest.raises(ConfigError, match=r"the method d2l reads the features.*model flat does not give"):
        check_network(recipe, 10)


def test_features_that_are_no_rows_are_refused():
    class Odd(nn.Module):
        def forward_features(self, images):
            return images.flatten()[:6]

        def forward_head(self, features, pre_logits):
            return features[:, None]

    with pytest.raises(ConfigError, match=r"have the shape \(6, 1\)"):
        require_features(Odd(), 8, "model odd", "the method x")
