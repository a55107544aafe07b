"""The labels a run trains on: from the source, from a label file, or from the source with noise added."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from shards.errors import DataError
from shards.sample_index import SampleIndex
from trainer.config.data import LabelsConfig
from trainer.loading.sample_order import Ids, derive_stream, draw_uniforms
from trainer.records.stored_labels import Labels
from trainer.run.label_file import EXCLUDED, Corrections, read_label_file
from trainer.run.noise_kinds import build_transition


def corrupt_labels(labels: Labels, ids: Ids, transition: npt.NDArray[np.float64], stream: int) -> Labels:
    """Redraw each label from its class's row of `transition`; a draw depends only on the sample's id and the seed."""
    upper = np.cumsum(transition, axis=1)
    upper[:, -1] = 1.0
    draw = draw_uniforms(stream, 0, ids, "label")
    drawn = np.empty(len(labels), np.int64)
    by_class = np.argsort(labels, kind="stable")  # by class: an array [samples, classes] might not fit in memory
    ends = np.cumsum(np.bincount(labels, minlength=len(transition)))
    for label, rows in enumerate(np.split(by_class, ends[:-1])):
        drawn[rows] = np.searchsorted(upper[label], draw[rows], side="right")
    return drawn


def make_labels(config: LabelsConfig, seed: int, index: SampleIndex, ids: Ids) -> tuple[Labels, Labels | None]:
    """Return the labels to train on and the true labels (None if unknown) of the samples `ids`."""
    source = index.label[ids].astype(np.int64)
    labels = source
    if config.file is not None:
        labels = read_label_file(Path(config.file), index)[ids]
    transition = build_transition(config, index.num_classes, index.class_names)
    if transition is not None:
        stream = derive_stream(seed if config.seed is None else config.seed, "labels")
        labels = corrupt_labels(source, ids, transition, stream)
    return labels, source if config.truth_is_known else None


def overlay_corrections(labels: Labels, ids: Ids, corrections: Corrections) -> tuple[Labels, npt.NDArray[np.bool_]]:
    """Return the labels of the samples `ids` with the corrections applied, and which of them were checked by hand.

    A label is EXCLUDED if its sample leaves the run, and checked if the corrections change it or vouch for it.
    """
    if not len(corrections.ids):
        return labels, np.zeros(len(ids), bool)
    by_id = np.argsort(corrections.ids)
    places = by_id[np.searchsorted(corrections.ids, ids, sorter=by_id).clip(max=len(by_id) - 1)]
    named = corrections.ids[places] == ids
    corrected = np.where(named, corrections.labels[places], labels)
    checked = (named & corrections.vouched[places]) | (corrected != labels)
    return corrected, checked & (corrected != EXCLUDED)


def require_every_class(labels: Labels, class_names: tuple[str, ...]) -> None:
    missing = np.flatnonzero(np.bincount(labels, minlength=len(class_names)) == 0)
    if len(missing):
        names = ", ".join(f"{label} ({class_names[label]})" for label in missing[:5])
        raise DataError(
            f"{len(missing)} class(es) have no sample: {names}. Every class needs at least one labelled sample: "
            "check data.train.limit, labels.file and labels.corrections, or leave the class out of the source"
        )
