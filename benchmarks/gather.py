"""Time and memory of gathering predictions on all ranks at WebVision's size; one JSON line per figure.

    python benchmarks/gather.py [--append]

Four gloo processes hold a quarter of 2.44 million rows each. The reference exchanges the same rows as pickled objects
(`all_gather_object`), then sorts and checks them with the single-process function. Each run starts four fresh
processes; its figure is that of the slowest, or largest, rank.
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
OURS, REFERENCE = "gathered", "all_gather_object"


def rank_body(way: str, rows: int) -> None:
    """One rank of a run: prints its seconds, its memory and the checksum of what it then holds."""
    # Here and not above: the process that starts the ranks does not wait for torch.
    import numpy as np
    import torch
    import torch.distributed as dist

    from trainer.config.schema import ExecutionConfig
    from trainer.distributed.process_group import join_world, leave_world
    from trainer.incv.gathering import gather_predictions
    from trainer.incv.predictions import Predictions, merge_predictions

    world = join_world(ExecutionConfig(device="cpu", threads=1, world=int(os.environ["WORLD_SIZE"])))
    part = made_up(np.random.default_rng(0).permutation(rows)[world.rank :: world.size])
    expected = np.arange(rows)

    def by_objects() -> Predictions:
        parts: list[Any] = [None] * world.size
        dist.all_gather_object(parts, part)
        return merge_predictions(parts, expected)

    def by_tensors() -> Predictions:
        return gather_predictions(world, part, expected)

    def start_together() -> None:
        """Also the first collective, which a run has long had behind it when it gathers."""
        world.all_reduce(torch.zeros(1))

    whole, seconds, extra = _measured(by_tensors if way == OURS else by_objects, start_together)
    digest = hashlib.sha256()
    for name in Predictions.__dataclass_fields__:
        digest.update(np.ascontiguousarray(getattr(whole, name)).tobytes())
    print(json.dumps({"seconds": seconds, "extra_mb": extra, "checksum": digest.hexdigest()}), flush=True)
    leave_world(world)
    world.watchdog.stop()


def made_up(ids: Any) -> Any:
    """Predictions of these ids: the numbers of a row follow from its id alone."""
    import numpy as np

    from trainer.incv.predictions import Predictions, Status

    ids = np.sort(ids).astype(np.int64)
    probability = ((ids * 2654435761 % 1_000_003 + 1) / 1_000_004).astype(np.float32)
    return Predictions(
        sample_id=ids,
        fold=(ids % 2).astype(np.int8),
        predicted=(ids * 7919 % 1000).astype(np.int32),
        agrees=ids % 3 > 0,
        loss=-np.log(probability),
        given_probability=probability,
        predicted_probability=np.maximum(probability, 1 - probability),
        second=(ids * 7907 % 1000).astype(np.int32),
        second_probability=np.minimum(probability, 1 - probability),
        given_rank=(ids * 7901 % 1000).astype(np.int32),
        status=np.where(ids % 1000 == 0, Status.UNREADABLE, Status.OK).astype(np.int8),
    )


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
    """Both ways in turn, so that they meet the same moods of the machine."""
    figures: dict[str, dict[str, list[float]]] = {way: {"seconds": [], "extra_mb": []} for way in (OURS, REFERENCE)}
    checksums, shares = set(), []
    for _ in range(rounds):
        for way, found in figures.items():
            wait_for_quiet(patience)
            others = Others()
            each = run(way, ranks, rows)
            shares.append(others.share())
            for figure, values in found.items():
                values.append(max(one[figure] for one in each))
            checksums |= {one["checksum"] for one in each}
    if len(checksums) > 1:
        sys.exit("the ranks, or the two ways, do not hold the same predictions")
    said = (
        f"{rows:,} rows, {ranks} gloo processes on one machine, an equal part each; all end with the same bytes; "
        f"reference: all_gather_object of the same columns, then sorted and checked; {said_of(shares)}"
    )
    memory = "highest resident memory during the call above that before it, the result included; the largest rank"
    ours, other = figures[OURS], figures[REFERENCE]
    return [
        record_runs("gather_s", ours["seconds"], other["seconds"], unit="s", note=f"{said}; the slowest rank"),
        record_runs("gather_extra_mb", ours["extra_mb"], other["extra_mb"], unit="MB", note=f"{said}; {memory}"),
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
