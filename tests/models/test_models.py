"""Networks: sizes, shapes, seeds, BatchNorm settings, weight-decay groups, and the error for a wrong name."""

import random

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from shards.errors import ConfigError
from trainer.models.cifar_resnets import ResidualBlock
from trainer.models.factory import create_model, import_timm, weight_decay_groups
from trainer.models.twin import TwinModel

timm = import_timm()

OURS = {
    "cifar_resnet20": (32, 64),  # image size, features before the classifier
    "cifar_resnet32": (32, 64),
    "cifar_resnet110": (32, 256),
    "digits_cnn": (8, 128),
}


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def resnet_v1_size(n):
    """Convolutions, BatchNorm scale and shift, classifier, for n blocks a stage and 10 classes."""
    stage = sum(9 * width * width * (2 * n) for width in (16, 32, 64))
    stage -= 9 * (32 * 16 + 64 * 32)  # the first convolution of stages 2 and 3 has half the inputs
    shortcuts = 16 * 32 + 32 * 64
    norms = 2 * (2 * n + 1) * (16 + 32 + 64)  # two a block, and one for the stem or the shortcut
    return 3 * 9 * 16 + stage + shortcuts + norms + 64 * 10 + 10


def resnet_v2_size(n):
    """As above for bottlenecks: 1x1, 3x3, 1x1, each with a BatchNorm before it; projections without."""
    total, inputs = 3 * 9 * 16 + 2 * 16, 16
    for width, outputs in ((16, 64), (64, 128), (128, 256)):
        total += inputs * outputs
        for _ in range(n):
            total += inputs * width + 9 * width * width + width * outputs + 2 * (inputs + 2 * width)
            inputs = outputs
    total -= 2 * 16  # the very first block is given activated inputs
    return total + 2 * 256 + 256 * 10 + 10


@pytest.mark.parametrize(
    ("name", "formula", "literature"),
    [
        ("cifar_resnet20", resnet_v1_size(3), 0.27e6),  # He et al. 2016a, table 6
        ("cifar_resnet32", resnet_v1_size(5), 0.465e6),  # 0.46 M there; shortcut convolutions and norms add
        ("cifar_resnet110", resnet_v2_size(12), 3.3e6),  # 9n+2 layers with n = 12
    ],
)
def test_sizes_of_the_resnets(name, formula, literature):
    size = count(create_model(name, 10, seed=0))
    assert size == formula
    assert size == pytest.approx(literature, rel=0.02)


