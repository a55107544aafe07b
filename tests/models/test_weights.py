"""Weights from files: what is loaded, what each network draws itself, and which files are refused."""

import json
import os
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shards.errors import ConfigError, DataError
from tests.support.saved_weights import Canary, lived_in, save
from trainer.models.classifier import start_classifier
from trainer.models.factory import create_model
from trainer.models.pretrained import input_settings
from trainer.models.weights import describe_misfit, load_weights

NETWORKS = {"test_resnet": "fc.", "test_vit": "head.", "digits_cnn": "fc."}
each_network = pytest.mark.parametrize(("name", "head"), NETWORKS.items(), ids=NETWORKS)


def started(weights, name, classes, seed, **options):
    network = create_model(name, classes, seed, **options)
    weights.load_into(network)
    return network.state_dict()


def split(tensors, head):
    return (
        {key: tensor for key, tensor in tensors.items() if not key.startswith(head)},
        {key: tensor for key, tensor in tensors.items() if key.startswith(head)},
    )


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


@each_network
@pytest.mark.parametrize("classes", [7, 5, 0], ids=["other classes", "as many classes", "no classifier"])
def test_all_but_the_classifier_comes_from_the_file(tmp_path, name, head, classes):
    saved = lived_in(name, classes)
    weights = load_weights(save(saved, tmp_path / "w.safetensors"), name, {})
    body, classifier = split(started(weights, name, 5, seed=3), head)
    assert equal(body, split(saved.state_dict(), head)[0])
    assert equal(classifier, split(create_model(name, 5, 3).state_dict(), head)[1])
    assert classifier


@each_network
def test_networks_with_other_seeds_differ_in_their_classifiers_alone(tmp_path, name, head):
    weights = load_weights(save(lived_in(name, 7), tmp_path / "w.safetensors"), name, {})
    first, again, other = (started(weights, name, 5, seed) for seed in (3, 3, 4))
    assert equal(first, again)
    assert equal(split(first, head)[0], split(other, head)[0])
    assert not torch.equal(first[f"{head}weight"], other[f"{head}weight"])


def test_networks_do_not_share_memory_with_the_weights(tmp_path):
    weights = load_weights(save(lived_in("digits_cnn", 7), tmp_path / "w.safetensors"), "digits_cnn", {})
    before = {key: tensor.clone() for key, tensor in weights.tensors.items()}
    for tensor in started(weights, "digits_cnn", 5, 0).values():
        tensor.zero_()
    assert equal(weights.tensors, before)


@pytest.mark.parametrize("suffix", [".pth", ".pt"])
@pytest.mark.parametrize("wrap", [dict, lambda state: {"epoch": 3, "state_dict": state}], ids=["plain", "checkpoint"])
def test_files_of_torch(tmp_path, suffix, wrap):
    state, path = lived_in("test_resnet", 7).state_dict(), tmp_path / f"w{suffix}"
    torch.save(wrap({f"module.{key}": tensor for key, tensor in state.items()}), path)
    loaded = load_weights(path, "test_resnet", {})
    assert equal(loaded.tensors, split(state, "fc.")[0])


def test_a_file_in_half_precision_starts_a_network_in_single_precision(tmp_path):
    saved = lived_in("test_resnet", 7).half()
    started_from = started(load_weights(save(saved, tmp_path / "w.pth"), "test_resnet", {}), "test_resnet", 5, 0)
    assert started_from["conv1.0.weight"].dtype == torch.float32
    assert torch.equal(started_from["conv1.0.weight"], saved.conv1[0].weight.float())


def test_position_embeddings_are_resized_to_the_image(tmp_path):
    weights = load_weights(save(lived_in("test_vit", 7), tmp_path / "w.safetensors"), "test_vit", {"img_size": 96})
    network = create_model("test_vit", 5, 0, img_size=96)
    weights.load_into(network)
    assert weights.tensors["pos_embed"].shape == network.pos_embed.shape


