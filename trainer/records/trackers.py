"""Experiment trackers (`execution.trackers`): the lines of metrics.jsonl, also for TensorBoard or Weights & Biases.

Accelerate's trackers write them. A tracker that fails is dropped with a warning: it must not end a run.
"""

import hashlib
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from shards.errors import ConfigError
from trainer.config.schema import Recipe

_log = logging.getLogger(__name__)


class Tracker(Protocol):
    """What is used of accelerate's `GeneralTracker`."""

    @property
    def name(self) -> str: ...

    def log(self, values: dict[str, float], step: int) -> None: ...

    def finish(self) -> None: ...


def require_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError, naming the extra to install, if the package of a tracker is missing."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f"execution.trackers: the package {name} is not installed: run `pip install 'incv[{name}]'`, or "
                f"remove {name} from execution.trackers"
            )


class JobTrackers:
    """The trackers of one training job."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, line: Mapping[str, Any]) -> None:
        """Log the numbers of a line of metrics.jsonl at its step."""
        values = {name: value for name, value in line.items() if name != "step" and _is_number(value)}
        self._each(lambda tracker: tracker.log(values, step=line["step"]))

    def close(self) -> None:
        self._each(lambda tracker: tracker.finish())
        self._trackers = []

    def _each(self, act: Any) -> None:
        for tracker in list(self._trackers):
            try:
                act(tracker)
            except Exception as error:  # a third-party tracker may raise anything
                _log.warning("%s failed and is no longer written: %s", tracker.name, error)
                self._trackers.remove(tracker)


@dataclass(frozen=True)
class TrackerSettings:
    """The trackers of a run; `open` starts those of one training job."""

    names: tuple[str, ...]
    root: Path
    """The run directory."""
    recipe: str
    """Name of the recipe."""
    config: dict[str, Any] = field(default_factory=dict)
    """The resolved recipe."""

    def open(self, job: str, step: int, identity: str | None = None) -> JobTrackers:
        """Start the trackers of a job that continues from `step`; its logs of later steps are replaced.

        identity: the hash of the recipe keys that affect the job's result. Call it on the job's first rank only.
        """
        starts = {"tensorboard": self._start_tensorboard, "wandb": self._start_wandb}
        trackers = []
        for name in self.names:
            try:
                trackers.append(starts[name](job, step, identity))
            except Exception as error:  # a third-party tracker may raise anything
                _log.warning("%s could not be started and is not written: %s", name, error)
        return JobTrackers(trackers)

    def _start_tensorboard(self, job: str, step: int, _identity: str | None) -> Tracker:
        from accelerate.tracking import TensorBoardTracker

        # TensorBoard hides what an earlier start logged from `purge_step` on.
        return _start(TensorBoardTracker(job, str(self.root / "tensorboard"), purge_step=step + 1))

    def _start_wandb(self, job: str, _step: int, identity: str | None) -> Tracker:
        from accelerate.tracking import WandBTracker

        mode = os.environ.get("WANDB_MODE", "offline")
        unique = hashlib.sha256(f"{self.root.resolve()}\n{identity}\n{job}".encode()).hexdigest()[:16]
        return _start(
            WandBTracker(
                os.environ.get("WANDB_PROJECT", f"incv-{self.recipe}"),
                name=f"{self.root.name}/{job}",
                group=self.root.name,
                id=unique,
                resume="allow" if mode == "online" else None,
                dir=str(self.root),
                config=self.config,
                mode=mode,
                reinit="create_new",  # several jobs may train at once in one process
                settings={"silent": True, "console": "off"},
            )
        )


def tracker_settings(root: Path, name: str, recipe: Recipe) -> TrackerSettings | None:
    """Return the trackers of a run in the directory `root`; None if its recipe, called `name`, asks for none."""
    names = recipe.execution.trackers
    return TrackerSettings(names, root, name, recipe.model_dump(mode="json")) if names else None


def _start(tracker: Any) -> Tracker:
    """Start a tracker of accelerate on this rank, without accelerate's state.

    Accelerate's `PartialState` may set torch's number of threads, which changes results; its trackers need it to find
    the main process, which the caller has done, and for their log messages.
    """
    from accelerate import tracking

    tracking.logger = logging.getLogger(tracking.__name__)
    tracker.main_process_only = False
    tracker.start()
    started: Tracker = tracker
    return started


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
