"""Write tensors to a safetensors file, with the GIL released."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from shards.durable import hash_file


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> str:
    """Write tensors that are in host memory; return the SHA-256 of the file.

    The file's bytes do not depend on the order of the tensors, provided that `metadata` has at most one entry.
    """
    path.touch()
    mode = path.stat().st_mode  # safetensors would set it to 0600, whatever the umask
    try:
        save_file(_separate(tensors), path, metadata)
    except SafetensorError as error:
        raise _as_os_error(error, path) from error
    path.chmod(mode)
    return hash_file(path)


def _separate(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make every tensor contiguous and give it its own memory, as safetensors requires; tied weights are copied."""
    separate: dict[str, torch.Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        dense = tensor.detach().contiguous()
        at = dense.untyped_storage().data_ptr()
        separate[name] = dense.clone() if at in taken else dense
        taken.add(at)
    return separate


def _as_os_error(error: SafetensorError, path: Path) -> Exception:
    """Convert a safetensors error to an OSError if its text contains an OS error number, as for a full disk."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return error if found is None else OSError(int(found[1]), os.strerror(int(found[1])), str(path))