def test_loading_leaves_the_random_state_alone(tmp_path):
    path = save(lived_in("test_vit", 7), tmp_path / "w.safetensors")
    before = torch.get_rng_state()
    load_weights(path, "test_vit", {})
    assert torch.equal(torch.get_rng_state(), before)


def test_the_checksum_is_that_of_the_file(tmp_path):
    one = load_weights(save(lived_in("digits_cnn", 7), tmp_path / "w.safetensors"), "digits_cnn", {})
    moved = load_weights(save(lived_in("digits_cnn", 7), tmp_path / "elsewhere" / "v.safetensors"), "digits_cnn", {})
    other = load_weights(save(lived_in("digits_cnn", 7, seed=8), tmp_path / "w.safetensors"), "digits_cnn", {})
    assert one.checksum == moved.checksum != other.checksum


# --- weights that do not fit


def refused(path, name, *words, **options):
    with pytest.raises(ConfigError) as error:
        load_weights(path, name, options)
    for each in (str(path), f"do not fit the network {name}", *words):
        assert each in str(error.value)


def test_weights_of_another_network_are_refused_with_the_tensors_and_what_to_set(tmp_path):
    described = {"architecture": "test_vit", "pretrained_cfg": {}}
    path = save(lived_in("test_vit", 7), tmp_path / "w.safetensors", described)
    refused(path, "test_resnet", "missing in the file: conv1.0.weight", "and", "more", "unknown to the network: ")
    refused(path, "test_resnet", "set model.name", "test_vit, according to config.json")
    refused(path, "digits_cnn", "missing in the file: body.0.weight")


def test_weights_of_the_same_names_and_other_shapes_are_refused(tmp_path):
    path = save(lived_in("test_vit", 7), tmp_path / "w.safetensors")
    refused(path, "test_vit2", "unknown to the network", "blocks")
    wide = save(lived_in("digits_cnn", 7, in_chans=1), tmp_path / "wide.safetensors")
    refused(wide, "digits_cnn", "1 tensor(s) of another shape: body.0.weight (32, 1, 3, 3) not (32, 3, 3, 3)")


@pytest.mark.parametrize("name", ["test_resnet", "digits_cnn"])
def test_one_tensor_too_few_or_too_many_is_refused(tmp_path, name):
    state = lived_in(name, 7).state_dict()
    lost = next(key for key in state if key.endswith(".bias"))
    path = tmp_path / "w.pth"
    torch.save({key: tensor for key, tensor in state.items() if key != lost}, path)
    refused(path, name, f"1 tensor(s) missing in the file: {lost}")
    torch.save({**state, "layer9.weight": torch.zeros(2)}, path)
    refused(path, name, "1 tensor(s) unknown to the network: layer9.weight")


shapes = st.dictionaries(st.sampled_from("abcdef"), st.lists(st.integers(0, 3), max_size=3).map(tuple))


@given(shapes, shapes)
def test_a_misfit_is_described_unless_names_and_shapes_are_equal(ours, theirs):
    network, file = ({name: torch.zeros(shape) for name, shape in each.items()} for each in (ours, theirs))
    described = describe_misfit(network, file)
    assert (described == "") == (ours == theirs)
    for what, names in {
        "missing in the file": ours.keys() - theirs.keys(),
        "unknown to the network": theirs.keys() - ours.keys(),
        "of another shape": {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]},
    }.items():
        assert (f"{len(names)} tensor(s) {what}" in described) == bool(names)


# --- files that cannot be read


def unusable(path, *words, name="test_resnet"):
    with pytest.raises(DataError) as error:
        load_weights(path, name, {})
    for each in (str(path), *words):
        assert each in str(error.value)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_refused(tmp_path, suffix, share):
    path = save(lived_in("test_resnet", 7), tmp_path / f"w{suffix}")
    os.truncate(path, int(path.stat().st_size * share))
    unusable(path)


