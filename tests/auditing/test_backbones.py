"""The table of backbones: it says what timm says, and each gives features at the sizes that it offers."""

import pytest
import torch

from tests.support.saved_weights import fill_hub_cache
from trainer.auditing.backbones import BACKBONES, Backbone, find_backbone
from trainer.models.factory import create_model, import_timm
from trainer.models.features import forward_with_features
from trainer.models.pretrained import find_licence, require_pretrained
from trainer.models.weights import load_weights

each = pytest.mark.parametrize("backbone", BACKBONES, ids=lambda backbone: backbone.name)


@each
def test_the_table_agrees_with_timm(backbone: Backbone) -> None:
    assert require_pretrained(backbone.name).tag == backbone.name.partition(".")[2]
    assert find_licence(backbone.name) == backbone.licence.lower()
    assert backbone.is_permissive == (backbone.licence == "Apache-2.0")
    assert list(backbone.sizes) == sorted(backbone.sizes, reverse=True)


@pytest.mark.slow  # builds each network
@each
def test_the_cost_is_that_of_the_network(backbone: Backbone) -> None:
    from trainer.estimate.probe import count_network

    classes = import_timm().get_pretrained_cfg(backbone.name).num_classes
    cost = count_network(backbone.name, max(classes, 1), 224, dict(backbone.options))
    assert cost.parameters / 1e6 == pytest.approx(backbone.parameters, rel=0.01)
    assert cost.forward_flops / 2e9 == pytest.approx(backbone.gmacs, rel=0.05)


@each
def test_it_gives_features_of_its_smallest_images(backbone: Backbone) -> None:
    _check_features(backbone, backbone.sizes[-1:])


@pytest.mark.slow
@each
def test_it_gives_features_at_every_size(backbone: Backbone) -> None:
    _check_features(backbone, backbone.sizes)


def _check_features(backbone: Backbone, sizes: tuple[int, ...]) -> None:
    network = create_model(backbone.name, 5, 0, **backbone.options).eval()
    for size in sizes:
        with torch.no_grad():
            _, features = forward_with_features(network, torch.randn(2, 3, size, size))
        assert features.shape == (2, network.num_features)
        assert torch.isfinite(features).all()


@pytest.mark.slow
def test_weights_of_another_size_are_fitted(tmp_path) -> None:
    """DINOv2's weights are for 518 pixels; timm interpolates their position embeddings."""
    backbone = find_backbone("vit_small_patch14_dinov2")
    assert backbone is not None
    saved = create_model(backbone.name, 0, 3)
    file = fill_hub_cache(tmp_path, backbone.name, saved)
    weights = load_weights(file, backbone.name, backbone.options, is_timms=True)
    network = create_model(backbone.name, 5, 0, **backbone.options).eval()
    weights.load_into(network)
    images = torch.randn(1, 3, 518, 518)
    with torch.no_grad():
        _, features = forward_with_features(network, images)
        assert torch.allclose(features, saved.eval()(images), atol=1e-5)


def test_a_backbone_is_found_with_and_without_its_tag() -> None:
    assert find_backbone("resnet50") == find_backbone("resnet50.a1_in1k") is not None
    assert find_backbone("resnet50.tv_in1k") is None
    assert find_backbone("digits_cnn") is None
