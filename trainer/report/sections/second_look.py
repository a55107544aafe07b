"""The second look: labels that were checked by hand and that a network strongly contradicts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainer.report.pictures import thumbnails
from trainer.report.run import ReportRun
from trainer.report.section import Report, Section
from trainer.report.sections.gallery import describe_samples
from trainer.report.summary import second_look

STRONG = 0.8  # held-out probability of another class from which on a checked label is worth a second look
MOST = 12  # maximum of these in report.json and on the page


def collect(run: ReportRun) -> dict[str, Any]:
    """Return what `labels.corrections` did, and the strongest contradictions of checked labels.

    Checked labels are never flagged: the person may be right.
    """
    counts, selection = run.mapping(run.directory.corrections), run.selection
    if counts is None:
        return {"corrections": None}
    if selection is None:
        return {"corrections": counts | {"contradicted": None, "second_look": None}}
    checked = np.zeros(0, bool) if run.samples.checked is None else run.samples.checked
    ids = np.flatnonzero(checked[: len(selection.state)])
    probability = selection.predicted_probability[ids]
    contradicted = (selection.predicted[ids] >= 0) & (selection.predicted[ids] != run.samples.given[ids])
    contradicted &= probability >= STRONG  # false for NaN
    ids = ids[contradicted][np.argsort(-probability[contradicted], kind="stable")]
    shown = describe_samples(run, selection, ids[:MOST])
    return {"corrections": counts | {"contradicted": len(ids), "second_look": shown}}


def render(report: Report, run: ReportRun) -> Mapping[str, Any] | None:
    shown = second_look(report)
    if not shown:
        return None
    return {
        "shown": shown,
        "thumbnails": thumbnails(shown, run.image_of),
        "strong": STRONG,
        "count": report["corrections"]["contradicted"],
    }


SECTION = Section(
    "second-look",
    "Checked labels worth a second look",
    collect,
    render,
    Path(__file__).with_suffix(".html"),
    link=None,
    leads=True,
)
