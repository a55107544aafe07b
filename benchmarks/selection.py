"""Seconds from a round's predictions to its selection at WebVision's size, and seconds of the preceding gather.

    python benchmarks/selection.py selection_s [--rows 2440000] [--small] [--append]

The selection is what every rank computes once it has all predictions: both halves' decisions, the index of the next
round and its checksum. The gather is that of gather.py, four gloo processes on one machine.
"""

import argparse
import time
from typing import Any

import gather
import numpy as np
from record import publish, record_runs

from trainer.incv.predictions import Predictions
from trainer.incv.selection import apply_round
from trainer.incv.selection_index import SelectionIndex

_REMOVE_RATIO = 0.1  # the recipe of WebVision


def selection_line(rows: int, runs: int) -> dict[str, Any]:
    predictions: Predictions = gather.made_up(np.arange(rows))
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
    if given.small:
        publish([selection_line(10_000, 2)], kept_in)
        publish(gather.measure(2, 10_000, 1, 0.0), kept_in)
    else:
        publish([selection_line(given.rows, 5)], kept_in)
        publish(gather.measure(4, given.rows, 3, 10.0), kept_in)


if __name__ == "__main__":
    main()
