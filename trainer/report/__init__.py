"""The report of a run: collect -> plots -> page."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from shards.durable import write_bytes, write_json
from trainer.report.collect import collect
from trainer.report.page import render_page
from trainer.report.suspects import thumbnails

__all__ = ["write_report"]


def write_report(run_dir: Path, image_of: Callable[[int], Image.Image] | None = None) -> dict[str, Any]:
    """Write report.json and report.html of a finished or unfinished run; `image_of` gives its pictures."""
    report = collect(run_dir)
    page = render_page(report, thumbnails(report["suspicious"] or (), image_of))
    write_json(run_dir / "report.json", report)
    write_bytes(run_dir / "report.html", page.encode())
    return report
