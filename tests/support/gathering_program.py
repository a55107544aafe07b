"""`torchrun ... gathering_program.py FOLDER`: ranks run collectives; each writes its results to rank<r>.json."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trainer.passes.table
from shards.errors import DataError
from tests.support.toy_networks import TARGETS, schedule_of
from tests.support.toy_passes import ToyNetwork, toy_pass
from trainer.config.optimisation import OptimizerConfig
from trainer.config.schema import ExecutionConfig
from trainer.distributed.process_group import join_world, leave_world
from trainer.distributed.watchdog import WorldError
from trainer.distributed.world import World
from trainer.incv.predictions import Predictions, gather_predictions, merge_predictions
from trainer.methods.standard import StandardTask
from trainer.methods.task import TaskSettings
from trainer.passes.table import gather_table
from trainer.training.checkpoint import (
    Checkpointer,
    gather_rank_state,
    local_rank_state,
    random_state,
    read_checkpoint,
    step_folder,
)

COLUMNS = tuple(Predictions.__dataclass_fields__)
ODD_FLOATS = np.array([0x7FC01234, 0x7F800001, 0xFFC00001, 0x80000000, 0x7F800000, 1], np.uint32).view(np.float32)
"""NaNs with something in them, one of them signalling, -0.0, infinity and the smallest number above 0."""
SPLITS = 12


def rows(ids: np.ndarray, seed: int) -> Predictions:
    """Made up, the same for the same ids and seed; every bit of the floats may be set."""
    draws = np.random.default_rng(seed)
    count = len(ids)

    def floats() -> np.ndarray:
        bits = draws.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
        bits[: len(ODD_FLOATS)] = ODD_FLOATS[:count]
        return bits

    return Predictions(
        sample_id=ids,
        fold=draws.integers(0, 64, count, dtype=np.int8),
        predicted=draws.integers(-1, 1000, count, dtype=np.int32),
        agrees=draws.integers(0, 2, count).astype(bool),
        loss=floats(),
        given_probability=floats(),
        predicted_probability=floats(),
        second=draws.integers(-1, 1000, count, dtype=np.int32),
        second_probability=floats(),
        given_rank=draws.integers(-1, 1000, count, dtype=np.int32),
        status=draws.integers(0, 3, count, dtype=np.int8),
    )


NONE = rows(np.empty(0, np.int64), 0)


def same_bits(a: Predictions, b: Predictions) -> bool:
    return all(getattr(a, name).tobytes() == getattr(b, name).tobytes() for name in COLUMNS) and all(
        getattr(a, name).dtype == getattr(b, name).dtype for name in COLUMNS
    )


def random_split(world: World, seed: int) -> bool:
    """Whether predictions dealt out at random come together bit for bit, on this rank, sorted by sample_id."""
    draws = np.random.default_rng(seed)
    ids = np.sort(draws.choice(5000, size=int(draws.integers(1, 400)), replace=False)).astype(np.int64)
    whole = rows(ids, seed)
    owner = draws.integers(0, world.size, len(ids))
    if seed % 4 == 0:
        owner[:] = seed % world.size  # everything from one rank, nothing from the others
    mine = whole.rows(owner == world.rank)
    expected = draws.permutation(ids)
    parts = [mine] if len(mine.sample_id) else []
    return same_bits(gather_predictions(world, parts, expected), merge_predictions([whole], expected))


def shared(world: World) -> bool:
    """Whether the same holds in memory that the ranks share, and what a rank writes there stays its own."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.passes.table, "WORTH_SHARING", 0)
        found += [random_split(world, seed) for seed in range(SPLITS)]
        ids = torch.arange(3) * world.size + world.rank
        table = gather_table(world, ids, {"value": ids * 2}, np.arange(3 * world.size), "the pass")
        table["value"][:] = world.rank
        world.barrier()
        found.append(bool((table["value"] == world.rank).all()))
        patch.setattr(trainer.passes.table, "_FOLDER", Path("/proc/nowhere"))
        found.append(random_split(world, 1))  # without such memory
    return all(found) and not list(Path("/dev/shm").glob("incv-*"))


def refusal(world: World, part: Predictions, expected: np.ndarray) -> str:
    try:
        gather_predictions(world, [part], expected)
    except DataError as error:
        return str(error)
    return "accepted"


def refusals(world: World) -> dict[str, str]:
    """Rank 0 has the ids 0-9, rank 1 the ids 10-19, the others nothing; then one thing is wrong."""
    ids = np.arange(20, dtype=np.int64)
    right = {0: rows(ids[:10], 0), 1: rows(ids[10:], 1)}.get(world.rank, NONE)
    second, last = world.rank == 1, world.rank == world.size - 1
    twice = np.repeat(ids[10:], np.where(ids[10:] == 13, 2, 1))
    parts = {
        "nothing wrong": right,
        "missing": right.rows(right.sample_id != 13),
        "twice by one": rows(twice, 1) if second else right,
        "twice by one instead of another": rows(np.where(ids[10:] == 14, 13, ids[10:]), 1) if second else right,
        "by two": rows(ids[3:4], 2) if last else right,
        "foreign": rows(np.array([7_000]), 2) if last else right,
        "negative": rows(np.array([-1]), 2) if last else right,
        "no rank has any": NONE,
    }
    found = {name: refusal(world, part, ids) for name, part in parts.items()}
    try:
        columns = {"a" if second else "b": torch.zeros(10)} if world.rank < 2 else {}
        gather_table(world, torch.from_numpy(right.sample_id), columns, ids, "the pass")
    except DataError as error:
        found["other columns"] = str(error)
    return found


