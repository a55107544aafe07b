"""Build the networks of a method, and load them from a finished training job."""

from pathlib import Path

import torch
from torch import nn

from shards.durable import read_json
from shards.errors import DataError
from trainer.config.schema import Recipe
from trainer.loading.sample_order import derive_stream, mix64
from trainer.methods.weight_average import load_averages
from trainer.models.classifier import start_classifier
from trainer.models.factory import create_model
from trainer.models.frozen import freeze_features
from trainer.models.twin import TwinModel
from trainer.models.weights import Weights
from trainer.training.checkpoint import find_newest_checkpoint, load_module

BEST = "best."
"""Prefix in a checkpoint of the weights of the best epoch, if it is not the last one that is used."""


def build_network(recipe: Recipe, classes: int, seed: int, weights: Weights | None = None) -> nn.Module:
    """Build a network with random weights, or with the given weights and a classifier that starts near zero."""
    network = create_model(recipe.model.name, classes, seed, **recipe.model.options)
    if weights is not None:
        weights.load_into(network)
        start_classifier(network, seed)
    if recipe.model.trainable == "classifier":
        freeze_features(network)
    return network


def build_module(recipe: Recipe, name: str, networks: int, classes: int, weights: Weights | None = None) -> nn.Module:
    """Build one network, or a TwinModel of two networks with different initial weights.

    name: name of the method, which determines the initial weights together with the run's seed.
    weights: start both networks from these; their classifiers differ.
    """

    def network(number: int) -> nn.Module:
        return build_network(recipe, classes, derive_stream(recipe.seed, f"{name}.init", 0, number), weights)

    return TwinModel(network(0), network(1)) if networks == 2 else network(0)


def seed_rng(stream: int, rank: int) -> None:
    """Seed torch's generator, which training uses for dropout, differently on each rank."""
    torch.manual_seed(stream if rank == 0 else int(mix64(stream, rank)))


def list_networks(module: nn.Module) -> list[nn.Module]:
    return [module.a, module.b] if isinstance(module, TwinModel) else [module]


def to_device(module: nn.Module, device: torch.device) -> nn.Module:
    """Move the module to the device; on a GPU, in channels-last layout, which tensor cores read and DALI writes."""
    module = module.to(device)
    return module.to(memory_format=torch.channels_last) if device.type == "cuda" else module


def load_trained_networks(recipe: Recipe, name: str, networks: int, folder: Path, classes: int) -> list[nn.Module]:
    """Load the networks of a finished training job, on the CPU, in eval mode: best epoch, average or last weights."""
    module = build_module(recipe, name, networks, classes)
    last = read_json(folder / "training.json")["steps"]
    found = find_newest_checkpoint(folder / "checkpoints")
    if found is None or (found[0] != last and not found[1].values.get("has_ended")):
        raise DataError(
            f"{folder / 'checkpoints'} holds no readable checkpoint of {name}'s last step ({last}): train it again "
            f"with `--redo {name}`"
        )
    tensors = found[1].tensors
    if any(key.startswith(BEST) for key in tensors):
        load_module(module, tensors, BEST)
    else:
        load_module(module, tensors, "model.")
        load_averages(module, tensors)
    return list_networks(module.eval())
