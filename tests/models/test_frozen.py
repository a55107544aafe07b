"""Frozen features: only the classifier is optimised, and BatchNorm keeps the statistics of the initial weights."""

import pytest
import torch
from torch import nn

from trainer.models.factory import create_model, weight_decay_groups
from trainer.models.frozen import freeze_features, set_train_mode
from trainer.models.twin import TwinModel

HEADS = {
    "cifar_resnet20": {"fc"},
    "digits_cnn": {"fc"},
    "test_resnet": {"fc"},
    "test_vit": {"head"},
    "test_efficientnet": {"classifier"},
    "deit_tiny_distilled_patch16_224": {"head", "head_dist"},
}


def frozen(name: str, seed: int = 0) -> nn.Module:
    network = create_model(name, 3, seed)
    freeze_features(network)
    return network


@pytest.mark.parametrize("name", HEADS)
def test_only_the_classifier_is_trainable(name: str) -> None:
    trainable = {
        key.rpartition(".")[0] for key, parameter in frozen(name).named_parameters() if parameter.requires_grad
    }
    assert trainable == HEADS[name]


@pytest.mark.parametrize("scope", ["all", "weights"])
@pytest.mark.parametrize("name", ["cifar_resnet20", "test_vit"])
def test_an_optimiser_gets_the_classifier_alone(name: str, scope: str) -> None:
    network = frozen(name)
    groups = weight_decay_groups(network, 0.1, scope)  # type: ignore[arg-type]
    given = [id(parameter) for group in groups for parameter in group["params"]]
    classifier = {id(parameter) for parameter in network.get_classifier().parameters()}
    assert set(given) == classifier
    assert len(given) == len(classifier)


@pytest.mark.parametrize("name", ["cifar_resnet20", "test_resnet"])
def test_frozen_layers_stay_in_eval_mode(name: str) -> None:
    network = frozen(name)
    set_train_mode(network)
    norms = [layer for layer in network.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert norms
    assert not any(layer.training for layer in norms)
    assert network.get_classifier().training


def test_each_of_two_networks_keeps_its_features() -> None:
    pair = TwinModel(frozen("cifar_resnet20", 1), frozen("cifar_resnet20", 2))
    before = {name: tensor.clone() for name, tensor in pair.state_dict().items()}
    set_train_mode(pair)
    sum(logits.square().sum() for logits in pair(torch.randn(4, 3, 32, 32))).backward()  # type: ignore[union-attr]
    for parameter in pair.parameters():
        if parameter.grad is not None:
            parameter.data -= parameter.grad
    moved = {name for name, tensor in pair.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {"a.fc.weight", "a.fc.bias", "b.fc.weight", "b.fc.bias"}


def test_without_frozen_layers_everything_is_in_train_mode() -> None:
    network = create_model("cifar_resnet20", 3, 0).eval()
    set_train_mode(network)
    assert all(layer.training for layer in network.modules())
