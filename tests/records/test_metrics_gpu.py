"""Metrics and divergence are read without waiting for the GPU. `make test-gpu` runs these."""

import json
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from trainer.records.metrics import MetricsLog
from trainer.training.finite_guard import FiniteGuard, NonFiniteError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
GPU = torch.device("cuda", 0)
LONG = 1_000_000_000
"""Cycles of the GPU: about half a second."""


@pytest.fixture
def no_waiting(tmp_path) -> Iterator[None]:
    """A busy GPU, and an error if the host waits for it; all kernels were used before, since loading one waits."""
    write_lines(MetricsLog(tmp_path / "before.jsonl"))
    with suppress(NonFiniteError):
        diverged().require_finite(wait=False)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def write_lines(log: MetricsLog) -> None:
    for step in (1, 2, 3):
        log.add({"loss": torch.full((), float(step), device=GPU)})
        log.write(False, step=step)


def diverged() -> FiniteGuard:
    guard = FiniteGuard(GPU)
    for _ in range(10):
        guard.note(torch.zeros((), dtype=torch.bool, device=GPU), torch.ones((), dtype=torch.bool, device=GPU))
    return guard


def test_lines_follow_when_the_gpu_has_computed_them(tmp_path, no_waiting):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    write_lines(log)
    assert not log.has_steps()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert log.write(False, step=4) == "loss 3.000"  # that of the last line with steps
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [*({"step": step, "loss": float(step)} for step in (1, 2, 3)), {"step": 4}]


def test_divergence_is_noticed_by_a_later_call(no_waiting):
    guard = diverged()
    guard.require_finite(wait=False)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    with pytest.raises(NonFiniteError, match="10 steps in a row"):
        guard.require_finite(wait=False)
