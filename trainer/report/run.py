"""What a run directory says, file by file: each is read once, and one that cannot be read is `Missing`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml
from numpy.typing import NDArray

from shards.durable import read_json, read_parquet
from shards.errors import InputError
from trainer.incv import measure
from trainer.incv.confident import are_doubted, confident_joint
from trainer.incv.selection_index import SelectionIndex, State
from trainer.records.run_directory import RunDirectory
from trainer.report.findings import CHECKS, LEAK, Findings, gather_findings
from trainer.report.pictures import ImageOf

_COLUMNS = {
    "labels.parquet": ("sample_id", "label"),
    "true_labels.parquet": ("sample_id", "label"),
    "selection.parquet": tuple(SelectionIndex.__dataclass_fields__),
    "predictions.parquet": ("sample_id", "predicted", "status", "given_probability", "predicted_probability"),
    "labels_review.parquet": ("key", "given_label", "checked"),
    "examination.parquet": ("sample_id", "group", "off_topic", *CHECKS),
}
"""The columns that the report reads."""
_CHECKED = "checked"  # optional, in labels.parquet and examination.parquet

_NEEDED = {
    "config.resolved.yaml": "the recipe's keys and methods are unknown",
    "manifest.json": "the recipe's name, the time of each stage, the starts and, without shards, the names of the "
    "classes are unknown",
    "labels.parquet": "samples and classes cannot be counted, and no label is shown",
}
"""Files that every run has, and what the report lacks without them."""
MOST_SOURCES = 12  # more top folders than this are no sources


@dataclass(frozen=True)
class Missing:
    """Stands for the content of a file that is missing or damaged."""

    reason: str
    """Follows the name of the file: `is missing`."""
    damaged: bool = True


@dataclass(frozen=True)
class RunSamples:
    """The labels of a run as dense arrays indexed by sample_id; -1 if unknown."""

    given: NDArray[np.int32]
    truth: NDArray[np.int32] | None
    inside: NDArray[np.bool_]  # whether a sample belongs to this run and is not held out (data.eval_fraction)
    names: list[str]
    checked: NDArray[np.bool_] | None = None  # whether the label was checked by hand; None: none was

    @property
    def classes(self) -> int:
        return len(self.names)

    @cached_property
    def measurable(self) -> NDArray[np.bool_]:
        """Mask of the run's samples whose true label is known."""
        return np.zeros_like(self.inside) if self.truth is None else self.inside & (self.truth >= 0)

    @cached_property
    def known(self) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
        """The (true, given) labels of the samples whose true label is known; None if there are none."""
        if self.truth is None or not self.measurable.any():
            return None
        return self.truth[self.measurable], self.given[self.measurable]

    def realised_noise(self) -> float | None:
        return None if self.known is None else measure.or_none(measure.realised_noise(*self.known))


@dataclass(frozen=True, eq=False)
class SampleSources:
    """Which source each sample comes from, such as Google or Flickr in WebVision: the top folder of its key."""

    names: list[str]
    numbers: NDArray[np.int16]
    """Position in `names`, by sample_id."""


@dataclass(frozen=True, eq=False)
class HeldOut:
    """The usable held-out predictions of round 1, of samples of the run; arrays [rows]."""

    ids: NDArray[np.int64]
    given: NDArray[np.int64]
    predicted: NDArray[np.int32]
    given_probability: NDArray[np.float32]
    predicted_probability: NDArray[np.float32]

    def joint(self, rows: NDArray[np.bool_] | slice, classes: int) -> NDArray[np.float64]:
        """Return the estimated joint distribution of given and true labels among some rows."""
        return confident_joint(
            self.given[rows],
            self.predicted[rows],
            self.given_probability[rows],
            self.predicted_probability[rows],
            classes,
        )


