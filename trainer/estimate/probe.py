"""Counts the computing cost of a network without running it, and measures it with a few training steps."""

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import benchmark
from torch.utils.flop_counter import FlopCounterMode

from shards.errors import ConfigError
from trainer.acceleration.precision import autocast
from trainer.config.schema import Recipe, Trainable
from trainer.estimate.measured import MeasuredNetwork, fit_rates
from trainer.methods.losses import target_losses
from trainer.methods.networks import build_network, to_device
from trainer.methods.registry import methods_of
from trainer.models.factory import create_model
from trainer.models.frozen import freeze_features, set_train_mode
from trainer.training.optim import make_optimizer

_SECONDS = 2.0


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


def probe_machine(
    recipe: Recipe,
    classes: int,
    cost: NetworkCost,
    device: torch.device,
    seconds: float = _SECONDS,
    most_rows: int | None = None,
) -> MeasuredNetwork:
    """Run a few steps with the recipe's batch and with a quarter of it, and a few forward passes.

    seconds: for about how long to measure each of the three rates; most_rows: of a batch; None: as in the recipe.
    """
    network = to_device(build_network(recipe, classes, recipe.seed), device)
    section = recipe.incv if recipe.incv is not None else methods_of(recipe)[0].config(recipe)
    settings = section.optimizer
    optimizer = make_optimizer(network, settings.kind, settings.weight_decay, decay_scope=settings.decay_scope)
    rows = min(recipe.batch.rows, recipe.batch.micro or recipe.batch.rows, most_rows or recipe.batch.rows)
    images = torch.zeros(rows, 3, recipe.image.size, recipe.image.size, device=device)
    if device.type == "cuda":
        images = images.to(memory_format=torch.channels_last)
    labels = torch.arange(rows, device=device) % classes

    def step(count: int) -> None:
        network.eval()
        if count > 1:  # BatchNorm refuses to train on a single row
            set_train_mode(network)
        with autocast(device, recipe.precision):
            logits = network(images[:count])
        target_losses(logits, labels[:count]).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def forward() -> None:
        with torch.no_grad(), autocast(device, recipe.precision):
            network(images)

    fewer = max(1, rows // 4)
    rates = fit_rates((fewer, rows), (_time(partial(step, fewer), seconds), _time(partial(step, rows), seconds)))
    network.eval()
    forward_row_s = _time(forward, seconds) / rows
    efficiency = (cost.forward_flops / forward_row_s) / (cost.step_flops / rates.row_s)
    rates = replace(rates, forward_efficiency=efficiency)
    on_gpu = device.type == "cuda"
    machine = f"{torch.get_num_threads()} threads on {os.cpu_count()} cores, {platform.machine()}"
    machine = torch.cuda.get_device_name(device) if on_gpu else machine
    name, pixels = recipe.model.name, recipe.image.size
    return MeasuredNetwork(name, pixels, rates, rates, cost.step_flops, cost.layers, machine, on_gpu)


def _time(run: Callable[[], None], seconds: float) -> float:
    """Return the median seconds of a call, measured for about this long."""
    timer = benchmark.Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=seconds).median)