@pytest.mark.parametrize(
    ("name", "layers"), [("cifar_resnet20", 20), ("cifar_resnet32", 32), ("cifar_resnet110", 110)]
)
def test_depth_counts_the_layers_outside_shortcuts(name, layers):
    model = create_model(name, 10, seed=0)
    weighted = [key for key, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert len([key for key in weighted if "shortcut" not in key]) == layers


def test_the_digits_network_is_small():
    assert 100_000 < count(create_model("digits_cnn", 10, seed=0)) < 200_000


@pytest.mark.parametrize(("name", "size", "features"), [(name, *shape) for name, shape in OURS.items()])
def test_shapes_and_timms_protocol(name, size, features):
    assert timm.is_model(name)
    assert name in timm.list_models()
    model = create_model(name, 7, seed=0, in_chans=1).eval()
    images = torch.randn(2, 1, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(images)
        maps = model.forward_features(images)
        penultimate = model.forward_head(maps, pre_logits=True)
    assert logits.shape == (2, 7)
    assert model.num_features == features
    assert maps.shape[:2] == (2, features)
    assert penultimate.shape == (2, features)
    torch.testing.assert_close(model.get_classifier()(penultimate), logits)
    torch.testing.assert_close(model.forward_head(maps), logits)


def test_resnets_halve_the_image_twice():
    with torch.no_grad():
        for name in ("cifar_resnet20", "cifar_resnet110"):
            maps = create_model(name, 10, seed=0).forward_features(torch.zeros(1, 3, 32, 32))
            assert maps.shape[2:] == (8, 8)


def test_without_classes_the_features_are_returned():
    assert create_model("digits_cnn", 0, seed=0)(torch.zeros(2, 3, 8, 8)).shape == (2, 128)


def test_batch_norm_settings():
    for name in ("cifar_resnet20", "cifar_resnet110"):
        norms = [m for m in create_model(name, 10, seed=0).modules() if isinstance(m, nn.BatchNorm2d)]
        assert {(norm.momentum, norm.eps) for norm in norms} == {(0.01, 1e-3)}
    norms = [m for m in create_model("digits_cnn", 10, seed=0).modules() if isinstance(m, nn.BatchNorm2d)]
    assert {norm.momentum for norm in norms} == {0.1}


def test_initial_weights_are_keras_ones():
    for layer in create_model("cifar_resnet32", 10, seed=0).modules():
        if isinstance(layer, nn.Conv2d):  # Glorot uniform: |w| up to √(6 / (fan_in + fan_out))
            taps = layer.kernel_size[0] ** 2
            limit = (6 / (taps * (layer.in_channels + layer.out_channels))) ** 0.5
            assert 0.8 * limit < layer.weight.abs().max() <= limit
    model = create_model("cifar_resnet110", 10, seed=0)
    assert not model.get_classifier().bias.any()
    widest = max((m for m in model.modules() if isinstance(m, nn.Conv2d)), key=lambda m: m.weight.numel())
    he = (2 / widest.weight[0].numel()) ** 0.5  # he_normal: standard deviation √(2 / fan_in)
    assert widest.weight.std().item() == pytest.approx(he, rel=0.01)
    assert widest.weight.abs().max() <= 2 * he / 0.879


@pytest.mark.parametrize("name", ["cifar_resnet20", "cifar_resnet110", "digits_cnn", "resnet18"])
def test_a_seed_gives_the_same_bits_whatever_the_global_state(name):
    torch.manual_seed(1)
    first = create_model(name, 5, seed=11).state_dict()
    torch.manual_seed(2)
    np.random.seed(3)  # noqa: NPY002  (the global state is what is tested)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    second = create_model(name, 5, seed=11).state_dict()
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
    assert random.getstate() == before[2]
    assert all(torch.equal(first[key], second[key]) for key in first)
    other = create_model(name, 5, seed=12).state_dict()
    assert not torch.equal(next(iter(first.values())), next(iter(other.values())))


def test_an_unknown_name_lists_near_matches():
    with pytest.raises(ConfigError, match=r"'cifar_resnet34'; did you mean cifar_resnet32"):
        create_model("cifar_resnet34", 10, seed=0)
    with pytest.raises(ConfigError, match="inception_resnet_v2"):
        create_model("inceptionresnetv2", 10, seed=0)
    with pytest.raises(ConfigError, match=r"choose one of timm.list_models"):
        create_model("????", 10, seed=0)


@pytest.mark.parametrize("name", ["hf-hub:someone/network", "local-dir:/tmp/network"])
def test_a_model_from_elsewhere_is_refused(name):
    with pytest.raises(ConfigError, match="unknown model"):
        create_model(name, 10, seed=0)


@pytest.mark.parametrize("option", ["pretrained", "checkpoint_path", "pretrained_cfg"])
def test_options_that_load_weights_are_refused(option):
    with pytest.raises(ConfigError, match=f"{option}.*loads weights"):
        create_model("resnet18", 10, seed=0, **{option: "x"})


def test_an_option_the_model_does_not_know_is_named():
    with pytest.raises(ConfigError, match="colour"):
        create_model("cifar_resnet20", 10, seed=0, colour="red")
    with pytest.raises(ConfigError, match="cannot be built"):
        create_model("resnet18.no_such_tag", 10, seed=0)
    with pytest.raises(RuntimeError, match="no pretrained weights"):
        timm.create_model("digits_cnn", pretrained=True)


def test_twins_see_the_same_rows_or_each_its_own():
    a, b = create_model("digits_cnn", 10, seed=0), create_model("digits_cnn", 10, seed=1)
    twins = TwinModel(a, b).eval()
    generator = torch.Generator().manual_seed(0)
    x, other = torch.randn(2, 4, 3, 8, 8, generator=generator)
    with torch.no_grad():
        torch.testing.assert_close(twins(x), (a(x), b(x)), rtol=0, atol=0)
        torch.testing.assert_close(twins(x, other[:3]), (a(x), b(other[:3])), rtol=0, atol=0)
    assert {key.split(".")[0] for key in twins.state_dict()} == {"a", "b"}


def assert_partition(model, groups):
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(parameter) for parameter in model.parameters()}


def twin_resnets():
    return TwinModel(create_model("cifar_resnet20", 10, seed=0), create_model("cifar_resnet20", 10, seed=1))


@pytest.mark.parametrize("build", [lambda: create_model("cifar_resnet110", 10, seed=0), twin_resnets])
def test_residual_convs_are_decayed_and_nothing_else(build):
    model = build()
    groups = weight_decay_groups(model, 2e-4, "residual_convs")
    assert [group["weight_decay"] for group in groups] == [2e-4, 0.0]
    assert_partition(model, groups)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed = {names[id(parameter)] for parameter in groups[0]["params"]}
    inside = {
        f"{block_name}.{name}.weight"
        for block_name, block in model.named_modules()
        if isinstance(block, ResidualBlock)
        for name, layer in block.named_modules()
        if isinstance(layer, nn.Conv2d)
    }
    assert decayed == inside
    assert any("shortcut" in name for name in decayed)
    assert not any(name.endswith(("body.0.weight", "fc.weight", "fc.bias")) for name in decayed)


def test_number_of_decayed_convolutions():
    for name, expected in (
        ("cifar_resnet20", 18 + 2),
        ("cifar_resnet32", 30 + 2),
        ("cifar_resnet110", 108 + 3),
    ):
        groups = weight_decay_groups(create_model(name, 10, seed=0), 1e-4, "residual_convs")
        assert len(groups[0]["params"]) == expected


def test_all_decays_every_parameter():
    for model in (create_model("digits_cnn", 10, seed=0), twin_resnets()):
        groups = weight_decay_groups(model, 1e-4, "all")
        assert [group["weight_decay"] for group in groups] == [1e-4]
        assert_partition(model, groups)


def test_weights_are_decayed_but_not_biases_norms_and_what_the_network_exempts():
    model = TwinModel(*(create_model("vit_tiny_patch16_224", 10, seed=seed, img_size=32, depth=1) for seed in (0, 1)))
    with_decay, without = weight_decay_groups(model, 0.05, "weights")
    assert (with_decay["weight_decay"], without["weight_decay"]) == (0.05, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, kept = ({names[id(p)] for p in group["params"]} for group in (with_decay, without))
    assert decayed | kept == set(names.values())
    assert not decayed & kept
    assert {name for name in kept if name.endswith(".weight")} == {
        f"{letter}.{norm}.weight" for letter in "ab" for norm in ("blocks.0.norm1", "blocks.0.norm2", "norm")
    }
    assert {"a.pos_embed", "b.pos_embed", "a.cls_token", "b.cls_token"} <= kept
    assert all(name.endswith(".weight") for name in decayed)


def test_residual_convs_needs_our_residual_blocks():
    for name in ("digits_cnn", "resnet18"):
        with pytest.raises(ConfigError, match="use 'all'"):
            weight_decay_groups(create_model(name, 10, seed=0), 1e-4, "residual_convs")
    with pytest.raises(ConfigError, match="'convs'"):
        weight_decay_groups(create_model("digits_cnn", 10, seed=0), 1e-4, "convs")


def test_the_digits_network_learns_the_digits():
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.tensor(images[order], dtype=torch.float32).reshape(-1, 1, 8, 8).repeat(1, 3, 1, 1) / 16
    y = torch.tensor(labels[order])
    model = create_model("digits_cnn", 10, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        for rows in torch.randperm(1400, generator=generator).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.7
    model.eval()
    with torch.no_grad():
        accuracy = (model(x[1400:]).argmax(dim=1) == y[1400:]).float().mean().item()
    assert accuracy >= 0.98
