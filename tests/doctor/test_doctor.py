"""The doctor on heartbeat files as ranks write them: which ranks hang, which are dead, and when all is well."""

import json
import logging
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.errors import ConfigError
from trainer.doctor.ranks import NO_DURABLE_POINT, Rank, describe_durable_point
from trainer.doctor.verdict import WIDTH, examine, find_hanging_ranks, format_spans
from trainer.records.heartbeat import Heartbeat
from trainer.records.logs import log_to_file
from trainer.training.checkpoint import Checkpointer, TrainState

NOW = 1_800_000_000.0
BEGAN = NOW - 3600


def write_manifest(root: Path, world: int, ended: str | None = None, **stages: str) -> None:
    start = {"time": datetime.fromtimestamp(BEGAN, UTC).isoformat(timespec="seconds"), "world": world, "ended": ended}
    states = {name: {"state": state} for name, state in stages.items()}
    content = {"recipe": "tiny", "dataset": None, "stages": states, "starts": [start]}
    root.mkdir(parents=True, exist_ok=True)
    (root / "manifest.json").write_text(json.dumps(content))


def beat(root: Path, rank: int, world: int, where: str, step: int, **other: Any) -> None:
    """A file as `Heartbeat` writes it, with other times."""
    path = root / "logs" / f"heartbeat-rank{rank}.json"
    heartbeat = Heartbeat(path, rank, world, "torchrun")
    heartbeat.update(where, step, 0 if where.startswith("waiting") else 400)
    heartbeat.write()
    content = (
        json.loads(path.read_text()) | {"moved": NOW - 1, "written": NOW - 2, "host": f"Node{rank // 8}"} | other
    )
    path.write_text(json.dumps(content))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def four(root: Path, *odd: tuple[int, dict[str, Any]], **common: Any) -> Path:
    """Four ranks in one training, some of them otherwise."""
    write_manifest(root, 4, labels="done", incv="running")
    usual = {"where": "incv/0/0", "step": 30}
    for rank in range(4):
        beat(root, rank, 4, **(usual | common | dict(odd).get(rank, {})))
    return root


def flat(text: str) -> str:
    return " ".join(text.split())


def test_all_is_well(root: Path) -> None:
    text, well = examine(four(root, (2, {"step": 29})), NOW)
    assert well
    assert text.endswith("All is well: no rank hangs.")
    assert "4 ranks by torchrun" in flat(text)
    rows = [re.split("  +", line) for line in text.splitlines() if line[:1].isdigit()]
    assert rows == [
        [
            str(rank),
            "alive",
            "incv, round 1, fold 1",
            f"{29 if rank == 2 else 30}/400",
            "1.0 s",
            "Node0",
            str(os.getpid()),
        ]
        for rank in range(4)
    ]


def test_the_rank_that_is_a_step_behind_hangs(root: Path) -> None:
    four(root, (2, {"step": 29, "moved": NOW - 200.5}), moved=NOW - 200)
    text, well = examine(root, NOW)
    assert not well
    assert (
        f"Rank 2 (Node0, pid {os.getpid()}) hangs in incv, round 1, fold 1 at step 29 of 400: no progress for 3 min"
        in flat(text)
    )


def test_the_rank_that_stopped_clearly_before_the_others_hangs(root: Path) -> None:
    four(root, (1, {"moved": NOW - 120}), moved=NOW - 100)
    text, well = examine(root, NOW)
    assert not well
    assert "Rank 1 (Node0" in text
    assert "Rank 0" not in text


def test_ranks_that_stopped_together_are_not_told_apart(root: Path) -> None:
    four(root, (1, {"moved": NOW - 101}), moved=NOW - 100)
    text, well = examine(root, NOW)
    assert not well
    assert (
        "Ranks 0-3 stalled together in incv, round 1, fold 1 at step 30 of 400: no progress for 1 min 40 s."
        in flat(text)
    )
    assert "do not show which" in flat(text)


def test_a_rank_others_wait_for_hangs(root: Path) -> None:
    waiting = {"where": "waiting for the other ranks", "step": 0, "moved": NOW - 500}
    late = {"where": "evaluate standard on test", "step": 3, "moved": NOW - 600}
    text, well = examine(four(root, (0, waiting), (1, waiting), (2, late), (3, waiting)), NOW)
    assert not well
    assert "Rank 2 (Node0" in text
    assert "hangs in evaluate standard on test at step 3 of 400" in flat(text)


def test_a_group_that_waits_for_one_at_work_is_well(root: Path) -> None:
    waiting = {"where": "waiting for fold 1", "step": 0, "moved": NOW - 5000}
    assert examine(four(root, (0, waiting), (1, waiting), where="incv/0/1"), NOW)[1]


def test_a_group_that_hangs_while_the_other_goes_on(root: Path) -> None:
    standing = {"where": "incv/0/1", "moved": NOW - 100}
    text, well = examine(four(root, (2, standing), (3, standing | {"step": 31})), NOW)
    assert not well
    assert "Rank 2 (Node0" in text


