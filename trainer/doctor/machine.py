"""Examines the libraries, GPUs, memory and disk of a machine, without torch where it can."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shards.durable import sync
from trainer.report.text import choose_form, printable

Level = Literal["ok", "note", "problem"]
_WIDTH = 100
_GIB = 2**30
_FEW_GIB_OF_DISK, _FEW_GIB_OF_MEMORY = 20, 4
_FEW_FILES = 10_000
_SMALL_SHM = _GIB  # NCCL's buffers between the processes of a node
_MOST_SKEW = 5.0  # seconds between the clocks of the file server and this machine
_SLOW_SYNC = 0.5  # seconds
_IMPORT_SECONDS = 180
_REINSTALL = "install it again in the version of constraints.txt: pip install --force-reinstall -c constraints.txt"


@dataclass(frozen=True)
class Finding:
    """What was examined and found. A note limits what can be run here; a problem would end or harm a run."""

    subject: str
    level: Level
    words: str
    fix: str = ""
    """What to do about a note or a problem."""


def format_findings(findings: Sequence[Finding]) -> str:
    """Format a line for each finding, with its fix below, and the verdict."""
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        head = f"{finding.level:<7}  {finding.subject:<{width}}  "
        lines += _indent(printable(finding.words), head)
        lines += _indent(printable(f"fix: {finding.fix}"), " " * len(head)) if finding.fix else []
    return "\n".join([*lines, "", judge_machine(findings)])


def _indent(words: str, head: str) -> list[str]:
    lines = textwrap.wrap(words, _WIDTH - len(head), break_long_words=False, break_on_hyphens=False)
    return [f"{' ' * len(head) if number else head}{line}" for number, line in enumerate(lines)]


def judge_machine(findings: Sequence[Finding]) -> str:
    """Return the verdict in one sentence."""
    problems = list(dict.fromkeys(finding.subject for finding in findings if finding.level == "problem"))
    notes = sum(finding.level == "note" for finding in findings)
    if problems:
        count = f"{len(problems)} {choose_form(len(problems), 'problem', 'problems')}"
        return f"verdict: {count} to solve before a run: {', '.join(problems)}."
    if notes:
        limits = choose_form(notes, "note", f"{notes} notes")
        return f"verdict: runs will work here, within the limits of the {limits}."
    return "verdict: all is well."


# --- libraries and GPUs ---------------------------------------------------------------------------------------


def examine_libraries(environ: Mapping[str, str] = os.environ, imports: bool = True) -> Iterator[Finding]:
    """Examine the libraries in the order in which they build on each other.

    imports: also import the optional ones, which takes seconds: once for each machine is enough.
    """
    try:
        import torch
        from torch.utils import collect_env
    except Exception as error:  # a broken installation raises OSError, ImportError or RuntimeError
        yield Finding("torch", "problem", f"cannot be imported: {_shorten(error)}", _REINSTALL)
        return
    cuda = torch.version.cuda
    built = f"built for CUDA {cuda}" if cuda else "built without CUDA"
    yield Finding("torch", "ok", f"{torch.__version__}, {built}; Python {sys.version.split()[0]}")
    driver = collect_env.get_nvidia_driver_version(collect_env.run)
    if driver:
        yield Finding("driver", "ok", f"NVIDIA {driver}")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield from (_try_gpu(torch, number) for number in range(gpus))
    if not gpus:
        yield explain_missing_gpu(driver, cuda, environ.get("CUDA_VISIBLE_DEVICES"))
    if not imports:
        return
    yield examine_library("torchvision.ops", Finding("torchvision", "problem", "not installed", _REINSTALL))
    if cuda:
        yield Finding("NCCL", "ok", ".".join(map(str, torch.cuda.nccl.version())))
    else:
        yield Finding("NCCL", "ok", "not in this torch, and not needed without GPUs: processes use gloo")
    fix = "pip install 'incv[dali]' decodes JPEGs on the GPU, for large images" if gpus else ""
    dali = Finding("DALI", "note" if gpus else "ok", "not installed: images are decoded on the CPU", fix)
    yield examine_library("nvidia.dali.fn", dali)
    words = "not installed; only `accelerate launch` with a DeepSpeed file needs it"
    yield examine_library("deepspeed", Finding("DeepSpeed", "ok", words), if_broken="note")


def explain_missing_gpu(driver: str | None, cuda: str | None, visible: str | None) -> Finding:
    """Say why torch sees no GPU. driver: version of NVIDIA's driver; cuda: that torch was built for."""
    limits = "training works on the CPU, for small data sets"
    if visible is not None and visible.strip() in ("", "-1"):
        words = f"CUDA_VISIBLE_DEVICES={visible} hides all GPUs; {limits}"
        return Finding("GPU", "note", words, "unset it to use GPUs")
    if not driver:
        fix = "to use a GPU, run on a machine with an NVIDIA driver; in a container, pass its GPUs (--gpus all)"
        return Finding("GPU", "note", f"none: this machine has no NVIDIA driver; {limits}", fix)
    if cuda is None:
        fix = "install a build for CUDA: https://pytorch.org/get-started/locally"
        return Finding("GPU", "problem", "there is a driver, but torch was built without CUDA", fix)
    words = f"driver {driver} is installed, but torch, built for CUDA {cuda}, finds no usable GPU"
    return Finding("GPU", "problem", words, f"update the driver to one for CUDA {cuda}, or install an older torch")