@dataclass(frozen=True, eq=False)
class ReportRun:
    """A run directory, finished or not, and what the caller knows of its images.

    Args:
        class_names: used if the manifest has none.
        image_of: returns the image of a sample_id; None without shards.
        keys: the key of every sample, by sample_id.
        key_root: the folder in which the keys are paths, if they are.
        gaps: what is missing, a sentence each by file or part.
    """

    directory: RunDirectory
    class_names: Sequence[str] = ()
    image_of: ImageOf | None = None
    keys: pa.ChunkedArray | None = None
    key_root: str | None = None
    sources: SampleSources | None = None
    gaps: dict[str, str] = field(default_factory=dict)
    _contents: dict[Path, Any] = field(default_factory=dict, init=False)

    def read(self, path: Path) -> Any:
        """Return the table or the mapping in a file of the run, or `Missing`."""
        if path not in self._contents:
            self._contents[path] = _read(path)
        return self._contents[path]

    def mapping(self, path: Path) -> dict[str, Any] | None:
        content = self.read(path)
        return None if isinstance(content, Missing) else content

    def columns(self, path: Path, *names: str) -> list[NDArray] | None:
        """Return some columns of a table; None if it is missing."""
        table = self.read(path)
        return None if isinstance(table, Missing) else [table[name].to_numpy() for name in names]

    def rounds(self, name: str) -> dict[int, Path]:
        """Return the readable files called `name` of the rounds, by round number."""
        paths = self.directory.round_files(name)
        return {number: path for number, path in paths.items() if not isinstance(self.read(path), Missing)}

    def selection_of(self, path: Path) -> SelectionIndex:
        return SelectionIndex.of_table(self.read(path))

    def key_of(self, sample_id: int) -> str | None:
        return None if self.keys is None else self.keys[sample_id].as_py()

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return self.mapping(self.directory.manifest) or {}

    @cached_property
    def config(self) -> dict[str, Any]:
        return self.mapping(self.directory.config) or {}

    @property
    def is_calibrated(self) -> bool:
        """Whether the held-out probabilities may be stated."""
        return is_calibrated(self.incv)

    @cached_property
    def incv(self) -> dict[str, Any] | None:
        return self.mapping(self.directory.incv)

    @cached_property
    def selection(self) -> SelectionIndex | None:
        """The final selection or, in an unfinished run, that of the last finished round."""
        paths = [*self.rounds("selection.parquet").values(), self.directory.selection]
        found = [path for path in paths if not isinstance(self.read(path), Missing)]
        return self.selection_of(found[-1]) if found else None

    @cached_property
    def samples(self) -> RunSamples:
        """The given labels and, if known, the true ones. `inside` has no samples that INCV did not select from."""
        selection = self.selection
        ids, labels = self.columns(self.directory.labels, "sample_id", "label") or [np.zeros(0, np.int64)] * 2
        size = max(int(ids.max(initial=-1)) + 1, len(selection.state) if selection else 0)
        given, truth, checked = _dense(ids, labels, size), None, None
        if (true := self.columns(self.directory.true_labels, "sample_id", "label")) is not None:
            here = true[0] < size
            truth = _dense(true[0][here], true[1][here], size)
        inside = given >= 0
        if selection is not None:
            inside[: len(selection.state)] &= ~np.isin(selection.state, (State.OUTSIDE, State.HELD_OUT))
            inside[len(selection.state) :] = False
        table = self.read(self.directory.labels)
        if not isinstance(table, Missing) and _CHECKED in table.column_names:
            checked = np.zeros(size, bool)
            checked[ids] = table[_CHECKED].to_numpy()
        highest = max(int(given.max(initial=-1)), -1 if truth is None else int(truth.max(initial=-1)))
        names = [str(name) for name in (self.manifest.get("dataset") or {}).get("class_names") or self.class_names]
        names += [str(number) for number in range(len(names), highest + 1)]
        return RunSamples(given, truth, inside, names, checked if checked is not None and checked.any() else None)

    @cached_property
    def flagged(self) -> NDArray[np.int64]:
        """The sample_ids that are flagged, most suspicious first; none without a selection.

        A sample is flagged if it is not selected, its last held-out prediction contradicts the label, and nobody has
        checked the label by hand. Of a judge by features, closer calls are not flagged.
        Labels that a duplicate contradicts are flagged, too, and come first.
        """
        selection, samples = self.selection, self.samples
        if selection is None:
            return np.zeros(0, np.int64)
        size = len(selection.state)
        inside = samples.inside[:size] | (selection.state == State.HELD_OUT)
        doubted = inside & (selection.state != State.SELECTED) & np.isfinite(selection.loss)
        doubted &= selection.predicted != samples.given[:size]
        if self.is_calibrated:
            doubted &= are_doubted(selection.loss, selection.predicted == samples.given[:size])
        if samples.checked is not None:
            doubted &= ~samples.checked[:size]
        ids = selection.ids_by_suspicion()
        if self.findings is None:
            return ids[doubted[ids]]
        contradicted = self.findings.contradicted[:size]
        ids = ids[np.argsort(~contradicted[ids], kind="stable")]
        return ids[(doubted | contradicted)[ids]]

    @cached_property
    def findings(self) -> Findings | None:
        """What is wrong besides labels; None if the images were not examined, or no label is judged."""
        table, selection, samples = self.mapping(self.directory.examination), self.selection, self.samples
        if table is None or selection is None or not len(table):
            return None
        probability = np.full(len(samples.given), np.nan, np.float32)
        probability[: len(selection.state)] = selection.given_probability
        return gather_findings(table, samples.given, probability, samples.checked)

    @cached_property
    def flagged_pairs(self) -> NDArray[np.int64]:
        """How many labels of the run are flagged, by given and suggested class: [classes, classes]."""
        if self.selection is None:
            return np.zeros((self.samples.classes, self.samples.classes), np.int64)
        ids = self.flagged[self.samples.inside[self.flagged]]
        ids = ids[self.selection.predicted[ids] != self.samples.given[ids]]
        return measure.confusion_counts(self.samples.given[ids], self.selection.predicted[ids], self.samples.classes)

    @cached_property
    def held_out(self) -> HeldOut | None:
        """The predictions of round 1, which cover every sample; None if there are none."""
        names = ("sample_id", "predicted", "status", "given_probability", "predicted_probability")
        columns = self.columns(self.directory.round_predictions(0), *names)
        if columns is None:
            return None
        ids, predicted, status, *probabilities = columns
        usable = (status == 0) & (ids < len(self.samples.given))
        usable[usable] = self.samples.inside[ids[usable]]
        chosen = ids[usable]
        given = self.samples.given[chosen].astype(np.int64)
        return HeldOut(chosen, given, *(column[usable] for column in (predicted, *probabilities)))

    @cached_property
    def joint(self) -> NDArray[np.float64] | None:
        """The estimated joint distribution of given and true labels; None without predictions."""
        if self.held_out is None or not len(self.held_out.ids):
            return None
        return self.held_out.joint(slice(None), self.samples.classes)

    def first_predictions(self) -> NDArray[np.int32] | None:
        """Return the held-out predictions of round 1 by sample_id; -1 if missing or unusable."""
        columns = self.columns(self.directory.round_predictions(0), "sample_id", "predicted", "status")
        if columns is None:
            return None
        ids, predicted, status = columns
        return _dense(ids[status == 0], predicted[status == 0], len(self.samples.given))

    def states(self, selection: SelectionIndex) -> NDArray[np.int8]:
        """Return the state of every sample, also of those that a selection does not have."""
        state = np.full(len(self.samples.given), State.OUTSIDE, np.int8)
        state[: len(selection.state)] = selection.state
        return state

    def find_gaps(self) -> dict[str, str]:
        """Return a sentence for each file that is damaged, or missing although every run has it."""
        run = self.directory
        paths = [run.config, run.manifest, run.labels, run.true_labels, run.selection, run.labels_review_parquet]
        for name in ("selection.parquet", "predictions.parquet"):
            paths += run.round_files(name).values()
        found = {}
        for path in [*paths, run.incv, run.evaluation, run.corrections]:
            name, content = str(path.relative_to(run.root)), self.read(path)
            if isinstance(content, Missing) and (content.damaged or name in _NEEDED):
                then = f", so {_NEEDED[name]}" if name in _NEEDED else "; the report is made without it"
                found[name] = f"{name} {content.reason}{then}."
        for number in self.rounds("selection.parquet"):
            if not run.round_predictions(number).exists():
                name = f"rounds/{number}/predictions.parquet"
                lost = "the estimates per class and the confusion" if number == 0 else "repeated predictions"
                found[name] = f"{name} is missing, so the report lacks {lost}."
        return found | self.gaps


