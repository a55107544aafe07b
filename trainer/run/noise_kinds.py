"""Registry of synthetic label noise: built-in kinds, and those of installed packages (`incv.noise_kinds`).

A kind turns the recipe's `labels:` section into a transition matrix T, T_ij = P(given label j | true class i).
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points

import numpy as np
import numpy.typing as npt

from shards.errors import ConfigError
from trainer.config.schema import LabelsConfig
from trainer.theory import asymmetric_transition, check_transition, symmetric_transition

GROUP = "incv.noise_kinds"
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
_BUILT_IN = (
    NoiseKind("symmetric", lambda config, classes: symmetric_transition(config.ratio, classes)),
    NoiseKind("asymmetric", lambda config, classes: asymmetric_transition(config.ratio, classes)),
    MATRIX,
)


@cache
def noise_kinds() -> dict[str, NoiseKind]:
    """All registered kinds by name."""
    kinds = {kind.name: kind for kind in _BUILT_IN}
    for entry in entry_points(group=GROUP):
        kind = entry.load()
        if not isinstance(kind, NoiseKind) or kind.name in kinds:
            raise ConfigError(
                f"the entry point {entry.name} of {GROUP} ({entry.value}) is not a NoiseKind with a name of its own: "
                "repair or uninstall its package"
            )
        kinds[kind.name] = kind
    return kinds


def validate_noise(config: LabelsConfig) -> None:
    """Raise ValueError if the section names an unknown kind, or sets keys that its kind does not read."""
    kinds = noise_kinds()
    if config.noise != "none" and config.noise not in kinds:
        names = ["none", *kinds]
        near = difflib.get_close_matches(config.noise, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"`labels.noise`: unknown kind {config.noise!r}; {hint}known: {', '.join(names)}")
    reads_ratio = config.noise != "none" and kinds[config.noise].uses_ratio
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
    return noise_kinds()[config.noise].transition(config, classes)
