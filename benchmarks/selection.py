"""Seconds from a round's predictions to its selection at WebVision's size.

    python benchmarks/selection.py selection_s [--rows 2440000] [--small] [--append]

The selection is what every rank computes once it has all predictions: both halves' decisions, the index of the next
round and its checksum.
"""

import argparse
import time
from typing import Any

import numpy as np
from record import publish, record_runs

from trainer.incv.predictions import Predictions
from trainer.incv.selection import apply_round
from trainer.incv.selection_index import SelectionIndex
from trainer.loading.sample_order import Ids
from trainer.passes import Status

_REMOVE_RATIO = 0.1  # the recipe of WebVision


def made_up(ids: Ids) -> Predictions:
    """Predictions of these ids: the numbers of a row follow from its id alone."""
    ids = np.sort(ids).astype(np.int64)
    probability = ((ids * 2654435761 % 1_000_003 + 1) / 1_000_004).astype(np.float32)
    return Predictions(
        sample_id=ids,
        fold=(ids % 2).astype(np.int8),
        predicted=(ids * 7919 % 1000).astype(np.int32),
        agrees=ids % 3 > 0,
        loss=-np.log(probability),
        given_probability=probability,
        predicted_probability=np.maximum(probability, 1 - probability),
        second=(ids * 7907 % 1000).astype(np.int32),
        second_probability=np.minimum(probability, 1 - probability),
        given_rank=(ids * 7901 % 1000).astype(np.int32),
        status=np.where(ids % 1000 == 0, Status.UNREADABLE, Status.OK).astype(np.int8),
    )


def selection_line(rows: int, runs: int) -> dict[str, Any]:
    predictions: Predictions = made_up(np.arange(rows))
    before = SelectionIndex.of_candidates(rows, predictions.sample_id)
    seconds, checksums = [], set()
    for _ in range(runs):
        began = time.perf_counter()
        checksums.add(apply_round(before, predictions, 1, _REMOVE_RATIO).checksum())
        seconds.append(time.perf_counter() - began)
    assert len(checksums) == 1
    note = f"{rows:,} predictions of two folds, removing {_REMOVE_RATIO} times the selected; one process, on the CPU"
    return record_runs("selection_s", seconds, unit="s", note=note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=["selection_s"])
    parser.add_argument("--rows", type=int, default=2_440_000)
    parser.add_argument("--small", action="store_true", help="few rows, to try the script")
    parser.add_argument("--append", action="store_true", help="keep the lines in results/selection.jsonl")
    given = parser.parse_args()
    kept_in = "selection.jsonl" if given.append else None
    publish([selection_line(10_000, 2) if given.small else selection_line(given.rows, 5)], kept_in)


if __name__ == "__main__":
    main()
