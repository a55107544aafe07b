"""`incv shards ...` from its arguments to its exit code."""

import argparse

import pytest

from shards.command import add_commands
from shards.errors import ConfigError
from shards.sample_index import Dataset
from tests.support.pictures import image_tree, picture


def _run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers(required=True), lambda: lambda: False)
    parsed = parser.parse_args(["shards", *arguments])
    return parsed.func(parsed)


def test_digits_are_packed_and_verified(tmp_path, capsys):
    out = str(tmp_path / "digits")
    pack = ("pack", "digits", "--out", out, "--split", "test", "--workers", "1", "--samples-per-shard", "150")
    assert _run(*pack) == 0
    line = capsys.readouterr().out
    assert "digits/test, 400 images of 10 classes in 3 shards" in line
    assert "0 rejected" in line
    assert _run(*pack) == 0
    assert capsys.readouterr().out == line
    assert _run("verify", out) == 0
    assert "400 samples in 3 shards" in capsys.readouterr().out
    (tmp_path / "digits" / "shard-000001.tar").unlink()
    assert _run("verify", out, "--workers", "2") == 3
    assert "shard-000001.tar is missing" in capsys.readouterr().err


def test_an_unknown_source_is_a_mistake_of_the_command_line(tmp_path):
    with pytest.raises(ConfigError, match="did you mean digits"):
        _run("pack", "digit", "--out", str(tmp_path))


def test_what_was_converted_rejected_and_repeated_is_said(tmp_path, capsys):
    root, out = image_tree(tmp_path / "root"), tmp_path / "out"
    (root / "train" / "class0" / "again.jpg").write_bytes((root / "train" / "class0" / "0.jpg").read_bytes())
    (root / "train" / "class0" / "cut.jpg").write_bytes(picture(kind="JPEG")[:-50])
    options = ("--resize", "8", "--quality", "85", "--max-rejected", "0.1", "--dali-index", "--workers", "1")
    pack = ("pack", "image_folder", "--root", str(root), "--out", str(out), *options)
    assert _run(*pack) == 0
    line = capsys.readouterr().out
    assert "image_folder/train, 22 images of 3 classes in 1 shards" in line
    assert "1 rejected (listed in rejected.parquet)" in line
    assert "converted: 9 format, 22 resized" in line
    assert "duplicates: 1 (listed in duplicates.parquet)" in line
    assert (out / "shard-000000.idx").is_file()
    dataset = Dataset.load(out)
    assert (dataset.resize, dataset.quality) == (8, 85)
    assert _run(*pack) == 0
    assert capsys.readouterr().out == line


def test_tasks_and_classes(tmp_path, capsys):
    root, out = image_tree(tmp_path / "root"), tmp_path / "out"
    pack = ("pack", "image_folder", "--root", str(root), "--out", str(out), "--classes", "2", "--workers", "1")
    pack += ("--samples-per-shard", "3")
    for task in ("1/2", "0/2"):
        assert _run(*pack, "--task", task) == 0
        assert f"task {task} is done" in capsys.readouterr().out
    assert _run(*pack) == 0
    assert "14 images of 2 classes in 5 shards" in capsys.readouterr().out


def test_a_packed_folder_is_downloaded(tmp_path, capsys):
    out, copy = str(tmp_path / "digits"), str(tmp_path / "copy")
    assert (
        _run("pack", "digits", "--out", out, "--split", "test", "--samples-per-shard", "150", "--workers", "1") == 0
    )
    assert _run("download", out, copy, "--workers", "2") == 0
    assert "3 shards copied" in capsys.readouterr().out
    assert _run("stage", out, copy) == 0  # an alias
    assert "0 shards copied (0.0 MB), 3 already present" in capsys.readouterr().out
    assert _run("verify", copy) == 0
