"""A heartbeat file is always complete, gives its rank's position, and never ends a run."""

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shards.durable import is_temporary
from trainer.records.heartbeat import Heartbeat


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_says_who_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    path = tmp_path / "logs" / "heartbeat-rank3.json"
    heartbeat = Heartbeat(path, 3, 4, "torchrun")
    before = time.time()
    heartbeat.update("incv/0/1", 12, 40)
    heartbeat.write()
    written = read(path)
    assert {key: written[key] for key in ("rank", "size", "launcher", "where", "step", "total", "ended")} == {
        "rank": 3,
        "size": 4,
        "launcher": "torchrun",
        "where": "incv/0/1",
        "step": 12,
        "total": 40,
        "ended": None,
    }
    assert (written["host"], written["pid"]) == (socket.gethostname(), os.getpid())
    assert before - 0.01 <= written["moved"] <= written["written"] <= time.time() + 0.01
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_node_is_called_by_its_slurm_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    heartbeat = Heartbeat(tmp_path / "heart.json", 0, 1, "srun")
    heartbeat.write()
    assert read(tmp_path / "heart.json")["host"] == "n2"


def test_only_another_place_is_movement(tmp_path: Path) -> None:
    path = tmp_path / "heart.json"
    heartbeat = Heartbeat(path, 0, 1, "alone")

    def moved() -> float:
        heartbeat.write()
        when: float = read(path)["moved"]
        return when

    heartbeat.update("standard", 1, 9)
    first = moved()
    time.sleep(0.02)
    heartbeat.update("standard", 1, 9)
    assert moved() == first
    heartbeat.update("standard", 2, 9)
    second = moved()
    assert second > first
    time.sleep(0.02)
    heartbeat.update("evaluate", 2, 9)
    assert moved() > second


def test_the_end_is_not_overtaken_by_the_beating_thread(tmp_path: Path) -> None:
    path = tmp_path / "heart.json"
    heartbeat = Heartbeat(path, 0, 1, "alone")
    ending = threading.Event()
    seen = []

    def keep_beating() -> None:
        while not ending.is_set():
            heartbeat.write()
            seen.append(read(path)["step"])

    thread = threading.Thread(target=keep_beating)
    thread.start()
    for step in range(2000):
        heartbeat.update("standard", step, 2000)
    heartbeat.close("stopped")
    ending.set()
    thread.join()
    assert seen == sorted(seen)
    assert (read(path)["ended"], read(path)["step"]) == ("stopped", 1999)


def test_a_disk_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    heartbeat = Heartbeat(tmp_path / "logs" / "heart.json", 0, 1, "alone")
    heartbeat.write()
    heartbeat.close("finished")


def test_what_cannot_take_its_place_is_not_left_behind(tmp_path: Path) -> None:
    (tmp_path / "heart.json").mkdir()
    Heartbeat(tmp_path / "heart.json", 0, 1, "alone").write()
    assert [path.name for path in tmp_path.iterdir()] == ["heart.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_no_error(tmp_path: Path) -> None:
    (tmp_path / f".heart.json.tmp{os.getpid()}").symlink_to("/dev/full")  # where the content is written first
    assert is_temporary(tmp_path / f".heart.json.tmp{os.getpid()}"), "a start would not sweep it away"
    Heartbeat(tmp_path / "heart.json", 0, 1, "alone").write()
    assert not (tmp_path / "heart.json").exists()
    assert list(tmp_path.iterdir()) == []


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    heartbeat = Heartbeat(None, 0, 1, "alone")
    heartbeat.update("standard", 1, 2)
    heartbeat.write()
    heartbeat.close("finished")
    assert list(tmp_path.iterdir()) == []
