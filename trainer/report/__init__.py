"""The report of a run: `collect` asks each section for its numbers, `page` shows them."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from shards.durable import write_bytes, write_json
from trainer.records.run_directory import RunDirectory
from trainer.report.collect import collect_report
from trainer.report.page import render_page
from trainer.report.pictures import ImageOf
from trainer.report.run import ReportRun, SampleSources

__all__ = ["write_report"]


def write_report(
    directory: RunDirectory,
    image_of: ImageOf | None = None,
    keys: pa.ChunkedArray | None = None,
    key_root: str | None = None,
    sources: SampleSources | None = None,
    class_names: Sequence[str] = (),
    gaps: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Write report.json and report.html of a finished or unfinished run; returns the report.

    The arguments are those of `ReportRun`.
    """
    run = ReportRun(directory, class_names, image_of, keys, key_root, sources, dict(gaps or {}))
    report = collect_report(run)
    page = render_page(report, run)
    write_json(directory.report_json, report)
    write_bytes(directory.report_html, page.encode())
    return report
