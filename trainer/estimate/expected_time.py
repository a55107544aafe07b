"""Estimates how long a run takes on this machine, from a few timed steps, before it starts."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainer.config.fitting import resolve_batch
from trainer.config.schema import Recipe
from trainer.estimate.cost import CostModel
from trainer.estimate.network_cost import count_network
from trainer.estimate.probe import probe_machine

_PROBE_SECONDS = 0.3
"""Each rate is measured for this long, or for two steps if they take longer."""


def estimate_cpu_seconds(recipe: Recipe, samples: int, classes: int) -> float:
    """Return about how long the training and predicting of a run take on this CPU.

    It takes about seven steps, and changes neither the random state nor the number of threads.
    """
    samples = min(samples, recipe.data.train.limit or samples)
    recipe = resolve_batch(recipe, samples)
    model = recipe.model
    cost = count_network(model.name, classes, recipe.image.size, model.options, model.trainable)
    with torch.random.fork_rng(devices=[]), _threads(recipe.execution.threads):
        machine = probe_machine(recipe, classes, cost, torch.device("cpu"), _PROBE_SECONDS)
    costs = CostModel(recipe, cost, samples, classes, machine=machine)
    return sum(phase.seconds for phase in costs.cost_run(1))


def describe_time(seconds: float) -> str:
    """Return the time in words, no more exact than the estimate: `about 12 minutes`."""
    if seconds < 60:
        return "less than a minute"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"about {minutes} minute{'s' if minutes > 1 else ''}"
    return f"about {round(seconds / 3600)} hours"


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Within the block, use this number of threads; None: as many as before."""
    before = torch.get_num_threads()
    if number is None or number == before:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
