"""What a network costs a row: FLOPs, parameters and memory, counted on the model itself without computing."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shards.errors import ConfigError
from trainer.models.factory import create_model

_ROWS = 2  # BatchNorm refuses one row where the last feature map is a single pixel


@dataclass(frozen=True)
class NetworkCost:
    """Of one row, where nothing else is said."""

    parameters: int
    """Of the network."""
    layers: int
    """Convolutions and linear layers of the network."""
    forward_flops: float
    step_flops: float
    """Forward and backward."""
    saved_numbers: float
    """Numbers that the forward keeps for the backward."""


def network_cost(name: str, classes: int, pixels: int, options: dict[str, Any]) -> NetworkCost:
    """Count one training step on the meta device: shapes without numbers."""
    network = create_model(name, classes, 0, **options).to("meta")
    saved: dict[int, torch.Tensor] = {}
    own = {parameter.untyped_storage()._cdata for parameter in network.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in own:
            saved[storage] = tensor  # the tensor too: a storage that is freed leaves its address to another
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    try:
        with FlopCounterMode(display=False) as counter, hooks:
            logits = network(torch.empty(_ROWS, 3, pixels, pixels, device="meta"))
            forward = counter.get_total_flops()
            logits.sum().backward()
    except (RuntimeError, ValueError, AttributeError) as error:
        raise ConfigError(f"the FLOPs of model {name} at image.size = {pixels} cannot be counted: {error}") from error
    return NetworkCost(
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        layers=sum(isinstance(module, nn.Conv2d | nn.Linear) for module in network.modules()),
        forward_flops=forward / _ROWS,
        step_flops=counter.get_total_flops() / _ROWS,
        saved_numbers=sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) / 4 / _ROWS,
    )
