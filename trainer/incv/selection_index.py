"""The global selection index: INCV's decision on every sample, as dense arrays over sample_id."""

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shards.durable import read_parquet, write_parquet


class State(IntEnum):
    """INCV's decision on a sample."""

    OUTSIDE = 0
    """Rejected when the shards were packed, not in this run's subset, or only trained on (`incv.halves: 1`)."""
    CANDIDATE = 1
    SELECTED = 2
    REMOVED = 3
    UNREADABLE = 4
    NON_FINITE = 5
    HELD_OUT = 6
    """Not a candidate, but predicted in every round: a sample that `data.eval_fraction` holds out of training."""


@dataclass(frozen=True)
class SelectionIndex:
    """INCV's decisions: row i is for sample_id i; `round` is the round of its last decision, -1 before the first."""

    state: npt.NDArray[np.int8]
    round: npt.NDArray[np.int16]
    predicted: npt.NDArray[np.int32]
    loss: npt.NDArray[np.float32]
    given_probability: npt.NDArray[np.float32]
    predicted_probability: npt.NDArray[np.float32]

    @classmethod
    def of_candidates(
        cls, samples: int, candidates: npt.NDArray[np.int64], held_out: npt.NDArray[np.int64] | None = None
    ) -> "SelectionIndex":
        """Create the index before the first round: every id that is not held out is a candidate (Alg. 2, line 1)."""
        state = np.full(samples, State.OUTSIDE, np.int8)
        state[candidates] = State.CANDIDATE
        if held_out is not None:
            state[held_out] = State.HELD_OUT
        return cls(
            state=state,
            round=np.full(samples, -1, np.int16),
            predicted=np.full(samples, -1, np.int32),
            loss=np.full(samples, np.nan, np.float32),
            given_probability=np.full(samples, np.nan, np.float32),
            predicted_probability=np.full(samples, np.nan, np.float32),
        )

    def ids(self, state: State) -> npt.NDArray[np.int64]:
        """Return the sample_ids that are in a state, in ascending order."""
        return np.flatnonzero(self.state == state).astype(np.int64)

    def ids_by_suspicion(self) -> npt.NDArray[np.int64]:
        """Return all sample_ids, lowest held-out probability of the given label first, those without one last.

        The loss is the negative logarithm of that probability and does not underflow, so the order is that of the
        loss. Of equal losses, the smaller sample_id comes first.
        """
        return np.argsort(-self.loss, kind="stable").astype(np.int64)

    def checksum(self) -> str:
        """SHA-256 of sample_id, state, round and predicted label, equal on all ranks and across restarts."""
        digest = hashlib.sha256()
        digest.update(np.arange(len(self.state), dtype="<i8").tobytes())
        digest.update(self.state.astype("<i8").tobytes())
        digest.update(self.round.astype("<i8").tobytes())
        digest.update(self.predicted.astype("<i8").tobytes())
        return digest.hexdigest()

    def write(self, path: Path) -> None:
        columns = {"sample_id": np.arange(len(self.state), dtype=np.int64)}
        columns |= {name: getattr(self, name) for name in self.__dataclass_fields__}
        write_parquet(path, pa.table(columns))

    @classmethod
    def read(cls, path: Path) -> "SelectionIndex":
        return cls.of_table(read_parquet(path, "selection index", list(cls.__dataclass_fields__)))

    @classmethod
    def of_table(cls, table: pa.Table) -> "SelectionIndex":
        return cls(**{name: table[name].to_numpy() for name in cls.__dataclass_fields__})
