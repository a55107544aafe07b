"""Each rank's lines are in its file; the terminal hears rank 0, and of the others only what is said aloud."""

import io
import logging
import os
import re
import sys
from pathlib import Path

import pytest
from tqdm import tqdm
from trainer.records.rank_log import print_from_any_rank, rank_log

from shards.errors import ConfigError, DataError
from shards.progress import Progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def lines(path: Path) -> list[str]:
    """Without the opening line."""
    return path.read_text().splitlines()[1:]


def test_rank_0_goes_to_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "logs" / "rank-0000.log"
    with rank_log(path, 0, 2):
        print("to stdout", 1)
        print("to stderr\nin two lines", file=sys.stderr)
        assert path.read_text().endswith("to stderr\nin two lines\n"), "a line must be there at once"
    assert lines(path) == ["to stdout 1", "to stderr", "in two lines"]
    assert capsys.readouterr() == ("to stdout 1\n", "to stderr\nin two lines\n")


def test_other_ranks_go_to_their_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with rank_log(tmp_path / "rank-0001.log", 1, 2):
        print("to stdout")
        print("to stderr", file=sys.stderr)
        print_from_any_rank("incv: error: heard by all")
    assert lines(tmp_path / "rank-0001.log") == ["to stdout", "to stderr", "incv: error: heard by all"]
    assert capsys.readouterr() == ("", "incv: error: heard by all\n")


def test_aloud_needs_no_log(capsys: pytest.CaptureFixture[str]) -> None:
    print_from_any_rank("incv: error: early")
    assert capsys.readouterr().err == "incv: error: early\n"


def test_aloud_is_not_said_twice_by_rank_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with rank_log(tmp_path / "rank-0000.log", 0, 2):
        print_from_any_rank("incv: error: once")
    assert capsys.readouterr().err == "incv: error: once\n"
    assert lines(tmp_path / "rank-0000.log") == ["incv: error: once"]


def test_each_start_opens_with_who_it_is(tmp_path: Path) -> None:
    for word in ("first", "second"):
        with rank_log(tmp_path / "rank-0007.log", 7, 64):
            print(word)
    opening = rf"--- \d{{4}}-\d\d-\d\dT[\d:]+\+00:00 \S+ pid {os.getpid()}, rank 7 of 64"
    pattern = f"{opening}\nfirst\n{opening}\nsecond\n"
    assert re.fullmatch(pattern, (tmp_path / "rank-0007.log").read_text())


def test_streams_are_given_back(tmp_path: Path) -> None:
    before = sys.stdout, sys.stderr
    with pytest.raises(ValueError, match="wrong"), rank_log(tmp_path / "a.log", 1, 2):
        raise ValueError("wrong")
    assert (sys.stdout, sys.stderr) == before


def test_an_error_is_in_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError), rank_log(tmp_path / "a.log", 1, 2):
        raise ConfigError("batch.global is 0: set it to 1 or more")
    assert lines(tmp_path / "a.log") == ["incv: error: batch.global is 0: set it to 1 or more"]
    with pytest.raises(ZeroDivisionError), rank_log(tmp_path / "b.log", 1, 2):
        print(1 // 0)
    assert lines(tmp_path / "b.log")[0] == "Traceback (most recent call last):"
    assert lines(tmp_path / "b.log")[-1].startswith("ZeroDivisionError")


def test_a_bar_is_for_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with rank_log(tmp_path / "a.log", 0, 1):
        with Progress("incv/0/0", 20) as outer:
            for _ in range(10):
                with Progress("predict", 2) as inner:  # a bar inside a bar moves the cursor
                    inner.advance(2, "loss 0.1")
                outer.advance(2)
                print("warning: said between", file=sys.stderr)
        with tqdm(total=2, mininterval=0) as bar:
            bar.update(2)
    assert "incv/0/0" in terminal.getvalue()
    assert "predict" in terminal.getvalue()
    assert lines(tmp_path / "a.log") == ["warning: said between"] * 10


def test_other_ranks_have_no_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with rank_log(tmp_path / "a.log", 1, 2):
        assert not sys.stderr.isatty()
        with Progress("incv/0/0", 20) as progress:
            progress.advance(20)
    assert terminal.getvalue() == ""


def test_a_line_without_an_end_is_kept(tmp_path: Path) -> None:
    with rank_log(tmp_path / "a.log", 1, 2):
        print("50 %\r100 %", end="")
    assert lines(tmp_path / "a.log") == ["100 %"]


def test_a_stream_held_for_longer_goes_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with rank_log(tmp_path / "a.log", 1, 2):
        handler = logging.StreamHandler()
        handler.emit(logging.makeLogRecord({"msg": "inside"}))
    handler.emit(logging.makeLogRecord({"msg": "outside"}))
    assert lines(tmp_path / "a.log") == ["inside"]
    assert capsys.readouterr().err == "outside\n"


def test_characters_of_any_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with rank_log(tmp_path / "a.log", 1, 2):
        print("Größe \N{SNOWMAN} \udcff")  # a file name that is not UTF-8
    assert lines(tmp_path / "a.log") == ["Größe \N{SNOWMAN} \\udcff"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    path = tmp_path / "run" / "logs" / "a.log"
    with pytest.raises(DataError, match=str(path)), rank_log(path, 0, 1):
        pass


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_does_not_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with rank_log(Path("/dev/full"), 0, 1):
        print("still heard")
    assert capsys.readouterr().out == "still heard\n"
