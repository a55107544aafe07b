"""Examines memory, disk and file system: whether it can be written to, locked, synced and renamed on."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from shards.durable import sync
from trainer.doctor.finding import Finding

_GIB = 2**30
_FEW_GIB_OF_DISK, _FEW_GIB_OF_MEMORY = 20, 4
_FEW_FILES = 10_000
_SMALL_SHM = _GIB  # NCCL's buffers between the processes of a node
_MOST_SKEW = 5.0  # seconds between the clocks of the file server and this machine
_SLOW_SYNC = 0.5  # seconds
_SHM = Path("/dev/shm")


def examine_memory() -> Finding:
    """Examine the memory that this process may use: that of the machine, or of its control group."""
    available, total = read_memory()
    if total is None or available is None:
        return Finding("memory", "ok", "unknown on this system")
    words = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB available; {count_cores()} cores"
    if available < _FEW_GIB_OF_MEMORY * _GIB:
        fix = "end other processes, ask the scheduler for more, or lower execution.workers"
        return Finding("memory", "note", words, fix)
    return Finding("memory", "ok", words)


def examine_shared_memory(processes: int, path: Path = _SHM) -> Iterator[Finding]:
    """Examine /dev/shm if several processes or GPUs share this machine."""
    if processes < 2 or not path.exists():
        return
    total = shutil.disk_usage(path).total
    if total < _SMALL_SHM:
        words = f"{path} has {total / 2**20:.0f} MiB: NCCL needs more between the GPUs of a machine"
        yield Finding("shared memory", "problem", words, "start the container with --shm-size=8g or --ipc=host")


def read_memory(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """Return available and total bytes, the smaller of machine and control group (version 2)."""
    try:
        lines = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines() if ":" in line)
        total, available = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return None, None
    try:
        limit = int((root / "sys/fs/cgroup/memory.max").read_text())  # `max` if there is no limit
        used = int((root / "sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available, total
    return min(available, max(limit - used, 0)), min(total, limit)


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def examine_folder(folder: Path) -> Iterator[Finding]:
    """Examine the disk and the file system of a folder, or of the nearest one that exists; leaves nothing behind."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not place.is_dir():
        yield Finding("disk", "problem", f"{place} is a file, not a folder", "name another folder with --folder")
        return
    yield _examine_space(place)
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix=".incv-doctor-") as scratch:
            yield from _try_file_system(Path(scratch), place)
    except OSError as error:
        fix = "choose another folder (--run-dir of `incv run`), or change its permissions"
        yield Finding("file system", "problem", f"{place} cannot be written to: {error.strerror}", fix)


def _examine_space(place: Path) -> Finding:
    usage, facts = shutil.disk_usage(place), os.statvfs(place)
    words = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free in {place}"
    if facts.f_files and facts.f_favail < _FEW_FILES:
        return Finding(
            "disk", "problem", f"{words}, but only {facts.f_favail:,} more files fit", "delete small files"
        )
    if usage.free < _GIB:
        return Finding("disk", "problem", words, "free some space, or choose another folder with --folder")
    if usage.free < _FEW_GIB_OF_DISK * _GIB:
        return Finding("disk", "note", words, "`incv run --dry-run` tells how much a run needs")
    return Finding("disk", "ok", words)


def _try_file_system(scratch: Path, place: Path) -> Iterator[Finding]:
    """Do in a folder what a run relies on: synced writes, renames over a file, locks, times."""
    kind = find_file_system(place)
    began = time.monotonic()
    new, old = scratch / "new", scratch / "old"
    old.write_bytes(b"old")
    _write_synced(new, b"new")
    seconds = time.monotonic() - began
    os.replace(new, old)
    problems = []
    if old.read_bytes() != b"new" or new.exists():
        problems.append("a rename over an existing file does not replace it")
    sync(scratch)
    skew = old.stat().st_mtime - time.time()
    lock = try_lock(scratch / "lock")
    if problems:
        fix = "choose a folder on another file system: a killed run could lose its checkpoints here"
        yield Finding("file system", "problem", f"{kind}: {'; '.join(problems)}", fix)
    elif lock:
        fix = "never start two runs in one run directory here, or mount with locks (NFS: without nolock)"
        yield Finding("file system", "note", f"{kind}: {lock}", fix)
    elif kind in ("tmpfs", "ramfs"):
        fix = "choose a folder on a disk if results must survive a reboot"
        yield Finding("file system", "note", f"{kind}: its content is in memory", fix)
    else:
        yield Finding(
            "file system", "ok", f"{kind}: writes, renames and locks work; a synced write takes {seconds:.3f} s"
        )
    if abs(skew) > _MOST_SKEW:
        fix = "synchronise the clocks (NTP): `incv doctor --run-dir` compares times of several machines"
        yield Finding("clock", "note", f"the file server's clock differs by {skew:+.0f} s", fix)
    if seconds > _SLOW_SYNC:
        fix = "write checkpoints less often (execution.checkpoint_every), or to a faster disk"
        yield Finding("disk speed", "note", f"a synced write of a few bytes takes {seconds:.1f} s", fix)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def try_lock(path: Path) -> str | None:
    """Lock a file twice; returns what is wrong, or None if the second attempt is refused as it should be."""
    with path.open("w") as first, path.open("w") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return f"files cannot be locked ({error.strerror})"
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return None
        return "locks have no effect"


def find_file_system(place: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Return the type of the file system of a folder, such as ext4, nfs4 or lustre."""
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return "unknown type"
    real = place.resolve()
    best: tuple[int, str] = (-1, "unknown type")
    for words in lines:
        if len(words) < 3:
            continue
        point = Path(words[1].encode().decode("unicode_escape"))  # spaces are written as \040
        if (real == point or point in real.parents) and len(point.parts) >= best[0]:
            best = (len(point.parts), words[2])
    return best[1]
