"""The gallery of the report: which samples it shows, and their data for the page's script."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shards.durable import read_parquet
from trainer.incv.selection_index import SelectionIndex, State
from trainer.records.run_directory import RunDirectory
from trainer.report.labels_review import STATE_NAMES
from trainer.report.measured import RunSamples
from trainer.report.pictures import ImageOf, Picture, encode_pictures
from trainer.report.sources import SampleSources
from trainer.report.suspects import flagged_ids

MOST_FLAGGED, MOST_KEPT = 2400, 1000
PICTURE_CHARACTERS = 10_500_000  # base64; keeps the page below 15 MB
MOST_EARLIER = 20_000  # earlier decisions that the page can repeat in its corrections.csv

Ids = NDArray[np.int64]


def choose_samples(selection: SelectionIndex, samples: RunSamples) -> Ids:
    """Return the sample_ids of the gallery: flagged ones, most suspicious first, then kept ones of every class."""
    flagged = flagged_ids(selection, samples)
    kept = selection.ids_by_suspicion()
    shown = (selection.state == State.SELECTED) & np.isfinite(selection.loss)
    kept = kept[shown[kept]]
    return np.concatenate(
        [
            take_first(flagged, samples.given[flagged], MOST_FLAGGED),
            take_spread(kept, samples.given[kept], MOST_KEPT),
        ]
    )


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


def build_gallery(
    run: RunDirectory,
    selection: SelectionIndex,
    samples: RunSamples,
    short_names: Sequence[str],
    *,
    image_of: ImageOf | None,
    keys: pa.ChunkedArray | None,
    sources: SampleSources | None,
    root: str | None,
) -> dict[str, Any]:
    """Return the data of the gallery for the page's script, ready for JSON; columns have one entry per sample.

    keys: of all samples, by sample_id; root: the folder in which they are paths, if they are.
    """
    ids = choose_samples(selection, samples)
    listed = ids.tolist()
    pictures: dict[int, Picture] = {}
    if image_of is not None:
        pictures = encode_pictures(listed, image_of, PICTURE_CHARACTERS)
    truth = samples.truth[ids].tolist() if samples.truth is not None else None
    earlier, more = read_earlier(run)
    return {
        "store": f"incv-{hashlib.sha256((selection.checksum() + str(run.root.name)).encode()).hexdigest()[:16]}",
        "names": samples.names,
        "short": list(short_names),
        "states": list(STATE_NAMES),
        "sources": sources.names if sources else [],
        "root": root,
        "earlier": earlier,
        "earlier_left_out": more,
        "id": listed,
        "state": selection.state[ids].tolist(),
        "given": samples.given[ids].tolist(),
        "suggested": selection.predicted[ids].tolist(),
        "true": truth,
        "source": sources.numbers[ids].tolist() if sources else None,
        "loss": _rounded(selection.loss[ids], 4),
        "given_probability": _rounded(selection.given_probability[ids], 4),
        "suggested_probability": _rounded(selection.predicted_probability[ids], 4),
        "key": None if keys is None else keys.take(pa.array(ids)).to_pylist(),
        "picture": [pictures[number].base64 if number in pictures else None for number in listed],
        "pixelated": [number for number in listed if number in pictures and pictures[number].pixelated],
    }


def read_earlier(run: RunDirectory) -> tuple[list[tuple[str, str | None]], int]:
    """Return the decisions of earlier corrections: (key, label or None if excluded), and how many more there are."""
    if not run.labels_review_parquet.exists():
        return [], 0
    table = read_parquet(run.labels_review_parquet, "list of labels", ["key", "given_label", "checked"])
    table = table.filter(pc.fill_null(table["checked"], False))
    shown = table.slice(0, MOST_EARLIER)
    pairs = zip(shown["key"].to_pylist(), shown["given_label"].to_pylist(), strict=True)
    return list(pairs), len(table) - len(shown)


def _rounded(values: NDArray[np.float32], digits: int) -> list[float | None]:
    return [round(value, digits) if np.isfinite(value) else None for value in values.tolist()]
