"""Which samples each step sees: pure functions of (stream, epoch, ids), which do not depend on the world size.

Randomness comes from `mix64`, not from a library's generator, which may change between versions.
"""

import hashlib
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from trainer.config.schema import OrderConfig

Ids = npt.NDArray[np.int64]
Views = int | npt.NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_FIRST_INVERSE = np.uint64(pow(int(_FIRST), -1, 2**64))
_SECOND_INVERSE = np.uint64(pow(int(_SECOND), -1, 2**64))
_BLOCK = 2**15  # words hashed at a time, so that they stay in the CPU cache
_MAX_CANDIDATE_SHARE = 0.5  # |B_C| / |B_S| = min(0.5, |C| / |S|), paper section 5.3


def _scramble(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply SplitMix64's finaliser, a bijection of 64-bit words in which every input bit affects every output bit."""
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    return value ^ (value >> np.uint64(31))


def _unscramble(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Invert `_scramble`."""
    value = (value ^ (value >> np.uint64(31)) ^ (value >> np.uint64(62))) * _SECOND_INVERSE
    value = (value ^ (value >> np.uint64(27)) ^ (value >> np.uint64(54))) * _FIRST_INVERSE
    return (value ^ (value >> np.uint64(30)) ^ (value >> np.uint64(60))) - _GOLDEN


def mix64(*words: int | npt.NDArray[np.int64] | npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash integers, or arrays of integers, into uint64; the result has the broadcast shape of the words."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is intended
        state = np.zeros((), np.uint64)
        for word in words:
            bits = np.asarray(word).astype(np.uint64) if not isinstance(word, int) else _as_uint64(word)
            state = _scramble(state ^ _scramble(bits))
        return np.asarray(state)


def _as_uint64(word: int) -> npt.NDArray[np.uint64]:
    return np.asarray(word % 2**64, dtype=np.uint64)


@cache
def _word(name: str) -> int:
    """Hash a name to an input word of mix64."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def derive_stream(seed: int, stage: str, round_: int = 0, fold: int = 0) -> int:
    """Derive the random key of one training job; different stages, rounds and folds get different keys."""
    return int(mix64(seed, _word(stage), round_, fold))


def draw_uniforms(stream: int, epoch: int, ids: Ids, what: str, views: Views = 0) -> npt.NDArray[np.float64]:
    """Draw one uniform number in [0, 1) per row: float64 [len(ids)].

    Args:
        what: Name of the purpose; draws for different purposes are independent.
        views: View of each row, or of all: a sample that is shown twice in an epoch is drawn anew for each view.
    """
    if not isinstance(views, int):
        hashes = mix64(stream, epoch, _word(what), ids)
        again = np.flatnonzero(views)
        hashes[again] = mix64(stream, epoch, views[again], _word(what), ids[again])
    elif views:
        hashes = mix64(stream, epoch, views, _word(what), ids)
    else:
        hashes = mix64(stream, epoch, _word(what), ids)
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53


def epoch_order(stream: int, epoch: int, ids: Ids) -> Ids:
    """Shuffle the ids by sorting them by mix64(stream, epoch, sample_id); their input order does not matter.

    mix64 is a bijection of its last word, so there are no ties and the ids can be recovered from the sorted hashes.
    This is seven times faster than an argsort by hash, and needs no memory beyond the result.
    """
    state = mix64(stream, epoch)
    words = np.empty(len(ids), np.uint64)
    blocks = [slice(first, first + _BLOCK) for first in range(0, len(ids), _BLOCK)]
    with np.errstate(over="ignore"):
        for block in blocks:
            words[block] = _scramble(state ^ _scramble(ids[block].astype(np.uint64)))
        words.sort()
        for block in blocks:
            words[block] = _unscramble(state ^ _unscramble(words[block]))
    return words.view(np.int64)


def windowed_order(stream: int, epoch: int, ids: Ids, shards: npt.NDArray[np.integer], window: int) -> Ids:
    """Shuffle the shards, take `window` of them at a time, and shuffle the ids of each window with `epoch_order`.

    shards: [len(ids)], the shard of each id. A reader needs the shards of only one window at a time, or of two in a
    step that crosses a boundary. If one window holds all shards, the result equals `epoch_order`.
    """
    present = np.flatnonzero(np.bincount(shards))
    shuffled = present[np.argsort(mix64(stream, epoch, _word("shard"), present))]
    window_of = np.zeros(shuffled.max(initial=0) + 1, np.min_scalar_type(len(shuffled) // window))
    window_of[shuffled] = np.arange(len(shuffled)) // window
    windows = window_of[shards]
    order = ids[np.argsort(windows, kind="stable")]  # NumPy uses a linear-time radix sort for integers this short
    ends = np.cumsum(np.bincount(windows)).tolist()
    for first, end in zip([0, *ends], ends, strict=False):
        order[first:end] = epoch_order(stream, epoch, order[first:end])
    return order


def slice_for_rank(ids: Ids, rank: int, world: int) -> Ids:
    """Return this rank's contiguous slice of a step's global ids; slice lengths differ by at most one."""
    return ids[rank * len(ids) // world : (rank + 1) * len(ids) // world]


def candidate_rows(selected_rows: int, selected: int, candidates: int) -> int:
    """Return the number of ids of C in a step with b ids of S: |B_C| = floor(b * min(0.5, |C| / |S|)).

    b is `selected_rows`, |S| is `selected` and |C| is `candidates`.
    """
    if candidates == 0:
        return 0
    if 2 * candidates >= selected:
        return int(selected_rows * _MAX_CANDIDATE_SHARE)
    return selected_rows * candidates // selected


@dataclass(frozen=True, eq=False)
class Windows:
    """Parameters of windowed shuffling, for storage on which random access over all shards is slow."""

    shards: npt.NDArray[np.integer]
    """Shard of each sample, indexed by sample_id."""
    window: int
    """Number of shards read together."""


def build_windows(order: OrderConfig, shards: npt.NDArray[np.integer]) -> Windows | None:
    """Return the recipe's windows, or None for a full shuffle. shards: shard of each sample, indexed by sample_id."""
    return Windows(shards, order.window) if order.kind == "windowed" else None
