"""The labels a run trains on: from the source, from a label file, or from the source with noise added."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shards.durable import write_json
from shards.errors import DataError
from shards.sample_index import SampleIndex
from trainer.config.data import LabelsConfig
from trainer.loading.sample_order import Ids, derive_stream, draw_uniforms, mix64
from trainer.records.stored_labels import Labels, write_labels
from trainer.run.label_file import EXCLUDED, Corrections, read_label_file
from trainer.run.noise_kinds import build_transition

if TYPE_CHECKING:
    from trainer.run.stages import StageRunner

_log = logging.getLogger(__name__)


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


def split_held_out(seed: int, ids: Ids, labels: npt.NDArray[np.int64], fraction: float) -> Ids:
    """Return the ids to hold out, ascending: `fraction` of each class, rounded, but never all of a class.

    labels: of the same samples. Which samples of a class are held out depends on the seed and on the ids alone.
    """
    if not fraction or not len(ids):
        return ids[:0]
    shuffled = np.argsort(mix64(derive_stream(seed, "data.eval_fraction"), ids), kind="stable")
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    counts = np.bincount(labels)
    place = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
    quota = np.minimum(np.floor(counts * fraction + 0.5).astype(np.int64), counts - 1)
    return np.sort(ids[by_class[place < np.repeat(quota, counts)]])


def require_every_class(labels: Labels, class_names: tuple[str, ...]) -> None:
    missing = np.flatnonzero(np.bincount(labels, minlength=len(class_names)) == 0)
    if len(missing):
        names = ", ".join(f"{label} ({class_names[label]})" for label in missing[:5])
        raise DataError(
            f"{len(missing)} class(es) have no sample: {names}. Every class needs at least one labelled sample: "
            "check data.train.limit, labels.file and labels.corrections, or leave the class out of the source"
        )


def write_label_files(stages: "StageRunner", name: str) -> None:
    """Write the labels of the run, and the true ones if they are known."""
    run, labels = stages.run, stages.data.labels
    if labels.true is not None:
        write_labels(run.true_labels, labels.ids, labels.true)
    if stages.recipe.labels.corrections is not None:
        counts = {"corrected": labels.corrected, "confirmed": labels.confirmed, "excluded": len(labels.excluded)}
        write_json(run.corrections, counts)
        _log.info("labels.corrections: %s", ", ".join(f"{count} {what}" for what, count in counts.items()))
    write_labels(run.labels, labels.ids, labels.given, labels.checked)
