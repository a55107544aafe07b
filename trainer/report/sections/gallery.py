"""The gallery section: flagged and kept samples with their images, on which the page's script collects decisions."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from markupsafe import Markup
from numpy.typing import NDArray

from trainer.incv.selection_index import SelectionIndex, State
from trainer.report.findings import TITLES
from trainer.report.labels_review import STATE_NAMES
from trainer.report.pictures import Picture, encode_pictures, thumbnails
from trainer.report.run import Missing, ReportRun
from trainer.report.section import Report, Section
from trainer.report.summary import claim_words, claimed_noise
from trainer.report.text import short_names

MOST = 240  # maximum in report.json; the gallery shows more, and labels_review.csv lists all
OPEN = 24  # on the page where scripts are off
MOST_FLAGGED, MOST_KEPT = 2400, 1000
MOST_FOUND = 100  # of each finding besides wrong labels, such as blank images
PICTURE_CHARACTERS = 10_500_000  # base64; keeps the page below 15 MB
MOST_EARLIER = 20_000  # earlier decisions that the page can repeat in its corrections.csv

Ids = NDArray[np.int64]


def collect(run: ReportRun) -> dict[str, Any]:
    selection, review = run.selection, run.directory.labels_review_csv
    held_out = {"samples": 0, "flagged": 0}
    if selection is not None:
        apart = selection.state == State.HELD_OUT
        held_out = {"samples": int(apart.sum()), "flagged": int(apart[run.flagged].sum())}
    return {
        "held_out": held_out,
        "flagged": None if selection is None else len(run.flagged),
        "suspicious": None if selection is None else describe_samples(run, selection, run.flagged[:MOST]),
        "labels_review": review.name if review.exists() else None,
    }


def describe_samples(run: ReportRun, selection: SelectionIndex, ids: Ids) -> list[dict[str, Any]]:
    """Return labels, loss and probabilities of some samples; labels are class numbers."""
    given, truth = run.samples.given, run.samples.truth
    return [
        {
            "sample_id": number,
            "given": int(given[number]),
            "predicted": int(selection.predicted[number]),
            "true": int(truth[number]) if truth is not None and truth[number] >= 0 else None,
            "loss": round(float(selection.loss[number]), 5),
            "given_probability": round(float(selection.given_probability[number]), 6),
            "predicted_probability": round(float(selection.predicted_probability[number]), 6),
            "key": run.key_of(number),
        }
        for number in ids.tolist()
    ]


def render(report: Report, run: ReportRun) -> Mapping[str, Any]:
    suspects, selection, gallery = report["suspicious"] or [], run.selection, None
    if selection is not None and run.samples.inside.any():
        gallery = _build(run, selection)
        if run.image_of is not None and gallery["id"] and not any(gallery["picture"]):
            run.gaps["shards"] = "No image could be read from the shards, so the gallery has no pictures."
    judged = [suspect for suspect in suspects if suspect["true"] is not None]
    return {
        "shown": suspects[:OPEN] if gallery else None,
        "thumbnails": thumbnails(suspects[:OPEN], run.image_of),
        "estimated": _count_wrong(report),
        "judged": len(judged),
        "wrong": sum(suspect["true"] != suspect["given"] for suspect in judged),
        "right": sum(suspect["true"] == suspect["predicted"] for suspect in judged),
        "end_of_page": _embed(gallery) if gallery else "",
    }


def _count_wrong(report: Report) -> str | None:
    """Return the estimated number of wrong labels; None if it is not stated, or explains all flagged ones."""
    estimate = claimed_noise(report) if report["noise"]["true"] is None else None
    if estimate is None or report["flagged"] is None:
        return None
    trained = report["flagged"] - report["held_out"]["flagged"]
    return claim_words(report, estimate)[1] if round(estimate * report["samples"]) < trained else None


def _embed(gallery: dict[str, Any]) -> Markup:
    """Return the data for the page's script, as JSON that cannot end its script element."""
    text = json.dumps(gallery, separators=(",", ":"), allow_nan=False)
    text = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return Markup(f'<script type="application/json" id="gallery-data">{text}</script>')


@dataclass(frozen=True, eq=False)
class _Choice:
    """The samples of the gallery."""

    ids: Ids
    """Flagged ones, then kept ones of every class and others with a finding; most suspicious first in both parts."""
    flagged: int
    """How many of `ids` are flagged."""
    totals: dict[str, int]
    """How many samples of the run are flagged, and kept."""
    found: dict[str, Ids]
    """All images of the run with each finding."""


