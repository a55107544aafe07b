"""Writers and readers meet devices, FIFOs, sockets, links and folders: nothing is lost, and nothing waits."""

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from shards.csv_file import read_csv_text, write_csv
from shards.durable import (
    atomic_folder,
    hash_file,
    read_json,
    read_parquet,
    remove_leftovers_of,
    require_own,
    write_bytes,
    write_json,
    write_parquet,
)
from shards.errors import DataError, InputError
from shards.folder_lock import lock_folder
from shards.regular_file import open_regular, open_to_append, read_regular
from tests.support.hostile_files import FOREIGN, IRREGULAR, nothing_lost, state_of
from trainer.records.heartbeat import Heartbeat
from trainer.records.logs import LogFile
from trainer.records.metrics import MetricsLog
from trainer.records.run_directory import RunDirectory

pytestmark = pytest.mark.timeout(20)
TABLE = pa.table({"a": ["b"]})


def fill_folder(path: Path) -> None:
    with atomic_folder(path) as temporary:
        (temporary / "file").write_text("ours")


def log_a_step(path: Path) -> None:
    MetricsLog(path).write(step=1)


WRITERS: dict[str, Callable[[Path], object]] = {
    "bytes": lambda path: write_bytes(path, b"ours"),
    "JSON": lambda path: write_json(path, {}),
    "table": lambda path: write_parquet(path, TABLE),
    "CSV": lambda path: write_csv(path, TABLE),
    "append": lambda path: open_to_append(path).close(),
    "log": LogFile,
    "metrics": log_a_step,
    "claim": lambda path: require_own(path, b"ours", True, "choose another -o"),
}
READERS: dict[str, Callable[[Path], object]] = {
    "bytes": read_regular,
    "JSON": read_json,
    "table": lambda path: read_parquet(path, "table"),
    "CSV": lambda path: read_csv_text(path, "labels.file"),
    "hash": hash_file,
}


@pytest.mark.parametrize("kind", IRREGULAR)
@pytest.mark.parametrize("writer", WRITERS)
def test_an_output_replaces_nothing_but_a_regular_file(writer: str, kind: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    IRREGULAR[kind](target)
    with nothing_lost(tmp_path), pytest.raises(InputError, match=r"target.* is a \w+"):
        WRITERS[writer](target)


@pytest.mark.parametrize("kind", [*IRREGULAR, *FOREIGN])
def test_a_folder_replaces_nothing_but_a_folder(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    IRREGULAR[kind](target) if kind in IRREGULAR else target.write_bytes(FOREIGN[kind])
    if kind == "folder":
        return  # whose it is, the caller knows
    with nothing_lost(tmp_path), pytest.raises(DataError, match=r"target: it is a \w+, not a folder"):
        fill_folder(target)


@pytest.mark.parametrize("writer", ["append", "log", "metrics"])
def test_nothing_is_appended_to_a_file_with_another_name(writer: str, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"the only copy")
    (tmp_path / "target").hardlink_to(tmp_path / "other")
    with nothing_lost(tmp_path), pytest.raises(DataError, match="target is a hard link"):
        WRITERS[writer](tmp_path / "target")


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_of_others_is_not_claimed(kind: str, force: bool, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(FOREIGN[kind])
    with nothing_lost(tmp_path), pytest.raises(InputError, match="choose another -o"):
        require_own(target, b'"key","label"\n', force, "choose another -o")


def test_an_own_file_is_claimed_by_force(tmp_path: Path) -> None:
    target = tmp_path / "target"
    require_own(target, b"ours", False, "choose another -o")
    write_bytes(target, b"ours, and more")
    with pytest.raises(InputError, match="--force"):
        require_own(target, b"ours", False, "choose another -o")
    require_own(target, b"ours", True, "choose another -o")


@pytest.mark.parametrize("kind", IRREGULAR)
@pytest.mark.parametrize("reader", READERS)
def test_no_reader_waits(reader: str, kind: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    IRREGULAR[kind](target)
    with nothing_lost(tmp_path):
        if kind.startswith("link") and kind not in ("link to a folder", "link to a FIFO", "link to a device"):
            assert os.path.samestat(os.fstat(open_regular(target)), target.stat())  # a link to a photo is a photo
        else:
            with pytest.raises((InputError, OSError)):
                READERS[reader](target)


@pytest.mark.parametrize("kind", IRREGULAR)
def test_a_heartbeat_replaces_only_its_file(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    IRREGULAR[kind](target)
    with nothing_lost(tmp_path):
        Heartbeat(target, 0, 1, "alone").write()  # which must not end the run


@pytest.mark.parametrize("kind", IRREGULAR)
def test_the_lock_of_a_packed_folder(kind: str, tmp_path: Path) -> None:
    (tmp_path / ".parts").mkdir()
    IRREGULAR[kind](tmp_path / ".parts" / "lock")
    with nothing_lost(tmp_path), pytest.raises(DataError, match="lock is a"), lock_folder(tmp_path, None):
        pass


RUN_FILES = [
    ".lock",
    "logs/rank-0000.log",
    "report.html",
    "rounds",
    "methods/standard/metrics.jsonl",
    "manifest.json",
]


@pytest.mark.parametrize("kind", IRREGULAR)
@pytest.mark.parametrize("place", RUN_FILES)
def test_a_run_refuses_a_directory_that_leads_elsewhere(place: str, kind: str, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    write_json(run.manifest, {"recipe": "tiny", "stages": {}, "starts": []})
    target = run.root / place
    target.unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    IRREGULAR[kind](target)
    if kind == "folder" and place not in (".lock", "report.html", "manifest.json"):
        return
    with nothing_lost(tmp_path), pytest.raises(InputError):
        run.acquire()


def test_a_lock_keeps_the_content_of_its_file(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    (tmp_path / ".lock").write_text("text")
    run.acquire()
    run.release()
    assert (tmp_path / ".lock").read_text() == "text"


def test_what_killed_writers_leave_is_removed_and_what_they_moved_is_put_back(tmp_path: Path) -> None:
    (tmp_path / ".out.tmp4711").mkdir()
    (tmp_path / ".out.tmp4711" / "half").touch()
    (tmp_path / ".out.tmp4711.old").mkdir()
    (tmp_path / ".out.tmp4711.old" / "whole").touch()
    (tmp_path / ".out.tmp12").write_bytes(b"half")
    others = [".other.tmp12", ".out.tmp", ".out.tmp12.txt", ".out", "out.tmp12"]
    for name in others:
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / ".out.tmp13")
    remove_leftovers_of(tmp_path / "out")
    assert state_of(tmp_path).keys() == {*others, ".out.tmp13", "out", "out/whole"}


def test_a_folder_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    replace = os.replace

    def fail(source: Path, target: Path) -> None:
        if target == tmp_path / "out" and not str(source).endswith(".old"):
            raise PermissionError(1, "no")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with nothing_lost(tmp_path), pytest.raises(DataError):
        fill_folder(tmp_path / "out")
