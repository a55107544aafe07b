"""Takes over the finished INCV stage of another run (`--incv-from`): checks that it fits, and copies its files."""

import logging
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shards.durable import atomic_folder, read_json, write_atomically
from shards.errors import ConfigError, DataError, list_some
from trainer.incv import NUMERICS
from trainer.incv.selection_index import SelectionIndex
from trainer.methods import WEIGHTS_NUMERICS
from trainer.records.manifest import INCV_FROM, Manifest
from trainer.records.run_directory import RunDirectory
from trainer.records.stored_labels import read_labels
from trainer.records.unreadable import UnreadableLog, parse_complete_lines
from trainer.run.ledger import StageLedger
from trainer.run.preflight import RunLabels
from trainer.run.result_keys import WEIGHTS_CHECKSUM

_log = logging.getLogger(__name__)

_ALONE = "leave out --incv-from to run INCV here"
_NEVER_REWRITTEN = ".parquet"  # replaced as a whole, so that a hard link stays as it is; metrics.jsonl is appended to


@dataclass(frozen=True)
class FinishedIncv:
    """The finished INCV stage of a run."""

    run: RunDirectory
    record: dict[str, Any]
    """Its entry in manifest.json."""
    seconds: float
    """The time it took, also if the run has itself taken it over."""

    def note(self) -> dict[str, Any]:
        """Return what the manifest of the run that takes it over records."""
        facts = {key: self.record.get(key) for key in ("hash", "finished")}
        return {"run": os.path.abspath(self.run.root), **facts, "seconds": self.seconds}


def open_finished_incv(root: Path) -> FinishedIncv:
    """Read the INCV stage of a run.

    Raises ConfigError unless it has finished and gives the numbers of this version, DataError if a file is missing.
    """
    run = RunDirectory(root)
    if not run.has_manifest():
        raise ConfigError(f"--incv-from {root} is not a run directory (it has no manifest.json): name that of a run")
    manifest = Manifest(run)
    record = manifest.stages.get("incv")
    if record is None:
        raise ConfigError(f"--incv-from {root}: this run has not begun its stage incv: finish it first, or {_ALONE}")
    if record.get("state") != "done":
        raise ConfigError(f"--incv-from {root}: INCV has not finished: run its command again first, or {_ALONE}")
    version = record.get("numerics")
    current = NUMERICS + WEIGHTS_NUMERICS * (WEIGHTS_CHECKSUM in record["keys"])
    if version != current:
        raise ConfigError(
            f"--incv-from {root}: its INCV was run by an incv whose INCV gives other results (numerics {version}, "
            f"now {current}): {_ALONE}"
        )
    files = [run.labels, run.selection, run.incv]
    if run.incv.exists():
        rounds = range(len(read_json(run.incv)["rounds"]))
        files += [path for i in rounds for path in (run.round_predictions(i), run.round_selection(i))]
    for path in files:
        if not path.exists():
            raise DataError(f"--incv-from {root}: INCV has finished, but {path} is missing: restore it, or {_ALONE}")
    before = (manifest.content.get(INCV_FROM) or {}).get("seconds", 0.0)
    return FinishedIncv(run, record, round(record.get("seconds", 0.0) + before, 3))


def require_fitting_incv(root: Path, ledger: StageLedger, own: RunDirectory, labels: RunLabels) -> FinishedIncv:
    """Return the INCV stage of the run `root`; raises ConfigError or DataError unless this run would give the same.

    ledger: of this run; own: its directory; labels: its labels.
    """
    if root.resolve() == own.root.resolve():
        raise ConfigError(f"--incv-from {root} is the directory of this run itself: name another run, or {_ALONE}")
    found = open_finished_incv(root)
    changes = ledger.compare("incv", found.record)
    if changes:
        raise ConfigError(
            f"--incv-from {root}: its INCV was run with other values than this run asks for: "
            f"{list_some(list(changes), 6, '; ')}. Set these keys to the values of that run, or {_ALONE}"
        )
    theirs = read_labels(found.run.labels)
    checked = theirs.ids[theirs.checked]
    pairs = ((theirs.ids, labels.ids), (theirs.labels, labels.given), (checked, labels.checked))
    if not all(np.array_equal(*pair) for pair in pairs):
        raise DataError(
            f"--incv-from {root}: {found.run.labels} has other labels than this run, although their keys and data "
            f"are the same: it was changed, or another version of incv wrote it; {_ALONE}"
        )
    return found


