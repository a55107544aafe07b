"""Runs of the tiny recipe with a brief INCV, and which of their files are results."""

from pathlib import Path

from tests.support.command_line import THREADS, contents

BRIEF = (THREADS, "data.train.limit=100", "data.eval.test.limit=20", "incv.epochs=1", "incv.min_per_class=4")
_OF_INCV = (
    "rounds",
    "labels.parquet",
    "selection.parquet",
    "incv.json",
    "labels_review.csv",
    "labels_review.parquet",
)
_OF_METHODS = ("methods", "evaluation.json")


def files_of_incv(run: Path | str) -> dict[str, bytes | None]:
    """The results of INCV; the checkpoints of its folds are not taken over."""
    every = contents(Path(run))
    return {path: text for path, text in every.items() if path.startswith(_OF_INCV) and "checkpoints" not in path}


def files_of_methods(run: Path | str) -> dict[str, bytes | None]:
    """All files of the training methods, and their evaluation."""
    return {path: text for path, text in contents(Path(run)).items() if path.startswith(_OF_METHODS)}
