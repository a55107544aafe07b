"""Finds samples whose labels the held-out predictions contradict, flagged or checked, and makes their thumbnails."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trainer.incv.selection_index import SelectionIndex, State
from trainer.report.measured import RunSamples
from trainer.report.pictures import encode_picture, read_image

MOST = 240  # maximum in report.json; the gallery shows more, and labels_review.csv lists all
OPEN = 24  # on the page where scripts are off
STRONG = 0.8  # held-out probability of another class from which on a checked label is worth a second look
MOST_CHECKED = 12  # maximum of these in report.json and on the page


def find_suspects(
    selection: SelectionIndex | None, samples: RunSamples, most: int = MOST
) -> tuple[int | None, list[dict[str, Any]] | None]:
    """Return the number of flagged samples and the most suspicious of them; None if there is no selection.

    A sample is flagged if it is not selected, its last held-out prediction contradicts the label, and nobody has
    checked the label by hand.
    """
    if selection is None:
        return None, None
    ids = flagged_ids(selection, samples)
    return len(ids), [_describe(int(number), selection, samples) for number in ids[:most]]


def flagged_ids(selection: SelectionIndex, samples: RunSamples) -> NDArray[np.int64]:
    """Return the sample_ids that are flagged, most suspicious first."""
    size = len(selection.state)
    inside = samples.inside[:size] | (selection.state == State.HELD_OUT)
    doubted = inside & (selection.state != State.SELECTED) & np.isfinite(selection.loss)
    doubted &= selection.predicted != samples.given[:size]
    if samples.checked is not None:
        doubted &= ~samples.checked[:size]
    ids = selection.ids_by_suspicion()
    return ids[doubted[ids]]


def count_held_out(selection: SelectionIndex | None, samples: RunSamples) -> dict[str, int]:
    """Count the samples that `data.eval_fraction` keeps from training, and how many of them are flagged."""
    if selection is None:
        return {"samples": 0, "flagged": 0}
    held_out = selection.state == State.HELD_OUT
    return {"samples": int(held_out.sum()), "flagged": int(held_out[flagged_ids(selection, samples)].sum())}


def find_contradicted_checks(
    selection: SelectionIndex | None, samples: RunSamples, most: int = MOST_CHECKED
) -> tuple[int | None, list[dict[str, Any]] | None]:
    """Return how many labels were checked by hand but are strongly contradicted, and the strongest contradictions.

    They are never flagged: the person may be right. Both are None if there is no selection.
    """
    if selection is None:
        return None, None
    checked = np.zeros(0, bool) if samples.checked is None else samples.checked
    ids = np.flatnonzero(checked[: len(selection.state)])
    probability = selection.predicted_probability[ids]
    contradicted = (selection.predicted[ids] >= 0) & (selection.predicted[ids] != samples.given[ids])
    contradicted &= probability >= STRONG  # false for NaN
    ids = ids[contradicted][np.argsort(-probability[contradicted], kind="stable")]
    return len(ids), [_describe(int(number), selection, samples) for number in ids[:most]]


def _describe(number: int, selection: SelectionIndex, samples: RunSamples) -> dict[str, Any]:
    """Return labels, loss and probabilities of the sample with this number; labels are class numbers."""
    return {
        "sample_id": number,
        "given": int(samples.given[number]),
        "predicted": int(selection.predicted[number]),
        "true": int(samples.truth[number]) if samples.truth is not None and samples.truth[number] >= 0 else None,
        "loss": round(float(selection.loss[number]), 5),
        "given_probability": round(float(selection.given_probability[number]), 6),
        "predicted_probability": round(float(selection.predicted_probability[number]), 6),
    }


def thumbnails(
    suspects: Iterable[dict[str, Any]], image_of: Callable[[int], Image.Image] | None
) -> dict[int, dict[str, Any]]:
    """Return sample_id -> {"uri": data URI, "pixelated": bool}, without samples whose image cannot be read."""
    found: dict[int, dict[str, Any]] = {}
    for suspect in suspects if image_of is not None else ():
        assert image_of is not None
        if (image := read_image(suspect["sample_id"], image_of)) is not None:
            picture = encode_picture(image)
            found[suspect["sample_id"]] = {"uri": picture.uri, "pixelated": picture.pixelated}
    return found
