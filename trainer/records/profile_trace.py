"""A torch.profiler trace of a few steps of each training, for `--profile`."""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

_log = logging.getLogger(__name__)

FILE = "profile-trace.json"
"""Chrome trace in each training's folder, for https://ui.perfetto.dev or chrome://tracing."""
_SKIPPED_STEPS, _TRACED_STEPS = 10, 3
"""Steps of a start before the profiler's warm-up step, and steps in the trace."""


class StepTrace:
    """Traces one training in one start, and writes the trace as soon as it is complete.

    A process can run only one profiler, so interleaved trainings are traced in turn.
    """

    _busy = False

    def __init__(self, device: torch.device, folder: Path) -> None:
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._path = folder / FILE
        self._profiler: profile | None = None
        self._steps, self._traced = 0, 0
        """Steps of this start, and those since the profiler started, including its warm-up step."""
        self._done = False

    def end_step(self) -> None:
        """Count a step: start, advance or stop the profiler. A failure only prints a warning."""
        self._steps += 1
        if self._done:
            return
        try:
            if self._profiler is not None:
                self._profiler.step()
                self._traced += 1
                if self._traced > _TRACED_STEPS:
                    self._stop().export_chrome_trace(str(self._path))
            elif not StepTrace._busy and self._steps >= _SKIPPED_STEPS:
                self._start()
        except (OSError, RuntimeError) as error:  # such as another profiler in the process
            self._done = True
            _log.warning("%s was not written: %s", self._path, error)

    def _start(self) -> None:
        profiler = profile(
            activities=self._activities, schedule=schedule(wait=0, warmup=1, active=_TRACED_STEPS, repeat=1)
        )
        profiler.start()
        self._profiler, StepTrace._busy = profiler, True

    def _stop(self) -> profile:
        assert self._profiler is not None
        stopped, self._profiler = self._profiler, None
        self._done, StepTrace._busy = True, False
        stopped.stop()
        return stopped

    def close(self) -> None:
        """Stop the profiler; discard the trace if the training ended before it was complete."""
        if self._profiler is not None:
            self._stop()
