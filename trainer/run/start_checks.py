"""Checks that all ranks have the same code, recipe and data, and access to the same run directory."""

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

import shards
import trainer
from shards.durable import write_bytes
from shards.errors import ConfigError
from shards.sample_index import SampleIndex
from trainer.config.recipe_file import recipe_yaml
from trainer.config.schema import Recipe
from trainer.distributed.launch import hostname
from trainer.distributed.process_group import select_backend
from trainer.distributed.world import World
from trainer.models.weights import Weights
from trainer.records.manifest import installed_versions
from trainer.records.run_directory import RunDirectory
from trainer.training.engines.deepspeed import deepspeed_stage

_PACKAGES = ("torch", "torchvision", "timm", "numpy", "accelerate", "deepspeed", "nvidia-dali-cuda130")
_PATIENCE = 15.0  # seconds; a new file may appear late on a network file system


def code_hash() -> str:
    """Return a hash of all Python files of `shards` and `trainer`."""
    digest = hashlib.sha256()
    for package in (shards, trainer):
        folder = Path(package.__path__[0])
        for file in sorted(folder.rglob("*.py")):
            digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def require_same_start(
    world: World, recipe: Recipe, indices: Mapping[str, SampleIndex], weights: Weights | None = None
) -> None:
    """Raise ConfigError on rank 0 if a rank has other code, versions, recipe, launcher, device, data or weights."""
    if world.rank_group is None:
        return
    facts = {
        "recipe": hashlib.sha256(recipe_yaml(recipe).encode()).hexdigest()[:16],
        "code of incv": code_hash(),
        "kind of device": f"{world.device.type}, {select_backend(recipe.execution, world.device)}",
        "launcher": f"{world.launcher}, ZeRO {deepspeed_stage(os.environ)}",
        **{f"version of {name}": text for name, text in installed_versions(_PACKAGES).items()},
        "initial weights": weights.checksum[:16] if weights is not None else "none",
        **{f"data in {index.folder}": index.checksum[:16] for index in indices.values()},
    }
    reported = [
        json.loads(each) for each in world.all_gather_strings(json.dumps({"host": hostname(), "facts": facts}))
    ]

    def compare() -> None:
        for rank, other in enumerate(reported):
            for what in {**facts, **other["facts"]}:
                ours, theirs = facts.get(what, "none"), other["facts"].get(what, "none")
                if theirs != ours:
                    raise ConfigError(
                        f"rank {rank} ({other['host']}) and rank 0 ({reported[0]['host']}) differ in the {what}: "
                        f"{theirs} and {ours}. Install the same versions and start every node with the same arguments"
                    )

    world.broadcast_from_rank0(compare)


def require_common_directory(world: World, run: RunDirectory) -> None:
    """Raise ConfigError on rank 0 if another node cannot access the run directory."""
    if world.rank_group is None:
        return
    token = run.root / ".seen-by-all"

    def write() -> str:
        stamp = f"{time.time_ns()}"
        write_bytes(token, stamp.encode())
        return stamp

    stamp = world.broadcast_from_rank0(write)
    seen = [json.loads(each) for each in world.all_gather_strings(json.dumps([hostname(), _sees(token, stamp)]))]

    def compare() -> None:
        token.unlink(missing_ok=True)
        blind = sorted({name for name, sees in seen if not sees})
        if blind:
            raise ConfigError(
                f"the run directory {run.root.absolute()} of {seen[0][0]} is not accessible on {', '.join(blind)}: "
                "choose a --run-dir on storage that every node mounts"
            )

    world.broadcast_from_rank0(compare)


def _sees(token: Path, stamp: str) -> bool:
    limit = time.monotonic() + _PATIENCE
    while time.monotonic() < limit:
        try:
            if token.read_text() == stamp:
                return True
        except OSError:
            pass
        time.sleep(0.05)
    return False
