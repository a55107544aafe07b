"""Each rank logs to its own file; the terminal shows rank 0, and other ranks' lines only if marked for any rank."""

import errno
import io
import logging
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shards.errors import ConfigError, DataError
from shards.progress import Progress
from trainer.records.logs import ANY_RANK, LogFile, LogTarget, current_target, log_to_file, set_target

log = logging.getLogger("trainer.tests")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def lines(path: Path) -> list[str]:
    """Level and text, without the opening line and the times."""
    return [re.sub(r"^\S+ (\w+) +", r"\1 ", line) for line in path.read_text().splitlines()[1:]]


def test_rank_0_writes_to_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "logs" / "rank-0000.log"
    with log_to_file(path, 0, 2):
        log.info("step %d", 7)
        assert path.read_text().endswith("step 7\n"), "a line must be there at once"
        log.warning("slow disk")
        log.error("no space")
    assert lines(path) == ["INFO step 7", "WARNING warning: slow disk", "ERROR incv: error: no space"]
    assert capsys.readouterr() == ("", "step 7\nwarning: slow disk\nincv: error: no space\n")


def test_other_ranks_write_to_their_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with log_to_file(tmp_path / "rank-0001.log", 1, 2):
        log.info("quiet")
        log.error("for all to see", extra=ANY_RANK)
    assert lines(tmp_path / "rank-0001.log") == ["INFO quiet", "ERROR incv: error: for all to see"]
    assert capsys.readouterr().err == "incv: error: for all to see\n"


def test_without_a_file_lines_go_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    log.info("early")
    assert capsys.readouterr().err == "early\n"


def test_each_start_opens_with_who_it_is(tmp_path: Path) -> None:
    for word in ("first", "second"):
        with log_to_file(tmp_path / "rank-0007.log", 7, 64):
            log.info(word)
    opening = rf"--- \d{{4}}-\d\d-\d\dT[\d:]+\+00:00 \S+ pid {os.getpid()}, rank 7 of 64"
    pattern = rf"{opening}\n\S+ INFO +first\n{opening}\n\S+ INFO +second\n"
    assert re.fullmatch(pattern, (tmp_path / "rank-0007.log").read_text())


def test_the_target_is_restored(tmp_path: Path) -> None:
    before = current_target()
    with pytest.raises(ValueError, match="wrong"), log_to_file(tmp_path / "a.log", 1, 2):
        raise ValueError("wrong")
    assert current_target() == before


def test_an_error_that_leaves_the_block_is_in_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError), log_to_file(tmp_path / "a.log", 1, 2):
        raise ConfigError("batch.global is 0: set it to 1 or more")
    assert lines(tmp_path / "a.log") == ["ERROR incv: error: batch.global is 0: set it to 1 or more"]
    with pytest.raises(ZeroDivisionError), log_to_file(tmp_path / "b.log", 1, 2):
        log.info(1 // 0)
    assert lines(tmp_path / "b.log")[0] == "ERROR Traceback (most recent call last):"
    assert (tmp_path / "b.log").read_text().splitlines()[-1].startswith("ZeroDivisionError")


def test_a_prefix_names_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = current_target()
    set_target(replace(before, prefix="seed=1: "))
    try:
        log.info("labels: done")
    finally:
        set_target(before)
    assert capsys.readouterr().err == "seed=1: labels: done\n"


def test_a_bar_is_for_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with log_to_file(tmp_path / "a.log", 0, 1), Progress("incv/0/0", 20) as outer:
        for _ in range(10):
            with Progress("predict", 2) as inner:
                inner.advance(2, "loss 0.1")
            outer.advance(2)
            log.warning("between two steps")
    assert "incv/0/0" in terminal.getvalue()
    assert "predict" in terminal.getvalue()
    assert lines(tmp_path / "a.log") == ["WARNING warning: between two steps"] * 10


@pytest.mark.parametrize("target", [LogTarget(echo=False), LogTarget(prefix="seed=1: ")], ids=["rank 1", "sweep"])
def test_no_bar_on_other_ranks_or_where_runs_share_a_terminal(target: LogTarget, monkeypatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    set_target(target)
    try:
        with Progress("incv/0/0", 20) as progress:
            progress.advance(20)
    finally:
        set_target(LogTarget())
    assert terminal.getvalue() == ""


def test_characters_of_any_kind(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "a.log")
    file.write("Größe \N{SNOWMAN} \udcff")  # a file name that is not UTF-8
    file.close()
    assert (tmp_path / "a.log").read_text() == "Größe \N{SNOWMAN} \\udcff\n"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    path = tmp_path / "run" / "logs" / "a.log"
    with pytest.raises(DataError, match=str(path)), log_to_file(path, 0, 1):
        pass


def test_a_full_disk_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("trainer.records.logs.os.write", fail)
        with log_to_file(tmp_path / "rank.log", 0, 1):
            log.info("still shown")
    assert capsys.readouterr().err == "still shown\n"
