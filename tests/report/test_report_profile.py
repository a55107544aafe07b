"""The profile section: summed over starts, in per cent, and omitted if unreadable."""

import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from shards.durable import read_json, write_json
from trainer.records.run_directory import RunDirectory
from trainer.report import write_report

Make = Callable[..., Path]
STARTS = (
    {"data_wait": 1.0, "step": 69.0, "warm_up": 20.0},
    {"data_wait": 2.0, "step": 138.0, "warm_up": 20.0},
)
BETWEEN_STEPS = {"predict": 6.0, "checkpoint": 1.5}


def entry(start: int, device: str = "NVIDIA H200", **where: Any) -> dict[str, Any]:
    seconds = STARTS[start] | {"other": 0.0}
    seconds["other"] = 100.0 * (start + 1) - sum(seconds.values())
    named = {"stage": "standard", "round": None, "fold": None, "start": start} | where
    return named | {"device": device, "steps": 500, "wall_s": 100.0 * (start + 1), "seconds": seconds}


def written(run_dir: Path, entries: Any) -> tuple[dict[str, Any], str]:
    write_json(run_dir / "profile.json", entries)
    write_report(RunDirectory(run_dir))
    return read_json(run_dir / "report.json"), (run_dir / "report.html").read_text()


def table_of(page: str) -> tuple[list[str], list[list[str]]]:
    """The heads and the cells of the table of phases."""
    section = page.partition('id="time"')[2].partition("</section>")[0]
    cells = [re.findall(r"<td[^>]*><span>(.*?)</span>", row) for row in re.findall(r"<tr>(.*?)</tr>", section)]
    return re.findall(r"<th[^>]*>(.*?)</th>", section), [row for row in cells if row]


def test_starts_of_a_training_are_added_up(make_run: Make) -> None:
    report, page = written(make_run(), [entry(0, stage="incv", round=2, fold=1), entry(0), entry(1)])
    fold, standard = report["profile"]
    assert (fold["training"], fold["round"], fold["fold"], fold["starts"]) == ("Round 3, fold 2", 3, 2, 1)
    assert (standard["training"], standard["starts"], standard["steps"]) == ("Standard training", 2, 1000)
    assert standard["wall_s"] == 300.0
    assert standard["seconds"]["step"] == 207.0
    heads, rows = table_of(page)
    assert rows[1] == [
        "Standard training",
        "1,000",
        "5 min 00 s",
        *("1.0 %", "69.0 %", "13.3 %", "16.7 %"),
    ]
    assert heads[-4:] == ["data wait", "step", "warm-up", "other"]
    assert "Standard training, step: 69.0 %" in page
    assert "measured on NVIDIA H200. Data wait is the time that the GPU was idle" in page


def test_what_is_done_between_steps_has_columns_of_its_own(make_run: Make) -> None:
    """Predicting only where some training did."""
    fold = entry(0, stage="incv", round=0, fold=0)
    fold["seconds"] |= BETWEEN_STEPS
    fold["seconds"]["other"] -= sum(BETWEEN_STEPS.values())
    method = entry(0)
    method["seconds"] |= {"checkpoint": 2.0, "other": 8.0}
    run = make_run()
    report, page = written(run, [fold, method])
    assert report["profile"][0]["seconds"].items() >= BETWEEN_STEPS.items()
    heads, rows = table_of(page)
    assert heads[-5:] == ["step", "predict", "checkpoint", "warm-up", "other"]
    assert rows[0][-5:] == ["69.0 %", "6.0 %", "1.5 %", "20.0 %", "2.5 %"]
    assert rows[1][-5:] == ["69.0 %", "0.0 %", "2.0 %", "20.0 %", "8.0 %"]
    assert "Round 1, fold 1, predict: 6.0 %" in page  # the bar
    assert "Predict is the pass over the held-out half" in page
    _, page = written(run, [method])
    assert "predict" not in table_of(page)[0]
    assert "Predict is" not in page


def test_an_unknown_phase_counts_as_time(make_run: Make) -> None:
    unknown = entry(0) | {"seconds": {"step": 50.0, "of_the_future": 50.0}}
    _, page = written(make_run(), [unknown])
    assert "50.0 %" in table_of(page)[1][0]


def test_names_of_devices_and_stages_are_escaped(make_run: Make) -> None:
    _, page = written(make_run(), [entry(0, device="<b>odd</b>", stage="<i>none</i>")])
    assert "<b>odd" not in page
    assert "<i>none" not in page
    assert "measured on <b>odd</b>" in unescape(page)


@pytest.mark.parametrize("content", [[], {"stage": "standard"}, [{"stage": "standard"}], [7], 7, None])
def test_a_profile_that_cannot_be_read_is_left_out(content: Any, make_run: Make) -> None:
    report, page = written(make_run(), content)
    assert report["profile"] is None
    assert "Time of each training by phase" not in page


def test_nothing_measured_counts_as_nothing(make_run: Make) -> None:
    """A training whose clock never moved divides by no zero."""
    still = entry(0) | {"wall_s": 0.0, "seconds": dict.fromkeys(("step", "other"), 0.0)}
    report, page = written(make_run(), [still])
    assert report["profile"][0]["wall_s"] == 0.0
    assert table_of(page)[1][0][-3:] == ["0.0 s", "0.0 %", "0.0 %"]
