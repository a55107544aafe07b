"""The progress of a run on a real pseudo-terminal and in a pipe, and the same facts in metrics.jsonl."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.support.command_line import THREADS, TINY
from trainer.records.pace import TIMES

WIDTH = 100
COMMAND = [sys.executable, "-m", "trainer", "run", "-c", TINY, "--run-dir", "run", THREADS, "execution.log_every=2"]
SHORT = ["incv.rounds=1", "methods=[standard, coteaching]", "execution.folds=in_turn", "execution.device=cpu"]


def run_on_terminal(command: list[str], cwd: Path) -> tuple[int, str]:
    """Run a command on a terminal of its own; returns its exit code and all that it wrote there."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(cwd)
        os.execv(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, WIDTH, 0, 0))
    written = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        written += part
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), written.decode()


def show_screens(written: str) -> list[list[str]]:
    """The lines on the screen after each piece of output: what carriage returns and cursor movements leave."""
    lines, row, column, screens = [""], 0, 0, []
    for piece in re.findall(r"\x1b\[A|\r|\n|[^\x1b\r\n]+", written):
        if piece == "\x1b[A":
            row -= 1
        elif piece == "\r":
            column = 0
        elif piece == "\n":
            row, column = row + 1, column  # the terminal's driver sends a carriage return before
            lines += [""] * (row + 1 - len(lines))
        else:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + piece + line[column + len(piece) :]
            column += len(piece)
            screens.append([line.rstrip() for line in lines])
    return screens


@pytest.fixture
def shown(playground: Path) -> list[list[str]]:
    code, written = run_on_terminal([*COMMAND, *SHORT], playground)
    assert code == 0, written
    return show_screens(written)


def test_one_tidy_view_on_a_terminal(shown: list[list[str]], playground: Path) -> None:
    bars = [
        (screen, row) for screen in shown for row, line in enumerate(screen) if "incv, round 1/1, fold 2/2" in line
    ]
    below = {screen[row + 1] for screen, row in bars if len(screen) > row + 1 and "epoch" in screen[row + 1]}
    facts = r"  epoch \d+\.\d/5, [\d,]+ images/s, data wait \d+ %, left: stage \d\d:\d\d, run \d\d:\d\d, loss \d\.\d+"
    assert [line for line in below if re.match(facts, line)], below
    for screen in shown:
        assert max((len(line) for line in screen if "images/s" in line or "steps/s" in line), default=0) <= WIDTH
        assert sum("steps/s" in line for line in screen) <= 2, "one bar at a time, or a pass inside a training"
    last = shown[-1]
    assert not [line for line in last if "images/s" in line or "steps/s" in line], "the view is removed at the end"
    done = [line.split(":")[0] for line in last if re.fullmatch(r"\w+: done in [\d.]+ s", line)]
    assert done == ["labels", "incv", "standard", "coteaching", "evaluate", "export", "report"]


def test_plain_lines_in_a_pipe_and_the_facts_in_metrics(playground: Path) -> None:
    answer = subprocess.run([*COMMAND, *SHORT], cwd=playground, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    assert not re.search(r"[\x1b\r]", answer.stderr + answer.stdout)
    for file in (*Path("run").glob("rounds/*/*/metrics.jsonl"), *Path("run").glob("methods/*/metrics.jsonl")):
        first, *lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert not set(TIMES) & first.keys(), "the first step may compile"
        timed = [line for line in lines if "loss" in line]
        assert timed
        assert all(set(TIMES) <= line.keys() for line in timed)
        assert all(line["images_per_s"] > 0 and 0 <= line["data_wait"] <= 1 for line in timed)
        assert all(line["left_s"] <= line["stage_left_s"] <= line["run_left_s"] for line in timed)
        assert timed[-1]["left_s"] == 0
    fold = json.loads(Path("run/rounds/0/fold0/metrics.jsonl").read_text().splitlines()[-1])
    last = json.loads(Path("run/methods/coteaching/metrics.jsonl").read_text().splitlines()[-1])
    assert fold["run_left_s"] > fold["stage_left_s"] > 0, "a fold, and two methods follow"
    assert last["run_left_s"] == 0, "nothing follows the last method"
