"""Real digits, packed once for this folder's tests; single-threaded training, process state restored."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shards.pack import pack
from shards.sample_index import SampleIndex
from shards.sources.digits import Digits
from tests.support.digits_bench import Bench


@pytest.fixture(scope="session")
def packed_digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packed splits `train` and `test`."""
    folder = tmp_path_factory.mktemp("digits")
    for split in ("train", "test"):
        pack(Digits(None, split), folder / split)
    return folder


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Bit-identical trainings, on one thread; `carry_out` sets threads and signal handlers for its process."""
    threads = torch.get_num_threads()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)}
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def bench(one_thread: None, packed_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(SampleIndex.load(packed_digits / "train"), lambda: tmp_path_factory.mktemp("run"))
