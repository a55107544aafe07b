"""`execution.trackers` in a run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command_line import THREADS, TINY, Answer, unchanged
from tests.support.untimed import untimed

Incv = Callable[..., Answer]
QUICK = ("incv=null", "methods=[standard]", "standard.epochs=2", "data.train.limit=60", "data.eval.test.limit=20")


def test_a_missing_tracker_is_refused_before_anything_is_written(
    incv: Incv, playground: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.records.trackers.find_spec", lambda name: None)
    for command in ("run", "validate"):
        with unchanged(playground):
            answer = incv(command, "-c", TINY, *QUICK, "execution.trackers=[wandb]")
        assert answer.code == 2
        assert "pip install 'incv[wandb]'" in answer.err


def test_a_run_writes_its_metrics_for_tensorboard(incv: Incv, playground: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    plain, tracked = ("run", "-c", TINY, *QUICK, THREADS, "--run-dir", "plain"), playground / "tracked"
    assert incv(*plain).code == 0
    answer = incv(*plain[:-1], "tracked", "execution.trackers=[tensorboard]")
    assert answer.code == 0, answer.err
    events = EventAccumulator(str(tracked / "tensorboard" / "standard"))
    events.Reload()
    lines = (tracked / "methods" / "standard" / "metrics.jsonl").read_text().splitlines()
    assert len(events.Scalars("loss")) == len(lines)
    metrics = [playground / run / "methods" / "standard" / "metrics.jsonl" for run in ("plain", "tracked")]
    assert untimed(metrics[0]) == untimed(metrics[1])
