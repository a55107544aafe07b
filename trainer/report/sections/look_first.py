"""What to mend first: duplicates whose labels differ, and the classes whose labels are contradicted most often."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.report.pictures import thumbnails
from trainer.report.run import ReportRun
from trainer.report.section import Report, Section

GROUPS, PAIRS = 6, 8  # on the page
FEWEST = 2  # flagged labels of a pair of classes


def render(report: Report, run: ReportRun) -> Mapping[str, Any] | None:
    """Show what the sections on duplicates and on confusion have found."""
    found, pairs = report["examination"] or {}, report["confusion"]["pairs"]["flagged"] or []
    conflicts = found.get("conflicting_groups", 0)
    groups = found["shown_groups"][: min(conflicts, GROUPS)] if conflicts else []
    if (report["trust"] or {}).get("level") == "do not use":
        pairs = []  # of flagged labels, which mean too little then
    pairs = [pair for pair in pairs[:PAIRS] if pair["count"] >= FEWEST]
    if not groups and not pairs:
        return None
    shown = [sample for group in groups for sample in group]
    return {"conflicts": conflicts, "groups": groups, "pairs": pairs, "thumbnails": thumbnails(shown, run.image_of)}


SECTION = Section(
    "look-first", "Look here first", lambda _: {}, render, Path(__file__).with_suffix(".html"), link=None, leads=True
)
