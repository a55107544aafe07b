"""Compiled blocks are kept as one file, found by another process with empty caches, and refused from strangers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support import REPOSITORY
from trainer.acceleration.compile_cache import CompiledCache

PROGRAM = REPOSITORY / "tests" / "support" / "compiled_program.py"


def served(cache: Path, own: Path, steps: tuple[int, ...] = (0, 1), precision: str = "fp32") -> tuple[int, int]:
    """Hits and misses of a process whose own caches are in `own`."""
    environ = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(own),
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, PROGRAM, str(cache), precision, *map(str, steps)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    hits, misses = done.stdout.split()[-2:]
    return int(hits), int(misses)


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path):
    hits, misses = served(tmp_path / "kept", tmp_path / "first")
    assert misses > 0
    (file,) = (tmp_path / "kept").iterdir()
    assert file.stat().st_mode & 0o077 == 0
    assert served(tmp_path / "kept", tmp_path / "second") == (hits + misses, 0)


@pytest.mark.slow
def test_a_file_that_serves_nothing_is_written_anew(tmp_path):
    """As after an update of the network's code, which its weights do not tell."""
    served(tmp_path / "older", tmp_path / "own_older", precision="bf16")
    hits, misses = served(tmp_path / "kept", tmp_path / "own_first")
    (older,), (kept,) = ((tmp_path / name).iterdir() for name in ("older", "kept"))
    kept.write_bytes(older.read_bytes())
    assert served(tmp_path / "kept", tmp_path / "own_second") == (hits, misses)
    assert served(tmp_path / "kept", tmp_path / "own_third") == (hits + misses, 0)


@pytest.mark.slow
def test_what_a_process_keeps_later_has_all_it_compiled_before(tmp_path):
    """Trainings and shapes share blocks, and another node may begin with any of them."""
    few, many = 0, 25  # rows, in these steps
    hits, misses = served(tmp_path / "kept", tmp_path / "own_first", (few, many))
    first, _ = sorted((tmp_path / "kept").iterdir(), key=lambda file: file.stat().st_mtime_ns)
    first.unlink()
    assert served(tmp_path / "kept", tmp_path / "own_second", (many, few)) == (hits + misses, 0)


def cache_in(folder: Path) -> CompiledCache:
    return CompiledCache(folder, nn.Linear(2, 2), "test", torch.device("cpu"), writes=True)


def kept_file(folder: Path) -> Path:
    """The file that a step on these shapes reads, with content of no use."""
    folder.mkdir(mode=0o700)
    file = cache_in(folder).file((1,))
    file.write_bytes(b"no cache")
    file.chmod(0o600)
    return file


def test_a_file_that_others_may_write_is_not_read(tmp_path, capsys):
    file = kept_file(tmp_path / "kept")
    file.chmod(0o660)
    with cache_in(tmp_path / "kept").kept((1,)):
        pass
    assert "written by others" in capsys.readouterr().err


def test_a_file_of_no_use_is_passed_over(tmp_path, capsys):
    kept_file(tmp_path / "kept")
    with cache_in(tmp_path / "kept").kept((1,)):
        pass
    assert "compiling anew" in capsys.readouterr().err


def test_without_a_file_nothing_is_said(tmp_path, capsys):
    with cache_in(tmp_path / "none").kept((1,)):
        pass
    assert capsys.readouterr().err == ""
