"""Every path a run may write, and the lock that keeps two processes out of one run."""

import fcntl
import json
import os
import sys
import time
from pathlib import Path
from typing import IO

from shards.durable import is_temporary, remove_leftovers
from shards.errors import ConfigError

_RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
_LEASE = 120.0  # seconds


class RunDirectory:
    """`root/` and what lies in it; DESIGN of the folder is in docs/architecture.md."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.resolved.yaml"
        self.manifest = root / "manifest.json"
        self.stopped = root / "stopped.json"
        self.labels = root / "labels.parquet"
        self.true_labels = root / "true_labels.parquet"
        self.incv = root / "incv.json"
        self.selection = root / "selection.parquet"
        self.evaluation = root / "evaluation.json"
        self.evaluation_progress = root / "evaluation.partial.json"
        self.report_json = root / "report.json"
        self.report_html = root / "report.html"
        self.logs = root / "logs"
        self.rounds = root / "rounds"
        self.methods = root / "methods"
        self.old = root / "old"
        self._lock: IO[str] | None = None

    def round(self, number: int) -> Path:
        return self.rounds / str(number)

    def round_predictions(self, number: int) -> Path:
        return self.round(number) / "predictions.parquet"

    def round_selection(self, number: int) -> Path:
        return self.round(number) / "selection.parquet"

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

    def require_ours(self) -> None:
        """Refuse a folder that holds something else."""
        if not self.root.exists():
            return
        if not self.root.is_dir():
            raise ConfigError(f"{self.root} is a file, not a folder: choose another --run-dir")
        content = [path for path in self.root.iterdir() if path.name != ".lock" and not is_temporary(path)]
        if content and not self._has_our_manifest():
            raise ConfigError(f"{self.root} is not empty and not a run directory: choose another --run-dir")

    def _has_our_manifest(self) -> bool:
        try:
            content = json.loads(self.manifest.read_text())
        except (OSError, ValueError):
            return False
        return isinstance(content, dict) and {"recipe", "stages", "starts"} <= content.keys()

    def take(self) -> None:
        """Make the folder and hold it until this process ends."""
        self.require_ours()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._lock = (self.root / ".lock").open("w")
        except OSError as error:
            raise ConfigError(f"{self.root} cannot be made or written: {error}; choose another --run-dir") from None
        if not self._locked(self._lock):
            raise ConfigError(
                f"another process is running in {self.root}: wait for it, stop it "
                f"(`touch {self.root}/STOP`), or choose another --run-dir"
            )
        remove_leftovers(self.root)

    def _locked(self, lock: IO[str]) -> bool:
        """Whether nobody else holds it; a file server may keep a dead node's lock for a while."""
        restarted = any(os.environ.get(name, "0") != "0" for name in _RESTARTS)
        limit = time.monotonic() + (_LEASE if restarted else 0.0)
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= limit:
                    return False
                time.sleep(1.0)
            except OSError as error:
                print(
                    f"warning: {self.root} cannot be locked ({error.strerror}): start no second run in it",
                    file=sys.stderr,
                )
                return True

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
