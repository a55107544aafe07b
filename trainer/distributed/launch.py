"""Detect the launcher (torchrun, accelerate, srun or none) and read rank and world size from its environment; set
how CPU threads wait. Does not import torch.
"""

import os
import socket
import subprocess
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shards.errors import ConfigError

WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables that say how OpenMP's threads wait: of any OpenMP, of GNU's and of Intel's and LLVM's."""

Launcher = Literal["alone", "torchrun", "accelerate", "srun"]
_PRECISION_NAMES = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


@dataclass(frozen=True)
class Launch:
    """Rank, world size and master address, as the launcher set them in the environment."""

    launcher: Launcher
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master_address: str | None = None
    """Host of rank 0; None for a single process, which has no process group."""
    master_port: int = 0

    @property
    def stop_exits_zero(self) -> bool:
        """Whether a stop must exit with code 0, because the launcher's agent would restart the worker otherwise."""
        return self.launcher in ("torchrun", "accelerate") and self.master_address is not None


def detect_launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """Read the launcher's environment variables; raise ConfigError if they contradict each other."""
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in environ
    if "RANK" in environ:
        return _from_torch_env(environ, "accelerate" if by_accelerate else "torchrun")
    if by_accelerate:
        # accelerate sets MASTER_ADDR only when launching several processes; a job script may have set it too.
        if "MASTER_ADDR" in environ and not _parent_has_variable("MASTER_ADDR"):
            raise ConfigError(
                "accelerate was configured for several processes but started one, as `--cpu --num_processes N` does: "
                "run `ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes N ...`, or use a config "
                "file from recipes/accelerate"
            )
        return Launch("accelerate")
    if "SLURM_STEP_NUM_TASKS" in environ and "SLURM_PROCID" in environ:
        return _from_slurm_env(environ)
    return Launch("alone")


