"""Time and memory of gathering a table of samples on all ranks at WebVision's size; one JSON line per figure.

    python benchmarks/gather.py [--append]

Four gloo processes hold a quarter of 2.44 million rows each: the probabilities of 50 classes in float32, 256 features
in float16, and a status. The reference copies as many bytes as the whole table has into new memory in each of four
processes at once, the least that a table on every rank costs. Each run starts four fresh processes; its figure is
that of the slowest, or largest, rank.
"""

import argparse
import ctypes
import gc
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from company import Others, said_of, wait_for_quiet
from record import publish, record_runs

ROOT = Path(__file__).parents[1]
OURS, REFERENCE = "gathered", "copied"
CLASSES, FEATURES = 50, 256
ROW_BYTES = 8 + 4 * CLASSES + 2 * FEATURES + 1


def rank_body(way: str, rows: int) -> None:
    """One rank of a run: prints its seconds, its memory and the checksum of what it then holds."""
    # Here and not above: the process that starts the ranks does not wait for torch.
    import numpy as np
    import torch

    from trainer.config.schema import ExecutionConfig
    from trainer.distributed.process_group import join_world, leave_world
    from trainer.passes.table import gather_table

    world = join_world(ExecutionConfig(device="cpu", threads=1, world=int(os.environ["WORLD_SIZE"])))
    expected = np.arange(rows)
    ids = torch.from_numpy(np.random.default_rng(0).permutation(rows)[world.rank :: world.size].copy())
    share = torch.ones(len(ids) * ROW_BYTES, dtype=torch.uint8) if way == REFERENCE else None
    columns = {} if way == REFERENCE else made_up(ids)

    def gathered() -> dict[str, torch.Tensor]:
        table = gather_table(world, ids, columns, expected, "the benchmark")
        return {"ids": table.ids, **table.columns}

    def copied() -> dict[str, torch.Tensor]:
        assert share is not None
        whole = torch.empty(rows * ROW_BYTES, dtype=torch.uint8)
        for part in whole.split(len(share)):
            part.copy_(share[: len(part)])
        return {"whole": whole}

    def start_together() -> None:
        """Also the first collective, which a run has long had behind it when it gathers."""
        world.all_reduce(torch.zeros(1))

    whole, seconds, extra = _measured(gathered if way == OURS else copied, start_together)
    digest = hashlib.sha256()
    for column in whole.values():
        for block in column.split(100_000):
            digest.update(block.contiguous().numpy().data)
    print(json.dumps({"seconds": seconds, "extra_mb": extra, "checksum": digest.hexdigest()}), flush=True)
    leave_world(world)
    world.watchdog.stop()


def made_up(ids: Any) -> Any:
    """Columns whose numbers follow from the id alone."""
    import torch

    return {
        "probabilities": (ids[:, None] * torch.arange(1, CLASSES + 1) % 9973).float() / 9973,
        "features": (ids[:, None].int() * torch.arange(1, FEATURES + 1, dtype=torch.int32) % 1009).half(),
        "status": (ids % 1000 == 0).to(torch.int8),
    }


def _measured(job: Callable[[], Any], start_together: Callable[[], None]) -> tuple[Any, float, float]:
    """Result, seconds, and the highest resident memory during the job above that before it, in MB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that the allocator kept would serve the job uncounted
    start_together()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = _status("VmRSS")
    start_together()
    start = time.perf_counter()
    result = job()
    seconds = time.perf_counter() - start
    return result, seconds, _status("VmHWM") - before


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise LookupError(field)


def run(way: str, ranks: int, rows: int) -> list[dict[str, Any]]:
    """What each of the ranks of one run says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--rows", str(rows), "--as-rank", way],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate()[0] for process in processes]
    codes = [process.returncode for process in processes]
    if any(codes):
        sys.exit(f"the ranks of a run ended with {codes}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def measure(ranks: int, rows: int, rounds: int, patience: float) -> list[dict[str, Any]]:
    """Both ways in turn, so that they meet the same load of the machine."""
    figures: dict[str, dict[str, list[float]]] = {way: {"seconds": [], "extra_mb": []} for way in (OURS, REFERENCE)}
    checksums: dict[str, set[str]] = {way: set() for way in figures}
    shares = []
    for _ in range(rounds):
        for way, found in figures.items():
            wait_for_quiet(patience)
            others = Others()
            each = run(way, ranks, rows)
            shares.append(others.share())
            for figure, values in found.items():
                values.append(max(one[figure] for one in each))
            checksums[way] |= {one["checksum"] for one in each}
    if len(checksums[OURS]) > 1:
        sys.exit("the ranks do not hold the same table")
    said = (
        f"{rows:,} rows of {ROW_BYTES} bytes, {rows * ROW_BYTES / 1e9:.2f} GB, {ranks} gloo processes on one "
        f"machine, an equal part each, dealt at random; all end with the same bytes; {said_of(shares)}"
    )
    memory = "resident memory at its highest above that before the call, of the largest rank; reference: the table"
    copy = "reference: as many bytes copied into new memory by as many processes at once"
    ours, other = figures[OURS], figures[REFERENCE]
    seconds, megabytes = ours["seconds"], [rows * ROW_BYTES / 1e6]
    return [
        record_runs("gather_table_s", seconds, other["seconds"], unit="s", note=f"{said}; {copy}; the slowest rank"),
        record_runs(
            "gather_table_extra_mb",
            ours["extra_mb"],
            megabytes,
            unit="MB",
            note=f"{said}; {memory}",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_440_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--patience", type=float, default=120.0, help="seconds to wait for a quiet machine, each run")
    parser.add_argument("--append", action="store_true", help="keep the lines in results/gather.jsonl")
    parser.add_argument("--as-rank", choices=(OURS, REFERENCE), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank:
        rank_body(given.as_rank, given.rows)
        return
    publish(measure(given.ranks, given.rows, given.rounds, given.patience), "gather.jsonl" if given.append else None)


if __name__ == "__main__":
    main()
