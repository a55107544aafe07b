"""Runs of Algorithm 2 on a few real digits, and the networks they train."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from shards.sample_index import SampleIndex
from tests.support import RECIPES
from trainer.config.schema import Recipe
from trainer.distributed.stop import StopRequest
from trainer.distributed.world import SINGLE_PROCESS
from trainer.incv.rounds import Incv
from trainer.loading.image_set import ImageSet, limit_ids, open_image_set
from trainer.records.heartbeat import Heartbeat
from trainer.records.manifest import Manifest
from trainer.records.run_directory import RunDirectory
from trainer.run.labels import make_labels
from trainer.run.recipe import load_recipe
from trainer.training.interleave import run_to_end
from trainer.training.loop import RunContext

TINY = RECIPES / "tiny.yaml"
KEYS = (
    "data.train.limit=200",
    "incv.rounds=1",
    "incv.epochs=2",
    "incv.round_network=last",
    "incv.optimizer.milestones=[]",
    "execution.threads=1",
    "execution.device=cpu",
)


@dataclass(frozen=True)
class Bench:
    """Digits with noisy labels, and runs of Algorithm 2 over them in folders of their own."""

    index: SampleIndex
    new_folder: Callable[[], Path]

    def recipe(self, *overrides: str) -> Recipe:
        return load_recipe(TINY, [*KEYS, *overrides])

    def data(self, recipe: Recipe) -> ImageSet:
        ids = limit_ids(self.index, recipe.data.train.limit)
        dense = np.full(len(self.index), -1, np.int64)
        dense[ids] = make_labels(recipe.labels, recipe.seed, self.index, ids)[0]
        device = torch.device("cpu")
        return open_image_set(self.index, ids, dense, recipe.image, recipe.execution, device)

    def run(self, recipe: Recipe, data: ImageSet, root: Path | None = None) -> RunDirectory:
        """All rounds, in a new folder or in one that an earlier run left."""
        run = RunDirectory(root or self.new_folder())
        torch.set_num_threads(1)
        notes = Manifest(run).begin("tiny", SINGLE_PROCESS, {"incv": recipe.batch.global_}, "the code")
        heartbeat = Heartbeat(None, 0, 1, "alone")
        ctx = RunContext(SINGLE_PROCESS, recipe.execution, notes, StopRequest(run.root), heartbeat)
        run_to_end(Incv(recipe, data, run, ctx).steps())
        return run


def network_of(run: RunDirectory, round_: int, fold: int) -> dict[str, torch.Tensor]:
    """All tensors of the fold's last checkpoint that belong to its network."""
    last = max((run.fold(round_, fold) / "checkpoints").glob("step-*/tensors.safetensors"))
    return {name: tensor for name, tensor in load_file(last).items() if name.startswith("model.")}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    assert one
    return all(torch.equal(one[name], other[name]) for name in one)