def check_takeover(
    asked: Path, ledger: StageLedger, run: RunDirectory, labels: RunLabels, redo: Sequence[str]
) -> None:
    """Raise ConfigError or DataError if `--incv-from` will be refused; an INCV stage that is done here needs none.

    redo: the stages to redo.
    """
    if not ledger.has_stage("incv"):
        raise ConfigError(
            f"--incv-from {asked}: this recipe has no INCV stage: leave out --incv-from, or add `incv:`"
        )
    if "incv" in ledger.with_followers(redo) or ledger.status("incv").state != "done":
        require_fitting_incv(asked, ledger, run, labels)


def plan_takeover(
    asked: Path | None, ledger: StageLedger, manifest: Manifest, run: RunDirectory, labels: RunLabels
) -> None:
    """Note in the manifest which run's INCV stage will be taken over, unless the own one is done.

    asked: None: the run that an earlier start has noted, if any. What this run has trained of INCV itself moves to
    old/.
    """
    noted = manifest.content.get(INCV_FROM)
    if not ledger.has_stage("incv") or (asked is None and noted is None) or ledger.status("incv").state == "done":
        return
    try:
        found = require_fitting_incv(asked or Path((noted or {})["run"]), ledger, run, labels)
    except (ConfigError, DataError) as error:
        if asked is not None:
            raise
        raise type(error)(f"{error} (this run has begun to take it over: add `--redo incv`)") from None
    if noted is None:
        ledger.set_aside("incv")
    manifest.content[INCV_FROM] = found.note()


def copy_incv(note: dict[str, Any], run: RunDirectory) -> None:
    """Copy the files of a finished INCV stage into `run`, without the checkpoints of its folds.

    Each output appears as a whole, so that an interrupted copy can be repeated. Files that are never rewritten in
    place become hard links if possible.
    """
    source = RunDirectory(Path(note["run"]))
    _require_unchanged(source, note)
    with atomic_folder(run.rounds) as folder:
        for path in _round_files(source):
            target = folder / path.relative_to(source.rounds)
            target.parent.mkdir(parents=True, exist_ok=True)
            _place(path, target)
    UnreadableLog(run, 0).adopt(
        line
        for path in source.unreadable_logs()
        for line in parse_complete_lines(path.read_bytes())
        if line["stage"] == "incv"
    )
    for path, target in ((source.selection, run.selection), (source.incv, run.incv)):
        target.unlink(missing_ok=True)  # of an interrupted copy: a rename between two links of a file does nothing
        write_atomically(target, lambda temporary: _place(path, temporary))  # noqa: B023 - called at once
    _require_unchanged(source, note)
    if SelectionIndex.read(run.selection).checksum() != read_json(run.incv)["selection_checksum"]:
        raise DataError(
            f"{source.selection} is not the selection that INCV wrote (selection_checksum in {source.incv}): restore "
            "it, or add `--redo incv` to run INCV here"
        )
    _log.info("incv: taken over from %s", source.root)


def _round_files(source: RunDirectory) -> list[Path]:
    """Return the files of the rounds that later stages and the report read."""
    patterns = (
        "predictions.parquet",
        "selection.parquet",
        "fold[0-9]*/predictions.parquet",
        "fold[0-9]*/metrics.jsonl",
    )
    return [path for pattern in patterns for path in sorted(source.rounds.glob(f"[0-9]*/{pattern}"))]


def _place(source: Path, target: Path) -> None:
    """Make `target` the same file as `source` if it is never rewritten, otherwise a copy."""
    try:
        source.open("rb").close()
    except OSError as error:
        raise DataError(f"cannot read {source}: {error.strerror}; INCV cannot be taken over from this run") from None
    if source.suffix == _NEVER_REWRITTEN:
        with suppress(OSError):  # another file system, or one without hard links
            os.link(source.resolve(), target)
            return
    shutil.copyfile(source, target)


def _require_unchanged(source: RunDirectory, note: dict[str, Any]) -> None:
    """Raise DataError if the other run has been removed, or has begun its INCV stage again."""
    record = Manifest(source).stages.get("incv") or {}
    if any(record.get(key) != note[key] for key in ("hash", "finished")):
        raise DataError(
            f"the INCV stage of {source.root} was removed or begun again while this run took it over: run the same "
            "command again when it has finished, or add `--redo incv` to run INCV here"
        )
