"""Measures a recipe's network on this machine with a few training steps, for `--dry-run --probe`."""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from trainer.acceleration.precision import autocast
from trainer.config.schema import Recipe, TrainingConfig
from trainer.estimate.measured import MeasuredNetwork, StepRates
from trainer.estimate.network_cost import NetworkCost
from trainer.methods.losses import sample_losses
from trainer.methods.networks import build_network, to_device
from trainer.methods.registry import methods_of
from trainer.models.frozen import set_train_mode
from trainer.training.optim import make_optimizer

_SECONDS = 2.0
"""By default, each of the three rates is measured for about this long."""
_MAX_STEPS = 20


@dataclass(frozen=True)
class Machine:
    """This machine, as probed: the rates of the recipe's own network, at its precision."""

    name: str
    network: MeasuredNetwork
    is_gpu: bool
    seconds: float
    """How long the probe took."""


def probe_machine(
    recipe: Recipe, classes: int, cost: NetworkCost, device: torch.device, seconds: float = _SECONDS
) -> Machine:
    """Run a few steps with the recipe's batch and with a quarter of it, and a few forward passes.

    seconds: for about how long to measure each of the three rates.
    """
    began = time.monotonic()
    network = to_device(build_network(recipe, classes, recipe.seed), device)
    section = _first_section(recipe)
    optimizer = make_optimizer(
        network, section.optimizer.kind, section.optimizer.weight_decay, decay_scope=section.optimizer.decay_scope
    )
    rows = min(recipe.batch.rows, recipe.batch.micro or recipe.batch.rows)
    fewer = max(1, rows // 4)

    def time_steps(count: int) -> float:
        images, labels = _make_batch(recipe, classes, count, device)

        def step() -> None:
            network.eval()
            if count > 1:  # BatchNorm refuses to train on a single row
                set_train_mode(network)
            with autocast(device, recipe.precision):
                logits = network(images)
            sample_losses(logits, labels).mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return _time(step, device, seconds)

    def forward() -> None:
        with torch.no_grad(), autocast(device, recipe.precision):
            network(images)

    rates = fit_rates((fewer, rows), (time_steps(fewer), time_steps(rows)))
    network.eval()
    images, _ = _make_batch(recipe, classes, rows, device)
    per_row = _time(forward, device, seconds) / rows
    efficiency = (cost.forward_flops / per_row) / (cost.step_flops / rates.row_s)
    rates = StepRates(rates.rows, rates.images_per_s, efficiency)
    measured = MeasuredNetwork(recipe.model.name, recipe.image.size, rates, rates, cost.step_flops, cost.layers)
    return Machine(_describe(device), measured, device.type == "cuda", time.monotonic() - began)


def fit_rates(rows: tuple[int, int], seconds: tuple[float, float]) -> StepRates:
    """Return the rates of steps with two numbers of rows. A step with more rows never takes less time per step."""
    few, many = rows
    quick, slow = seconds
    if few == many:  # no fixed part can be told apart
        return StepRates((many, 2 * many), (many / slow, many / slow), 1.0)
    quick = min(quick, slow * 0.999)  # noise: otherwise the time per row would be negative
    quick = max(quick, slow * few / many)  # and the fixed part would be
    return StepRates((few, many), (few / quick, many / slow), 1.0)


def _first_section(recipe: Recipe) -> TrainingConfig:
    return recipe.incv if recipe.incv is not None else methods_of(recipe)[0].config(recipe)


def _make_batch(recipe: Recipe, classes: int, rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    size = recipe.image.size
    images = torch.zeros(rows, 3, size, size, device=device)
    if device.type == "cuda":
        images = images.to(memory_format=torch.channels_last)
    return images, torch.arange(rows, device=device) % classes


def _time(run: Callable[[], None], device: torch.device, limit: float) -> float:
    """Return the median seconds of a call. limit: seconds to measure for, but at least two calls after the first."""
    seconds: list[float] = []
    run()
    while len(seconds) < _MAX_STEPS and (len(seconds) < 2 or sum(seconds) < limit):
        _finish(device)
        began = time.perf_counter()
        run()
        _finish(device)
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} threads on {os.cpu_count()} cores, {platform.machine()}"
