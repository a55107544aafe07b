"""Examines torch, the GPUs with their driver, NCCL, DALI and DeepSpeed; each failure becomes a finding."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

from trainer.doctor.finding import Finding
from trainer.records.manifest import installed_versions

_IMPORT_SECONDS = 180
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_REINSTALL = "install incv again with its constraints: pip install -c constraints.txt 'incv[demo]'"


def examine_libraries(environ: Mapping[str, str] = os.environ, imports: bool = True) -> Iterator[Finding]:
    """Examine the libraries in the order in which they build on each other.

    imports: also import the optional ones, which takes seconds: once for each machine is enough.
    """
    try:
        import torch
    except Exception as error:  # a broken installation raises OSError, ImportError or RuntimeError
        yield Finding("torch", "problem", f"cannot be imported: {_shorten(error)}", _REINSTALL)
        return
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    yield Finding("torch", "ok", f"{torch.__version__}, {built}; Python {sys.version.split()[0]}")
    yield from _examine_gpus(torch, environ)
    if not imports:
        return
    yield _examine_torchvision()
    yield _examine_nccl(torch)
    yield _examine_dali(torch.cuda.is_available())
    yield _examine_deepspeed()


def _examine_torchvision() -> Finding:
    if error := try_import("torchvision.ops"):
        return Finding("torchvision", "problem", f"does not fit this torch: {error}", _REINSTALL)
    return Finding("torchvision", "ok", installed_versions(["torchvision"]).get("torchvision", "installed"))


def _examine_gpus(torch: Any, environ: Mapping[str, str]) -> Iterator[Finding]:
    driver = find_driver()
    if driver is not None:
        yield Finding("driver", "ok", f"NVIDIA {driver}")
    if not torch.cuda.is_available():
        yield explain_missing_gpu(driver, torch.version.cuda, environ.get("CUDA_VISIBLE_DEVICES"))
        return
    for number in range(torch.cuda.device_count()):
        yield _try_gpu(torch, number)


def explain_missing_gpu(driver: str | None, cuda: str | None, visible: str | None) -> Finding:
    """Say why torch sees no GPU. driver: version of NVIDIA's driver; cuda: that torch was built for."""
    limits = "training works on the CPU, for small data sets"
    if visible is not None and visible.strip() in ("", "-1"):
        return Finding(
            "GPU", "note", f"CUDA_VISIBLE_DEVICES={visible} hides all GPUs; {limits}", "unset it to use GPUs"
        )
    if driver is None:
        fix = "to use a GPU, run on a machine with an NVIDIA driver; in a container, pass its GPUs (--gpus all)"
        return Finding("GPU", "note", f"none: this machine has no NVIDIA driver; {limits}", fix)
    if cuda is None:
        fix = "install a build for CUDA: https://pytorch.org/get-started/locally"
        return Finding("GPU", "problem", "there is a driver, but torch was built without CUDA", fix)
    return Finding(
        "GPU",
        "problem",
        f"driver {driver} is installed, but torch, built for CUDA {cuda}, finds no usable GPU",
        f"run nvidia-smi, which must list the GPUs; update the driver to one for CUDA {cuda}, or install a torch "
        "built for an older CUDA",
    )


def _try_gpu(torch: Any, number: int) -> Finding:
    """Compute something on a GPU and compare it with the CPU."""
    subject = f"GPU {number}"
    try:
        device = torch.device("cuda", number)
        free, total = torch.cuda.mem_get_info(device)
        matrix = torch.arange(256.0).reshape(16, 16) / 256
        difference = float(((matrix.to(device) @ matrix.to(device)).cpu() - matrix @ matrix).abs().max())
        name = torch.cuda.get_device_name(device)
    except Exception as error:  # CUDA errors of all kinds
        fix = "run nvidia-smi; reset or reboot the machine, or leave the GPU out with CUDA_VISIBLE_DEVICES"
        return Finding(subject, "problem", f"cannot compute: {_shorten(error)}", fix)
    gib = f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
    if difference > 0.01:
        return Finding(subject, "problem", f"{name} computes wrong products (by {difference:g})", "replace the GPU")
    if free < total / 2:
        return Finding(subject, "note", f"{name}, {gib}: another process uses it", "find it with nvidia-smi")
    return Finding(subject, "ok", f"{name}, {gib}")


def _examine_nccl(torch: Any) -> Finding:
    if torch.version.cuda is None:
        return Finding("NCCL", "ok", "not in this torch, and not needed without GPUs: processes use gloo")
    try:
        found = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as error:  # the library cannot be loaded
        return Finding("NCCL", "problem", f"cannot be loaded: {_shorten(error)}", _REINSTALL)
    return Finding("NCCL", "ok", found)


def _examine_dali(has_gpu: bool) -> Finding:
    name = find_distribution("nvidia-dali-cuda")
    if name is None:
        level = "note" if has_gpu else "ok"
        fix = "pip install 'incv[dali]' decodes JPEGs on the GPU, for large images" if has_gpu else ""
        return Finding("DALI", level, "not installed: images are decoded on the CPU", fix)  # type: ignore[arg-type]
    if error := try_import("nvidia.dali.fn"):
        fix = "pip install --force-reinstall 'incv[dali]', or remove it: the CPU then decodes the images"
        return Finding("DALI", "problem", f"{name} {version(name)} cannot be imported: {error}", fix)
    return Finding("DALI", "ok", f"{name} {version(name)}")


def _examine_deepspeed() -> Finding:
    try:
        found = version("deepspeed")
    except PackageNotFoundError:
        return Finding("DeepSpeed", "ok", "not installed; only `accelerate launch` with a DeepSpeed file needs it")
    if error := try_import("deepspeed"):
        fix = "pip install --force-reinstall 'incv[deepspeed]'; runs without DeepSpeed are not affected"
        return Finding("DeepSpeed", "note", f"{found} cannot be imported: {error}", fix)
    return Finding("DeepSpeed", "ok", found)


def try_import(module: str) -> str | None:
    """Import a module in a process of its own, which may crash; returns the error, or None."""
    try:
        tried = subprocess.run(
            [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, timeout=_IMPORT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"the import takes more than {_IMPORT_SECONDS} s"
    if tried.returncode == 0:
        return None
    lines = [line for line in tried.stderr.splitlines() if line.strip()]
    return _shorten(lines[-1]) if lines else f"the process ended with {tried.returncode}"


def find_driver(file: Path = _DRIVER_FILE) -> str | None:
    """Return the version of NVIDIA's driver; None if there is none."""
    try:
        words = file.read_text().split("\n")[0].split()
    except OSError:
        words = []
    numbers = [word for word in words if word[0].isdigit() and "." in word]
    if numbers:
        return numbers[0]
    answer = query_gpus("driver_version")
    return answer[0] if answer else None


def query_gpus(fields: str) -> list[str]:
    """Return what nvidia-smi says of each GPU; [] without it."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def find_distribution(prefix: str) -> str | None:
    """Return the name of the installed package that begins like this; it may name the version of CUDA."""
    names = (str(each.metadata["Name"]) for each in distributions())
    return next((name for name in names if name.lower().startswith(prefix)), None)


def _shorten(error: object) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]
