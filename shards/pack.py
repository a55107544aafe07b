"""Packs a source into shards: in parallel, resumable after a kill, with byte-identical output."""

import multiprocessing
import os
import pickle
import shlex
import shutil
import signal
import threading
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from shards.dali_index import write_dali_index
from shards.durable import list_missing, read_json, remove_leftovers, remove_on_error, write_json
from shards.errors import CommandStopped, ConfigError, DataError, Fix
from shards.folder_lock import lock_folder
from shards.image_store import DEFAULT_QUALITY
from shards.merge import merge
from shards.plan import ArrayTask, Plan, make_plan
from shards.progress import Progress
from shards.sample_index import Dataset, SampleIndex
from shards.shard_writer import Part, read_part, repair_shard, write_shard
from shards.source_files import MOST_COMPARED, find_changes, is_unchanged, read_source_files
from shards.sources.source import Source
from shards.verify import is_marked_verified, mark_verified, require_verified, verify

SAMPLES_PER_SHARD = 1000

_SECONDS_BETWEEN_POLLS = 0.5
_REJECTED_SHOWN = 5
_ANOTHER_FOLDER = Fix("choose another {}", "out")


@dataclass(frozen=True)
class PackOptions:
    """How to pack a source. Only `samples_per_shard`, `resize` and `quality` decide what the shards hold."""

    workers: int = 1
    """Processes; with 1, this process packs itself."""
    samples_per_shard: int = SAMPLES_PER_SHARD
    max_rejected: float = 0.01
    """Raise DataError if a larger share of the images is unusable."""
    resize: int | None = None
    quality: int = DEFAULT_QUALITY
    dali_index: bool = False
    check_source: bool = False
    """Compare a complete folder with the files of its source, even if there are many."""
    wait_for_lock: bool = False
    """If another process is packing into the folder, wait for it instead of raising DataError."""
    keep_unfinished: bool = True
    """If packing fails, keep finished shards, so that it can be resumed; False: remove the folder if it is new."""
    stop: Callable[[], bool] = lambda: False
    """Polled; raises CommandStopped when it returns True."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"must be 1 or more, not {self.workers}", field="workers")
        if not 0 <= self.max_rejected <= 1:
            raise ConfigError(f"must be a fraction from 0 to 1, not {self.max_rejected}", field="max_rejected")

    def plan(self, source: Source) -> Plan:
        return make_plan(source, self.samples_per_shard, self.resize, self.quality)


DEFAULT_OPTIONS = PackOptions()


def pack(source: Source, out: Path, options: PackOptions = DEFAULT_OPTIONS) -> SampleIndex:
    """Pack all rows of `source` into `out` and return the index. Shards that are already there are kept, and merged
    with the others; a complete folder is verified.
    """
    plan = options.plan(source)
    require_ours(out)
    new = [] if options.keep_unfinished else list_missing(out)
    if not is_packed(out):
        with lock_folder(out, None, partial(_raise_if_stopped, options, out) if options.wait_for_lock else None):
            if not is_packed(out):  # else another process has finished it in the meantime
                return _pack_missing(source, out, plan, options, new)
    return reopen(source, out, plan, options)


def pack_task(source: Source, out: Path, task: ArrayTask, options: PackOptions = DEFAULT_OPTIONS) -> None:
    """Write the shards of one task of an array job; when all tasks are done, `pack` merges their shards.

    Tasks may run concurrently on several machines that share the folder.
    """
    plan = options.plan(source)
    require_ours(out)
    if not is_packed(out):
        with lock_folder(out, task):
            if not is_packed(out):
                _claim(out, plan)
                _write_shards(source, out, plan, task.shards(plan), options)
                return
    _require_same_files(source, out, plan, options)
    _require_same(out, Dataset.load(out), plan)


def reopen(source: Source, out: Path, plan: Plan, options: PackOptions = DEFAULT_OPTIONS) -> SampleIndex:
    """Verify a folder that was packed before, rewrite damaged shards, and return its index.

    The folder may be read-only: it is locked only if a shard is damaged.
    """
    _require_same_files(source, out, plan, options)
    dataset = Dataset.load(out)
    _require_same(out, dataset, plan)
    if not is_marked_verified(out):
        report = verify(out, options.workers)
        if report.damaged and report.tables_are_good:
            what = f"repair {plan.source}/{plan.split}"
            with lock_folder(out, None), Progress(what, len(report.damaged), unit="shards") as progress:
                for shard in report.damaged:
                    repair_shard(source, out, plan, dataset, shard)
                    progress.advance()
    shutil.rmtree(out / ".parts", ignore_errors=True)
    if options.dali_index:
        with suppress(OSError):  # `require_verified` reports an unreadable shard
            write_dali_index(SampleIndex.load(out))
    return require_verified(out, options.workers)


def is_packed(folder: Path) -> bool:
    return (folder / "dataset.json").exists()


def _pack_missing(source: Source, out: Path, plan: Plan, options: PackOptions, new: list[Path]) -> SampleIndex:
    """Write the missing shards into a locked folder, and merge all. new: what to remove if it fails."""
    begun = _plan_path(out).exists()
    with nullcontext() if begun else remove_on_error(new, ConfigError, DataError):
        _claim(out, plan)
        remove_leftovers(out)  # tasks do not: other tasks may be writing temporary files now
        merge(source, out, plan, _write_shards(source, out, plan, plan.shards, options))
    index = SampleIndex.load(out)
    if options.dali_index:
        write_dali_index(index)
    mark_verified(out)  # the checksums were computed while writing
    return index


def require_ours(out: Path) -> None:
    """Raise DataError if `out` holds anything other than a packed or partly packed data set."""
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file, not a folder", fix=_ANOTHER_FOLDER)
    if is_packed(out) or (out / ".parts").exists() or not out.exists():
        return
    strangers = sorted(
        path.name for path in out.iterdir() if path.name != ".parts"
    )  # `.parts`: another task may have just started
    if strangers:
        raise DataError(f"{out} contains {strangers[0]} and is not a packed data set", fix=_ANOTHER_FOLDER)


def _require_same_files(source: Source, out: Path, plan: Plan, options: PackOptions) -> None:
    """Raise ConfigError if the source no longer has the files that were packed into a complete folder."""
    dataset = Dataset.load(out)
    if (dataset.source, dataset.split, dataset.subset) != (plan.source, plan.split, plan.subset):
        return  # `_require_same` reports it
    if dataset.count > MOST_COMPARED and not options.check_source:
        return
    with suppress(DataError):  # `verify` reports a damaged index
        index, recorded = SampleIndex.load(out), read_source_files(out, dataset)
        if recorded is not None and (changes := find_changes(source, index, recorded)):
            raise ConfigError(
                f"the files of the source have changed since they were packed into {out}: {changes.describe()}",
                fix=[_ANOTHER_FOLDER, _suggest_removal(out)],
            )


def find_plan_difference(found: Dataset | Plan, plan: Plan) -> str | None:
    """Return how a packed or partly packed folder differs from the plan: the first setting that does."""
    for name, wanted in asdict(plan).items():
        is_now = getattr(found, name)
        if is_now != wanted:
            brief = isinstance(wanted, int | str | None) and name != "listing"
            return f"{name} {is_now!r} instead of {wanted!r}" if brief else f"a different {name}"
    return None


def can_resume(out: Path, plan: Plan) -> bool:
    """Whether `out` was partly packed with this plan."""
    try:
        return find_plan_difference(Plan.of_json(read_json(_plan_path(out))), plan) is None
    except (DataError, TypeError, KeyError):
        return False


def _require_same(out: Path, found: Dataset | Plan, plan: Plan) -> None:
    difference = find_plan_difference(found, plan)
    if difference is not None:
        raise DataError(
            f"{out} already holds {found.source}/{found.split}, packed with {difference}",
            fix=[_ANOTHER_FOLDER, _suggest_removal(out)],
        )


def _suggest_removal(out: Path) -> str:
    return f"remove it: rm -r {shlex.quote(str(out))}"


def _plan_path(out: Path) -> Path:
    return out / ".parts" / "plan.json"


def _claim(out: Path, plan: Plan) -> None:
    """Record the plan in an empty folder, or check that a partly packed folder has the same plan."""
    path = _plan_path(out)
    if not path.exists():
        write_json(path, asdict(plan))
        return
    try:
        found = Plan.of_json(read_json(path))
    except (TypeError, KeyError) as error:
        raise DataError(f"{path} was not written by incv", fix=_suggest_removal(out)) from error
    _require_same(out, found, plan)


def _write_shards(source: Source, out: Path, plan: Plan, wanted: range, options: PackOptions) -> list[Part]:
    """Write those of the wanted shards that are missing; return the parts of all wanted shards, in order."""
    found = {shard: part for shard in wanted if (part := read_part(out, plan, shard)) is not None}
    finished = {shard: part for shard, part in found.items() if is_unchanged(source, part.table)}
    missing = [shard for shard in wanted if shard not in finished]
    rejected = [row for part in finished.values() for row in _list_rejected(part.table)]
    _require_few(rejected, plan, options.max_rejected)
    write = _write_in_processes if options.workers > 1 and len(missing) > 1 else _write_in_turn
    total, done = (sum(len(plan.rows(shard)) for shard in shards) for shards in (wanted, finished))
    with (
        closing(write(source, out, plan, missing, options)) as written,
        Progress(f"pack {plan.source}/{plan.split}", total, done) as progress,
    ):
        for shard in written:
            part = read_part(out, plan, shard)
            if part is None:
                raise DataError(f"shard {shard} vanished from {out}; is something else writing there?")
            finished[shard] = part
            rejected += _list_rejected(part.table)
            progress.advance(len(plan.rows(shard)))
            _require_few(rejected, plan, options.max_rejected)
    return [finished[shard] for shard in wanted]


def _write_in_turn(
    source: Source, out: Path, plan: Plan, missing: list[int], options: PackOptions
) -> Generator[int, None, None]:
    for shard in missing:
        _raise_if_stopped(options, out)
        write_shard(source, out, plan, shard)
        yield shard


def _write_in_processes(
    source: Source, out: Path, plan: Plan, missing: list[int], options: PackOptions
) -> Generator[int, None, None]:
    # workers are forked from a server process that imports the packages once and holds no other state
    workers, processes = min(options.workers, len(missing)), multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["shards.shard_writer", "webdataset"])
    pool = ProcessPoolExecutor(
        workers, processes, initializer=_start_worker, initargs=(pickle.dumps((source, plan)),)
    )
    try:
        # submit at most one shard per worker: a stop cannot cancel what the pool has already queued
        waiting = iter(missing)
        running = {pool.submit(_write_in_worker, out, shard) for shard in islice(waiting, workers)}
        while running:
            _raise_if_stopped(options, out)
            done, running = wait(running, _SECONDS_BETWEEN_POLLS, FIRST_COMPLETED)
            running |= {pool.submit(_write_in_worker, out, shard) for shard in islice(waiting, len(done))}
            for future in done:
                yield future.result()
    except BrokenProcessPool as error:
        _raise_if_stopped(options, out)  # a stop signal sent to the whole job also kills the workers
        raise DataError(
            "a packing process was killed, perhaps because memory ran out; finished shards are kept",
            fix=Fix("run the same command again with a smaller {}", "workers"),
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)  # waits for the shards being written


def _raise_if_stopped(options: PackOptions, out: Path) -> None:
    if options.stop():
        raise CommandStopped(f"packing into {out} was stopped; run the same command again to resume")


_worker_job: bytes


def _start_worker(job: bytes) -> None:
    """Keep the pickled source and plan. `_load_job` unpickles them in the first task, whose future reports errors."""
    global _worker_job
    _worker_job = job
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent is killed; otherwise the worker would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@cache
def _load_job() -> tuple[Source, Plan]:
    job: tuple[Source, Plan] = pickle.loads(_worker_job)
    return job


def _write_in_worker(out: Path, shard: int) -> int:
    source, plan = _load_job()
    write_shard(source, out, plan, shard)
    return shard


def _list_rejected(table: pa.Table) -> list[dict[str, Any]]:
    rows = table.select(["sample_id", "key", "verdict", "reason"])
    return rows.filter(pc.not_equal(rows["verdict"], "ok")).to_pylist()


def _require_few(rejected: list[dict[str, Any]], plan: Plan, max_rejected: float) -> None:
    if len(rejected) <= max_rejected * plan.count:
        return
    first = sorted(rejected, key=lambda row: row["sample_id"])[:_REJECTED_SHOWN]
    shown = "; ".join(f"{row['key']}: {row['reason']}" for row in first)
    name = "/".join(filter(None, (plan.source, plan.split)))
    raise DataError(
        f"the source {name} has at least {len(rejected):,} unusable images among {plan.count:,}, "
        f"more than the {max_rejected:.2%} allowed. The first: {shown}",
        fix=["replace them with intact copies", Fix("allow more with {}", "max_rejected")],
    )
