"""Atomic checkpoints, written in the background.

checkpoints/
  latest                    name of the newest step folder, for people and scripts
  step-0000000120/
    tensors.safetensors     weights, optimiser moments, random states; per-rank tensors are named `ranks.<name>`
    state.json              all other state that the next step depends on
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from shards.durable import atomic_folder, hash_file, remove_leftovers, write_bytes
from trainer.distributed.world import World

_log = logging.getLogger(__name__)

_KEPT = 2


@dataclass
class TrainState:
    """All state that a training job needs to resume as if it had never stopped."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class Checkpointer:
    """Writes checkpoints to one folder; at most one write is in flight."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._in_flight: Future[None] | None = None

    def save(self, step: int, state: TrainState, wait: bool = False) -> None:
        """Snapshot the state now and write it in the background. wait: return only once the checkpoint is durable."""
        self.wait()
        snapshot = TrainState(_snapshot(state.tensors), json.loads(json.dumps(state.values)))
        taken = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None
        self._in_flight = self._writer.submit(self._write, step, snapshot, taken)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Block until the write in flight is durable; raise its error if it failed."""
        if self._in_flight is not None:
            in_flight, self._in_flight = self._in_flight, None
            in_flight.result()

    def close(self) -> None:
        self._writer.shutdown(wait=True)

    def _write(self, step: int, state: TrainState, taken: torch.cuda.Event | None) -> None:
        target = step_folder(self._folder, step)
        with atomic_folder(target) as temporary:
            checksum = write_tensors(temporary / "tensors.safetensors", _copy_to_host(state.tensors, taken))
            (temporary / "state.json").write_text(json.dumps({"sha256": checksum, "values": state.values}))
        write_bytes(self._folder / "latest", f"{target.name}\n".encode())
        self._prune()

    def _prune(self) -> None:
        for old in _step_folders(self._folder)[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)  # on NFS, a file that is open elsewhere; tried again next time
        remove_leftovers(self._folder)


def _snapshot(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy the tensors on their own device; on a GPU the copies run between two steps, with no host-device sync."""
    try:
        return {
            name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
        }
    except torch.OutOfMemoryError:  # no GPU memory for a second copy: copy to the host instead, which blocks
        return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def _copy_to_host(tensors: dict[str, torch.Tensor], taken: torch.cuda.Event | None) -> dict[str, torch.Tensor]:
    """Copy a snapshot to host memory on a separate stream, while training continues.

    taken: event recorded after the snapshot.
    """
    there = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
    if taken is None or there is None:
        return tensors
    taken.synchronize()
    with torch.cuda.stream(torch.cuda.Stream(there)):  # explicit device: this thread's default would be GPU 0
        return {name: tensor.to("cpu") for name, tensor in tensors.items()}


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:010d}"


def find_newest_checkpoint(folder: Path) -> tuple[int, TrainState] | None:
    """Return the step and state of the newest readable checkpoint, or None; skip damaged ones with a warning."""
    for candidate in reversed(_step_folders(folder)):
        try:
            return int(candidate.name.removeprefix("step-")), read_checkpoint(candidate)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            _log.warning("checkpoint %s is damaged (%s); trying an older one", candidate, error)
    return None


def _step_folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def read_checkpoint(folder: Path) -> TrainState:
    """Read the state from a step folder; raise ValueError if its checksum does not match."""
    record = json.loads((folder / "state.json").read_text())
    content = (folder / "tensors.safetensors").read_bytes()
    if hashlib.sha256(content).hexdigest() != record["sha256"]:
        raise ValueError("checksum mismatch")
    return TrainState(load(content), record["values"])


def module_state(module: torch.nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """Return the module's weights and buffers, with `prefix` prepended to their names."""
    return {f"{prefix}{name}": tensor for name, tensor in module.state_dict().items()}


def load_module(module: torch.nn.Module, tensors: dict[str, torch.Tensor], prefix: str) -> None:
    own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    module.load_state_dict(own, strict=True)


def gather_rank_state(world: World, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gather a tensor that differs between ranks into one checkpoint entry, `ranks.<name>`: [ranks, ...].

    A collective: all ranks call it, with tensors of equal shape and dtype. Only rank 0, which writes the checkpoint,
    gets the entry; other ranks get an empty dict. In a world of one, the entry is the tensor itself, under `name`.
    """
    if world.size == 1:
        return {name: tensor}
    rows = world.gather_to_rank0(tensor.cpu())
    return {} if rows is None else {f"ranks.{name}": rows}


def local_rank_state(world: World, name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Return what `gather_rank_state` saved for this rank; None if the world size has changed since."""
    if world.size == 1:
        return tensors.get(name)
    rows = tensors.get(f"ranks.{name}")
    return rows[world.rank].clone() if rows is not None and len(rows) == world.size else None


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["random.cuda"] = torch.cuda.get_rng_state(device)
    return state


def load_random_state(tensors: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restore the random generators from the result of `random_state`."""
    torch.set_rng_state(tensors["random.cpu"])
    if device.type == "cuda" and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"], device)


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
