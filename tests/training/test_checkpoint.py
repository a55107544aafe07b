"""Checkpoints: bit-exact, complete or absent; loads the newest readable one, keeps two, snapshots at the call."""

import errno
import os
import threading
import time

import pytest
import torch
from torch import nn

from shards.durable import remove_leftovers
from shards.errors import DataError
from trainer.distributed.flat_tensors import flatten_bytes, unflatten_bytes
from trainer.distributed.world import SINGLE_PROCESS, World
from trainer.training.checkpoint import (
    Checkpointer,
    TrainState,
    find_newest_checkpoint,
    gather_rank_state,
    load_module,
    load_random_state,
    local_rank_state,
    module_state,
    random_state,
    read_checkpoint,
)
from trainer.training.optim import load_moments, moments_state

CPU = torch.device("cpu")
OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "sgd without momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
}


@pytest.fixture
def checkpointer(tmp_path):
    made = Checkpointer(tmp_path / "checkpoints")
    yield made
    made.close()


def state_of(number):
    return TrainState({"x": torch.full((3,), float(number))}, {"number": number})


def names(tmp_path):
    return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())


def training(optimizer, seed=0):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    module[3].bias.requires_grad_(False)  # a weight the optimiser has nothing to remember about
    return module, OPTIMIZERS[optimizer](module.parameters())


