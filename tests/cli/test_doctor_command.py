"""`incv doctor` on the directories of real runs (finished, stopped, killed), without changing them."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command_line import THREADS, TINY, Answer, unchanged

Incv = Callable[..., Answer]


def test_a_finished_run_is_well(incv: Incv, finished: Path) -> None:
    with unchanged(finished):
        answer = incv("doctor", "--run-dir", finished)
    assert (answer.code, answer.err) == (0, "")
    assert "recipe tiny" in answer.out
    assert f"The run has finished: {finished / 'report.html'}." in " ".join(answer.out.split())


def test_the_line_of_progress_follows_a_run(incv: Incv, playground: Path) -> None:
    lines = []

    def note() -> None:
        answer = incv("doctor", "--run-dir", "run", "--progress")
        assert (answer.code, answer.err, answer.out.count("\n")) == (0, "", 1)
        lines.append(answer.out)

    note()
    for stage in ("labels", "incv", "standard"):
        assert incv(stage, "-c", TINY, "--run-dir", "run", THREADS, "incv.rounds=1", "incv.epochs=1").code == 0
        note()
    incv("labels", "-c", TINY, "--run-dir", "run", THREADS, "incv.rounds=1", "incv.epochs=1")
    note()
    assert len(set(lines)) == 4
    assert lines[-1] == lines[-2]
    answer = incv("doctor", "--run-dir", "run")
    assert answer.code == 0
    assert "stages done so far: pack, labels, incv, standard." in " ".join(answer.out.split())


def test_a_stopped_run_is_well(incv: Incv, finished: Path) -> None:
    record = {
        "stage": "incv",
        "where": "incv/0/1",
        "step": 30,
        "reason": "STOP file",
        "time": "2026-11-15T03:00:00+00:00",
    }
    (finished / "stopped.json").write_text(json.dumps(record))
    answer = incv("doctor", "--run-dir", finished)
    assert answer.code == 0
    assert "stopped in incv, round 1, fold 2 at step 30 by STOP file" in " ".join(answer.out.split())


def test_a_run_that_was_killed_is_not(incv: Incv, finished: Path) -> None:
    manifest = json.loads((finished / "manifest.json").read_text())
    manifest["starts"][-1]["ended"] = None
    manifest["starts"][-1]["time"] = "2020-01-01T00:00:00+00:00"
    (finished / "manifest.json").write_text(json.dumps(manifest))
    for heartbeat in (finished / "logs").glob("heartbeat-rank*.json"):
        content = json.loads(heartbeat.read_text()) | {"ended": None, "written": 1_600_000_000.0}
        heartbeat.write_text(json.dumps(content))
    answer = incv("doctor", "--run-dir", finished)
    assert answer.code == 1
    assert "no heartbeat" in answer.out
    assert "Rerun the same command" in answer.out


def test_another_folder_is_refused(incv: Incv, playground: Path) -> None:
    for folder in (playground, playground / "none"):
        with unchanged(playground):
            answer = incv("doctor", "--run-dir", folder)
        assert (answer.code, answer.out) == (2, "")
        assert "is not a run directory" in answer.err


@pytest.mark.parametrize("option", [[], ["--progress"]])
def test_it_does_not_wait_for_torch(finished: Path, option: list[str]) -> None:
    code = (
        "import sys; from trainer.cli import main; "
        f"main(['doctor', '--run-dir', {str(finished)!r}, *{option!r}]); print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("False\n")