def _choose_samples(run: ReportRun, selection: SelectionIndex) -> _Choice:
    by_suspicion, given = selection.ids_by_suspicion(), run.samples.given
    rank = np.empty(len(by_suspicion), np.int64)
    rank[by_suspicion] = np.arange(len(by_suspicion))
    found = {}
    if run.findings is not None:
        found = {name: ids for name in TITLES if len(ids := run.findings.images_of(name, rank))}
    kept = (selection.state == State.SELECTED) & np.isfinite(selection.loss)
    kept[run.flagged] = False
    spread = by_suspicion[kept[by_suspicion]]
    flagged = take_first(run.flagged, given[run.flagged], MOST_FLAGGED)
    others = [take_spread(spread, given[spread], MOST_KEPT), *(ids[:MOST_FOUND] for ids in found.values())]
    rest = np.setdiff1d(np.concatenate(others), flagged)
    ids = np.concatenate([flagged, rest[np.argsort(rank[rest])]])
    return _Choice(ids, len(flagged), {"flagged": len(run.flagged), "kept": len(spread)}, found)


def take_first(ids: Ids, labels: NDArray[np.integer], most: int) -> Ids:
    """Return about the first `most` ids in their order, with ids of every class.

    Half of them are dealt to the classes evenly; with more than `most` classes, there is one id of each.
    """
    if len(ids) <= most:
        return ids
    present = len(np.unique(labels))
    dealt = rank_within_class(labels) < max(most // (2 * present), 1)
    chosen = np.argsort(~dealt, kind="stable")[: max(most, present)]
    return ids[np.sort(chosen)]


def take_spread(ids: Ids, labels: NDArray[np.integer], most: int) -> Ids:
    """Return at most about `most` ids in their order: of each class the first, and others evenly spaced after it."""
    if len(ids) <= most:
        return ids
    wanted = max(most // len(np.unique(labels)), 1)
    rank, size = rank_within_class(labels), np.bincount(labels)[labels]
    return ids[(rank * wanted) // size != ((rank - 1) * wanted) // size]


def rank_within_class(labels: NDArray[np.integer]) -> Ids:
    """Return how many earlier rows have the same label: int64 [rows]."""
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(labels) else np.zeros(0, np.int64)
    rank = np.empty(len(labels), np.int64)
    rank[order] = np.arange(len(labels)) - np.repeat(starts, np.diff(np.r_[starts, len(labels)]))
    return rank


def _build(run: ReportRun, selection: SelectionIndex) -> dict[str, Any]:
    """Return the data of the gallery for the page's script, ready for JSON; columns have one entry per sample."""
    choice, samples, sources = _choose_samples(run, selection), run.samples, run.sources
    ids, listed = choice.ids, choice.ids.tolist()
    row_of = {number: row for row, number in enumerate(listed)}
    place = np.zeros(len(selection.state), np.int64)
    place[run.flagged] = np.arange(1, len(run.flagged) + 1)
    pictures: dict[int, Picture] = {}
    if run.image_of is not None:
        pictures = encode_pictures(listed, run.image_of, PICTURE_CHARACTERS)
    earlier, more = _read_earlier(run)
    identity = selection.checksum() + str(run.directory.root.name)
    return {
        "store": f"incv-{hashlib.sha256(identity.encode()).hexdigest()[:16]}",
        "names": samples.names,
        "short": short_names(samples.names),
        "states": list(STATE_NAMES),
        "sources": sources.names if sources else [],
        "root": run.key_root,
        "earlier": earlier,
        "earlier_left_out": more,
        "calibrated": run.is_calibrated,
        "flagged": choice.flagged,
        "totals": choice.totals,
        "found": [
            {
                "name": name,
                "title": TITLES[name],
                "total": len(found),
                "rows": [row_of[number] for number in found.tolist() if number in row_of],
            }
            for name, found in choice.found.items()
        ],
        "group": None if run.findings is None else run.findings.groups[ids].tolist(),
        "rank": place[ids[: choice.flagged]].tolist(),
        "id": listed,
        "state": selection.state[ids].tolist(),
        "given": samples.given[ids].tolist(),
        "suggested": selection.predicted[ids].tolist(),
        "true": None if samples.truth is None else samples.truth[ids].tolist(),
        "source": sources.numbers[ids].tolist() if sources else None,
        "loss": _rounded(selection.loss[ids]),
        "given_probability": _rounded(selection.given_probability[ids]),
        "suggested_probability": _rounded(selection.predicted_probability[ids]),
        "key": None if run.keys is None else run.keys.take(pa.array(ids)).to_pylist(),
        "picture": [pictures[number].base64 if number in pictures else None for number in listed],
        "pixelated": [number for number in listed if number in pictures and pictures[number].pixelated],
    }


def _read_earlier(run: ReportRun) -> tuple[list[tuple[str, str | None]], int]:
    """Return the decisions of earlier corrections: (key, label or None if excluded), and how many more there are."""
    table = run.read(run.directory.labels_review_parquet)
    if isinstance(table, Missing):
        return [], 0
    table = table.filter(pc.fill_null(table["checked"], False))
    shown = table.slice(0, MOST_EARLIER)
    pairs = zip(shown["key"].to_pylist(), shown["given_label"].to_pylist(), strict=True)
    return list(pairs), len(table) - len(shown)


def _rounded(values: NDArray[np.float32]) -> list[float | None]:
    return [round(value, 4) if np.isfinite(value) else None for value in values.tolist()]


SECTION = Section("suspicious", "Gallery", collect, render, Path(__file__).with_suffix(".html"), leads=True)