def test_when_all_wait_nobody_works(root: Path) -> None:
    text, well = examine(four(root, where="waiting for the other fold", step=0, moved=NOW - 400), NOW)
    assert not well
    assert "Ranks 0-3 are waiting: no progress for 6 min 40 s." in flat(text)


def test_a_silent_rank_is_named_first(root: Path) -> None:
    text, well = examine(four(root, (3, {"written": NOW - 90, "moved": NOW - 92}), moved=NOW - 80), NOW)
    assert not well
    verdict = flat(text.split("\n\n")[2])
    assert verdict.startswith(
        f"Rank 3 (Node0, pid {os.getpid()}) has written no heartbeat for 1 min 30 s: killed, frozen, or on"
    )


def test_a_beat_that_is_late_is_not_death(root: Path) -> None:
    assert examine(four(root, (3, {"written": NOW - 50, "moved": NOW - 50})), NOW)[1]


def test_a_killed_run(root: Path) -> None:
    text, well = examine(four(root, written=NOW - 900, moved=NOW - 900), NOW)
    assert not well
    assert "Ranks 0-3 have written no heartbeat for 15 min" in flat(text)
    assert "Rerun the same command" in flat(text)


def test_long_work_without_steps_is_no_hang(root: Path) -> None:
    write_manifest(root, 1, report="running")
    beat(root, 0, 1, "report", 0, total=0, moved=NOW - 300)
    assert examine(root, NOW)[1]
    beat(root, 0, 1, "report", 0, total=0, moved=NOW - 700)
    assert not examine(root, NOW)[1]


def test_ranks_of_an_earlier_start_are_not_looked_at(root: Path) -> None:
    """A start with fewer ranks leaves the files of others behind; one with as many overwrites them in time."""
    four(root, (0, {}), (1, {}), (2, {"written": BEGAN - 50}), (3, {"written": BEGAN - 50, "ended": "failed"}))
    write_manifest(root, 2)
    assert examine(root, NOW)[1]
    write_manifest(root, 4)
    text, well = examine(root, NOW)
    assert not well
    assert "Ranks 2-3 have written no heartbeat since the last start." in flat(text)
    text, well = examine(root, BEGAN + 30)
    assert well
    assert "Ranks 2-3 are not seen yet" in flat(text)


def test_finished_and_stopped(root: Path) -> None:
    four(root, written=NOW - 5000, moved=NOW - 5000, ended="finished")
    write_manifest(root, 4, "finished", labels="done", report="done")
    text, well = examine(root, NOW)
    assert well
    assert f"The run has finished: {root / 'report.html'}." in flat(text)
    write_manifest(root, 4, "finished", labels="done")
    assert "stages done so far: labels." in flat(examine(root, NOW)[0])
    record = {
        "stage": "incv",
        "where": "incv/0/1",
        "step": 30,
        "reason": "SIGUSR2",
        "time": "2026-11-15T03:00:00+00:00",
    }
    (root / "stopped.json").write_text(json.dumps(record))
    text, well = examine(root, NOW)
    assert well
    assert "The run was stopped in incv, round 1, fold 2 at step 30 by SIGUSR2, 2026-11-15T03:00:00+00:00." in flat(
        text
    )


def test_a_failure_is_told_by_the_log_of_who_failed_first(root: Path) -> None:
    four(root, (2, {"written": NOW - 20}), ended="failed")
    write_manifest(root, 4, "failed")
    for rank in range(4):
        log = root / "logs" / f"rank-{rank:04d}.log"
        with log_to_file(log, rank, 4):
            logging.getLogger("trainer").info("of an earlier start")
        with pytest.raises(ConfigError), log_to_file(log, rank, 4):
            raise ConfigError("rank 2 (Node0): the disk is on fire" if rank != 2 else "the disk is on fire")
    text, well = examine(root, NOW)
    assert not well
    assert "The last start failed. Rank 2 (Node0" in flat(text)
    assert "failed first, in incv, round 1, fold 1 at step 30 of 400." in flat(text)
    assert f"The end of {root / 'logs' / 'rank-0002.log'}:\n" in text
    assert text.endswith("incv: error: the disk is on fire")
    assert "earlier start" not in text


def test_a_failure_of_a_run_without_heartbeats(root: Path) -> None:
    write_manifest(root, 1, "failed")
    text, well = examine(root, NOW)
    assert not well
    assert text.endswith("The last start failed.")


def test_images_that_could_not_be_read_are_counted(root: Path) -> None:
    four(root)
    line = {"sample_id": 7, "key": "a", "split": "train", "stage": "incv", "doing": "training", "round": 0, "fold": 0}
    for rank in (0, 1):
        (root / "logs" / f"unreadable-rank{rank}.jsonl").write_text(json.dumps(line) + "\n")
    text, well = examine(root, NOW)
    assert well
    assert "Images that could not be read: 1 " in flat(text)


def test_a_stop_that_is_asked_for_is_said(root: Path) -> None:
    (four(root) / "STOP").touch()
    assert "STOP file requests a stop" in examine(root, NOW)[0]


