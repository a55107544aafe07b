"""`incv env`: the facts about a machine that a bug report needs, from incv and from torch.utils.collect_env."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from shards.errors import ConfigError
from trainer.distributed.launch import detect_launch
from trainer.doctor.machine import examine_memory, find_file_system
from trainer.records.manifest import installed_versions
from trainer.report.text import printable

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_SHOWN_VARIABLES = re.compile(
    r"(CUDA_|NCCL_|GLOO_|OMP_|MKL_|TORCH_|TORCHELASTIC_|PYTORCH_|ACCELERATE_|INCV_)\w+"
    r"|RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|SLURM_(JOB_ID|NNODES|NTASKS|PROCID|LOCALID|RESTART_COUNT|STEP_NUM_TASKS)"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_UNINTERESTING = re.compile(r"Flags:|Vulnerability |Collecting environment")


def describe_environment(environ: Mapping[str, str] = os.environ) -> str:
    """Return one fact per line, `name: value`. The home folder is written as ~, and no secrets are shown."""
    folder = Path.cwd()
    facts = {
        "incv": installed_versions(["incv"]).get("incv", "not installed (run from a checkout)"),
        "python": sys.executable,
        "memory": examine_memory().words,
        "folder": f"{folder} ({find_file_system(folder)})",
        "launcher": _describe_launcher(environ),
        "packages": _list_packages(),
        "variables": _list_variables(environ),
    }
    lines = [f"{name}: {value}" for name, value in facts.items()] + _describe_torch()
    home = environ.get("HOME", "").rstrip("/")
    return "\n".join(printable(line.replace(f"{home}/", "~/") if home else line) for line in lines)


def _describe_torch() -> list[str]:
    """Return the facts that torch collects. It does so in a process of its own, as importing it may be what fails."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.utils.collect_env"]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        return [f"torch: {found.stderr.strip().splitlines()[-1] if found.stderr.strip() else 'cannot be imported'}"]
    return [line for line in found.stdout.splitlines() if line and not _UNINTERESTING.match(line)]


def _describe_launcher(environ: Mapping[str, str]) -> str:
    try:
        launch = detect_launch(environ)
    except ConfigError as error:
        return f"error: {error}"
    return f"{launch.launcher}, rank {launch.rank} of {launch.size}"


def _list_packages() -> str:
    """List the versions of the packages that incv depends on, optional ones included."""
    try:
        wanted = requires("incv") or []
    except PackageNotFoundError:
        wanted = []
    names = {match[0] for line in wanted if (match := _NAME.match(line))}
    return ", ".join(f"{name} {found}" for name, found in installed_versions(sorted(names)).items())


def _list_variables(environ: Mapping[str, str]) -> str:
    shown = {
        name: "(hidden)" if _SECRET.search(name) else value
        for name, value in sorted(environ.items())
        if _SHOWN_VARIABLES.fullmatch(name)
    }
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in shown.items()) or "none of interest"
