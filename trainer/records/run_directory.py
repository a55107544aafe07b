"""The paths of all files of a run, and the lock that keeps other processes out."""

import os
import shlex
import tempfile
import time
from pathlib import Path

from shards.durable import is_temporary, read_json, remove_leftovers
from shards.errors import ConfigError, DataError
from shards.folder_lock import try_lock
from shards.regular_file import find_kind, open_regular
from trainer.config.shipped import MANIFEST, RESOLVED

_RESTART_COUNTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
_LOCK_LEASE = 120.0  # seconds that a file server may hold the lock of a dead node


class RunDirectory:
    """The layout of a run directory, documented in docs/files.md."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / RESOLVED
        self.manifest = root / MANIFEST
        self.stopped = root / "stopped.json"
        self.labels = root / "labels.parquet"
        self.true_labels = root / "true_labels.parquet"
        self.corrections = root / "corrections.json"
        self.incv = root / "incv.json"
        self.selection = root / "selection.parquet"
        self.labels_review_csv = root / "labels_review.csv"
        self.labels_review_parquet = root / "labels_review.parquet"
        self.rejected_csv = root / "rejected.csv"
        self.evaluation = root / "evaluation.json"
        self.evaluation_progress = root / "evaluation.partial.json"
        self.report_json = root / "report.json"
        self.report_html = root / "report.html"
        self.logs = root / "logs"
        self.features = root / "features"
        self.given = root / "given"
        self.examination = root / "examination.parquet"
        self.examination_facts = root / "examination.json"
        self.neighbours = root / "neighbours.npy"
        self.probabilities = root / "probabilities.npy"
        self.probabilities_table = root / "probabilities.parquet"
        self.judge_facts = root / "judge.json"
        self.classifier = root / "classifier"
        self.rounds = root / "rounds"
        self.methods = root / "methods"
        self.old = root / "old"
        self._lock: int | None = None

    def round(self, number: int) -> Path:
        return self.rounds / str(number)

    def round_predictions(self, number: int) -> Path:
        return self.round(number) / "predictions.parquet"

    def round_selection(self, number: int) -> Path:
        return self.round(number) / "selection.parquet"

    def round_files(self, name: str) -> dict[int, Path]:
        """Return the files called `name` in rounds/<i>/, by round number i, ascending."""
        found = {int(path.parent.name): path for path in self.rounds.glob(f"[0-9]*/{name}")}
        return dict(sorted(found.items()))

    def fold_metrics(self) -> dict[tuple[int, int], Path]:
        """Return the metrics.jsonl of each fold that has one, by (round, fold)."""
        found = {
            (int(path.parent.parent.name), int(path.parent.name.removeprefix("fold"))): path
            for path in self.rounds.glob("[0-9]*/fold[0-9]*/metrics.jsonl")
        }
        return dict(sorted(found.items()))

    def method_metrics(self) -> dict[str, Path]:
        """Return the metrics.jsonl of each method that has one, by method."""
        return {path.parent.name: path for path in sorted(self.methods.glob("*/metrics.jsonl"))}

    def unreadable_logs(self) -> list[Path]:
        return sorted(self.logs.glob("unreadable-rank*.jsonl"))

    def fold(self, round_: int, fold: int) -> Path:
        return self.round(round_) / f"fold{fold}"

    def method(self, name: str) -> Path:
        return self.methods / name

    def export(self, method: str) -> Path:
        return self.method(method) / "export"

    def unreadable(self, rank: int) -> Path:
        return self.logs / f"unreadable-rank{rank}.jsonl"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:04d}.log"

    def heartbeat(self, rank: int) -> Path:
        return self.logs / f"heartbeat-rank{rank}.json"

    def trace(self, rank: int) -> Path:
        return self.logs / f"trace-rank{rank}.jsonl"

    def require_run_directory(self) -> None:
        """Raise ConfigError if the folder exists and is neither empty nor a run directory."""
        if not self.root.exists():
            return
        if not self.root.is_dir():
            raise ConfigError(f"{self.root} is a file, not a folder: choose another --run-dir")
        own = (self.root / ".lock", self.given)
        content = [path for path in self.root.iterdir() if path not in own and not is_temporary(path)]
        if content and not self.has_manifest():
            if not self.has_results():
                raise ConfigError(f"{self.root} is neither empty nor a run directory: choose another --run-dir")
            raise ConfigError(
                f"{self.root} has files of a run but no readable manifest.json: choose another --run-dir, or report "
                f"what is there with `incv report {shlex.quote(str(self.root))}`"
            )

    def require_writable(self) -> None:
        """Raise ConfigError if the folder cannot be created or written to; leaves nothing behind."""
        place = next(path for path in (self.root, *self.root.absolute().parents) if path.exists())
        try:
            Path(tempfile.mkdtemp(dir=place, prefix=".incv-")).rmdir()
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(f"cannot create or write to {self.root}: {error.strerror}; choose another --run-dir")

    def has_manifest(self) -> bool:
        """Whether the folder has the manifest of a run."""
        try:
            content = read_json(self.manifest)
        except (OSError, DataError):
            return False
        return isinstance(content, dict) and {"recipe", "stages", "starts"} <= content.keys()

    def has_results(self) -> bool:
        """Whether the folder has any file from which a report can be made."""
        files = (self.config, self.labels, self.incv, self.selection, self.evaluation)
        return (
            self.has_manifest()
            or any(path.is_file() for path in files)
            or bool(self.fold_metrics() or self.method_metrics() or self.round_files("selection.parquet"))
        )

    def acquire(self) -> None:
        """Create the folder and hold its lock until `release` or the end of this process."""
        self.require_run_directory()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._require_own_files()
            self._lock = open_regular(self.root / ".lock", os.O_RDWR | os.O_CREAT)
            is_locked = _wait_for_lock(self._lock)
        except OSError as error:
            raise self._unwritable(error) from None
        if not is_locked:
            raise ConfigError(
                f"another process is using {self.root}: wait for it, stop it "
                f"(`touch {self.root}/STOP`), or choose another --run-dir"
            )
        remove_leftovers(self.root)

    def _require_own_files(self) -> None:
        """Raise ConfigError if the run would follow a link out of its directory, or write to a device or FIFO."""
        folders = (self.logs, self.rounds, self.methods, self.features, self.given, self.classifier, self.old)
        files = {path for path in vars(self).values() if isinstance(path, Path)} - {self.root, *folders}
        found = [(path, find_kind(path)) for path in sorted(files)]
        for folder in folders:
            inside = [folder, *folder.rglob("*")] if find_kind(folder) == "a folder" else [folder]
            found += [(path, kind) for path in inside if (kind := find_kind(path)) != "a folder"]
        for path, kind in found:
            if kind is not None:
                raise ConfigError(
                    f"{path} is {kind}, and a run writes only to files and folders of its own: remove it, or choose "
                    "another --run-dir"
                )

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _wait_for_lock(lock: int) -> bool:
    """Take the lock and return whether that succeeded. After a restart, wait for a dead node's lock to expire."""
    restarted = any(os.environ.get(name, "0") != "0" for name in _RESTART_COUNTS)
    deadline = time.monotonic() + (_LOCK_LEASE if restarted else 0.0)
    while not try_lock(lock):
        if time.monotonic() >= deadline:
            return False
        time.sleep(1.0)
    return True