def test_damaged_files_are_taken_for_missing(root: Path) -> None:
    four(root)
    (root / "logs" / "heartbeat-rank1.json").write_text('{"rank": 1, "step"')
    (root / "logs" / "heartbeat-rank2.json").write_text('{"rank": "2"}')
    text, well = examine(root, NOW)
    assert not well
    assert "Ranks 1-2 have written no heartbeat" in flat(text)


@pytest.mark.parametrize("content", [None, [], ["notes.txt"]])
def test_what_is_no_run_directory_is_refused(root: Path, content: list[str] | None) -> None:
    if content is not None:
        root.mkdir()
        for name in content:
            (root / name).touch()
    with pytest.raises(ConfigError, match=r"is not a run directory: pass the --run-dir"):
        examine(root, NOW)


@pytest.mark.parametrize("trouble", ["none", "behind", "silent", "all silent"])
@pytest.mark.parametrize("world", [2, 64])
def test_it_fits_a_terminal(root: Path, world: int, trouble: str) -> None:
    write_manifest(root, world, labels="done")
    for rank in range(world):
        times = {"none": NOW - 1, "behind": NOW - 100, "silent": NOW - 100, "all silent": NOW - 999}[trouble]
        written = times if trouble == "all silent" or (trouble == "silent" and rank == 1) else NOW - 1
        step = 119_999 if trouble == "behind" and rank == 1 else 120_000
        where = f"evaluate coteaching_incv on the validation set of a long name, part {rank % 2}"
        other = {
            "total": 520_000,
            "moved": times,
            "written": written,
            "host": f"gpu-{rank // 8:03d}.long.example.org",
        }
        beat(root, rank, world, where, step, **other)
    text, well = examine(root, NOW)
    assert well == (trouble == "none")
    assert max(len(line) for line in text.splitlines() if str(root) not in line) <= WIDTH
    assert len(text.splitlines()) < 20


def _rank(number: int, step: int, moved: float, where: str = "a") -> Rank:
    return Rank(number, "stalled", where, step, 100, moved, NOW, "host", 1)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 100), st.sampled_from("ab")), min_size=1, max_size=8))
def test_some_standing_rank_is_always_named(standing: Sequence[tuple[int, float, str]]) -> None:
    ranks = [_rank(number, step, moved, where) for number, (step, moved, where) in enumerate(standing)]
    hanging, sure = find_hanging_ranks(ranks)
    assert hanging
    assert sure or len(hanging) > 1
    by_step = {where: {rank.step for rank in ranks if rank.where == where} for where in "ab"}
    for rank in hanging:
        assert rank.step == min(by_step[rank.where]), "one that is ahead was blamed"


def test_numbers_in_spans() -> None:
    assert format_spans([5, 0, 1, 2, 9, 8]) == "0-2, 5, 8-9"


# --- the line of progress -----------------------------------------------------------------------------------


def test_the_line_changes_with_each_durable_point_and_only_then(root: Path) -> None:
    seen = [describe_durable_point(root)]

    def changed() -> bool:
        seen.append(describe_durable_point(root))
        assert "\n" not in seen[-1]
        assert (seen[-1] != seen[-2]) == (seen[-1] not in seen[:-1])
        return seen[-1] != seen[-2]

    root.mkdir()
    assert not changed()
    write_manifest(root, 2, pack="done", labels="running")
    assert not changed()
    write_manifest(root, 2, pack="done", labels="done")
    assert changed()
    fold = root / "rounds" / "0" / "fold1"
    checkpoints = Checkpointer(fold / "checkpoints")
    for step in (0, 5, 10, 15):  # the oldest are pruned
        checkpoints.save(step, TrainState(), wait=True)
        assert changed()
    checkpoints.save(15, TrainState(), wait=True)
    checkpoints.close()
    assert not changed()
    (fold / "checkpoints" / ".step-0000000020.tmp123").mkdir()
    (fold / "metrics.jsonl").write_text("{}\n")
    beat(root, 0, 2, "incv/0/1", 17)
    write_manifest(root, 2, "failed", pack="running", labels="done", incv="running")
    assert not changed()
    for file in (fold / "predictions.parquet", fold.parent / "predictions.parquet"):
        file.touch()
        assert changed()
    (root / "evaluation.partial.json").write_text(json.dumps({"test": {"standard": {}}}))
    assert changed()
    (root / "evaluation.partial.json").write_text(json.dumps({"test": {"standard": {}, "coteaching": {}}}))
    assert changed()
    (root / "evaluation.partial.json").unlink()
    write_manifest(root, 2, labels="done", incv="done", evaluate="done")
    assert changed()


def test_a_damaged_directory_has_a_line_too(root: Path) -> None:
    root.mkdir()
    (root / "manifest.json").write_text("{")
    (root / "evaluation.partial.json").write_text("[]")
    assert describe_durable_point(root) == NO_DURABLE_POINT
    assert describe_durable_point(root / "manifest.json") == NO_DURABLE_POINT