def _try_gpu(torch: Any, number: int) -> Finding:
    """Compute something on a GPU and compare it with the CPU."""
    subject = f"GPU {number}"
    try:
        device = torch.device("cuda", number)
        free, total = torch.cuda.mem_get_info(device)
        matrix = torch.arange(256.0).reshape(16, 16) / 256
        difference = float(((matrix.to(device) @ matrix.to(device)).cpu() - matrix @ matrix).abs().max())
        words = f"{torch.cuda.get_device_name(device)}, {free / _GIB:.0f} of {total / _GIB:.0f} GiB free"
    except Exception as error:  # CUDA errors of all kinds
        fix = "run nvidia-smi; reset or reboot the machine, or leave the GPU out with CUDA_VISIBLE_DEVICES"
        return Finding(subject, "problem", f"cannot compute: {_shorten(error)}", fix)
    if difference > 0.01:
        return Finding(subject, "problem", f"{words}; wrong products (by {difference:g})", "replace the GPU")
    if free < total / 2:
        return Finding(subject, "note", f"{words}: another process uses it", "find it with nvidia-smi")
    return Finding(subject, "ok", words)


def examine_library(module: str, absent: Finding, if_broken: Level = "problem") -> Finding:
    """Import a module in a process of its own, which may crash. absent: the finding if it is not installed."""
    package = module.rpartition(".")[0] or module
    command = [sys.executable, "-c", f"import {module}; print({package}.__version__)"]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        return Finding(absent.subject, if_broken, f"the import takes more than {_IMPORT_SECONDS} s", _REINSTALL)
    lines = (tried.stderr if tried.returncode else tried.stdout).strip().splitlines()
    last = lines[-1][:300] if lines else f"the process ended with {tried.returncode}"
    if tried.returncode == 0:
        return Finding(absent.subject, "ok", last)
    if any(last.endswith(f"No module named '{name}'") for name in (package, package.partition(".")[0])):
        return absent
    return Finding(absent.subject, if_broken, f"cannot be imported: {last}", _REINSTALL)


def _shorten(error: object) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


# --- memory and disk ------------------------------------------------------------------------------------------


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


def examine_shared_memory(processes: int, path: Path = Path("/dev/shm")) -> Iterator[Finding]:
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
    usage, facts = shutil.disk_usage(place), os.statvfs(place)
    words = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free in {place}"
    if facts.f_files and facts.f_favail < _FEW_FILES:
        words = f"{words}, but only {facts.f_favail:,} more files fit"
        yield Finding("disk", "problem", words, "delete small files")
    elif usage.free < _GIB:
        yield Finding("disk", "problem", words, "free some space, or choose another folder with --folder")
    elif usage.free < _FEW_GIB_OF_DISK * _GIB:
        yield Finding("disk", "note", words, "`incv run --dry-run` tells how much a run needs")
    else:
        yield Finding("disk", "ok", words)
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix=".incv-doctor-") as scratch:
            yield from _try_file_system(Path(scratch), find_file_system(place))
    except OSError as error:
        fix = "choose another folder (--run-dir of `incv run`), or change its permissions"
        yield Finding("file system", "problem", f"{place} cannot be written to: {error.strerror}", fix)


def _try_file_system(scratch: Path, kind: str) -> Iterator[Finding]:
    """Do in a folder what a run relies on: synced writes, renames over a file, locks, times."""
    new, old = scratch / "new", scratch / "old"
    began = time.monotonic()
    old.write_bytes(b"old")
    with new.open("wb") as file:
        file.write(b"new")
        file.flush()
        os.fsync(file.fileno())
    seconds = time.monotonic() - began
    os.replace(new, old)
    replaced = old.read_bytes() == b"new" and not new.exists()
    sync(scratch)
    skew = old.stat().st_mtime - time.time()
    if not replaced:
        words = f"{kind}: a rename over an existing file does not replace it"
        fix = "choose a folder on another file system: a killed run could lose its checkpoints here"
        yield Finding("file system", "problem", words, fix)
    elif lock := try_lock(scratch / "lock"):
        fix = "never start two runs in one run directory here, or mount with locks (NFS: without nolock)"
        yield Finding("file system", "note", f"{kind}: {lock}", fix)
    elif kind in ("tmpfs", "ramfs"):
        fix = "choose a folder on a disk if results must survive a reboot"
        yield Finding("file system", "note", f"{kind}: its content is in memory", fix)
    else:
        words = f"{kind}: writes, renames and locks work; a synced write takes {seconds:.3f} s"
        yield Finding("file system", "ok", words)
    if abs(skew) > _MOST_SKEW:
        fix = "synchronise the clocks (NTP): `incv doctor --run-dir` compares times of several machines"
        yield Finding("clock", "note", f"the file server's clock differs by {skew:+.0f} s", fix)
    if seconds > _SLOW_SYNC:
        fix = "write checkpoints less often (execution.checkpoint_every), or to a faster disk"
        yield Finding("disk speed", "note", f"a synced write of a few bytes takes {seconds:.1f} s", fix)


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
    kind, depth, real = "unknown type", -1, place.resolve()
    for line in mounts.read_text().splitlines() if mounts.exists() else ():
        _, point, found, *_ = [*line.split(), "", "", ""]
        mounted = Path(point.encode().decode("unicode_escape"))  # spaces are written as \040
        if found and mounted in (real, *real.parents) and len(mounted.parts) >= depth:
            kind, depth = found, len(mounted.parts)
    return kind
