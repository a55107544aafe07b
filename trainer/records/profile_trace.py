"""A torch.profiler trace of a few steps of each training, for `--profile trace`."""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

_log = logging.getLogger(__name__)

FILE = "profile-trace.json"
"""Chrome trace in each training's folder, for https://ui.perfetto.dev or chrome://tracing."""
_SKIPPED_STEPS, _TRACED_STEPS = 10, 3
"""Steps before the profiler's warm-up step, and steps in the trace."""


class StepTrace:
    """Traces one training. A process can run only one profiler, so interleaved trainings are traced in turn."""

    _busy = False

    def __init__(self, device: torch.device) -> None:
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._profiler: profile | None = None
        self._traced = 0
        """Steps since the profiler started, including its warm-up step."""
        self._done = False

    def end_step(self, steps: int) -> None:
        """Start, advance or stop the profiler. steps: number of steps in this start so far."""
        if self._profiler is not None and not self._done:
            self._profiler.step()
            self._traced += 1
            if self._traced > _TRACED_STEPS:
                self.stop()
        elif not self._done and not StepTrace._busy and steps >= _SKIPPED_STEPS:
            self._start()

    def _start(self) -> None:
        try:
            self._profiler = profile(
                activities=self._activities, schedule=schedule(wait=0, warmup=1, active=_TRACED_STEPS, repeat=1)
            )
            self._profiler.start()
            StepTrace._busy = True
        except RuntimeError as error:  # another profiler is attached to the process
            self._profiler, self._done = None, True
            _log.warning("no steps are traced: %s", error)

    def stop(self) -> None:
        """Stop the profiler; discard the trace if the training ended before it was complete."""
        if self._profiler is not None and not self._done:
            self._profiler.stop()
            self._done, StepTrace._busy = True, False
            if self._traced <= _TRACED_STEPS:
                self._profiler = None

    def write(self, folder: Path) -> None:
        """Write the trace if it is complete and not yet written."""
        if self._profiler is not None and self._done:
            complete, self._profiler = self._profiler, None
            complete.export_chrome_trace(str(folder / FILE))