def _read(path: Path) -> Any:
    if not path.exists():
        return Missing("is missing", damaged=False)
    if path.suffix == ".parquet":
        return _read_table(path)
    is_yaml = path.suffix == ".yaml"
    try:
        content = (yaml.safe_load(path.read_text()) or {}) if is_yaml else read_json(path)
    except (InputError, OSError, ValueError, yaml.YAMLError, json.JSONDecodeError):
        return Missing(f"cannot be read (not valid {'YAML' if is_yaml else 'JSON'})")
    if not isinstance(content, dict):
        return Missing(f"cannot be read (not {'a mapping' if is_yaml else 'an object'})")
    return content


def _read_table(path: Path) -> pa.Table | Missing:
    needed = _COLUMNS[path.name]
    try:
        present = pq.read_schema(path).names
        if lacking := [name for name in needed if name not in present]:
            return Missing(f"cannot be read (it lacks the column {lacking[0]})")
        wanted = [name for name in dict.fromkeys((*needed, _CHECKED, LEAK)) if name in present]
        return read_parquet(path, "table of this run", wanted)
    except (InputError, OSError, ValueError, KeyError, pa.ArrowException):
        return Missing("cannot be read (not a table of this version)")


def is_calibrated(incv: dict[str, Any] | None) -> bool:
    """Whether the probabilities are those of a judge by features."""
    return "judge" in (incv or {})


def find_sources(keys: pa.ChunkedArray | pa.Array, labels: NDArray[np.integer]) -> SampleSources | None:
    """Return the sources of samples with these keys, or None if the data set has only one.

    The top folders of the keys are sources if they are few and each has several classes: where every class has a
    folder of its own, folders say nothing new. labels: those of the source, by sample_id.
    """
    top = pc.struct_field(pc.extract_regex(keys, r"^(?P<top>[^/]+)/"), "top")
    coded = pc.dictionary_encode(top)
    coded = coded.combine_chunks() if isinstance(coded, pa.ChunkedArray) else coded
    if isinstance(coded, pa.ChunkedArray):  # without any key
        return None
    names = coded.dictionary.to_pylist()
    if not 2 <= len(names) <= MOST_SOURCES or coded.null_count:
        return None
    numbers = coded.indices.to_numpy().astype(np.int16)
    for number in range(len(names)):
        found = labels[numbers == number]
        if (found == found[0]).all():
            return None
    return SampleSources(names, numbers)


def _dense(ids: NDArray, values: NDArray, size: int) -> NDArray[np.int32]:
    dense = np.full(size, -1, np.int32)
    dense[ids] = values
    return dense
