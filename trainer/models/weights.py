"""Initial weights from a file: read without running pickled code, fitted to the network, without the classifier."""

import logging
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shards.durable import hash_file
from shards.errors import ConfigError, DataError, Fix, describe_unreadable, list_some
from trainer.config.schema import ModelConfig
from trainer.distributed.launch import hostname
from trainer.models.cifar_resnets import SMALL_NETWORKS
from trainer.models.classifier import classifier_names
from trainer.models.factory import create_model, import_timm, seeded_cpu
from trainer.models.pretrained import base_name, describe_file, find_pretrained

SUFFIXES = (".safetensors", ".pth", ".pt")

Tensors = dict[str, Tensor]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights that every network of a run starts from: all but the classifier, which each network draws itself."""

    path: Path
    checksum: str
    """SHA-256 of the file."""
    tensors: Tensors
    """The tensors of the network by name, without those of its classifier."""

    def load_into(self, network: nn.Module) -> None:
        """Overwrite everything but the classifier. network: of the architecture that the weights were read for."""
        unknown = network.load_state_dict(self.tensors, strict=False).unexpected_keys
        assert not unknown, unknown


def find_weights(model: ModelConfig, download: bool = True) -> Weights | None:
    """Find and check the initial weights of a recipe; None if it starts from random ones.

    download: if false, also return None for timm's weights that are not in the cache.
    """
    if model.pretrained:
        path = find_pretrained(model.name, download)
    else:
        path = Path(model.weights).expanduser() if model.weights is not None else None
    return load_weights(path, model.name, model.options, model.pretrained) if path is not None else None


def load_found_weights(path: Path, model: ModelConfig) -> Weights:
    """Load the weights that rank 0 has found; called on all other ranks, so that no two ranks download them."""
    if not path.is_file():
        raise DataError(
            f"{hostname()} cannot access the weights {path}: put them on storage that every node mounts, and set "
            "model.weights to the file, or HF_HUB_CACHE to the cache, there"
        )
    _log.info("initial weights: %s", path)
    return load_weights(path, model.name, model.options, model.pretrained)


def load_weights(path: Path, name: str, options: Mapping[str, Any], is_timms: bool = False) -> Weights:
    """Read weights for the model `name`; raises DataError for an unusable file, ConfigError if they do not fit.

    is_timms: the file is the one that timm has for this model, not one that the recipe names.
    """
    if not is_timms and path.suffix not in SUFFIXES:
        raise ConfigError(f"{path} is not of a supported type: {', '.join(SUFFIXES)}", field="model.weights")
    try:
        checksum = hash_file(path)
    except OSError as error:
        raise DataError(describe_unreadable("the file", path, error), field="model.weights") from error
    state = read_state_dict(path)
    network = create_model(name, 1, 0, **options)
    own = _drop_classifier(network.state_dict(), network)
    try:
        fitted = _fit(state, name, None if is_timms else count_classes(state, network), options)
    except Exception as error:  # timm's conversions of another network's tensors may raise anything
        why = describe_misfit(own, _drop_classifier(state, network)) or str(error)[:300]
        raise _refusal(path, name, why) from error
    tensors = _drop_classifier(fitted, network)
    if misfit := describe_misfit(own, tensors):
        raise _refusal(path, name, misfit)
    if broken := [key for key, tensor in tensors.items() if not torch.isfinite(tensor).all()]:
        raise DataError(
            f"the weights {path} contain NaN or infinity in {len(broken)} tensor(s): {list_some(broken)}",
            field="model.weights",
            fix=Fix("choose others with {}", "model.weights"),
        )
    return Weights(path, checksum, tensors)


def read_state_dict(path: Path) -> Tensors:
    """Read tensors by name from a safetensors file or, with torch.load(weights_only=True), from a .pth or .pt file.

    A training checkpoint is unwrapped as timm does it: `state_dict` or `model` if there is such an entry, averaged
    weights (`state_dict_ema`, `model_ema`) first, without the prefixes of DDP and torch.compile.
    """
    try:
        state = import_timm().models.load_state_dict(str(path), weights_only=True)
    except Exception as error:  # a damaged file makes torch.load raise almost anything
        if isinstance(error, pickle.UnpicklingError) or isinstance(error.__cause__, pickle.UnpicklingError):
            raise DataError(
                f"the weights {path} contain pickled objects other than tensors{_name_globals(path)}. Such objects "
                "can run code, so they are refused: save the network's state_dict() alone, as a safetensors file"
            ) from error
        raise DataError(
            f"the weights {path} cannot be read: the file is damaged or of another type ({str(error)[:200]}). "
            "Save the network's state_dict() as a safetensors file"
        ) from error
    if not state or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise DataError(f"the weights {path} are not a state_dict(), a mapping of names to tensors: save that alone")
    return dict(state)


def _name_globals(path: Path) -> str:
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except Exception:  # a pickle that torch did not write
        return ""
    return f" ({list_some(found)})" if found else ""


def _fit(state: Tensors, name: str, classes: int | None, options: Mapping[str, Any]) -> Tensors:
    """Return the tensors of a network that has loaded all of `state`; raises if they do not fit.

    classes: number of classes of `state`; None: as timm records for its own weights.
    """
    if name in SMALL_NETWORKS:
        network = create_model(name, classes or 0, 0, **options)
        network.load_state_dict(state)
        return network.state_dict()
    # timm converts older layouts and resizes position embeddings. It is strict only if the numbers of classes agree.
    count = {} if classes is None else {"num_classes": classes}
    overlay = {"state_dict": state} | ({} if classes is None else {**count, "label_offset": 0})
    with seeded_cpu(0):
        network = import_timm().create_model(
            name, pretrained=True, pretrained_cfg_overlay=overlay, **count, **options
        )
    return network.state_dict()


def count_classes(state: Mapping[str, Tensor], network: nn.Module) -> int:
    """Return the number of classes that weights of this architecture were trained on; 0 without a classifier."""
    outputs = [state[key] for name in classifier_names(network) if (key := f"{name}.weight") in state]
    return outputs[0].shape[0] if outputs and outputs[0].ndim else 0


def _drop_classifier(tensors: Mapping[str, Tensor], network: nn.Module) -> Tensors:
    classifier = tuple(f"{name}." for name in classifier_names(network))
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(classifier)}


def _refusal(path: Path, name: str, misfit: str) -> ConfigError:
    described = describe_file(path).get("architecture")
    other = f" ({described}, according to config.json)" if described not in (None, base_name(name)) else ""
    saved = Fix(f"set {{}} and model.options to the network that they were saved from{other}", "model.name")
    problem = f"the weights {path} do not fit the network {name}: {misfit}"
    return ConfigError(problem, fix=[saved, Fix("choose others with {}", "model.weights")])


def describe_misfit(network: Mapping[str, Tensor], file: Mapping[str, Tensor]) -> str:
    """Describe the tensors in which a file differs from a network; empty if there are none."""
    shapes = {name: (tuple(file[name].shape), tuple(network[name].shape)) for name in network if name in file}
    parts = {
        "missing in the file": [name for name in network if name not in file],
        "unknown to the network": [name for name in file if name not in network],
        "of another shape": [
            f"{name} {theirs} not {ours}" for name, (theirs, ours) in shapes.items() if theirs != ours
        ],
    }
    return "; ".join(f"{len(found)} tensor(s) {what}: {list_some(found)}" for what, found in parts.items() if found)
