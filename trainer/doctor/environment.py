"""`incv env`: the facts about a machine that a bug report needs; does not import torch."""

import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path

from shards.errors import ConfigError
from trainer.distributed.launch import detect_launch
from trainer.doctor.libraries import find_distribution, find_driver, query_gpus
from trainer.doctor.storage import count_cores, find_file_system, read_memory
from trainer.records.manifest import installed_versions
from trainer.report.text import printable

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_SHOWN_VARIABLES = re.compile(
    r"(CUDA_|NCCL_|GLOO_|OMP_|MKL_|TORCH_|TORCHELASTIC_|PYTORCH_|ACCELERATE_|INCV_)\w+"
    r"|RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|SLURM_(JOB_ID|NNODES|NTASKS|PROCID|LOCALID|RESTART_COUNT|STEP_NUM_TASKS)"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


def describe_environment(environ: Mapping[str, str] = os.environ) -> str:
    """Return one fact per line, `name: value`. The home folder is written as ~, and no secrets are shown."""
    facts = {
        "incv": installed_versions(["incv"]).get("incv", "not installed (run from a checkout)"),
        "python": f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}",
        "system": f"{platform.platform()}, {platform.machine()}",
        "cpu": f"{_find_cpu()}, {count_cores()} of {os.cpu_count()} cores",
        "memory": _describe_memory(),
        "folder": f"{Path.cwd()} ({find_file_system(Path.cwd())})",
        "torch": _describe_torch(),
        "driver": find_driver() or "none",
        "gpus": "; ".join(query_gpus("name,memory.total")) or "none that nvidia-smi lists",
        "launcher": _describe_launcher(environ),
        "packages": ", ".join(f"{name} {found}" for name, found in sorted(_find_packages().items())),
        "variables": _describe_variables(environ),
    }
    return "\n".join(f"{name}: {printable(_hide_home(value, environ))}" for name, value in facts.items())


def _find_cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _describe_memory() -> str:
    available, total = read_memory()
    if available is None or total is None:
        return "unknown"
    return f"{available / 2**30:.1f} of {total / 2**30:.1f} GiB available"


def _describe_torch() -> str:
    """Read the version from torch's version.py: importing torch takes seconds, and may be what fails."""
    try:
        spec = find_spec("torch")
        text = Path(str(spec.origin)).with_name("version.py").read_text() if spec is not None else ""
    except (OSError, ValueError):
        text = ""
    found = dict(re.findall(r"^(__version__|cuda)\b[^=\n]*= *'([^'\n]*)'", text, re.MULTILINE))
    if "__version__" not in found:
        return "not installed"
    nccl = find_distribution("nvidia-nccl")
    parts = [found["__version__"], f"CUDA {found['cuda']}" if "cuda" in found else "without CUDA"]
    parts += [f"NCCL {installed_versions([nccl])[nccl]}"] if nccl else []
    return ", ".join(parts)


def _describe_launcher(environ: Mapping[str, str]) -> str:
    try:
        launch = detect_launch(environ)
    except ConfigError as error:
        return f"error: {error}"
    return f"{launch.launcher}, rank {launch.rank} of {launch.size}"


def _find_packages() -> dict[str, str]:
    """Return the versions of all packages that incv depends on, optional ones included."""
    try:
        wanted = requires("incv") or []
    except PackageNotFoundError:
        wanted = ["torch", "torchvision", "timm", "numpy", "pyarrow", "pillow", "accelerate"]
    names = {match[0] for line in wanted if (match := _NAME.match(line))}
    return {name: found for name, found in installed_versions(sorted(names)).items() if name != "python"}


def _describe_variables(environ: Mapping[str, str]) -> str:
    shown = {
        name: "(hidden)" if _SECRET.search(name) else value
        for name, value in sorted(environ.items())
        if _SHOWN_VARIABLES.fullmatch(name)
    }
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in shown.items()) or "none of interest"


def _hide_home(text: str, environ: Mapping[str, str]) -> str:
    home = environ.get("HOME", "").rstrip("/")
    return text.replace(f"{home}/", "~/") if home else text