def steps(module, optimizer, numbers):
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        optimizer.zero_grad()
        module(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()


def state_of_training(module, optimizer):
    return TrainState(module_state(module, "model.") | moments_state(optimizer))


@pytest.mark.parametrize("done", [0, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_training_goes_on_bit_for_bit(kind, done, checkpointer, tmp_path):
    module, optimizer = training(kind)
    steps(module, optimizer, range(done))
    saved = state_of_training(module, optimizer)
    checkpointer.save(done, saved, wait=True)
    step, state = find_newest_checkpoint(tmp_path / "checkpoints")
    assert step == done
    assert state.tensors.keys() == saved.tensors.keys()
    for name, tensor in saved.tensors.items():
        assert state.tensors[name].dtype == tensor.dtype
        assert torch.equal(state.tensors[name], tensor), name

    other, other_optimizer = training(kind, seed=9)
    steps(other, other_optimizer, [50])  # moments that must be replaced
    load_module(other, state.tensors, "model.")
    load_moments(other_optimizer, state.tensors)
    for pair in ((module, optimizer), (other, other_optimizer)):
        steps(*pair, range(10, 14))
    ours, theirs = state_of_training(module, optimizer), state_of_training(other, other_optimizer)
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(tensor, theirs.tensors[name]) for name, tensor in ours.tensors.items())


def test_moments_are_among_what_is_saved():
    module, optimizer = training("adam")
    assert moments_state(optimizer) == {}
    steps(module, optimizer, range(2))
    saved = moments_state(optimizer)
    assert {name.rpartition(".")[2] for name in saved} == {"step", "exp_avg", "exp_avg_sq"}
    assert len(saved) == 3 * 5  # five of six weights learn


def test_weights_of_another_network_are_refused():
    module, _ = training("adam")
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        load_module(nn.Linear(4, 6), module_state(module, "model."), "model.")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor(7),
        torch.empty(0, 3),
        torch.randn(3).bfloat16(),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
)
def test_any_tensor_comes_back_as_it_was(tensor, checkpointer, tmp_path):
    values = {"a": [1, 2.5, None, "x"], "b": {"c": 0.1 + 0.2}}
    checkpointer.save(1, TrainState({"t": tensor}, values), wait=True)
    _, state = find_newest_checkpoint(tmp_path / "checkpoints")
    torch.testing.assert_close(state.tensors["t"], tensor, rtol=0, atol=0, equal_nan=True)
    assert state.values == values


def test_tensors_that_share_memory_are_saved_each(checkpointer, tmp_path):
    shared = torch.arange(4.0)
    checkpointer.save(1, TrainState({"a": shared, "b": shared, "c": shared[1:]}), wait=True)
    _, state = find_newest_checkpoint(tmp_path / "checkpoints")
    assert [state.tensors[name].tolist() for name in "abc"] == [[0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3]]


def test_random_numbers_go_on(checkpointer, tmp_path):
    torch.manual_seed(5)
    torch.rand(3)
    checkpointer.save(1, TrainState(random_state(CPU)), wait=True)
    expected = torch.rand(4)
    torch.manual_seed(6)
    load_random_state(find_newest_checkpoint(tmp_path / "checkpoints")[1].tensors, CPU)
    assert torch.equal(torch.rand(4), expected)


def test_nothing_saved_is_none(tmp_path):
    assert find_newest_checkpoint(tmp_path / "checkpoints") is None
    (tmp_path / "checkpoints").mkdir()
    assert find_newest_checkpoint(tmp_path / "checkpoints") is None


def test_two_are_kept_and_latest_names_the_newest(checkpointer, tmp_path):
    for number in (0, 5, 10, 1_000_000, 20_000_000):
        checkpointer.save(number, state_of(number), wait=True)
        assert find_newest_checkpoint(tmp_path / "checkpoints")[0] == number
        assert (tmp_path / "checkpoints" / "latest").read_text().strip() == f"step-{number:010d}"
    assert names(tmp_path) == ["latest", "step-0001000000", "step-0020000000"]
    assert read_checkpoint(tmp_path / "checkpoints" / "step-0001000000").values == {"number": 1_000_000}


def test_a_step_saved_again_is_replaced(checkpointer, tmp_path):
    checkpointer.save(5, state_of(1), wait=True)
    checkpointer.save(5, state_of(2), wait=True)
    assert find_newest_checkpoint(tmp_path / "checkpoints")[1].values == {"number": 2}


def test_a_kill_between_moving_a_checkpoint_aside_and_replacing_it_loses_none(checkpointer, tmp_path):
    checkpointer.save(5, state_of(1), wait=True)
    folder = tmp_path / "checkpoints"
    (folder / "step-0000000005").rename(folder / ".step-0000000005.tmp123.old")
    (folder / ".step-0000000005.tmp123").mkdir()
    remove_leftovers(tmp_path)
    assert find_newest_checkpoint(folder)[1].values == {"number": 1}
    assert names(tmp_path) == ["latest", "step-0000000005"]


def test_an_old_checkpoint_that_cannot_be_removed_does_not_end_the_training(checkpointer, tmp_path, monkeypatch):
    checkpointer.save(1, state_of(1), wait=True)
    held, remove = tmp_path / "checkpoints" / "step-0000000001", os.rmdir

    def refuse_one(path, **options):
        if held.name in str(path):
            raise OSError(errno.EBUSY, "a file in it is open elsewhere", str(path))
        remove(path, **options)

    monkeypatch.setattr(os, "rmdir", refuse_one)
    for number in (2, 3, 4):
        checkpointer.save(number, state_of(number), wait=True)
    assert held.exists()
    assert find_newest_checkpoint(tmp_path / "checkpoints")[0] == 4


def test_a_torn_write_is_no_checkpoint(checkpointer, tmp_path):
    checkpointer.save(5, state_of(5), wait=True)
    torn = tmp_path / "checkpoints" / ".step-0000000009.tmp99999999"
    torn.mkdir()
    (torn / "tensors.safetensors").write_bytes(b"half")
    assert find_newest_checkpoint(tmp_path / "checkpoints")[0] == 5
    checkpointer.save(10, state_of(10), wait=True)
    assert not torn.exists()  # cleared away by the next write
    assert names(tmp_path) == ["latest", "step-0000000005", "step-0000000010"]


def cut_tensors(folder):
    path = folder / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def empty_tensors(folder):
    (folder / "tensors.safetensors").write_bytes(b"")


def no_tensors(folder):
    (folder / "tensors.safetensors").unlink()


def cut_values(folder):
    (folder / "state.json").write_text('{"number": ')


def no_values(folder):
    (folder / "state.json").unlink()


@pytest.mark.parametrize("damage", [cut_tensors, empty_tensors, no_tensors, cut_values, no_values])
def test_a_damaged_checkpoint_falls_back_to_the_older_with_a_warning(checkpointer, tmp_path, capsys, damage):
    for number in (5, 10):
        checkpointer.save(number, state_of(number), wait=True)
    damage(tmp_path / "checkpoints" / "step-0000000010")
    step, state = find_newest_checkpoint(tmp_path / "checkpoints")
    assert (step, state.values, state.tensors["x"].tolist()) == (5, {"number": 5}, [5, 5, 5])
    warning = capsys.readouterr().err
    assert "step-0000000010" in warning
    assert "damaged" in warning
    damage(tmp_path / "checkpoints" / "step-0000000005")
    assert find_newest_checkpoint(tmp_path / "checkpoints") is None


def test_an_error_of_the_background_write_surfaces_once(tmp_path):
    (tmp_path / "file").write_text("in the way")
    checkpointer = Checkpointer(tmp_path / "file" / "checkpoints")
    checkpointer.save(1, state_of(1))
    with pytest.raises(DataError, match=r"cannot write .*file"):
        checkpointer.wait()
    checkpointer.wait()
    checkpointer.save(2, state_of(2))
    with pytest.raises(DataError, match=r"cannot write .*file"):
        checkpointer.save(3, state_of(3))
    with pytest.raises(DataError, match=r"cannot write .*file"):
        checkpointer.save(4, state_of(4), wait=True)
    checkpointer.close()


@pytest.fixture
def held_back(checkpointer, monkeypatch):
    """The writing thread waits until the event is set, before it makes its first folder."""
    go, make = threading.Event(), os.mkdir

    def later(path, *arguments, **options):
        if threading.current_thread() is not threading.main_thread():
            assert go.wait(30)
        make(path, *arguments, **options)

    monkeypatch.setattr(os, "mkdir", later)
    yield go
    go.set()


def test_the_snapshot_is_of_the_moment_of_the_call(checkpointer, tmp_path, held_back):
    tensor, values = torch.zeros(4), {"list": [1]}
    state = TrainState({"x": tensor, "view": tensor[1:3]}, values)
    checkpointer.save(1, state)
    tensor.add_(7)
    values["list"].append(2)
    state.tensors["y"] = torch.ones(1)
    assert find_newest_checkpoint(tmp_path / "checkpoints") is None  # not there before it is whole
    held_back.set()
    checkpointer.wait()
    _, saved = find_newest_checkpoint(tmp_path / "checkpoints")
    assert saved.values == {"list": [1]}
    assert saved.tensors.keys() == {"x", "view"}
    assert not saved.tensors["x"].any()
    assert not saved.tensors["view"].any()


def test_at_most_one_write_is_in_flight(checkpointer, tmp_path, held_back):
    checkpointer.save(1, state_of(1))
    threading.Timer(0.05, held_back.set).start()
    checkpointer.save(2, state_of(2))
    assert read_checkpoint(tmp_path / "checkpoints" / "step-0000000001").values == {"number": 1}
    checkpointer.wait()
    assert find_newest_checkpoint(tmp_path / "checkpoints")[0] == 2


def test_closing_finishes_the_write(tmp_path):
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    checkpointer.save(3, state_of(3))
    checkpointer.close()
    assert find_newest_checkpoint(tmp_path / "checkpoints")[0] == 3


def test_a_flipped_bit_in_the_weights_is_damage(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 2):
        checkpointer.save(step, TrainState({"x": torch.ones(8)}), wait=True)
    path = tmp_path / "step-0000000002" / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7e")
    step, _ = find_newest_checkpoint(tmp_path)
    assert step == 1


class Crowd(World):
    """A rank of many that are not there: each has this one's tensor, its own number added."""

    def gather_to_rank0(self, tensor):
        return tensor + torch.arange(self.size, dtype=tensor.dtype)[:, None] if self.is_rank0 else None


def crowd(size, rank=0):
    return Crowd(rank, size, CPU, 1)


def test_what_differs_between_ranks_is_one_entry_however_many_they_are(checkpointer, tmp_path):
    own = torch.arange(6, dtype=torch.uint8)
    for size in (2, 512):
        assert gather_rank_state(crowd(size, rank=1), "statistics", own) == {}  # the first has it all
        checkpointer.save(size, TrainState(gather_rank_state(crowd(size), "statistics", own)), wait=True)
        saved = find_newest_checkpoint(tmp_path / "checkpoints")[1].tensors
        assert len(saved) == 1
        for rank in range(size):
            assert torch.equal(
                local_rank_state(crowd(size, rank), "statistics", saved), own + torch.tensor(rank).byte()
            )
        assert local_rank_state(crowd(size + 1, rank=1), "statistics", saved) is None
        assert local_rank_state(crowd(size, rank=1), "others", saved) is None
        assert local_rank_state(SINGLE_PROCESS, "statistics", saved) is None


def test_what_one_process_has_is_saved_as_it_is():
    saved = gather_rank_state(SINGLE_PROCESS, "statistics", torch.ones(3))
    assert saved.keys() == {"statistics"}
    assert local_rank_state(SINGLE_PROCESS, "statistics", saved) is saved["statistics"]
    assert local_rank_state(crowd(2), "statistics", saved) is None


def test_many_ranks_take_hardly_longer_than_two():
    """Which a tensor for each buffer and rank does."""
    buffers = [torch.zeros(8) for _ in range(816)]

    def seconds(size):
        begun = time.perf_counter()
        gather_rank_state(crowd(size), "statistics", flatten_bytes(buffers))
        return time.perf_counter() - begun

    assert min(seconds(512) for _ in range(5)) < 0.05 + 10 * min(seconds(2) for _ in range(5))


def test_tensors_of_any_type_and_layout_as_bytes():
    held = [
        torch.randn(3).half(),
        torch.tensor(True),
        torch.randn(2, 3).double().t(),
        torch.empty(0, 2),
        torch.ones(()),
    ]
    whole = flatten_bytes(held)
    assert (whole.dtype, len(whole)) == (torch.uint8, 6 + 1 + 48 + 4)
    for one, other in zip(held, unflatten_bytes(whole, held), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)
