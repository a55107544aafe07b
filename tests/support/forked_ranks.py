"""`forked_ranks.py CASES.json`: a launcher that forks its ranks, so that torch is imported once for many worlds.

A case is {"name": ..., "port": ..., "ranks": [{"arguments": [...], "cwd": ..., "environ": {...}}, ...]}. Each rank is
told what torchrun would tell it, and writes to NAME-rank<r>.log. Into CASES.out.json goes, for each case, the exit
code of each rank and the seconds from the first error on rank 0's terminal to the end of the last rank.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from trainer.cli import main
from trainer.run import runner as run  # noqa: F401 - imported before the fork, for all ranks
from trainer.run import start_checks  # noqa: F401 - imported before the fork, for all ranks

AT_ONCE = 3
PATIENCE = 90.0


class World:
    """The processes of one case."""

    def __init__(self, folder: Path, case: dict[str, Any]) -> None:
        self._began = time.monotonic()
        self._logs = [folder / f"{case['name']}-rank{rank}.log" for rank in range(len(case["ranks"]))]
        for log in self._logs:  # `ended` reads it, maybe before the rank writes
            log.touch()
        self._error: float | None = None
        self._codes: dict[int, int] = {}
        self._alive = {self._fork(case, rank): rank for rank in range(len(case["ranks"]))}

    def _fork(self, case: dict[str, Any], rank: int) -> int:
        process = os.fork()
        if process:
            return process
        size, own = len(case["ranks"]), case["ranks"][rank]
        output = os.open(self._logs[rank], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(own["cwd"])
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ.update({name: str(value) for name, value in told.items()})
        os.environ["INCV_LAUNCHED"] = str(time.time())
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(case["port"]), **own["environ"])
        code = 1
        try:
            code = main(own["arguments"])
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def ended(self) -> bool:
        if self._error is None and "error:" in self._logs[0].read_text():
            self._error = time.monotonic()
        for process in list(self._alive):
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                self._codes[self._alive.pop(process)] = os.waitstatus_to_exitcode(status)
        if time.monotonic() - self._began > PATIENCE:
            for process in self._alive:
                os.kill(process, signal.SIGKILL)
        return not self._alive

    def result(self) -> dict[str, Any]:
        lasted = time.monotonic() - self._error if self._error is not None else None
        return {"codes": [self._codes[rank] for rank in sorted(self._codes)], "seconds_after_error": lasted}


def run_entry(file: Path) -> None:
    waiting = json.loads(file.read_text())
    running: dict[str, World] = {}
    results: dict[str, Any] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            case = waiting.pop(0)
            running[case["name"]] = World(file.parent, case)
        for name in [name for name, world in running.items() if world.ended()]:
            results[name] = running.pop(name).result()
        time.sleep(0.02)
    file.with_suffix(".out.json").write_text(json.dumps(results))


if __name__ == "__main__":
    run_entry(Path(sys.argv[1]))
