"""Features of the penultimate layer: the classifier maps them to the logits; networks without them are refused."""

import pytest
import torch
from torch import nn

from shards.errors import ConfigError
from tests.support import RECIPES
from trainer.models.cifar_resnets import SMALL_NETWORKS
from trainer.models.factory import create_model
from trainer.models.features import forward_with_features, require_features
from trainer.run.network_check import check_network
from trainer.run.recipe import load_recipe


@pytest.mark.parametrize(
    "name",
    [*SMALL_NETWORKS, "resnet18", "vit_tiny_patch16_224", "mobilenetv3_small_050", "inception_resnet_v2"],
)
def test_features_are_what_the_classifier_reads(name):
    size = 224 if "224" in name else 96 if "inception" in name else 32
    network, images = create_model(name, 5, 0).eval(), torch.randn(2, 3, size, size)
    read = []
    network.get_classifier().register_forward_pre_hook(lambda layer, inputs: read.append(inputs[0]))
    with torch.no_grad():
        logits, features = forward_with_features(network, images)
        assert torch.equal(logits, network(images))
    assert features.shape == (2, read[0].shape[1])
    assert all(torch.equal(features, seen) for seen in read)
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

        def forward_head(self, features, pre_logits=False):
            return features[:, None]

    with pytest.raises(ConfigError, match=r"shape \(6, 1\).*set model\.name"):
        require_features(Odd(), 8, "model odd", "the method x")
