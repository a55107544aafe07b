"""Who started this process, as what rank of how many: torchrun, accelerate, srun, or nobody."""

import os
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shards.errors import ConfigError

Launcher = Literal["alone", "torchrun", "accelerate", "srun"]
_PRECISION_NAMES = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


@dataclass(frozen=True)
class Launch:
    """What a launcher tells its processes through the environment."""

    launcher: Launcher
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master_address: str | None = None
    """Host and port of rank 0; None: this process has no company and needs none."""
    master_port: int = 0

    @property
    def stop_exits_zero(self) -> bool:
        """Whether an agent would restart a worker that leaves with another code than 0."""
        return self.launcher in ("torchrun", "accelerate") and self.master_address is not None


def detect_launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """Read a launcher's variables; raises ConfigError where they contradict themselves."""
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in environ
    if "RANK" in environ:
        return _of_torch(environ, "accelerate" if by_accelerate else "torchrun")
    if by_accelerate:
        # accelerate sets it only where more than one process was asked for; a job script may have set it too.
        if "MASTER_ADDR" in environ and not _launcher_has("MASTER_ADDR"):
            raise ConfigError(
                "accelerate was asked for several processes and started one (`--cpu --num_processes N` does that): "
                "say `ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes N ...` or take a file of "
                "recipes/accelerate"
            )
        return Launch("accelerate")
    if "SLURM_STEP_NUM_TASKS" in environ and "SLURM_PROCID" in environ:
        return _of_slurm(environ)
    return Launch("alone")


def _of_torch(environ: Mapping[str, str], launcher: Launcher) -> Launch:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in environ]
    if missing:
        raise ConfigError(
            f"RANK is set, {', '.join(missing)} not: start with torchrun, accelerate launch or srun, which set all "
            "of them, or unset RANK"
        )
    rank, size, local = (_number(environ, name) for name in names[:3])
    local_size = _number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else local + 1
    return Launch(launcher, rank, size, local, local_size, environ["MASTER_ADDR"], _number(environ, "MASTER_PORT"))


def _of_slurm(environ: Mapping[str, str]) -> Launch:
    size = _number(environ, "SLURM_STEP_NUM_TASKS")
    if size == 1:
        return Launch("srun")
    rank, local = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_LOCALID")
    every = _unfolded(environ.get("SLURM_STEP_TASKS_PER_NODE", str(local + 1)))
    here = every[min(_number(environ, "SLURM_NODEID"), len(every) - 1)] if "SLURM_NODEID" in environ else every[0]
    master_address = environ.get("MASTER_ADDR") or _first_host(environ.get("SLURM_STEP_NODELIST", ""))
    # Jobs that share a node must not share a port, nor two steps of a job.
    of_job = 20_000 + (_number(environ, "SLURM_JOB_ID") * 7 + _number(environ, "SLURM_STEP_ID")) % 20_000
    port = _number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else of_job
    return Launch("srun", rank, size, local, max(here, local + 1), master_address, port)


def _unfolded(counts: str) -> list[int]:
    """Slurm's `2(x3),1` as [2, 2, 2, 1]."""
    unfolded: list[int] = []
    for part in counts.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        unfolded += [int(count)] * int(times or 1)
    return unfolded


def _launcher_has(name: str) -> bool:
    """Whether the process that started this one was itself started with the variable."""
    try:
        return f"{name}=".encode() in b"\0" + Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return False


def _first_host(nodes: str) -> str:
    """The address of the first of Slurm's nodes; `n[1-3,7]` is for scontrol to unfold."""
    try:
        first = _scontrol("show", "hostnames", nodes).split()[0]
        facts = _scontrol("show", "node", "-o", first).split()
    except (OSError, subprocess.SubprocessError, IndexError):
        raise ConfigError(
            f"cannot find the address of the first of the nodes {nodes!r} by scontrol: set MASTER_ADDR to it"
        ) from None
    addresses = [fact.removeprefix("NodeAddr=") for fact in facts if fact.startswith("NodeAddr=")]
    return addresses[0] if addresses else first


def _scontrol(*arguments: str) -> str:
    return subprocess.run(["scontrol", *arguments], capture_output=True, text=True, check=True, timeout=30).stdout


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise ConfigError(f"the launcher's variable {name} is {environ.get(name)!r}, not a number") from None


def check_world_size(launch: Launch, promised: int | None) -> None:
    """The world the recipe was promised is the world that came."""
    if promised is not None and launch.size != promised:
        raise ConfigError(
            f"execution.world promises {promised} processes, and {launch.launcher} started {launch.size}: check the "
            "launcher's number of nodes and processes, or correct execution.world"
        )


def check_launcher_options(precision: str, environ: Mapping[str, str] = os.environ) -> None:
    """The recipe decides how is computed; a launcher that says otherwise would be obeyed by nobody."""
    said = environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if said not in ("no", _PRECISION_NAMES[precision]):
        raise ConfigError(
            f"accelerate was started with mixed_precision {said}, and the recipe says precision: {precision}: the "
            "recipe decides, so start accelerate with `--mixed_precision no`, or change the recipe"
        )
    dynamo = environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if dynamo != "no":
        raise ConfigError(f"accelerate was started with dynamo_backend {dynamo}: start it with `--dynamo_backend no`")
    parts = environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if parts not in ("1", "auto"):
        raise ConfigError(
            f"accelerate was started with gradient_accumulation_steps {parts}: leave it at 1 and set batch.micro"
        )


def get_launch_time(environ: Mapping[str, str] = os.environ) -> float:
    """Unix time at which the launcher started, not this worker: agents restart workers."""
    if "INCV_LAUNCHED" in environ:
        try:
            return float(environ["INCV_LAUNCHED"])
        except ValueError:
            raise ConfigError(f"INCV_LAUNCHED is {environ['INCV_LAUNCHED']!r}, not a Unix time") from None
    process = os.getppid() if detect_launch(environ).stop_exits_zero else os.getpid()
    return _started(process)


def get_launch_id() -> str:
    """The launcher's process, by which workers that it starts again know that they are the same launch's."""
    parent = os.getppid()
    return f"{hostname()} {parent} {os.environ.get('INCV_LAUNCHED') or _started(parent)}"


def _started(process: int) -> float:
    """When a process began, from /proc; the file's time where there is no more to know."""
    try:
        ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, StopIteration, ValueError):
        return Path(f"/proc/{process}").stat().st_mtime if Path(f"/proc/{process}").exists() else 0.0


def hostname() -> str:
    """This machine's name; Slurm's name of the node where there is one."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
