"""Exclusive streams for CUDA graphs. `make test-gpu` runs these."""

import gc
import threading

import pytest
import torch

from trainer.acceleration.streams import ExclusiveStream

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
GPU = torch.device("cuda", 0)


def test_they_come_and_go_for_as_long_as_a_run_lasts():
    kept = [ExclusiveStream(GPU) for _ in range(8)]
    for _ in range(500):
        some = [ExclusiveStream(GPU) for _ in range(4)]
        assert len({own.stream for own in kept + some}) == len(kept) + len(some)
        del some
        gc.collect(0)
    assert all(own.stream.priority < 0 for own in kept)


def test_threads_get_different_ones():
    found, lock = [], threading.Lock()

    def draw():
        own = ExclusiveStream(GPU)
        with lock:
            found.append(own)

    threads = [threading.Thread(target=draw) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({own.stream for own in found}) == len(found)
