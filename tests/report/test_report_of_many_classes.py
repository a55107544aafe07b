"""The report of a run with 1000 long-named classes: built in seconds, and readable."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from shards.durable import read_json, write_json
from trainer.incv.selection_index import State
from trainer.records.run_directory import RunDirectory
from trainer.report import write_report
from trainer.report.sections.noise import label_table
from trainer.report.text import short_names

Make = Callable[..., Path]
CLASSES = 1000


def synset(number: int) -> str:
    return f"n{1440764 + 977 * number:08d} creature {number}, Bestia {'longissima ' * 8}var. {number}"


NAMES = [synset(number) for number in range(CLASSES)]


@pytest.fixture
def large_run(make_run: Make) -> Path:
    return make_run(names=NAMES, samples=60_000, classes=CLASSES)


def test_it_is_small_and_made_in_seconds(large_run: Path) -> None:
    began = time.process_time()
    write_report(RunDirectory(large_run))
    assert time.process_time() - began < 10
    assert (large_run / "report.html").stat().st_size < 2_500_000
    assert (large_run / "report.json").stat().st_size < 3_000_000


def test_names_are_short_and_tables_have_an_end(large_run: Path) -> None:
    content = read_json(large_run / "incv.json")
    content["filled_classes"] = [{"class": number, "selected": 1, "filled": 2} for number in range(CLASSES)]
    write_json(large_run / "incv.json", content)
    write_report(RunDirectory(large_run))
    page = (large_run / "report.html").read_text()
    body = page.partition('<script type="application/json"')[0]
    visible = re.sub("<title>.*?</title>", "", body)
    shown = re.findall(r">([^<>]*creature[^<>]*)<", visible)
    assert shown
    assert max(map(len, shown)) <= 34
    assert not any(name.startswith("n0") for name in shown)
    assert f'title="{NAMES[0]}"' in page  # the whole name is a pointer away
    assert "and 950 more" in page
    assert len(re.findall("<tr>", body)) < CLASSES + 100


def test_every_class_has_a_row(large_run: Path) -> None:
    report = write_report(RunDirectory(large_run))
    table = label_table(report)
    assert table is not None
    assert [row[0].whole for row in table.rows] == NAMES
    labels = [column.label for column in table.columns]
    recall = [row[labels.index("recall")].value for row in table.rows]
    assert recall == pytest.approx([row["label_recall"] for row in report["selection"]["by_class"]])
    assert (table.search, table.sortable) == ("Find a class", True)
    assert table.shown < 100


def test_without_the_truth_classes_are_those_of_the_labels(large_run: Path) -> None:
    (large_run / "true_labels.parquet").unlink()
    report = write_report(RunDirectory(large_run))
    given = pq.read_table(large_run / "labels.parquet")["label"].to_numpy()
    selection = pq.read_table(large_run / "selection.parquet").to_pydict()
    state, predicted = np.array(selection["state"]), np.array(selection["predicted"])
    row = report["selection"]["by_label"][7]
    here = (given == 7) & (state != State.OUTSIDE)
    flagged = here & np.isin(state, (State.CANDIDATE, State.REMOVED)) & (predicted != 7)
    assert row["samples"] == here.sum()
    assert row["selected"] == np.sum(here & (state == State.SELECTED))
    assert row["flagged"] == flagged.sum()
    counts = np.bincount(predicted[flagged], minlength=CLASSES)
    assert (row["suggested"], row["suggested_count"]) == (counts.argmax(), counts.max())
    assert row["wrong"] is None
    table = label_table(report)
    assert table is not None
    assert "recall" not in [column.label for column in table.columns]
    json.loads((large_run / "report.json").read_text())


def test_a_noise_matrix_of_the_recipe_is_not_printed(large_run: Path) -> None:
    config = yaml.safe_load((large_run / "config.resolved.yaml").read_text())
    config["labels"]["matrix"] = [[0.001] * 60] * 60
    (large_run / "config.resolved.yaml").write_text(json.dumps(config))
    report = write_report(RunDirectory(large_run))
    assert report["config"]["labels"]["matrix"] == "60 x 60 numbers, in config.resolved.yaml"
    configuration = (large_run / "report.html").read_text().partition("Configuration with all keys")[2]
    assert "0.001" not in configuration.partition("</details>")[0]


def test_short_names_tell_classes_apart() -> None:
    names = [
        "n01440764 tench, Tinca tinca",
        "n02012849 crane",
        "n03126707 crane",
        "n03710637 maillot, tank suit",
        "7",
        "n12 not a synset, at all",
        "my class, with a comma",
    ]
    short = short_names(names)
    assert short == ["tench", "crane (n02012849)", "crane (n03126707)", "maillot", *names[4:]]
    assert len(set(short_names(NAMES))) == CLASSES
