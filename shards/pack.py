"""Packing a source into shards: in parallel, resumable after any kill, the same bytes every time."""

import errno
import fcntl
import hashlib
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from shards.durable import disk_errors, read_json, remove_leftovers, write_json
from shards.errors import ConfigError, DataError
from shards.progress import Progress
from shards.sample_index import Dataset, SampleIndex, ShardFile, write_index
from shards.shard_writer import read_part, write_shard
from shards.sources.source import Source
from shards.verify import note_good, require_verified

_SECONDS_BETWEEN_POLLS = 0.5
_REJECTED_SHOWN = 5


class PackStopped(Exception):
    """Packing was asked to stop; what is finished is kept and the same command goes on from there."""


@dataclass(frozen=True)
class Plan:
    """What is being packed; equal plans give equal bytes, so a half-finished folder may be continued."""

    source: str
    split: str
    class_names: tuple[str, ...]
    count: int
    samples_per_shard: int
    listing: str

    def rows(self, shard: int) -> range:
        first = shard * self.samples_per_shard
        return range(first, min(first + self.samples_per_shard, self.count))

    @property
    def shards(self) -> range:
        return range(-(-self.count // self.samples_per_shard))


def pack(
    source: Source,
    out: Path,
    workers: int = 1,
    samples_per_shard: int = 1000,
    max_rejected: float = 0.01,
    stop: Callable[[], bool] = lambda: False,
) -> SampleIndex:
    """Pack all rows of `source` into `out`; a finished pack of the same rows is checked and returned."""
    if workers < 1 or samples_per_shard < 1:
        raise ConfigError(f"workers ({workers}) and samples per shard ({samples_per_shard}) must be 1 or more")
    if not 0 <= max_rejected <= 1:
        raise ConfigError(f"max_rejected is a share of the images, 0 to 1, not {max_rejected}")
    plan = make_plan(source, samples_per_shard)
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    with _sole_writer(out):
        if (out / "dataset.json").exists():
            _require_same(out, Dataset.load(out), plan)
            shutil.rmtree(out / ".parts", ignore_errors=True)
            return require_verified(out, workers)
        _begin(out, plan)
        finished = _write_shards(source, out, plan, workers, max_rejected, stop)
        _merge(out, plan, finished)
        note_good(out)  # checksums were taken from the very bytes written
    return SampleIndex.load(out)


def make_plan(source: Source, samples_per_shard: int) -> Plan:
    """List the source once, without pixels: labels in range, no key twice."""
    if len(source) == 0:
        raise DataError(f"{source.name}/{source.split} holds no images")
    digest, classes = hashlib.sha256(), len(source.class_names)
    rows: dict[str, int] = {}
    for row in range(len(source)):
        key, label = source.key(row), source.label(row)
        if not 0 <= label < classes:
            raise DataError(f"{key} has label {label}; the labels of {source.name} are 0..{classes - 1}")
        first = rows.setdefault(key, row)
        if first != row:
            raise DataError(f"two images of {source.name} have the key {key} (rows {first} and {row})")
        digest.update(f"{len(key)} {key} {label}\n".encode())
    return Plan(
        source=source.name,
        split=source.split,
        class_names=source.class_names,
        count=len(source),
        samples_per_shard=samples_per_shard,
        listing=digest.hexdigest(),
    )


@contextmanager
def _sole_writer(out: Path) -> Iterator[None]:
    """A lock on the folder itself: it leaves no file behind and ends with the process, however that ends."""
    descriptor = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"another process is packing into {out}; wait for it, or choose another --out") from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.EBADF, errno.EINVAL, errno.ENOLCK):
                raise  # those five: a file system without locks, where the user has to take care
        yield
    finally:
        os.close(descriptor)


def _require_same(out: Path, found: Dataset | Plan, plan: Plan) -> None:
    for name, wanted in asdict(plan).items():
        if getattr(found, name) != wanted:
            raise DataError(
                f"{out} already holds {found.source}/{found.split}, packed with another {name} "
                f"than {plan.source}/{plan.split} now; choose another --out, or remove it: rm -r {out}"
            )


def _begin(out: Path, plan: Plan) -> None:
    """Claim an empty folder, or go on in one that was left half-finished with the same plan."""
    plan_path = out / ".parts" / "plan.json"
    if plan_path.exists():
        content = read_json(plan_path)
        try:
            found = Plan(**{**content, "class_names": tuple(content["class_names"])})
        except (TypeError, KeyError) as error:
            raise DataError(f"{plan_path} was not written by incv; remove the folder: rm -r {out}") from error
        _require_same(out, found, plan)
    else:
        strangers = sorted(path.name for path in out.iterdir() if path.name != ".parts")
        if strangers:
            raise DataError(f"{out} is not empty ({strangers[0]}) and not a packed data set; choose another --out")
        write_json(plan_path, asdict(plan))
    remove_leftovers(out)


