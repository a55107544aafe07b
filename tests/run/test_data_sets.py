"""The packed splits of a recipe: packed as its keys say, and never replaced by another pack."""

import io
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shards.errors import CommandStopped, ConfigError, DataError, Fix
from shards.folder_lock import lock_folder
from shards.sample_index import SampleIndex
from shards.verify import verify
from trainer.config.data import DataConfig
from trainer.distributed.stop import StopRequest
from trainer.run.data_sets import open_split


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ROOT/train/<class>/<image>.jpg: three classes of two."""
    root = tmp_path_factory.mktemp("images")
    for row in range(6):
        folder = root / "train" / f"class{row // 2}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(row).integers(0, 256, (20, 30, 3), dtype=np.uint8)
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "JPEG")
        (folder / f"{row}.jpg").write_bytes(stream.getvalue())
    return root


def _open(root: Path, shards: Path, **keys: Any) -> SampleIndex:
    config = DataConfig(source="image_folder", root=str(root), shards=str(shards), **keys)
    return open_split("data.train", config, 1, StopRequest())


def test_the_keys_of_a_recipe_reach_the_shards(root, tmp_path):
    index = _open(root, tmp_path / "out", resize=10, classes=2)
    assert (len(index), index.num_classes, index.dataset.resize) == (4, 2, 10)
    assert index.height.tolist() == [10] * 4
    assert _open(root, tmp_path / "out", resize=10, classes=2).checksum == index.checksum
    assert _open(root, tmp_path / "out", resize=10).checksum == index.checksum  # null: as the folder has it


def test_one_class_is_refused_before_anything_is_written(root, tmp_path):
    with pytest.raises(DataError, match=r"data\.train has one class only, 'train'.*data\.train\.split"):
        _open(root, tmp_path / "out", split="")
    with pytest.raises(DataError, match="one class only"):
        _open(root, tmp_path / "out", classes=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("packed", "asked", "facts"),
    [
        ({"resize": 10}, {}, "resize 10.*null.*data.train.resize"),
        ({}, {"resize": 10}, "resize null.*10"),
        ({"resize": 10}, {"resize": 12}, "resize 10.*12"),
        ({"classes": 2}, {"classes": 3}, "classes 2.*3"),
        ({}, {"split": "val"}, "split train.*val"),
        ({}, {"subset": "google"}, "subset ''.*google"),
    ],
)
def test_a_folder_packed_otherwise_is_refused(root, tmp_path, packed, asked, facts):
    _open(root, tmp_path / "out", **packed)
    with pytest.raises(ConfigError, match=facts):
        _open(root, tmp_path / "out", **asked)


def test_errors_of_packing_name_the_keys_of_the_recipe(root, tmp_path):
    with pytest.raises(ConfigError, match=r"^data\.train\.subset: image_folder has no subsets"):
        _open(root, tmp_path / "out", subset="google")


def _open_in_thread(pool: ThreadPoolExecutor, root: Path, shards: Path, stop: StopRequest) -> "Future[SampleIndex]":
    """Open the split while the caller holds the folder's lock; returns once the thread has begun to wait for it."""
    config = DataConfig(source="image_folder", root=str(root), shards=str(shards))
    opened = pool.submit(open_split, "data.train", config, 1, stop)
    with pytest.raises(TimeoutError):
        opened.result(timeout=1.0)
    return opened


@pytest.mark.parametrize("outcome", ["is killed", "finishes", "fails and removes the folder"])
def test_a_run_waits_for_another_that_packs_the_same_split(root, tmp_path, caplog, outcome):
    caplog.set_level("INFO")
    packed = _open(root, tmp_path / "other")
    out = tmp_path / "shards" / "out"
    with ThreadPoolExecutor() as pool:
        with lock_folder(out, None):
            opened = _open_in_thread(pool, root, out, StopRequest())
            if outcome == "finishes":
                shutil.copytree(tmp_path / "other", out, dirs_exist_ok=True)
                shutil.rmtree(out / ".parts")
            elif outcome == "fails and removes the folder":
                shutil.rmtree(out.parent)
        index = opened.result(timeout=60)
    assert f"another process is packing into {out}; waiting" in caplog.messages
    assert index.checksum == packed.checksum
    assert not (out / ".parts").exists()
    assert not verify(out).problems


def test_a_run_that_is_refused_after_waiting_leaves_the_folder_as_it_is(root, tmp_path):
    other = _open(root, tmp_path / "other", resize=10)
    out = tmp_path / "out"
    with ThreadPoolExecutor() as pool:
        with lock_folder(out, None):
            opened = _open_in_thread(pool, root, out, StopRequest())
            shutil.copytree(tmp_path / "other", out, dirs_exist_ok=True)
            shutil.rmtree(out / ".parts")
        with pytest.raises(DataError, match="resize 10"):
            opened.result(timeout=60)
    assert _open(root, out, resize=10).checksum == other.checksum


def test_a_run_that_fails_removes_what_it_has_packed(root, tmp_path):
    for image in shutil.copytree(root, tmp_path / "root").rglob("*.jpg"):
        image.write_bytes(b"no image")
    with pytest.raises(DataError, match=r"data\.max_rejected"):
        _open(tmp_path / "root", tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()


def test_a_stopped_run_does_not_wait_for_another_that_packs_the_same_split(root, tmp_path):
    stop = StopRequest()
    with ThreadPoolExecutor() as pool, lock_folder(tmp_path / "out", None):
        opened = _open_in_thread(pool, root, tmp_path / "out", stop)
        stop.record_signal("SIGTERM")
        with pytest.raises(CommandStopped, match="run the same command again"):
            opened.result(timeout=60)
    assert (tmp_path / "out" / ".parts").exists()


def test_errors_of_packing_name_recipe_keys(root, tmp_path, monkeypatch):
    def kill(*_: object) -> None:
        fixes = [Fix("use a smaller {}", "workers"), Fix("choose another {}", "out"), Fix("allow {}", "max_rejected")]
        raise DataError("killed", field="label_column", fix=fixes)

    monkeypatch.setattr("trainer.run.data_sets.pack", kill)
    with pytest.raises(DataError) as raised:
        _open(root, tmp_path / "out")
    assert str(raised.value) == (
        "data.train.label_column: killed; use a smaller execution.workers, or choose another data.train.shards, "
        "or allow data.max_rejected"
    )
