"""`incv shards pack` with bad images, disks or concurrent packers: one clear line, exit code 3, no partial output."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shards.command
from shards.folder_lock import lock_folder
from shards.image_check import MAX_PIXELS
from shards.pack import PackOptions, pack
from shards.plan import ArrayTask
from shards.sources import open_source
from tests.support import REPOSITORY
from tests.support.pictures import contents, image_tree, picture
from tests.support.small_disk import enlarge, mounted_disk
from trainer.cli import main


@pytest.fixture
def incv(capsys: pytest.CaptureFixture[str]) -> Iterator[object]:
    """The command in this process: (exit code, what it said on stderr)."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)}

    def run(*arguments: object) -> tuple[int, str]:
        try:
            code = main([str(argument) for argument in ("shards", *arguments)])
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, capsys.readouterr().err

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _pack(root: Path, out: Path, *options: str) -> tuple[object, ...]:
    return ("pack", "image_folder", "--root", root, "--out", out, "--workers", "1", *options)


def _one_line(error: str) -> str:
    lines = [line for line in error.splitlines() if line.startswith("incv: error: ")]
    assert len(lines) == 1
    assert "Traceback" not in error
    return lines[0]


def _jpeg_bomb() -> bytes:
    """A small JPEG whose frame says 60,000 x 60,000."""
    data = bytearray(picture(kind="JPEG"))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = (60_000).to_bytes(2, "big") * 2
    return bytes(data)


def test_a_bomb_costs_nothing_and_is_rejected(tmp_path):
    assert MAX_PIXELS < 60_000**2
    root, out = image_tree(tmp_path / "root", per_class=2), tmp_path / "out"
    (root / "train" / "class0" / "bomb.jpg").write_bytes(_jpeg_bomb())
    command = [str(argument) for argument in ("shards", *_pack(root, out, "--resize", "8"))]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", *command], env=environment, stderr=subprocess.PIPE, text=True
    )
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 3, said
    assert "bomb.jpg: larger than 64 MiB or 50 megapixels" in _one_line(said)
    assert used.ru_maxrss < 3_000_000  # KB; its pixels would be 10,800,000
    assert not (out / "dataset.json").exists()


def test_more_rejected_than_allowed(incv, tmp_path):
    root, out = image_tree(tmp_path / "root"), tmp_path / "out"
    (root / "train" / "class1" / "0.jpg").write_bytes(b"<html>gone</html>")
    (root / "train" / "class1" / "1.png").write_bytes(b"\0\0\0\x20ftypavif" + bytes(99))
    code, error = incv(*_pack(root, out, "--max-rejected", "0.05"))
    assert code == 3
    assert "train/class1/0.jpg: HTML bytes in a .jpg, not an image" in _one_line(error)
    assert "train/class1/1.png: AVIF bytes in a .png, which is not supported" in _one_line(error)
    assert "--max-rejected" in error
    assert incv(*_pack(root, out, "--max-rejected", "0.1"))[0] == 0


def test_an_image_that_vanishes_while_packing_is_named(incv, tmp_path, monkeypatch):
    root, out = image_tree(tmp_path / "root"), tmp_path / "out"
    lost = root / "train" / "class2" / "3.png"
    kept = lost.read_bytes()

    def open_and_lose(*arguments, **options):
        source = open_source(*arguments, **options)
        lost.unlink(missing_ok=True)  # after the list was made, before it is read
        return source

    monkeypatch.setattr(shards.command, "open_source", open_and_lose)
    code, error = incv(*_pack(root, out, "--samples-per-shard", "8"))
    assert code == 3
    assert "train/class2/3.png" in _one_line(error)
    assert not list(out.rglob(".*.tmp*"))
    lost.write_bytes(kept)
    monkeypatch.undo()
    assert incv(*_pack(root, out, "--samples-per-shard", "8"))[0] == 0
    pack(open_source("image_folder", root, "train"), tmp_path / "whole", PackOptions(samples_per_shard=8))
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("task", [None, "1/2"])
def test_two_packers_on_one_folder(incv, tmp_path, task):
    root, out = image_tree(tmp_path / "root"), tmp_path / "out"
    options = [] if task is None else ["--task", task]
    with lock_folder(out, None if task is None else ArrayTask.parse(task)):
        code, error = incv(*_pack(root, out, *options))
    assert code == 3
    assert "another process is" in _one_line(error)
    assert str(out) in error
    assert incv(*_pack(root, out, *options))[0] == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Room for the first shards, not for all."""
    with mounted_disk(tmp_path / "disk", "64k") as folder:
        yield folder


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_disk_that_fills_up(incv, tmp_path, small_disk, workers):
    root, out = image_tree(tmp_path / "root"), small_disk / "out"
    options = ("--samples-per-shard", "3", "--workers", workers)
    code, error = incv(*_pack(root, out, *options))
    assert code == 3
    assert "the disk is full" in _one_line(error)
    assert not list(out.rglob(".*.tmp*"))
    assert not (out / "dataset.json").exists()
    enlarge(small_disk, "10m")
    assert incv(*_pack(root, out, *options))[0] == 0
    pack(open_source("image_folder", root, "train"), tmp_path / "whole", PackOptions(samples_per_shard=3))
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--task", "4/4"], "numbered 0/N"),
        (["--task", "one"], "I/N"),
        (["--resize", "0"], "resize"),
        (["--quality", "0"], "quality"),
        (["--subset", "google"], "--subset"),
        (["--classes", "0"], "classes"),
        (["--workers", "0"], "workers"),
    ],
)
def test_wrong_arguments_are_mistakes_of_the_command_line(incv, tmp_path, options, words):
    code, error = incv(*_pack(image_tree(tmp_path / "root"), tmp_path / "out"), *options)
    assert code == 2
    assert words in _one_line(error)
    assert not (tmp_path / "out").exists()


def test_an_out_that_is_a_file(incv, tmp_path):
    (tmp_path / "out").write_text("x")
    code, error = incv(*_pack(image_tree(tmp_path / "root"), tmp_path / "out"))
    assert code == 3
    assert "is a file" in _one_line(error)
