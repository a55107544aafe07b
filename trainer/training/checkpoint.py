"""Checkpoints that are complete or absent, written in the background.

checkpoints/
  latest                    the newest step folder's name, for people and scripts
  step-0000000120/
    tensors.safetensors     weights, optimiser moments, random states; what differs between ranks as `ranks.<name>`
    state.json              everything else the next step depends on
"""

import hashlib
import json
import logging
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from shards.durable import atomic_folder, remove_leftovers, write_bytes
from trainer.distributed.world import World
from trainer.training.tensor_file import write_tensors

_log = logging.getLogger(__name__)

_KEPT = 2


@dataclass
class TrainState:
    """What a training needs to resume as if it had never stopped."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class Checkpointer:
    """One folder of checkpoints; at most one write is in flight."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._in_flight: Future[None] | None = None

    def save(self, step: int, state: TrainState, wait: bool = False) -> None:
        """Snapshot now, write in the background; `wait` returns once it is durable."""
        self.wait()
        snapshot = TrainState(_snapshot(state.tensors), json.loads(json.dumps(state.values)))
        taken = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None
        self._in_flight = self._writer.submit(self._write, step, snapshot, taken)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Return once the write in flight is durable; raises its error."""
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
            shutil.rmtree(old)
        remove_leftovers(self._folder)


def _snapshot(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies on the tensors' own device, which a GPU makes between two steps with no host-device sync."""
    try:
        return {
            name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
        }
    except torch.OutOfMemoryError:  # no room for a second state on the GPU: copy to the host, which blocks
        return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def _copy_to_host(tensors: dict[str, torch.Tensor], taken: torch.cuda.Event | None) -> dict[str, torch.Tensor]:
    """The snapshot in host memory, copied on a separate stream while training continues."""
    there = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
    if taken is None or there is None:
        return tensors
    taken.synchronize()
    with torch.cuda.stream(torch.cuda.Stream(there)):  # the device is explicit: the default in this thread is GPU 0
        return {name: tensor.to("cpu") for name, tensor in tensors.items()}


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:010d}"


def find_newest_checkpoint(folder: Path) -> tuple[int, TrainState] | None:
    """The newest readable checkpoint, with its step; skips damaged ones with a warning."""
    for candidate in reversed(_step_folders(folder)):
        try:
            return int(candidate.name.removeprefix("step-")), read_checkpoint(candidate)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            _log.warning("checkpoint %s is damaged (%s); trying an older one", candidate, error)
    return None


def _step_folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def read_checkpoint(folder: Path) -> TrainState:
    """The state in a step folder; raises ValueError where its checksum differs."""
    record = json.loads((folder / "state.json").read_text())
    content = (folder / "tensors.safetensors").read_bytes()
    if hashlib.sha256(content).hexdigest() != record["sha256"]:
        raise ValueError("its checksum has changed")
    return TrainState(load(content), record["values"])


def module_state(module: torch.nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """Weights and buffers under names that start with `prefix`."""
    return {f"{prefix}{name}": tensor for name, tensor in module.state_dict().items()}


def load_module(module: torch.nn.Module, tensors: dict[str, torch.Tensor], prefix: str) -> None:
    own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    module.load_state_dict(own, strict=True)


def gather_rank_state(world: World, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tensor that differs between ranks, as one entry `ranks.<name>`: [ranks, ...]; in a world of one, `name`.

    A collective: all ranks call it, with tensors of equal shape and type. Only rank 0, which writes, gets the entry.
    """
    if world.size == 1:
        return {name: tensor}
    rows = world.gather_to_rank0(tensor.cpu())
    return {} if rows is None else {f"ranks.{name}": rows}


def local_rank_state(world: World, name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """What `gather_rank_state` saved of this rank; None where the saved world had another size."""
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
    """Restore what `random_state` returned."""
    torch.set_rng_state(tensors["random.cpu"])
    if device.type == "cuda" and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"], device)
