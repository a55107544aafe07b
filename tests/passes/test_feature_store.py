"""Features by content: nothing is computed twice, and damage is named."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import trainer.passes.feature_store as module
from shards.errors import DataError
from trainer.distributed.world import SINGLE_PROCESS
from trainer.passes.feature_store import FeatureStore, content_keys

WIDTH = 3


class Pass:
    """A pass that remembers the ids it was asked for."""

    def __init__(self, unusable: tuple[int, ...] = ()) -> None:
        self.asked: list[int] = []
        self.unusable = unusable

    def __call__(self, ids, path):
        self.asked += ids.tolist()
        path.parent.mkdir(parents=True, exist_ok=True)
        np.repeat(ids[:, None], WIDTH, axis=1).astype(np.float16).tofile(path)
        return SimpleNamespace(usable=torch.from_numpy(~np.isin(ids, self.unusable)))


@pytest.fixture
def store(tmp_path) -> FeatureStore:
    return FeatureStore(tmp_path / "network", SINGLE_PROCESS)


def test_only_new_images_are_computed(store, monkeypatch):
    monkeypatch.setattr(module, "PIECE", 4)  # several parts
    ids = np.arange(10)
    keys = (ids + 100).astype(np.uint64)
    first, second = Pass(), Pass()
    assert store.fill(keys, ids, first) == 10
    assert sorted(first.asked) == ids.tolist()
    more = np.arange(12)
    assert store.fill((more + 100).astype(np.uint64), more, second) == 2
    assert second.asked == [10, 11]
    features, found = store.read((more[::-1] + 100).astype(np.uint64))
    assert found.all()
    assert features[:, 0].tolist() == more[::-1].tolist()


def test_equal_images_are_computed_once(store):
    keys, once = np.array([7, 8, 7], np.uint64), Pass()
    assert store.fill(keys, np.arange(3), once) == 2
    features, found = store.read(keys)
    assert found.all()
    assert features[0].tolist() == features[2].tolist()


def test_unusable_images_have_no_features_and_are_tried_again(store):
    keys, ids = np.array([1, 2, 3], np.uint64), np.arange(3)
    store.fill(keys, ids, Pass(unusable=(1,)))
    assert store.read(keys)[1].tolist() == [True, False, True]
    again = Pass()
    store.fill(keys, ids, again)
    assert again.asked == [1]
    assert store.read(keys)[1].all()


def test_a_part_without_keys_is_computed_again(store):
    keys, ids = np.array([1, 2], np.uint64), np.arange(2)
    store.folder.mkdir(parents=True)
    (store.folder / "00000.features").write_bytes(b"left by a kill")
    again = Pass()
    store.fill(keys, ids, again)
    assert again.asked == [0, 1]


@pytest.mark.parametrize("name", ["00000.features", "00000.keys.npy"])
def test_damage_is_named(store, name):
    keys, ids = np.array([1, 2], np.uint64), np.arange(2)
    store.fill(keys, ids, Pass())
    (store.folder / name).write_bytes(b"x")
    with pytest.raises(DataError, match=name):
        store.read(keys)


def test_keys_follow_from_the_content():
    columns = {name: np.array([1, 1, 2], np.int64) for name in ("crc32", "nbytes", "width", "height")}
    keys = content_keys(SimpleNamespace(**columns), np.arange(3))
    assert keys[0] == keys[1] != keys[2]
    assert keys.all()
