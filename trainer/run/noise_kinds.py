"""Registry of synthetic label noise: built-in kinds, and those of installed packages (`incv.noise_kinds`).

A kind turns the recipe's `labels:` section into a transition matrix T, T_ij = P(given label j | true class i).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shards.errors import ConfigError, did_you_mean
from shards.plugins import PluginGroup
from trainer.config.schema import LabelsConfig
from trainer.theory import asymmetric_transition, check_transition, symmetric_transition

PLUGINS = PluginGroup("incv.noise_kinds", "kind of label noise")
Transition = npt.NDArray[np.float64]


@dataclass(frozen=True)
class NoiseKind:
    """One kind of label noise."""

    name: str
    transition: Callable[[LabelsConfig, int], Transition]
    """(section, classes): T, float64 [classes, classes]."""
    uses_ratio: bool = True
    """Whether the kind reads `labels.ratio`."""


def _given_matrix(config: LabelsConfig, classes: int) -> Transition:
    rows: Sequence[Sequence[float]] = config.matrix or ()
    if len(rows) != classes or any(len(row) != classes for row in rows):
        raise ConfigError(f"labels.matrix must have {classes} rows of {classes} numbers, one per class")
    matrix = np.asarray(rows, np.float64)
    try:
        check_transition(matrix)
    except ValueError as error:
        raise ConfigError(f"labels.matrix: {error}") from None
    return matrix


MATRIX = NoiseKind("matrix", _given_matrix, uses_ratio=False)
_RECORDS = (
    NoiseKind("symmetric", lambda config, classes: symmetric_transition(config.ratio, classes)),
    NoiseKind("asymmetric", lambda config, classes: asymmetric_transition(config.ratio, classes)),
    MATRIX,
)
_BUILT_IN = {kind.name: kind for kind in _RECORDS}


def find_noise_kind(name: str) -> NoiseKind:
    """The kind of that name; raises ConfigError if it is unknown or unusable."""
    entry = PLUGINS.find(name, _BUILT_IN)
    if entry is not None:
        return PLUGINS.load(entry, NoiseKind)
    if name not in _BUILT_IN:
        known = ["none", *_BUILT_IN, *PLUGINS.names()]
        raise ConfigError(f"`labels.noise`: unknown kind {name!r}; {did_you_mean(name, known)}")
    return _BUILT_IN[name]


def validate_noise(config: LabelsConfig) -> None:
    """Raise ValueError if the section names an unusable kind, or sets keys that its kind does not read."""
    try:
        kind = None if config.noise == "none" else find_noise_kind(config.noise)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    reads_ratio = kind is not None and kind.uses_ratio
    if config.ratio and not reads_ratio:
        raise ValueError(f"labels.ratio has no meaning with labels.noise: {config.noise}; set it to 0")
    if (config.matrix is not None) != (config.noise == MATRIX.name):
        raise ValueError("labels.matrix goes with labels.noise: matrix, and only with it")


def build_transition(config: LabelsConfig, classes: int) -> Transition | None:
    """T of the corruption, [classes, classes]; None if labels are not corrupted."""
    if config.noise == "none":
        return None
    if classes < 2:
        raise ConfigError(f"labels.noise: {config.noise} needs at least 2 classes, the data set has {classes}")
    return find_noise_kind(config.noise).transition(config, classes)
