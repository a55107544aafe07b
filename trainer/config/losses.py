"""Training losses by kind: ours, and those of installed packages (entry point group `incv.losses`), without torch."""

import json
import logging
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SerializeAsAny

from shards.errors import ConfigError, did_you_mean
from shards.plugins import PluginGroup
from trainer.config.section import Section

_log = logging.getLogger(__name__)


class LossConfig(Section):
    """The training loss: its kind, and the options of this kind."""

    kind: str = "cross_entropy"
    """cross_entropy; gce: the generalised cross-entropy; or a loss of an installed package."""

    @classmethod
    def kinds(cls) -> dict[str, type[Section]]:
        found: dict[str, type[Section]] = {}
        for kind in LOSSES.names() if cls is LossConfig else ():
            try:
                found[kind] = find_loss(kind).options
            except ConfigError as error:
                _log.warning("%s", error)
        return found


class GceConfig(LossConfig):
    """Generalised cross-entropy (Zhang and Sabuncu 2018): (1 - p^q) / q, where p is the probability of the label."""

    q: Annotated[float, Field(gt=0, le=1)]
    """Towards 0: cross-entropy; 1: mean absolute error. Larger values fit wrong labels less, and learn more slowly.

    0.7 is the authors' value.
    """


@dataclass(frozen=True)
class Loss:
    """A loss of the training on given labels."""

    name: str
    """Its `kind` in recipes."""
    options: type[LossConfig]
    """Its recipe section."""
    function: str
    """`module:function`, imported when a training starts and called as function(logits, targets, smoothing=share,
    **options): see `trainer.methods.losses.RowLosses`. smoothing: the section's `label_smoothing`."""


CROSS_ENTROPY = Loss("cross_entropy", LossConfig, "trainer.methods.losses:target_losses")
GCE = Loss("gce", GceConfig, "trainer.methods.losses:generalised_losses")
LOSSES = PluginGroup(
    "incv.losses",
    "loss",
    {"cross_entropy": "trainer.config.losses:CROSS_ENTROPY", "gce": "trainer.config.losses:GCE"},
)


def find_loss(kind: str) -> Loss:
    """Return the loss of this kind; raise ConfigError if it is unknown or unusable."""
    entry = LOSSES.find(kind)
    if entry is None:
        raise ConfigError(f"`loss.kind`: unknown loss {kind!r}; {did_you_mean(kind, LOSSES.names())}")
    return LOSSES.load(entry, Loss)


def _validate_kind(value: Any) -> Any:
    """Validate a section `loss` with the options of its kind."""
    kind = value.get("kind", CROSS_ENTROPY.name) if isinstance(value, dict) else None
    if not isinstance(kind, str):
        return value
    try:
        options = find_loss(kind).options
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return options.model_validate_json(json.dumps(value))


AnyLoss = Annotated[SerializeAsAny[LossConfig], BeforeValidator(_validate_kind)]
"""The section of any registered loss."""
