"""Tensors as a safetensors file, written tensor by tensor so that other threads go on meanwhile.

The library's own `save` holds the interpreter in one piece, and so does its `save_file` before version 0.8; from then
on that keeps the file from other users (mode 0600), and hides a full disk behind an error of its own.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.distributed.flat_tensors import as_bytes

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Write tensors that are in host memory; returns the SHA-256 of the file.

    The same tensors make the same bytes, in whatever order they come.
    """
    checksum = hashlib.sha256()
    with path.open("wb") as file:
        for part in _parts(tensors, metadata):  # large ones are written, and hashed, without the interpreter
            file.write(part)
            checksum.update(part)
    return checksum.hexdigest()


def _parts(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> Iterator[bytes | memoryview]:
    # The widest types first: every tensor then begins at a multiple of its numbers' size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    yield _header({name: tensors[name] for name in names}, metadata)
    for name in names:
        # By way of bytes: NumPy has no bfloat16.
        yield as_bytes(tensors[name]).numpy().data


def _header(tensors: dict[str, torch.Tensor], metadata: Mapping[str, str] | None) -> bytes:
    """Its length, then what each tensor is and where it lies, as JSON."""
    described: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _TYPES:
            raise TypeError(f"{name} is of type {tensor.dtype}, which is not among those that are saved")
        begin, end = end, end + tensor.nbytes
        kind = _TYPES[tensor.dtype]
        described[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