def test_a_file_of_the_other_type_is_refused(tmp_path):
    save(lived_in("test_resnet", 7), tmp_path / "w.safetensors").rename(tmp_path / "w.pth")
    unusable(tmp_path / "w.pth")
    save(lived_in("test_resnet", 7), tmp_path / "v.pth").rename(tmp_path / "v.safetensors")
    unusable(tmp_path / "v.safetensors", "damaged or of another type")


@pytest.mark.parametrize("content", [{}, [1, 2], {"a": 1}, torch.zeros(3)], ids=["empty", "list", "number", "tensor"])
def test_a_file_without_named_tensors_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "w.pth")
    unusable(tmp_path / "w.pth")


def test_a_missing_file_a_folder_and_an_unknown_suffix_are_refused(tmp_path):
    unusable(tmp_path / "none.safetensors", "there is no such file")
    (tmp_path / "folder.pth").mkdir()
    unusable(tmp_path / "folder.pth", "it is a folder")
    with pytest.raises(ConfigError, match=r"w\.ckpt.*\.safetensors, \.pth, \.pt"):
        load_weights(tmp_path / "w.ckpt", "test_resnet", {})


@pytest.mark.parametrize("suffix", [".pth", ".pt"])
@pytest.mark.parametrize("write", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content, 2))])
def test_pickled_code_does_not_run(tmp_path, monkeypatch, suffix, write):
    nest, path = tmp_path / "nest", tmp_path / f"w{suffix}"
    state = lived_in("test_resnet", 7).state_dict()
    write({**state, "canary": Canary(nest)}, path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # a default that an explicit argument overrides
    unusable(path, "can run code, so they are refused")
    assert not nest.exists()
    pickle.loads(pickle.dumps(Canary(nest)))  # the canary can sing
    assert nest.read_text() == "it sang"


def test_the_refusal_names_what_would_have_run(tmp_path):
    torch.save({"canary": Canary(tmp_path / "nest")}, tmp_path / "w.pth")
    unusable(tmp_path / "w.pth", "pathlib", "can run code", "state_dict()")


def test_weights_with_nan_are_refused_with_the_tensor(tmp_path):
    saved = lived_in("test_resnet", 7)
    saved.conv1[0].weight.data[0, 0, 0, 0] = torch.nan
    path = save(saved, tmp_path / "w.safetensors")
    unusable(path, "model.weights: ", "contain NaN or infinity in 1 tensor(s): conv1.0.weight; choose others")


# --- how the classifier starts on given weights


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_efficientnet"])
def test_classifiers_start_near_zero_and_differ_by_seed(name):
    networks = [create_model(name, 5, 0) for _ in range(3)]
    for network, seed in zip(networks, (3, 3, 4), strict=True):
        start_classifier(network, seed)
    first, again, other = (network.get_classifier() for network in networks)
    assert first(torch.rand(64, first.in_features)).abs().max() < 0.05
    assert torch.equal(first.weight, again.weight)
    assert not first.bias.any()
    assert not torch.equal(first.weight, other.weight)


# --- the input that weights expect


def test_a_file_is_described_by_the_config_beside_it(tmp_path):
    cfg = {"input_size": [3, 48, 48], "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    described = {"architecture": "test_resnet.mine", "pretrained_cfg": cfg}
    path = save(lived_in("test_resnet", 7), tmp_path / "w.safetensors", described)
    expected = {"size": 48, "mean": cfg["mean"], "std": cfg["std"]}
    assert input_settings("test_resnet.r160_in1k", path) == expected
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "test_resnet", **cfg}))  # the older format
    assert input_settings("test_resnet", path) == expected


@pytest.mark.parametrize(
    "described", [None, {"architecture": "test_vit", "pretrained_cfg": {"mean": [1, 1, 1]}}, [3]]
)
def test_a_file_without_a_config_of_its_own_is_described_by_timm(tmp_path, described):
    path = save(lived_in("test_resnet", 7), tmp_path / "w.safetensors", described)
    assert input_settings("test_resnet", path) == {"size": 160, "mean": [0.5] * 3, "std": [0.5] * 3}
    assert input_settings("digits_cnn", path) == {}
