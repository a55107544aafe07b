"""scikit-learn's 1,797 handwritten digits (8x8 pixels), which need no download."""

from pathlib import Path

import numpy as np

from shards.errors import DataError
from shards.sources.source import RawSample, SourceType, encode_png, require_split

_SPLITS = ("train", "test")
_TEST_ROWS_PER_CLASS = 40
_WORD = 0xFFFFFFFFFFFFFFFF


class Digits:
    """The splits `train` (1,397 digits) and `test` (a fixed 400, 40 per class). `root` is ignored."""

    name = "digits"
    subset = ""
    class_names = tuple(str(digit) for digit in range(10))

    def __init__(self, root: Path | None, split: str) -> None:
        require_split(self.name, split, _SPLITS)
        pixels, labels = _load_digits()
        in_test = select_test_rows(labels)
        self.split = split
        self._rows = np.flatnonzero(in_test if split == "test" else ~in_test)
        self._pixels, self._labels = pixels[self._rows], labels[self._rows]

    def __len__(self) -> int:
        return len(self._rows)

    def key(self, row: int) -> str:
        """Return a key with the row number in scikit-learn's data set, so that keys are unique across both splits."""
        return f"digits/{self.split}/{self._rows[row]:05d}"

    def label(self, row: int) -> int:
        return int(self._labels[row])

    def origin(self, row: int) -> str:
        return f"image {self._rows[row]} of scikit-learn's digits"

    def sample(self, row: int) -> RawSample:
        return RawSample(self.key(row), self.label(row), "png", encode_png(self._pixels[row]))


SOURCE = SourceType(Digits.name, Digits, splits=_SPLITS, needs_root=False)


def select_test_rows(labels: np.ndarray) -> np.ndarray:
    """Return bool [n]: true for the 40 rows of each class with the smallest hash.

    The hash is our own, because those of libraries may change.
    """
    chosen = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        rows = [int(row) for row in np.flatnonzero(labels == label)]
        chosen[sorted(rows, key=_hash)[:_TEST_ROWS_PER_CLASS]] = True
    return chosen


def _hash(row: int) -> int:
    """Hash a row number with splitmix64, a bijection of 64-bit integers, so that there are no ties."""
    mixed = (row + 0x9E3779B97F4A7C15) & _WORD
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD
    return mixed ^ (mixed >> 31)


def _load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return pixels uint8 [1797, 8, 8] in 0..240 and labels int32 [1797], in scikit-learn's order."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(
            "the source digits needs scikit-learn, which is not installed: pip install 'incv[demo]'"
        ) from None
    digits = load_digits()
    return (digits.images * 15).astype(np.uint8), digits.target.astype(np.int32)
