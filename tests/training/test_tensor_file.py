"""safetensors reads what we write; the same tensors give the same bytes; writing does not block other threads."""

import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load, load_file, save

from shards.durable import atomic_folder
from shards.errors import DataError
from tests.support.small_disk import mounted_disk
from trainer.training.checkpoint import write_tensors

TYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
Tensors = dict[str, torch.Tensor]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*bits)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bits in any layout: NaNs with a payload, negative zeros, no rows, no dimensions, transposed."""
    kind, shape = draw(st.sampled_from(TYPES)), draw(st.lists(st.integers(0, 4), max_size=4))
    count = int(torch.tensor(shape, dtype=torch.int64).prod())
    if kind == torch.bool:
        made = torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=kind)
    else:
        content = draw(st.binary(min_size=count * kind.itemsize, max_size=count * kind.itemsize))
        made = torch.frombuffer(bytearray(content), dtype=kind) if count else torch.empty(0, dtype=kind)
    made = made.reshape(shape)
    return made.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else made


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(held=st.dictionaries(names, tensors(), max_size=8), metadata=st.none() | st.just({"é": '"'}))
def test_safetensors_reads_what_was_written(tmp_path: Path, held: Tensors, metadata: dict[str, str] | None) -> None:
    path = tmp_path / "file"
    checksum = write_tensors(path, held, metadata)
    content = path.read_bytes()
    assert checksum == hashlib.sha256(content).hexdigest()
    assert int.from_bytes(content[:8], "little") % 8 == 0
    for read in (load(content), load_file(path)):
        assert read.keys() == held.keys()
        assert all(same_bits(read[name], tensor) for name, tensor in held.items())
    with safe_open(path, "pt") as file:
        assert file.metadata() == metadata
    backwards = dict(reversed(held.items()))
    assert write_tensors(path, backwards, metadata) == checksum
    assert path.read_bytes() == content


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_every_type_comes_back(tmp_path: Path, kind: torch.dtype) -> None:
    held = {"scalar": torch.ones((), dtype=kind), "empty": torch.ones(0, 3, dtype=kind)}
    held |= {"some": (torch.arange(6) % 2).to(kind).reshape(2, 3), "odd": torch.ones(3, dtype=torch.uint8)}
    write_tensors(tmp_path / "file", held)
    read = load((tmp_path / "file").read_bytes())
    assert all(same_bits(read[name], tensor) for name, tensor in held.items())


def test_tensors_that_share_memory_are_all_written(tmp_path: Path) -> None:
    weights = torch.arange(6.0)
    held = {"tied": weights, "again": weights, "part": weights[2:4], "odd": weights[1::2]}
    write_tensors(tmp_path / "file", held)
    read = load_file(tmp_path / "file")
    assert all(same_bits(read[name], tensor) for name, tensor in held.items())


def test_the_file_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_tensors(tmp_path / "file", {"weights": torch.zeros(2)})
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("counts", [(1_000_000,), (10,) * 40_000], ids=["one large", "many small"])
def test_a_full_disk_is_said(tmp_path: Path, counts: tuple[int, ...]) -> None:
    held = {str(number): torch.zeros(count) for number, count in enumerate(counts)}
    with mounted_disk(tmp_path / "disk", "1m") as disk:
        with pytest.raises(DataError, match="the disk is full"), atomic_folder(disk / "folder") as folder:
            write_tensors(folder / "file", held)
        assert not list(disk.iterdir())


def longest_gap(work: Callable[[], object]) -> float:
    """Seconds that another thread, which wishes to run every millisecond, had to wait at most."""
    done, waits = threading.Event(), [0.0]

    def watch() -> None:
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            last, before = time.perf_counter(), last
            waits.append(last - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return max(waits)


def test_other_threads_go_on(tmp_path: Path) -> None:
    """Beside the library's `save`, which holds them up; the best of a few tries, since the machine may be busy."""
    held = {str(number): torch.ones(2_500_000) for number in range(30)}
    ours = min(longest_gap(lambda: write_tensors(tmp_path / "file", held)) for _ in range(3))
    theirs = min(longest_gap(lambda: save(held)) for _ in range(3))
    assert ours < max(0.05, theirs / 3)
