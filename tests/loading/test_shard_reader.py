"""Byte ranges requested from shards: single samples, or whole shards for the windowed order."""

import os

import numpy as np
import pytest

from tests.support.packed_pictures import equal_pictures, packed, with_damage
from trainer.loading.sample_order import windowed_order
from trainer.loading.shard_reader import CorruptSample, ShardReader


@pytest.fixture(scope="module")
def forty_shards(tmp_path_factory):
    pictures = equal_pictures(120, width=9, height=9, classes=2)
    return packed(pictures, tmp_path_factory.mktemp("forty") / "shards", samples_per_shard=3)


def swept_in(index, reader, window, epochs, monkeypatch):
    """How many shards were swept in each epoch."""
    counts, shards = [], index.shard[index.usable_ids()]
    real = os.posix_fadvise
    for epoch in range(epochs):
        swept = []

        def advise(descriptor, offset, length, advice, swept=swept):
            if advice == os.POSIX_FADV_WILLNEED and offset == 0:
                swept.append(descriptor)
            real(descriptor, offset, length, advice)

        monkeypatch.setattr(os, "posix_fadvise", advise)
        for sample in windowed_order(7, epoch, index.usable_ids(), shards, window):
            reader.read(int(sample))
        counts.append(len(swept))
    monkeypatch.setattr(os, "posix_fadvise", real)
    return counts


def test_every_epoch_sweeps_its_shards(forty_shards, monkeypatch):
    reader = ShardReader(forty_shards, window=2)
    counts = swept_in(forty_shards, reader, 2, 3, monkeypatch)
    assert counts[0] == 40
    assert all(count >= 30 for count in counts)  # all but those that the last window left open
    assert len(reader._files) <= 8
    reader.close()


def test_without_a_window_nothing_but_the_samples_is_asked_for(forty_shards, monkeypatch):
    reader = ShardReader(forty_shards)
    assert swept_in(forty_shards, reader, 2, 2, monkeypatch) == [0, 0]
    reader.close()


def test_what_is_not_what_was_packed_is_never_returned(forty_shards, tmp_path):
    damaged = with_damage(forty_shards, tmp_path / "shards", [5])
    reader = ShardReader(damaged)
    assert reader.read_or_none(5) is None
    with pytest.raises(CorruptSample, match=r"sample 5 .*incv shards verify"):
        reader.read(5)
    assert reader.read(6) == ShardReader(forty_shards).read(6)
    reader.close()


def test_a_reader_that_was_closed_opens_again(forty_shards):
    reader = ShardReader(forty_shards)
    first = reader.read(0)
    reader.close()
    assert reader.read(0) == first
    assert np.frombuffer(first, np.uint8)[0] == 0x89  # a PNG
    reader.close()
