"""The report of a run directory with parts missing or damaged: what is there, with the gaps named."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from PIL import Image

from shards.durable import write_parquet
from trainer.records.run_directory import RunDirectory
from trainer.report import write_report
from trainer.report.summary import summary_table

Make = Callable[..., Path]
FILES = (
    "config.resolved.yaml",
    "manifest.json",
    "labels.parquet",
    "true_labels.parquet",
    "incv.json",
    "evaluation.json",
    "selection.parquet",
    "rounds/0/selection.parquet",
    "rounds/0/predictions.parquet",
    "rounds/2/selection.parquet",
    "rounds/2/predictions.parquet",
    "methods/standard/metrics.jsonl",
)
NAMED = {"config.resolved.yaml", "manifest.json", "labels.parquet", *FILES[8:9], *FILES[10:11]}


def gaps_on_page(run_dir: Path) -> str:
    page = (run_dir / "report.html").read_text()
    return page.partition('id="gaps"')[2].partition("</div>")[0]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_does_not_stop_the_report(make_run: Make, name: str) -> None:
    run_dir = make_run()
    (run_dir / name).unlink()
    report = write_report(RunDirectory(run_dir))
    assert (name in report["gaps"]) == (name in NAMED)
    assert (f"{name} is missing" in gaps_on_page(run_dir)) == (name in NAMED)
    assert (f"{name} is missing" in summary_table(report)) == (name in NAMED)
    assert json.loads((run_dir / "report.json").read_text()) == report


@pytest.mark.parametrize("content", [b"", b"\x00\xff<script>", b"[1, 2]"])
@pytest.mark.parametrize("name", FILES[:-1])
def test_a_damaged_file_is_named_and_does_not_stop_the_report(make_run: Make, name: str, content: bytes) -> None:
    run_dir = make_run()
    (run_dir / name).write_bytes(content)
    report = write_report(RunDirectory(run_dir))
    if (name, content) != ("config.resolved.yaml", b""):  # an empty recipe is valid YAML
        assert name in report["gaps"]
        assert re.search(rf"{re.escape(name)} cannot be read", gaps_on_page(run_dir))
    assert summary_table(report)


def test_a_table_without_a_column_is_damaged(make_run: Make) -> None:
    run_dir = make_run()
    write_parquet(run_dir / "rounds/0/predictions.parquet", pa.table({"sample_id": [1]}))
    report = write_report(RunDirectory(run_dir))
    assert "rounds/0/predictions.parquet" in report["gaps"]
    assert report["confusion"]["estimated_pairs"] is None
    assert len(report["rounds"]) == 3, "the rest is shown"


def test_an_empty_directory_gives_a_report_of_gaps(tmp_path: Path) -> None:
    report = write_report(RunDirectory(tmp_path))
    assert set(report["gaps"]) == {"config.resolved.yaml", "manifest.json", "labels.parquet"}
    assert "<h1>unknown data set</h1>" in (tmp_path / "report.html").read_text()
    assert summary_table(report)


def test_unreadable_shards_are_named(make_run: Make) -> None:
    run_dir = make_run()

    def image_of(_: int) -> Image.Image:
        raise OSError("gone")

    report = write_report(RunDirectory(run_dir), image_of)
    assert "shards" in report["gaps"]
    assert "No image could be read" in gaps_on_page(run_dir)


def test_control_characters_are_shown_in_the_terminal_and_on_the_page(make_run: Make) -> None:
    run_dir = make_run()
    manifest = json.loads((run_dir / "manifest.json").read_text())
    manifest["recipe"] = "demo\x1b[2J\u202e"
    (run_dir / "manifest.json").write_text(json.dumps(manifest))
    report = write_report(RunDirectory(run_dir))
    for text in (summary_table(report), (run_dir / "report.html").read_text()):
        assert "demo\\u001b[2J\\u202e" in text
        assert not {"\x1b", "\u202e"} & set(text)


def test_a_whole_run_has_no_gaps(make_run: Make) -> None:
    run_dir = make_run()
    assert write_report(RunDirectory(run_dir))["gaps"] == {}
    assert gaps_on_page(run_dir) == ""
    shutil.rmtree(run_dir / "methods")
    assert write_report(RunDirectory(run_dir))["curves"]["methods"] == {}
