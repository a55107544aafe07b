"""The commands that a report suggests: when, and with which files."""

import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.records.run_directory import RunDirectory
from trainer.report.sections.next_steps import count_on, format_steps, next_steps

RUN = RunDirectory(Path("runs/my photos"))


def report_of(**changes):
    return {
        "gaps": {},
        "selection": {"selected": 5},
        "trust": {"level": "trusted"},
        "noise": {"true": None},
        "labels_review": "labels_review.csv",
        "config": {"labels": {"corrections": None}},
    } | changes


def commands(report, run=RUN) -> list[list[str]]:
    lines = [line for step in next_steps(report, run) for line in step.lines]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_correct_labels_or_write_the_cleaned_set():
    copy, again, clean = commands(report_of())
    assert copy == ["cp", "runs/my photos/labels_review.csv", "corrections.csv"]
    recipe = ["-c", "runs/my photos/config.resolved.yaml", "labels.corrections=corrections.csv"]
    assert again == ["incv", "run", *recipe, "--run-dir", "runs/my photos-corrected"]
    assert clean == ["incv", "clean", "runs/my photos", "--out", "cleaned"]


def test_a_second_correction_overwrites_neither_file_nor_run():
    report = report_of(config={"labels": {"corrections": "lists/corrections.csv"}})
    copy, again, _ = commands(report, RunDirectory(Path("runs/mine-corrected")))
    assert copy[-1] == "lists/corrections-2.csv"
    assert "labels.corrections=lists/corrections-2.csv" in again
    assert again[-1] == "runs/mine-corrected-2"


def test_earlier_decisions_are_to_be_kept():
    words = "Keep the rows with checked = true"
    assert words not in format_steps(next_steps(report_of(), RUN))
    report = report_of(config={"labels": {"corrections": "corrections.csv"}})
    assert words in format_steps(next_steps(report, RUN))


@pytest.mark.parametrize("level", ["trusted", "with care", "do not use"])
def test_nothing_is_suggested_without_trust(level):
    assert bool(next_steps(report_of(trust={"level": level}), RUN)) == (level != "do not use")


def test_known_wrong_labels_are_not_to_be_corrected():
    assert [words[1] for words in commands(report_of(noise={"true": 0.2}))] == ["clean"]
    assert commands(report_of(selection=None)) == []


def test_every_line_of_the_terminal_text_is_complete():
    steps = next_steps(report_of(), RUN)
    lines = format_steps(steps).splitlines()
    assert lines[0].startswith("next: ")
    assert [line for line in lines if line.startswith("or: ")]
    for step in steps:
        assert all(f"  {line}" in lines for line in step.lines)


@given(st.text(st.characters(codec="utf-8", exclude_characters="/\0\n"), min_size=1))
def test_names_in_a_series_differ(name):
    series = [name]
    for _ in range(12):
        series.append(count_on(series[-1]))
    assert len(set(series)) == 13
    assert series[2].rpartition("-")[0] == series[1].rpartition("-")[0]