def _from_torch_env(environ: Mapping[str, str], launcher: Launcher) -> Launch:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in environ]
    if missing:
        raise ConfigError(
            f"RANK is set without {', '.join(missing)}: start with torchrun, accelerate launch or srun, which set "
            "all of them, or unset RANK"
        )
    rank, size, local = (_read_int(environ, name) for name in names[:3])
    local_size = _read_int(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else local + 1
    return Launch(launcher, rank, size, local, local_size, environ["MASTER_ADDR"], _read_int(environ, "MASTER_PORT"))


def _from_slurm_env(environ: Mapping[str, str]) -> Launch:
    size = _read_int(environ, "SLURM_STEP_NUM_TASKS")
    if size == 1:
        return Launch("srun")
    rank, local = _read_int(environ, "SLURM_PROCID"), _read_int(environ, "SLURM_LOCALID")
    tasks_per_node = _expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", str(local + 1)))
    node = min(_read_int(environ, "SLURM_NODEID"), len(tasks_per_node) - 1) if "SLURM_NODEID" in environ else 0
    master_address = environ.get("MASTER_ADDR") or _find_first_host(environ.get("SLURM_STEP_NODELIST", ""))
    # Jobs on one node, and steps of one job, need different ports.
    default_port = 20_000 + (_read_int(environ, "SLURM_JOB_ID") * 7 + _read_int(environ, "SLURM_STEP_ID")) % 20_000
    port = _read_int(environ, "MASTER_PORT") if "MASTER_PORT" in environ else default_port
    return Launch("srun", rank, size, local, max(tasks_per_node[node], local + 1), master_address, port)


def _expand_counts(counts: str) -> list[int]:
    """Expand Slurm's `2(x3),1` to [2, 2, 2, 1]."""
    expanded: list[int] = []
    for part in counts.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        expanded += [int(count)] * int(times or 1)
    return expanded


def _parent_has_variable(name: str) -> bool:
    """Whether the parent process already had the variable in its own environment."""
    try:
        return f"\0{name}=".encode() in b"\0" + Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return False


def _find_first_host(nodes: str) -> str:
    """Return the address of the first node in a Slurm node list such as `n[1-3,7]`, as expanded by scontrol."""
    try:
        first = _run_scontrol("show", "hostnames", nodes).split()[0]
        facts = _run_scontrol("show", "node", "-o", first).split()
    except (OSError, subprocess.SubprocessError, IndexError):
        raise ConfigError(
            f"scontrol did not return the address of the first node of {nodes!r}: set MASTER_ADDR to that address"
        ) from None
    addresses = [fact.removeprefix("NodeAddr=") for fact in facts if fact.startswith("NodeAddr=")]
    return addresses[0] if addresses else first


def _run_scontrol(*arguments: str) -> str:
    return subprocess.run(["scontrol", *arguments], capture_output=True, text=True, check=True, timeout=30).stdout


def _read_int(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise ConfigError(
            f"the launcher's variable {name} is {environ.get(name)!r}, not a number: unset it, or start "
            "the run with a launcher that sets it"
        ) from None


def check_world_size(launch: Launch, expected: int | None) -> None:
    """Raise ConfigError unless the launcher started `expected` processes (execution.world); None: any number."""
    if expected is not None and launch.size != expected:
        raise ConfigError(
            f"execution.world is {expected}, but the launcher ({launch.launcher}) started {launch.size} processes: "
            "check its number of nodes and processes, or correct execution.world"
        )


def check_launcher_options(precision: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if accelerate was given an option that belongs in the recipe, as it would have no effect."""
    mixed_precision = environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if mixed_precision not in ("no", _PRECISION_NAMES[precision]):
        raise ConfigError(
            f"accelerate was started with mixed_precision {mixed_precision}, but the recipe sets `precision: "
            f"{precision}`: start accelerate with `--mixed_precision no`, or change the recipe"
        )
    dynamo = environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if dynamo != "no":
        raise ConfigError(f"accelerate was started with dynamo_backend {dynamo}: start it with `--dynamo_backend no`")
    steps = environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps not in ("1", "auto"):
        raise ConfigError(
            f"accelerate was started with gradient_accumulation_steps {steps}: leave it at 1 and set batch.micro"
        )


def get_launch_time(environ: Mapping[str, str] = os.environ) -> float:
    """Return the Unix time at which the launcher started (not this worker, which an agent may have restarted)."""
    if "INCV_LAUNCHED" in environ:
        try:
            return float(environ["INCV_LAUNCHED"])
        except ValueError:
            raise ConfigError(
                f"INCV_LAUNCHED is {environ['INCV_LAUNCHED']!r}, not a Unix time: unset it, or set it "
                "to `$(date +%s)`"
            ) from None
    process = os.getppid() if detect_launch(environ).stop_exits_zero else os.getpid()
    return _process_start_time(process)


def get_launch_id() -> str:
    """Return an id of the launcher process, which stays the same when an agent restarts workers."""
    parent = os.getppid()
    return f"{hostname()} {parent} {os.environ.get('INCV_LAUNCHED') or _process_start_time(parent)}"


def _process_start_time(process: int) -> float:
    """Return the Unix time at which a process started, from /proc, or else the mtime of its /proc entry."""
    try:
        ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, StopIteration, ValueError):
        return Path(f"/proc/{process}").stat().st_mtime if Path(f"/proc/{process}").exists() else 0.0


def hostname() -> str:
    """Return Slurm's name for this node, or the host name if Slurm is not used."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def let_waiting_threads_sleep(environ: MutableMapping[str, str]) -> None:
    """Choose OpenMP's passive wait policy, unless the user has set one. Call it before torch is imported.

    By default, threads spin while they wait at the end of a parallel loop. If other processes need the cores, the
    threads that spin take them from the one that is waited for. Results do not depend on the policy.
    """
    if not any(name in environ for name in WAIT_VARIABLES):
        environ["OMP_WAIT_POLICY"] = "PASSIVE"
