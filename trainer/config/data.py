"""The sections of a recipe on data: `data` and `labels`."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from trainer.config.section import PathText, Positive, Ratio, Section, execution

_LONGEST_FOLDER = 40


class DataConfig(Section):
    """One packed split of a data set."""

    source: str
    """Name of a source: webvision, ilsvrc12, image_folder, image_csv, webdataset, cifar10 or digits."""
    split: str = "train"
    """Which split of the source: train, val or test, as far as the source has them.

    cifar10 also has fit and validation: the first 45,000 and the last 5,000 images of train.
    """
    subset: str | None = None
    """A subset of the split (webvision: google, flickr or all); null: the source's default."""
    classes: Positive | None = None
    """Use only the first N classes of the source; null: all."""
    resize: Positive | None = None
    """When packing, resize the shorter side to this many pixels; null: keep the size."""
    root: PathText | None = execution(None)
    """Folder of the raw images; read only when packing."""
    csv: PathText | None = execution(None)
    """image_csv: the file of paths and labels, in the working folder or in root; null: the one that root contains.

    This key and the four below matter only when packing: the result, keys and labels, counts as a result key.
    """
    path_column: str | None = execution(None)
    """image_csv: the column of the paths; null: recognised by its name."""
    label_column: str | None = execution(None)
    """image_csv: the column of the labels; webdataset: their key in .json members; null: recognised by its name."""
    partial: bool = execution(False)
    """image_csv, webdataset: ignore images without a label instead of refusing them; rejected.csv names them."""
    allow_outside: bool = execution(False)
    """image_csv, image_folder: accept paths and links that leave root."""
    limit: Positive | None = None
    """Use only this many samples, spread evenly over the classes; null: all."""
    shards: PathText = Field("", validate_default=True, json_schema_extra={"execution": True})
    """Folder of the packed split; the `pack` stage creates it if it does not exist.

    Default: a folder in data/shards, named by a hash of all keys that packing reads, so that recipes that differ in
    one of them never share it.
    """

    @field_validator("shards")
    @classmethod
    def _choose_folder(cls, shards: str, others: ValidationInfo) -> str:
        """Return the default if the folder is not set; `others` has all keys above, apart from those refused."""
        packing = {key: value for key, value in others.data.items() if value != cls.model_fields[key].default}
        packing.pop("limit", None)
        return shards or default_folder({"source": ""} | packing)


HELD_OUT_SET = "held_out"
"""Name of the evaluation set that `data.eval_fraction` holds out of the training set."""


class DataSections(Section):
    """The data sets."""

    train: DataConfig
    """The training set."""
    eval: dict[str, DataConfig] = Field(default_factory=dict)
    """Evaluation sets, by the name used in the report."""
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Hold out this fraction of each class of the training set as the evaluation set `held_out`; 0: none.

    No network trains on these samples. INCV's folds predict them too, so they are in labels_review.csv.
    """
    max_rejected: Ratio = execution(0.01)
    """Packing fails if more than this fraction of the images of a split is unusable."""
    max_unreadable: Ratio = execution(0.01)
    """The run fails once a rank has found more than this fraction of all training samples unreadable."""

    @model_validator(mode="after")
    def _check_names(self) -> "DataSections":
        if self.eval_fraction and HELD_OUT_SET in self.eval:
            raise ValueError(
                "data.eval.held_out has the name of the set that data.eval_fraction creates: rename it, or set "
                "data.eval_fraction to 0"
            )
        return self

    def evaluation_names(self) -> list[str]:
        """Return the names of all evaluation sets, that of the held-out samples last."""
        return [*self.eval, *([HELD_OUT_SET] if self.eval_fraction else [])]

    def splits(self) -> dict[str, DataConfig]:
        """Return the splits by their recipe keys: `data.train`, then `data.eval.NAME`."""
        return {"data.train": self.train} | {f"data.eval.{name}": config for name, config in self.eval.items()}


NOISE_ALIASES = {"pair_flip": "asymmetric"}
"""Other names of kinds of label noise; a run with either name has the same result keys."""


class LabelsConfig(Section):
    """The labels a run trains on: those of the source, of a file, or of the source with noise added."""

    noise: str = "none"
    """none, or a kind of noise from trainer/run/noise_kinds.py.

    symmetric: to any other class; symmetric_inclusive: to any class, the true one included; asymmetric or pair_flip:
    y -> y + 1; similar_class: between classes of CIFAR-10 that people confuse (Patrini et al., 2017); matrix: that
    of `labels.matrix`.
    """
    ratio: Ratio = 0.0
    """Fraction of labels flipped; with symmetric_inclusive, redrawn."""
    matrix: tuple[tuple[float, ...], ...] | None = None
    """T[i][j] = P(label j | class i), for `noise: matrix`."""
    seed: int | None = None
    """Seed of the label noise; null: the run's seed."""
    file: PathText | None = execution(None)
    """Labels to use instead of the source's: a CSV with columns key,label, or one label per line in source order.

    Its checksum counts as a result key; its path does not.
    """
    corrections: PathText | None = execution(None)
    """Labels that replace those above for some samples: a CSV with columns key,label, or an edited labels_review.csv.

    A sample with an empty label is excluded from the run. INCV always selects samples whose label was changed or
    confirmed. The checksum of the file counts as a result key; its path does not.
    """
    source_is_true: bool | None = None
    """Whether the source's labels are the ground truth, against which selections are measured.

    null: true if this recipe adds noise to them (labels.noise is not none); otherwise the truth is unknown.
    """

    @field_validator("noise")
    @classmethod
    def _resolve_alias(cls, noise: str) -> str:
        return NOISE_ALIASES.get(noise, noise)

    @property
    def truth_is_known(self) -> bool:
        return self.noise != "none" if self.source_is_true is None else self.source_is_true

    @model_validator(mode="after")
    def _check_consistency(self) -> "LabelsConfig":
        if self.file is not None and self.noise != "none":
            raise ValueError("labels.file cannot be combined with labels.noise: set labels.noise to none")
        return self


def default_folder(packing: Mapping[str, Any]) -> str:
    """Return a folder under data/shards whose name depends on every key that packing reads.

    packing: the keys of the split that are not at their default, without `shards`. Two recipes that differ in one of
    them never share a folder; two that agree in all of them do.
    """
    root = packing.get("root")
    keys = {**packing, "root": None if root is None else os.path.abspath(root)}
    digest = hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:8]
    name = packing["source"] if root is None else PurePath(keys["root"]).name or packing["source"]
    words = [
        re.sub(r"[^\w.-]+", "_", word).strip(".")[:_LONGEST_FOLDER] for word in (name, packing.get("split", "train"))
    ]
    return "/".join(["data", "shards", "-".join([*filter(None, words), digest])])
