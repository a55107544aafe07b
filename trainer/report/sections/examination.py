"""The section on what is wrong besides labels: duplicates, off-topic images and bad pictures."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.report.findings import CHECKS, LEAK, TITLES
from trainer.report.pictures import thumbnails
from trainer.report.run import ReportRun
from trainer.report.section import Report, Section
from trainer.report.sections.gallery import describe_samples

MOST = 12
"""Groups of duplicates, and images of each kind, in report.json and on the page."""
_EACH = 4


def collect(run: ReportRun) -> dict[str, Any]:
    facts, table = run.mapping(run.directory.examination_facts), run.mapping(run.directory.examination)
    selection = run.selection
    if facts is None or table is None or selection is None or run.findings is None:
        return {"examination": None}
    ids, own = table["sample_id"].to_numpy(), table["group"].to_numpy()
    given, conflicts = run.samples.given[ids], run.findings.contradicted[ids]
    sizes = np.bincount(own, minlength=len(own))
    contradicted = np.bincount(own, weights=conflicts, minlength=len(own)) > 0
    groups = np.flatnonzero(sizes > 1)
    worst = np.zeros(len(own))  # of the groups with different labels, the most suspicious label
    np.maximum.at(worst, own[conflicts], np.nan_to_num(selection.loss[ids[conflicts]]))
    groups = groups[np.lexsort((groups, -sizes[groups], -worst[groups], ~contradicted[groups]))]

    def describe(rows: NDArray[np.int64]) -> list[dict[str, Any]]:
        return describe_samples(run, selection, ids[rows])

    kinds = {"off_topic": table["off_topic"].to_numpy()} | {name: table[name].to_numpy() for name in CHECKS}
    scores = selection.loss[ids]
    return {
        "examination": {
            "groups": len(groups),
            "repeated": int((sizes[groups] - 1).sum()),
            "conflicting_groups": int(contradicted[groups].sum()),
            "conflicting": int(conflicts.sum()),
            "shown_groups": [describe(_choose_members(own == group, given)) for group in groups[:MOST]],
            "kinds": [
                {
                    "name": name,
                    "title": TITLES[name],
                    "count": int(found.sum()),
                    "why": facts["off_topic"]["why"] if name == "off_topic" else facts["checks"][name]["why"],
                    "shown": describe(np.flatnonzero(found)[np.argsort(-scores[found])][:MOST]),
                }
                for name, found in kinds.items()
                if found.any()
            ],
            "why": facts["near_duplicates"]["why"],
            "leaks": _describe_leaks(facts, table, describe),
        }
    }


def _choose_members(group: NDArray[np.bool_], given: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the first rows of a group of duplicates: one of each label, then others."""
    rows = np.flatnonzero(group)
    _, first = np.unique(given[rows], return_index=True)
    return np.concatenate([rows[np.sort(first)], np.delete(rows, first)])[:_EACH]


def _describe_leaks(
    facts: Mapping[str, Any], table: Any, describe: Callable[[NDArray[np.int64]], list[dict[str, Any]]]
) -> dict[str, Any] | None:
    """Return the counts of images that are also in `incv.against`, and some of them; None if none were looked for."""
    if "leaks" not in facts or LEAK not in table.column_names:
        return None
    return facts["leaks"] | {"shown": describe(np.flatnonzero(table[LEAK].is_valid())[:MOST])}


def render(report: Report, run: ReportRun) -> Mapping[str, Any] | None:
    found = report["examination"]
    if found is None or not (found["groups"] or found["kinds"] or found.get("leaks")):
        return None
    groups = found["shown_groups"][found["conflicting_groups"] :]  # the others are at the top of the page
    shown = [one for group in groups for one in group]
    shown += [one for kind in found["kinds"] for one in kind["shown"]]
    shown += (found.get("leaks") or {"shown": []})["shown"]
    return {"found": found, "groups": groups, "thumbnails": thumbnails(shown, run.image_of)}


SECTION = Section("examination", "Duplicates and bad pictures", collect, render, Path(__file__).with_suffix(".html"))
