"""An exponential moving average (EMA) of a module's weights, which prediction, evaluation and export use."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from shards.errors import DataError
from trainer.methods.buffers import batchnorm_statistics

_PREFIX = "ema."
_WARMUP = 10


def decay_at(step: int, decay: float) -> float:
    """Return the decay after optimiser step `step`: min(decay, (1 + step) / (10 + step)).

    A constant decay would leave the average near the random initial weights for the first 1 / (1 - decay) steps.
    """
    return min(decay, (1 + step) / (_WARMUP + step))


class WeightAverage:
    """The average of a module's parameters and, with `use_buffers`, of its BatchNorm statistics."""

    def __init__(self, module: nn.Module, decay: float, use_buffers: bool = False) -> None:
        self._decay = decay
        statistics = batchnorm_statistics(module) if use_buffers else {}
        self._statistics = tuple(statistics)
        self._live = dict(module.named_parameters()) | statistics
        self._average = {name: tensor.detach().clone() for name, tensor in self._live.items()}
        device = next(iter(self._average.values())).device
        self._pull = torch.zeros((), device=device)  # on the device, because CUDA graphs refer to it

    def set_step(self, step: int) -> None:
        """Set how far the next `update` moves the average."""
        self._pull.fill_(1 - decay_at(step, self._decay))

    @torch.no_grad()
    def update(self, ok: torch.Tensor) -> None:
        """Move the average towards the weights if `ok` (bool []) is true, with no host-device sync."""
        average, live = list(self._average.values()), [tensor.detach() for tensor in self._live.values()]
        moves = torch._foreach_sub(live, average)
        torch._foreach_mul_(moves, torch.where(ok, self._pull, 0.0))
        torch._foreach_add_(average, moves)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the module has the averaged weights, at the same addresses."""
        live = {name: tensor.detach().clone() for name, tensor in self._live.items()}
        self.apply()
        try:
            yield
        finally:
            _copy(self._live, live)

    def apply(self) -> None:
        """Replace the module's weights by their average."""
        _copy(self._live, self._average)

    def statistics(self) -> dict[str, torch.Tensor]:
        """Return the averaged BatchNorm statistics, which differ between ranks, by their keys in a checkpoint."""
        return {f"{_PREFIX}{name}": self._average[name] for name in self._statistics}

    def state(self) -> dict[str, torch.Tensor]:
        return {f"{_PREFIX}{name}": tensor for name, tensor in self._average.items()}

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        _copy(self._average, _averages_in(tensors))


def load_averages(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace the module's weights, and statistics that were averaged, by the averages in a checkpoint, if any."""
    averages = _averages_in(tensors)
    if averages:
        statistics = {name: buffer for name, buffer in batchnorm_statistics(module).items() if name in averages}
        _copy(dict(module.named_parameters()) | statistics, averages)


def _averages_in(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items() if name.startswith(_PREFIX)}


@torch.no_grad()
def _copy(into: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    if into.keys() != tensors.keys():
        raise DataError(
            "the averaged weights (ema) of the checkpoint are not those of this network: restore the right "
            "checkpoint, or restart the stage with --redo"
        )
    for name, tensor in into.items():
        tensor.copy_(tensors[name])
