"""`graph_ranks_program.py FOLDER KIND...`: a rank trains each kind, with CUDA graphs and eagerly; writes rank<r>.pt.

Started with torchrun's variables it is one of several ranks over gloo, which may share a GPU; without, it is alone.
Without a GPU it trains eagerly only.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.support.fast_steps import (
    CANDIDATES,
    CLASSES,
    OPTIMIZERS,
    ROWS,
    SCHEDULE,
    TARGETS,
    batch_at,
    build_task,
    position,
)
from trainer.config.schema import ExecutionConfig
from trainer.distributed.process_group import join_world, leave_world
from trainer.distributed.world import World
from trainer.loading.batch import Batch
from trainer.loading.epoch_plan import StepIds
from trainer.loading.sample_order import slice_for_rank
from trainer.methods.task import BaseTask, TaskSettings

STEPS = range(10, 30)
"""With the empty batch, the one with NaN, the short one, and the first that hold rows of C."""


class Network(nn.Module):
    """Each row is normalised by itself, so that it does not matter which rows a rank sees together."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.body = nn.Sequential(
                nn.Conv2d(3, 16, 3, 2), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU()
            )
            self.head = nn.Linear(32, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(images).mean((2, 3)))
        return logits


def task_of(kind: str, world: World, graphs: bool) -> BaseTask:
    setting = TaskSettings(OPTIMIZERS["sgd"], SCHEDULE, TARGETS, world, graphs=graphs, require_graphs=graphs)
    return build_task(kind, Network(1), Network(2), setting)


def share_of(batch: Batch, at: StepIds, world: World) -> Batch:
    """What a loader gives this rank of a step: its rows of S, of C, then its own again at weight 0."""
    selected, candidates = len(at.selected), len(at.candidates)
    of_s = slice_for_rank(np.arange(selected), world.rank, world.size)
    of_c = slice_for_rank(np.arange(selected, selected + candidates), world.rank, world.size)
    own = np.concatenate([of_s, of_c])
    rows = -(-ROWS // world.size) + (-(-CANDIDATES // world.size) if candidates else 0)
    shown = torch.from_numpy(own[np.arange(rows) % len(own)]).to(world.device)
    real = torch.arange(rows, device=world.device) < len(own)
    return Batch(
        ids=torch.where(real, batch.ids[shown], -1),
        images=batch.images[shown].contiguous(memory_format=torch.channels_last),
        weights=batch.weights[shown] * real,
    )


def weights_of(task: BaseTask) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in task.state().tensors.items()}


def trained(kind: str, world: World, graphs: bool) -> dict[str, Any]:
    task = task_of(kind, world, graphs)
    first, values, chosen = weights_of(task), [], []
    for step in STEPS:
        at = position(step)
        found = task.step(share_of(batch_at(step, world.device), at, world), at)
        values.append({name: float(value) for name, value in found.items()})
        chosen.append([ids.tolist() for ids in task.chosen or ()])
    guard = task.state().values["guard"]
    return {"first": first, "last": weights_of(task), "values": values, "chosen": chosen, "guard": guard}


def main() -> None:
    world = join_world(ExecutionConfig(backend="gloo", threads=1))
    # After joining, which lets cuDNN search for kernels: two ranks may find different ones.
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    torch.backends.cudnn.allow_tf32 = False
    ways = {"graphs": True, "eager": False} if world.device.type == "cuda" else {"eager": False}
    told = {f"{kind} {way}": trained(kind, world, graphs) for kind in sys.argv[2:] for way, graphs in ways.items()}
    torch.save(told, Path(sys.argv[1], f"rank{world.rank}.pt"))
    leave_world(world)


if __name__ == "__main__":
    main()
