"""The opening of the report: conflicting duplicates, and the pairs of classes that are contradicted most often."""

from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from shards.durable import write_parquet
from tests.report.conftest import examine
from trainer.incv.selection_index import SelectionIndex
from trainer.records.run_directory import RunDirectory
from trainer.report import write_report
from trainer.report.run import ReportRun
from trainer.report.sections import look_first

Make = Callable[..., Path]


class Links(HTMLParser):
    """Collects the sections in their order, and the data of the links in each."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.sections: dict[str, list[dict[str, str]]] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "section":
            self.sections[dict(attrs)["id"] or ""] = []
        elif tag == "a" and self.sections:
            data = {name.removeprefix("data-"): value or "" for name, value in attrs if name.startswith("data-")}
            self.sections[list(self.sections)[-1]].append(data)


def report_on(run_dir: Path) -> tuple[dict, Links]:
    keys = pa.chunked_array([[f"key {number}" for number in range(600)]])
    report = write_report(RunDirectory(run_dir), lambda _: Image.new("L", (8, 8)), keys)
    return report, Links((run_dir / "report.html").read_text())


@pytest.fixture
def labels_of() -> Callable[[Path], np.ndarray]:
    return lambda run_dir: pq.read_table(run_dir / "labels.parquet")["label"].to_numpy()


def pairs_of_labels(labels: np.ndarray, differ: bool) -> list[tuple[int, int]]:
    """Return neighbouring samples whose labels differ, or do not."""
    firsts = [number for number in range(100, 300, 2) if (labels[number] != labels[number + 1]) == differ]
    return [(number, number + 1) for number in firsts]


def test_it_comes_first_with_conflicts_and_pairs(make_run: Make, labels_of: Callable) -> None:
    run_dir = make_run()
    labels = labels_of(run_dir)
    conflicts, equal = pairs_of_labels(labels, True)[:8], pairs_of_labels(labels, False)[:3]
    examine(run_dir, [*conflicts, *equal])
    report, links = report_on(run_dir)
    assert list(links.sections)[:2] == ["look-first", "suspicious"]
    assert report["examination"]["conflicting_groups"] == 8
    data = links.sections["look-first"]
    shown = [int(each["sample"]) for each in data if "sample" in each]
    assert len(shown) == 2 * look_first.GROUPS
    assert {tuple(sorted(shown[place : place + 2])) for place in range(0, len(shown), 2)} <= set(conflicts)
    assert data[0] == {"show": "conflict"}
    selection, flagged = SelectionIndex.read(run_dir / "selection.parquet"), ReportRun(RunDirectory(run_dir)).flagged
    pairs = [(int(each["given"]), int(each["suggested"])) for each in data if "given" in each]
    counts = [int(np.sum((labels[flagged] == i) & (selection.predicted[flagged] == j))) for i, j in pairs]
    assert len(pairs) == look_first.PAIRS
    assert counts == sorted(counts, reverse=True)
    assert [pair["count"] for pair in report["confusion"]["pairs"]["flagged"]][: len(pairs)] == counts
    assert "sample" not in "".join(map(str, links.sections["examination"])), "conflicts are not shown again"


def test_a_label_that_was_checked_is_no_conflict(make_run: Make, labels_of: Callable) -> None:
    run_dir = make_run()
    labels = labels_of(run_dir)
    first, second = pairs_of_labels(labels, True)[:2]
    examine(run_dir, [first, second])
    checked = np.isin(np.arange(600), [*first, second[0]])
    table = {"sample_id": np.arange(600), "label": labels, "checked": checked}
    write_parquet(run_dir / "labels.parquet", pa.table(table))
    report, _ = report_on(run_dir)
    assert report["examination"]["conflicting_groups"] == 1
    assert ReportRun(RunDirectory(run_dir)).flagged[0] == second[1], "the one that nobody has checked"


def test_it_shows_only_what_there_is(make_run: Make, labels_of: Callable) -> None:
    run_dir = make_run()
    report, links = report_on(run_dir)
    assert {tuple(each) for each in links.sections["look-first"]} == {("show", "given", "suggested")}
    run = ReportRun(RunDirectory(run_dir))
    untrusted = report | {"trust": {"level": "do not use"}}
    assert look_first.render(untrusted, run) is None
    examine(run_dir, pairs_of_labels(labels_of(run_dir), True)[:1])
    report, _ = report_on(run_dir)
    content = look_first.render(report | {"trust": {"level": "do not use"}}, run)
    assert content is not None
    assert (len(content["groups"]), content["pairs"]) == (1, []), "a conflict is certain"
