"""Counts the computing cost of a network without running it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shards.errors import ConfigError
from trainer.config.schema import Trainable
from trainer.models.factory import create_model
from trainer.models.frozen import freeze_features


@dataclass(frozen=True)
class NetworkCost:
    """The computing cost of a network; FLOPs and saved numbers are per row."""

    parameters: int
    layers: int
    """Number of convolutions and linear layers."""
    forward_flops: float
    step_flops: float
    """FLOPs of forward and backward."""
    saved_numbers: float
    """Numbers that the forward pass saves for the backward pass."""


def count_network(
    name: str, classes: int, pixels: int, options: dict[str, Any], trainable: Trainable = "all"
) -> NetworkCost:
    """Count the cost of one training step on the meta device, which computes only shapes."""
    rows = 2  # BatchNorm rejects a single row if the last feature map is one pixel
    network = create_model(name, classes, 0, **options).to("meta")
    if trainable == "classifier":
        freeze_features(network)
    own = {parameter.untyped_storage()._cdata for parameter in network.parameters()}
    saved: dict[int, torch.Tensor] = {}  # keeps the tensors alive, so that no storage address is reused

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    try:
        with FlopCounterMode(display=False) as counter, hooks:
            logits = network(torch.empty(rows, 3, pixels, pixels, device="meta"))
            forward = counter.get_total_flops()
            logits.sum().backward()
    except Exception as error:  # a third-party network may raise anything
        raise ConfigError(f"the FLOPs of model {name} at image.size = {pixels} cannot be counted: {error}") from error
    saved_bytes = sum(tensor.untyped_storage().nbytes() for at, tensor in saved.items() if at not in own)
    return NetworkCost(
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        layers=sum(isinstance(module, nn.Conv2d | nn.Linear) for module in network.modules()),
        forward_flops=forward / rows,
        step_flops=counter.get_total_flops() / rows,
        saved_numbers=saved_bytes / 4 / rows,
    )
