"""Bytes fetched from storage for one epoch of a random subset, against the bytes of its samples; one line per case.

.venv/bin/python benchmarks/read_amplification.py --append

The shards are synthetic. Each case is its own process that drops them from the page cache, then reads every sample of
the subset once through ShardReader. Bytes fetched are `read_bytes` of /proc/self/io: the kernel's requests to the
block device, including read-ahead. In the `small_cache` cases the process runs in a memory cgroup smaller than the
shards.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from made_up_index import make_index
from record import publish, record_runs

from shards.sample_index import SampleIndex
from trainer.loading.sample_order import derive_stream, epoch_order, windowed_order
from trainer.loading.shard_reader import ShardReader

CGROUP = Path("/sys/fs/cgroup/memory")  # version 1


@dataclass(frozen=True)
class Case:
    order: str
    whole_shards: bool
    small_cache: bool

    @property
    def name(self) -> str:
        parts = ["read", self.order, "whole_shards" * self.whole_shards, "small_cache" * self.small_cache]
        return "_".join(filter(None, parts))


@dataclass(frozen=True)
class Reading:
    fetched: int
    wanted: int
    seconds: float


CASES = tuple(
    Case(order, whole, small)
    for small in (False, True)
    for order, whole in (("shuffled", False), ("windowed", False), ("windowed", True))
)


def read_epoch(folder: Path, case: Case, share: float, window: int, run: int, cgroup: Path | None) -> Reading:
    """In a process of its own: join the cgroup, drop the shards from memory, read the subset in its order."""
    index = SampleIndex.load(folder)
    usable, stream = index.usable_ids(), derive_stream(run, "standard")
    ids = np.sort(np.random.default_rng(run).choice(usable, int(len(usable) * share), replace=False))
    if case.order == "windowed":
        order = windowed_order(stream, 0, ids, index.shard[ids], window)
    else:
        order = epoch_order(stream, 0, ids)
    _drop(index)
    if cgroup is not None:
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))
    reader = ShardReader(index, window if case.whole_shards else None)
    before, start = _fetched(), time.perf_counter()
    for sample in order.tolist():
        reader.read(sample)
    return Reading(_fetched() - before, int(index.nbytes[ids].sum()), time.perf_counter() - start)


def _drop(index: SampleIndex) -> None:
    for shard in range(len(index.dataset.shards)):
        descriptor = os.open(index.shard_path(shard), os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _fetched() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def _send(connection: Connection, arguments: tuple[Any, ...]) -> None:
    connection.send(read_epoch(*arguments))


def in_own_process(*arguments: Any) -> Reading:
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_send, args=(there, arguments))
    process.start()
    there.close()
    try:
        reading: Reading = here.recv()
    except EOFError:
        sys.exit(f"a measured process ended with {process.exitcode}")
    finally:
        process.join()
    return reading


@contextmanager
def memory_limit(megabytes: int) -> Iterator[Path | None]:
    """A memory cgroup, the page cache of its processes in it; None where we may not make one."""
    folder = CGROUP / f"incv-read-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        yield None
        return
    try:
        (folder / "memory.limit_in_bytes").write_text(str(megabytes * 10**6))
        yield folder
    finally:
        folder.rmdir()


def measure(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    make_index(folder, arguments.rows, with_shards=True)
    total = sum(shard.nbytes for shard in SampleIndex.load(folder).dataset.shards) / 1e6
    readings: dict[Case, list[Reading]] = {case: [] for case in CASES}
    for run in range(arguments.runs):  # in turn, so that all cases meet the same moods of the machine
        for case in CASES:
            with memory_limit(arguments.cache) as cgroup:
                if case.small_cache and cgroup is None:
                    continue
                limit = cgroup if case.small_cache else None
                reading = in_own_process(folder, case, arguments.share, arguments.window, run, limit)
            readings[case].append(reading)
    lines = []
    for case, found in readings.items():
        if not found:
            print(f"no memory cgroup could be made: {case.name} was not measured", file=sys.stderr)
            continue
        rate = np.median([reading.wanted / reading.seconds for reading in found]) / 1e6
        note = (
            f"reference: the bytes of the samples; {arguments.share:.0%} of {arguments.rows:,} samples in shards of "
            f"{total:,.0f} MB; /proc/self/io; {rate:,.0f} MB/s of samples on one thread"
        )
        note += f"; windows of {arguments.window} shards" * (case.order == "windowed")
        note += f"; memory limited to {arguments.cache} MB" * case.small_cache
        fetched, wanted = ([getattr(one, name) / 1e6 for one in found] for name in ("fetched", "wanted"))
        lines.append(record_runs(f"{case.name}_mb", fetched, wanted, unit="MB", note=note))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes fetched from storage against bytes of the samples read.")
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--share", type=float, default=0.3, help="of the samples that are in the subset")
    parser.add_argument("--window", type=int, default=16, help="shards")
    parser.add_argument("--cache", type=int, default=400, metavar="MB", help="memory in the cases with little of it")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the made-up shards lie for a while; on a real disk")
    parser.add_argument("--append", action="store_true", help="keep the lines in results/read_amplification.jsonl")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        lines = measure(Path(name) / "packed", arguments)
    publish(lines, "read_amplification.jsonl" if arguments.append else None)


if __name__ == "__main__":
    main()