def _write_shards(
    source: Source, out: Path, plan: Plan, workers: int, max_rejected: float, stop: Callable[[], bool]
) -> list[tuple[ShardFile, pa.Table]]:
    """Write the shards that are not there yet; return all, in order."""
    finished = {shard: part for shard in plan.shards if (part := read_part(out, shard)) is not None}
    missing = [shard for shard in plan.shards if shard not in finished]
    rejected = [row for _, table in finished.values() for row in _rejected(table)]
    _require_few(rejected, plan, max_rejected)
    if workers > 1 and len(missing) > 1:
        written = _written_by_processes(source, out, plan, missing, min(workers, len(missing)), stop)
    else:
        written = _written_here(source, out, plan, missing, stop)
    done = sum(len(plan.rows(shard)) for shard in finished)
    with closing(written), Progress(f"pack {plan.source}/{plan.split}", plan.count, done) as progress:
        for shard in written:
            part = read_part(out, shard)
            if part is None:
                raise DataError(f"shard {shard} vanished from {out}; is something else writing there?")
            finished[shard] = part
            rejected += _rejected(part[1])
            progress.advance(len(plan.rows(shard)))
            _require_few(rejected, plan, max_rejected)
    return [finished[shard] for shard in plan.shards]


def _written_here(
    source: Source, out: Path, plan: Plan, missing: list[int], stop: Callable[[], bool]
) -> Generator[int, None, None]:
    for shard in missing:
        _obey(stop, out)
        write_shard(source, out, shard, plan.rows(shard))
        yield shard


def _written_by_processes(
    source: Source, out: Path, plan: Plan, missing: list[int], workers: int, stop: Callable[[], bool]
) -> Generator[int, None, None]:
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(source,)
    )
    try:
        running = {pool.submit(_write_in_worker, out, shard, plan.rows(shard)) for shard in missing}
        while running:
            _obey(stop, out)
            done, running = wait(running, _SECONDS_BETWEEN_POLLS, FIRST_COMPLETED)
            for future in done:
                yield future.result()
    except BrokenProcessPool as error:
        _obey(stop, out)  # a signal to the whole job ends the workers too
        raise DataError(
            "a packing process was killed, perhaps for want of memory; what is finished is kept. "
            "Run the same command again, with fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)  # shards begun are finished, the others are not begun


def _obey(stop: Callable[[], bool], out: Path) -> None:
    if stop():
        raise PackStopped(f"packing into {out} was stopped; the same command goes on from there")


_worker_source: Source


def _start_worker(source: Source) -> None:
    """The source travels to a worker once, not with every shard."""
    global _worker_source
    _worker_source = source
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would otherwise wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _write_in_worker(out: Path, shard: int, rows: range) -> int:
    write_shard(_worker_source, out, shard, rows)
    return shard


def _rejected(table: pa.Table) -> list[dict[str, Any]]:
    rows = table.select(["sample_id", "key", "verdict"])
    return rows.filter(pc.not_equal(rows["verdict"], "ok")).to_pylist()


def _require_few(rejected: list[dict[str, Any]], plan: Plan, max_rejected: float) -> None:
    if len(rejected) <= max_rejected * plan.count:
        return
    first = sorted(rejected, key=lambda row: row["sample_id"])[:_REJECTED_SHOWN]
    shown = "; ".join(f"{row['key']}: {row['verdict']}" for row in first)
    raise DataError(
        f"{plan.source}/{plan.split} has {len(rejected):,} or more unusable images among {plan.count:,}, "
        f"{max_rejected:.2%} are allowed. The first: {shown}. "
        "Bring good copies of them, or allow more with --max-rejected"
    )


def _merge(out: Path, plan: Plan, finished: list[tuple[ShardFile, pa.Table]]) -> None:
    """Parts to index; dataset.json last of all, because it says that the folder is finished."""
    table = pa.concat_tables([part for _, part in finished])
    checksum = write_index(out, table)
    shards = tuple(facts for facts, _ in finished)
    dataset = Dataset(**asdict(plan), usable=sum(s.samples for s in shards), index_checksum=checksum, shards=shards)
    dataset.write(out)
    shutil.rmtree(out / ".parts")
