"""How the held-out losses of selected, candidate and removed samples are distributed."""

from typing import Any

import numpy as np

from trainer.incv.selection_index import SelectionIndex, State
from trainer.report.measured import RunSamples

BINS = 40
STATES = {"selected": State.SELECTED, "candidates": State.CANDIDATE, "removed": State.REMOVED}


def measure_losses(selection: SelectionIndex | None, samples: RunSamples) -> dict[str, Any] | None:
    """Return the edges of the bins and, for each state with samples, the share of its losses in each bin.

    The last bin also has all larger losses. None if no sample has a loss.
    """
    if selection is None:
        return None
    inside = samples.inside[: len(selection.state)] & np.isfinite(selection.loss)
    losses = {name: selection.loss[inside & (selection.state == state)] for name, state in STATES.items()}
    every = np.concatenate(list(losses.values()))
    if not len(every):
        return None
    high = float(np.quantile(every, 0.995)) or 1.0
    edges = np.linspace(0.0, high, BINS + 1)
    shares = {
        name: (np.histogram(np.clip(values, 0.0, high), edges)[0] / len(values)).round(6).tolist()
        for name, values in losses.items()
        if len(values)
    }
    medians = {name: round(float(np.median(losses[name])), 4) for name in shares}
    return {"edges": edges.round(6).tolist(), "shares": shares, "medians": medians}
