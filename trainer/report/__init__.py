"""The report of a run: collect the data (`collect`), draw the plots (`figures`), render the page (`page`)."""

from collections.abc import Callable
from typing import Any

from PIL import Image

from shards.durable import write_bytes, write_json
from trainer.records.run_directory import RunDirectory
from trainer.report.collect import collect_report
from trainer.report.next_steps import next_steps
from trainer.report.page import render_page
from trainer.report.suspects import thumbnails

__all__ = ["write_report"]


def write_report(
    run: RunDirectory,
    image_of: Callable[[int], Image.Image] | None = None,
    keys_of: Callable[[list[int]], list[str]] | None = None,
) -> dict[str, Any]:
    """Write report.json and report.html of a finished or unfinished run; returns the report.

    image_of, keys_of: functions from sample_ids to images and source keys.
    """
    report = collect_report(run)
    suspects, checked = report["suspicious"] or [], (report["corrections"] or {}).get("second_look") or []
    shown = [*suspects, *checked]
    ids = [sample["sample_id"] for sample in shown]
    for sample, key in zip(shown, keys_of(ids) if keys_of else [None] * len(ids), strict=True):
        sample["key"] = key
    pictures = thumbnails(suspects, image_of) | thumbnails(checked, image_of)
    page = render_page(report, pictures, next_steps(report, run))
    write_json(run.report_json, report)
    write_bytes(run.report_html, page.encode())
    return report
