"""A single-process world, and settings refused before rendezvous."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shards.errors import ConfigError, DataError
from trainer.config.schema import ExecutionConfig
from trainer.distributed.process_group import is_peer_failure, join_world
from trainer.distributed.world import SINGLE_PROCESS, World
from trainer.incv.folds import folds_share_device, folds_side_by_side


def test_a_world_of_one_says_nothing() -> None:
    numbers = torch.tensor([1.5, -2.0])
    assert SINGLE_PROCESS.is_rank0
    assert SINGLE_PROCESS.group is None
    assert SINGLE_PROCESS.all_reduce(numbers) is numbers
    assert torch.equal(SINGLE_PROCESS.all_gather(numbers)[0], numbers)
    assert torch.equal(SINGLE_PROCESS.all_reduce_mean([numbers])[0], numbers)
    assert SINGLE_PROCESS.all_reduce_mean([numbers])[0] is not numbers
    assert SINGLE_PROCESS.broadcast_from_rank0(lambda: {1: ("a", "b")}) == {"1": ["a", "b"]}, "as with many ranks"
    assert SINGLE_PROCESS.all_gather_strings("me") == ["me"]
    assert (SINGLE_PROCESS.barrier(), SINGLE_PROCESS.barrier(True)) == (False, True)
    SINGLE_PROCESS.require_equal("x", "anything")


def test_the_agreement_of_one() -> None:
    wishes: list[str] = []
    agreement = SINGLE_PROCESS.stop_consensus(lambda: wishes[0] if wishes else None)
    agreement.post()
    assert not agreement.result()
    agreement.post()
    wishes.append("SIGTERM")
    assert agreement.result(), "what came during the step counts at once"


def test_joining_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "ACCELERATE_MIXED_PRECISION", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    try:
        world = join_world(ExecutionConfig(device="cpu", threads=1, world=1))
    finally:
        torch.set_num_threads(before)
    assert (world.rank, world.size, world.launcher, world.rank_group) == (0, 1, "alone", None)
    world.watchdog.stop()
    with pytest.raises(ConfigError, match=r"execution\.world is 2, .*alone.* started 1"):
        join_world(ExecutionConfig(world=2))


def test_nccl_needs_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigError, match="backend: nccl needs GPUs"):
        join_world(ExecutionConfig(device="cpu", threads=torch.get_num_threads(), backend="nccl"))


@pytest.mark.parametrize(
    ("folds", "size", "beside"),
    [("auto", 1, False), ("auto", 2, True), ("auto", 3, False), ("in_turn", 4, False), ("side_by_side", 4, True)],
)
def test_which_worlds_train_two_folds_at_once(folds: Any, size: int, beside: bool) -> None:
    assert folds_side_by_side(2, ExecutionConfig(folds=folds), _of(size)) == beside


@pytest.mark.parametrize("size", [3, 5])
def test_an_odd_world_cannot_be_halved(size: int) -> None:
    with pytest.raises(ConfigError, match=f"even number of them, not {size}"):
        folds_side_by_side(2, ExecutionConfig(folds="side_by_side"), _of(size))


@pytest.mark.parametrize(("folds", "size", "beside"), [(4, 2, True), (6, 4, True), (3, 2, False), (4, 3, False)])
def test_only_even_numbers_of_folds_and_ranks_are_halved(folds: int, size: int, beside: bool) -> None:
    assert folds_side_by_side(folds, ExecutionConfig(), _of(size)) == beside


def test_an_odd_number_of_folds_cannot_be_halved() -> None:
    with pytest.raises(ConfigError, match="even number of folds, not 5"):
        folds_side_by_side(5, ExecutionConfig(folds="side_by_side"), _of(2))


@pytest.mark.parametrize("size", [1, 3, 4])
def test_one_fold_is_trained_by_all_ranks(size: int) -> None:
    assert not folds_side_by_side(1, ExecutionConfig(folds="side_by_side"), _of(size))


@pytest.mark.parametrize(
    ("folds", "size", "device", "small", "shared"),
    [
        ("auto", 1, "cuda", True, True),
        ("auto", 1, "cuda", False, False),
        ("auto", 1, "cpu", True, False),
        ("in_turn", 1, "cuda", True, False),
        ("side_by_side", 1, "cpu", False, True),
        ("side_by_side", 2, "cuda", True, False),
    ],
)
def test_when_one_process_trains_both_folds_at_once(
    folds: Any, size: int, device: str, small: bool, shared: bool
) -> None:
    world = World(0, size, torch.device(device), 1)
    assert folds_share_device(ExecutionConfig(folds=folds), world, small) == shared


def _of(size: int) -> World:
    return World(0, size, torch.device("cpu"), 1)


@pytest.mark.parametrize(
    "error",
    [
        dist.DistNetworkError("recvVector failed"),
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
        RuntimeError("Timed out waiting 20000ms for recv operation to complete"),
    ],
)
def test_errors_that_say_that_a_rank_is_gone(error: Exception) -> None:
    assert is_peer_failure(error)


class CompilerError(RuntimeError):
    """As torch's BackendCompilerFailed."""


@pytest.mark.parametrize(
    "error",
    [
        DataError("no samples"),
        RuntimeError("shape mismatch"),
        ValueError("timeout"),
        CompilerError("tl.store(out_ptr0 + x0, tmp3): unsupported"),
    ],
)
def test_errors_of_our_own(error: Exception) -> None:
    assert not is_peer_failure(error)
