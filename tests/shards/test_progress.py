"""Without a terminal a long command prints a line after ten seconds, then one per minute."""

import pytest

from shards import progress
from shards.progress import Progress


def test_lines_without_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock)
    said = []
    with Progress("incv/0/0", 400, unit="steps") as bar:
        for second in range(1, 201):
            clock = 1000.0 + second
            bar.advance(1, "loss 0.500")
            if capsys.readouterr().err:
                said.append(second)
    assert said == [10, 70, 130, 190]


def test_what_a_line_says(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock)
    with Progress("incv/0/0", 400, done=100, unit="steps") as bar:
        clock = 10.0
        bar.advance(200, "loss 0.500")
    assert capsys.readouterr().err == "incv/0/0: 300/400 steps, 20/s, 5 s left, loss 0.500\n"