def passed(world: World, folder: Path) -> dict[str, dict[str, list[Any]]]:
    """The tables of passes over many samples, and over fewer than ranks."""
    outputs = ("features", "probabilities", "losses", "agreement", "given_rank")
    labels, tables = np.arange(200) % 4, {}
    for count in (23, 2):
        ids, samples = np.arange(3, 3 + 4 * count, 4), toy_pass(world)
        each: dict[str, dict[str, Any]] = {"gathered": {}, "own": {"gather": False}}
        each["file"] = {"features_to": folder / f"features{count}"}
        for name, keys in each.items():
            table = samples.run([ToyNetwork(1), ToyNetwork(2)], ids, outputs, labels=labels, top_k=2, **keys)
            columns = {"ids": table.ids, **table.columns}
            # As text, in which NaN equals NaN.
            tables[f"{count} {name}"] = {column: [str(row) for row in columns[column].tolist()] for column in columns}
    for table in tables.values():
        table["ids"] = [int(sample) for sample in table["ids"]]
    return tables


def heard(world: World) -> dict[str, Any]:
    """What the world's own ways of speaking give on this rank."""
    rank = float(world.rank)
    mean = world.all_reduce_mean([torch.tensor([rank, 1 / 3]), torch.tensor([[2 * rank]], dtype=torch.float64)])
    return {
        "size": world.size,
        "rank": world.rank,
        "sum": world.all_reduce(torch.tensor([1, 10**world.rank])).tolist(),
        "mean": [tensor.tolist() for tensor in mean],
        "mean of equals": torch.equal(mean[0][1], torch.tensor(1 / 3)),
        "gathered": [
            tensor.tolist() for tensor in world.all_gather(torch.tensor([rank, -rank], dtype=torch.float16))
        ],
        "gathered by first": _lists(world.gather_to_rank0(torch.tensor([world.rank, 7], dtype=torch.uint8))),
        "shared": world.broadcast_from_rank0(lambda: {"from": world.rank}),
        "told": world.all_gather_strings(f"I am {world.rank}"),
        "met, none wished": world.barrier(),
        "met, last wished": world.barrier(world.rank == world.size - 1),
        "different": _words_of(lambda: world.require_equal(str(world.rank), "the number"), WorldError),
        "agreed": _agreed(world),
    }


def _lists(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else tensor.tolist()


def task_in(world: World) -> StandardTask:
    """Its network has BatchNorm, whose statistics are of two types."""
    network = nn.Sequential(nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5), nn.Flatten(), nn.BatchNorm1d(20).double())
    return StandardTask(
        network, TaskSettings(OptimizerConfig(kind="sgd", learning_rate=0.1), schedule_of(5), TARGETS, world)
    )


def statistics_of(task: StandardTask) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in task.module.named_buffers() if tensor.is_floating_point()}


def kept(world: World, folder: Path) -> dict[str, Any]:
    """Statistics and draws that are each rank's own, saved by all and loaded again."""
    torch.manual_seed(world.rank)
    task, again = task_in(world), task_in(world)
    for buffer in task.module.buffers():
        if buffer.is_floating_point():
            buffer.uniform_()
    state, draws = task.state(), random_state(world.device)["random.cpu"]
    entries = sorted(state.tensors)
    state.tensors.update(gather_rank_state(world, "random.cpu", draws))
    if world.is_rank0:
        Checkpointer(folder).save(1, state, wait=True)
    world.barrier()
    found = read_checkpoint(step_folder(folder, 1))
    again.load(found)
    own = local_rank_state(world, "random.cpu", found.tensors)
    return {
        "entries": entries,
        "statistics": statistics_of(task),
        "loaded": statistics_of(again),
        "same draws": own is not None and torch.equal(own, draws),
    }


def _words_of(do: Callable[[], object], kind: type[Exception]) -> str:
    try:
        do()
    except kind as error:
        return str(error)
    return ""


def _agreed(world: World) -> list[bool]:
    """The last rank wishes to stop before its third step; all know it after that very step."""
    wishes = iter([None, None, "SIGTERM" if world.rank == world.size - 1 else None, None])
    agreement = world.stop_consensus(lambda: next(wishes))
    found = []
    for _ in range(4):
        agreement.post()
        found.append(agreement.result())
    return found


if __name__ == "__main__":
    joined = join_world(ExecutionConfig(threads=1, timeout=20.0, lost_after=15.0))
    report = {
        "heard": heard(joined),
        "passed": passed(joined, Path(sys.argv[1])),
        "splits": [random_split(joined, seed) for seed in range(SPLITS)],
        "shared": shared(joined),
        "refusals": refusals(joined),
        "kept": kept(joined, Path(sys.argv[1], "checkpoints")),
    }
    Path(sys.argv[1], f"rank{joined.rank}.json").write_text(json.dumps(report))
    leave_world(joined)
