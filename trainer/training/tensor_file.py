"""Tensors as a safetensors file, written with the interpreter lock released."""

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> str:
    """Write tensors that are in host memory; returns the SHA-256 of the file.

    The same tensors make the same bytes, in any order; so does metadata of one entry.
    """
    path.touch()
    mode = path.stat().st_mode  # safetensors would leave 0600, whatever the umask
    try:
        save_file(_separate(tensors), path, metadata)
    except SafetensorError as error:
        raise _as_os_error(error, path) from error
    path.chmod(mode)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _separate(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous, and each in memory of its own (tied weights are not): safetensors refuses all others."""
    separate: dict[str, torch.Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        dense = tensor.detach().contiguous()
        at = dense.untyped_storage().data_ptr()
        separate[name] = dense.clone() if at in taken else dense
        taken.add(at)
    return separate


def _as_os_error(error: SafetensorError, path: Path) -> Exception:
    """safetensors names the cause, a full disk for one, only in its text."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return error if found is None else OSError(int(found[1]), os.strerror(int(found[1])), str(path))
