"""Data sets by name: built-in, and from installed packages through an entry point."""

import re
import subprocess
from pathlib import Path

import pytest

from shards.sample_index import Dataset
from shards.sources import find_source, list_sources, published_size
from tests.support.installed_package import install_package, run_python

TOY = '''
"""Five gray images in two classes."""
import numpy as np
from shards.sources.source import RawSample, SourceType, encode_png

class Toy:
    name, subset, class_names = "toy", "", ("even", "odd")
    def __init__(self, root, split):
        self.split = split
    def __len__(self):
        return 5
    def key(self, row):
        return f"toy/{row}"
    def label(self, row):
        return row % 2
    def origin(self, row):
        return f"row {row}"
    def sample(self, row):
        return RawSample(self.key(row), self.label(row), "png", encode_png(np.full((8, 8), 40 * row, np.uint8)))

SOURCE = SourceType("toy", Toy, splits=("train",), needs_root=False, note="five images")
'''


def _install(folder: Path, package: str, entry: str, module: str) -> None:
    install_package(folder, package, "incv.sources", entry, module)


def _shards(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return run_python(folder, "-m", "trainer", "shards", *arguments)


def test_another_package_brings_a_data_set(tmp_path):
    _install(tmp_path, "toy_images", "toy = toy_images:SOURCE", TOY)
    out = tmp_path / "out"
    packed = _shards(tmp_path, "pack", "toy", "--out", str(out), "--workers", "2", "--samples-per-shard", "3")
    assert packed.returncode == 0, packed.stderr
    assert "toy/train, 5 images of 2 classes in 2 shards" in packed.stdout
    assert Dataset.load(out).class_names == ("even", "odd")
    shown = _shards(tmp_path, "pack", "--help").stdout
    assert "toy            --split train; no --root; five images" in shown


@pytest.mark.parametrize(
    ("entry", "module", "asked", "said"),
    [
        ("broken = bad_images:SOURCE", "import missing_library", "broken", "bad_images.*missing_library"),
        ("broken = bad_images:SOURCE", "SOURCE = 5", "broken", "bad_images.*SourceType"),
        ("digits = bad_images:SOURCE", TOY, "digits", "bad_images.*'digits'.*uninstall"),
    ],
)
def test_a_broken_or_clashing_entry_point_is_refused_when_asked_for(tmp_path, entry, module, asked, said):
    _install(tmp_path, "bad_images", entry, module)
    out = str(tmp_path / "out")
    refused = _shards(tmp_path, "pack", asked, "--out", out)
    assert refused.returncode == 2
    assert re.search(said, refused.stderr)
    shown = _shards(tmp_path, "pack", "--help")
    assert shown.returncode == 0
    assert "bad_images" in shown.stderr
    assert "webvision" in shown.stdout
    assert f"  {asked} " not in shown.stdout


def test_a_data_set_of_two_packages_is_refused(tmp_path):
    for package in ("toy_a", "toy_b"):
        _install(tmp_path, package, f"toy = {package}:SOURCE", TOY)
    refused = _shards(tmp_path, "pack", "toy", "--out", str(tmp_path / "out"))
    assert refused.returncode == 2
    assert re.search("toy_[ab] and toy_[ab].*'toy'.*uninstall", refused.stderr)


def test_other_data_sets_are_not_touched_by_a_broken_package(tmp_path):
    _install(tmp_path, "bad_images", "broken = bad_images:SOURCE", "import missing_library")
    packed = _shards(tmp_path, "pack", "digits", "--split", "test", "--out", str(tmp_path / "out"), "--workers", "1")
    assert (packed.returncode, packed.stderr) == (0, "")


def test_every_record_is_found_by_its_name():
    assert [find_source(source.name) for source in list_sources()] == list_sources()
    assert len(list_sources()) >= 5


@pytest.mark.parametrize(
    ("asked", "size"),
    [
        (("webvision", "train"), (2_440_000, 1000)),
        (("webvision", "train", "google"), (980_000, 1000)),
        (("webvision", "train", "google", 50), (66_000, 50)),  # known
        (("webvision", "train", "google", 100), (98_000, 100)),  # in proportion
        (("webvision", "train", "google", 1000), (980_000, 1000)),
        (("ilsvrc12", "val", None, 50), (2_500, 50)),
        (("cifar10", "test"), (10_000, 10)),
        (("cifar10", "fit"), (45_000, 10)),
        (("cifar10", "validation"), (5_000, 10)),
        (("image_folder", "train"), None),
        (("no such data set", "train"), None),
    ],
)
def test_published_sizes(asked, size):
    assert published_size(*asked) == size
