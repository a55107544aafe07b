"""Batches handed between CUDA streams: complete on arrival, and few in flight. `make test-gpu` runs these."""

import gc
from collections.abc import Generator, Iterable, Sequence

import pytest
import torch

from trainer.loading.batch import Batch
from trainer.loading.prefetch import PrefetchThread, make_batches

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
GPU = torch.device("cuda", 0)
COUNT, ROWS, PIXELS = 60, 16, 256
SHORT, LONG = 2_000_000, 20_000_000
"""Cycles of the GPU: about 1 and 10 ms."""
MOST_AT_ONCE = 10
"""4 computing, 2 ready, one each in the hands of the consumer and the feeder, one just made, one just done with."""


def numbered(number: int) -> Batch:
    """Every tensor holds the number, some time after it was asked for."""
    shape = (ROWS, 3, PIXELS, PIXELS)
    batch = Batch(
        ids=torch.empty(ROWS, dtype=torch.int64, device=GPU),
        images=torch.empty(shape, device=GPU),
        weights=torch.empty(ROWS, device=GPU),
    )
    torch.cuda._sleep(SHORT)  # whoever does not wait for the making stream reads what was there before
    for tensor in (batch.ids, batch.images, batch.weights):
        tensor.fill_(number)
    return batch


def numbered_group(numbers: Sequence[int]) -> list[Batch]:
    return [numbered(number) for number in numbers]


def groups() -> list[range]:
    """All numbers, in groups of one and of two."""
    return [range(1), *(range(first, min(first + 2, COUNT)) for first in range(1, COUNT, 2))]


def all_numbers() -> Generator[Batch, None, None]:
    for number in range(COUNT):
        yield numbered(number)


def extremes(batch: Batch) -> torch.Tensor:
    """Smallest and largest number of each tensor: float32 [6]."""
    tensors = (batch.ids, batch.images, batch.weights)
    return torch.stack([bound.float() for tensor in tensors for bound in torch.aminmax(tensor)])


def consumed(batches: Iterable[Batch]) -> list[list[float]]:
    """What a slow stream reads of each batch, long after the host has let go of it."""
    seen = []
    with torch.cuda.stream(torch.cuda.Stream(GPU)):
        for batch in batches:
            torch.cuda._sleep(LONG)
            seen.append(extremes(batch))
            del batch
        assert not torch.cuda.current_stream().query()  # the host is through, the GPU is not
    torch.cuda.synchronize()
    return [found.tolist() for found in seen]


def in_use(which: str) -> int:
    """Bytes; unlike memory_allocated, with what the host has freed and a stream still reads."""
    return int(torch.cuda.memory_stats(GPU)[f"active_bytes.all.{which}"])


def test_fed_batches_arrive_unharmed_and_few_at_a_time():
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(GPU)
    before = in_use("current")
    feeder = PrefetchThread(all_numbers(), GPU)
    try:
        seen = consumed(feeder)
    finally:
        feeder.close()
    assert seen == [[float(number)] * 6 for number in range(COUNT)]
    batch, most = ROWS * 3 * PIXELS * PIXELS * 4, in_use("peak") - before
    assert 3 * batch < most < (MOST_AT_ONCE + 0.5) * batch  # the consumer was far behind, and the feeder waited


def test_batches_made_when_asked_for_arrive_unharmed():
    seen = consumed(make_batches(numbered_group, groups(), GPU))
    assert seen == [[float(number)] * 6 for number in range(COUNT)]


def test_the_host_waits_for_no_batch():
    """Neither to make one nor to hand it over."""
    batches = make_batches(numbered_group, groups(), GPU)
    next(batches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            extremes(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_feeder_that_is_closed_early_lets_go_of_its_batches():
    gc.collect()  # what the tests before it left
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(GPU)
    feeder = PrefetchThread(all_numbers(), GPU)
    batches = iter(feeder)
    assert extremes(next(batches)).tolist() == [0.0] * 6
    batches.close()
    feeder.close()
    del feeder, batches
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated(GPU) == before
