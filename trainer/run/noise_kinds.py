"""Registry of synthetic label noise: built-in kinds, and those of installed packages (`incv.noise_kinds`).

A kind turns the recipe's `labels:` section into a transition matrix T, T_ij = P(given label j | true class i).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shards.errors import ConfigError, did_you_mean
from shards.plugins import PluginGroup
from trainer.config.data import NOISE_ALIASES, LabelsConfig
from trainer.theory import (
    asymmetric_transition,
    check_transition,
    inclusive_symmetric_transition,
    mapped_transition,
    symmetric_transition,
)

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
    class_names: tuple[str, ...] | None = None
    """The classes for which it is defined, in order; None: any."""


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


_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# Classes that people confuse (Patrini et al., Making deep neural networks robust to label noise, CVPR 2017).
_SIMILAR = {"truck": "automobile", "bird": "airplane", "deer": "horse", "cat": "dog", "dog": "cat"}
_SIMILAR_NUMBERS = {_CIFAR10.index(one): _CIFAR10.index(other) for one, other in _SIMILAR.items()}

MATRIX = NoiseKind("matrix", _given_matrix, uses_ratio=False)
_RECORDS = (
    NoiseKind("symmetric", lambda config, classes: symmetric_transition(config.ratio, classes)),
    NoiseKind("symmetric_inclusive", lambda config, classes: inclusive_symmetric_transition(config.ratio, classes)),
    NoiseKind("asymmetric", lambda config, classes: asymmetric_transition(config.ratio, classes)),
    NoiseKind(
        "similar_class",
        lambda config, classes: mapped_transition(config.ratio, _SIMILAR_NUMBERS, classes),
        class_names=_CIFAR10,
    ),
    MATRIX,
)
_BUILT_IN = {kind.name: kind for kind in _RECORDS}


def find_noise_kind(name: str) -> NoiseKind:
    """The kind of that name; raises ConfigError if it is unknown or unusable."""
    entry = PLUGINS.find(name, _BUILT_IN)
    if entry is not None:
        return PLUGINS.load(entry, NoiseKind)
    if name not in _BUILT_IN:
        known = ["none", *_BUILT_IN, *NOISE_ALIASES, *PLUGINS.names()]
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


def build_transition(
    config: LabelsConfig, classes: int, class_names: Sequence[str] | None = None
) -> Transition | None:
    """T of the corruption, [classes, classes]; None if labels are not corrupted. class_names: None if unknown."""
    if config.noise == "none":
        return None
    if classes < 2:
        raise ConfigError(f"labels.noise: {config.noise} needs at least 2 classes, the data set has {classes}")
    kind = find_noise_kind(config.noise)
    defined = kind.class_names
    if defined is not None and (len(defined) != classes or (class_names and tuple(class_names) != defined)):
        raise ConfigError(
            f"labels.noise: {kind.name} is defined for the classes {', '.join(defined)} only: set labels.noise to "
            f"{MATRIX.name} and labels.matrix to the matrix for your classes"
        )
    return kind.transition(config, classes)
