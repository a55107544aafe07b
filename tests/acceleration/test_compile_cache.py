"""A copy of the compile cache serves every compilation of another process; a cache writable by others is refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import REPOSITORY
from trainer.acceleration.compile import cache_directory, use_compile_cache

PROGRAM = REPOSITORY / "tests" / "support" / "compiled_program.py"
VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def run_program(cache: Path) -> dict[str, list[int]]:
    """Hits and misses of torch's two caches in a process of its own."""
    environ = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environ |= {"INCV_COMPILE_CACHE": str(cache)}
    done = subprocess.run([sys.executable, PROGRAM], env=environ, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[int]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_copy_at_another_path_compiles_nothing_anew(tmp_path: Path) -> None:
    first = run_program(tmp_path / "first")
    assert all(missed > 0 for _, missed in first.values())
    assert (tmp_path / "first").stat().st_mode & 0o077 == 0
    shutil.copytree(tmp_path / "first", tmp_path / "elsewhere" / "copy")
    shutil.rmtree(tmp_path / "first")
    again = run_program(tmp_path / "elsewhere" / "copy")
    assert again == {name: [served + missed, 0] for name, (served, missed) in first.items()}


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("INCV_COMPILE_CACHE", "XDG_CACHE_HOME", *VARIABLES):
        monkeypatch.setenv(name, "")  # restored afterwards, whatever the test sets
        monkeypatch.delenv(name)
    return monkeypatch


def test_torch_and_triton_cache_in_the_named_directory(tmp_path: Path, environ: pytest.MonkeyPatch) -> None:
    environ.setenv("INCV_COMPILE_CACHE", str(tmp_path / "named"))
    use_compile_cache()
    assert [os.environ[name] for name in VARIABLES] == [str(tmp_path / "named" / it) for it in ("inductor", "triton")]


def test_variables_of_torch_and_triton_take_precedence(tmp_path: Path, environ: pytest.MonkeyPatch) -> None:
    environ.setenv("INCV_COMPILE_CACHE", str(tmp_path / "named"))
    for name in VARIABLES:
        environ.setenv(name, "/chosen")
    use_compile_cache()
    assert [os.environ[name] for name in VARIABLES] == ["/chosen", "/chosen"]


def test_the_default_is_in_the_users_cache(tmp_path: Path, environ: pytest.MonkeyPatch) -> None:
    environ.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache/incv/compiled"
    environ.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_directory() == Path("/xdg/incv/compiled")


def test_a_user_without_a_home_has_none(environ: pytest.MonkeyPatch) -> None:
    def fail(_: type[Path]) -> Path:
        raise RuntimeError("no home")

    environ.setattr(Path, "home", classmethod(fail))
    assert cache_directory() is None
    use_compile_cache()
    assert not any(name in os.environ for name in VARIABLES)


def test_a_directory_that_others_may_write_is_refused(
    tmp_path: Path, environ: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o770)
    environ.setenv("INCV_COMPILE_CACHE", str(shared))
    use_compile_cache()
    assert f"{shared} is not used" in caplog.text
    assert not any(name in os.environ for name in VARIABLES)


def test_a_directory_that_cannot_be_made_costs_no_run(
    tmp_path: Path, environ: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    environ.setenv("INCV_COMPILE_CACHE", str(tmp_path / "file" / "cache"))
    use_compile_cache()
    assert "cannot be used" in caplog.text
