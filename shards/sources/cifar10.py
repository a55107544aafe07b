"""CIFAR-10 as published, in the binary or the Python version."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from shards.errors import DataError
from shards.sources.source import RawSample, SourceType, encode_png, require_root, require_split

_ROWS = 10_000  # images per official file
_PIXELS = 3 * 32 * 32
_RECORD = 1 + _PIXELS
_LARGEST_PICKLE = 64 * 2**20
_BATCHES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
_SPLITS = {  # the official set, and its rows
    "train": ("train", range(50_000)),
    "test": ("test", range(10_000)),
    "fit": ("train", range(45_000)),
    "validation": ("train", range(45_000, 50_000)),
}
_LAYOUT = (
    "cifar-10-batches-bin/ (data_batch_1.bin ... data_batch_5.bin, test_batch.bin, batches.meta.txt) or "
    "cifar-10-batches-py/ (data_batch_1 ... data_batch_5, test_batch, batches.meta), "
    "from https://www.cs.toronto.edu/~kriz/cifar.html"
)


class Cifar10:
    """50,000 `train` and 10,000 `test` images in the order of the official files.

    To choose settings without the test set, `fit` has the first 45,000 training images and `validation` the other
    5,000, under the keys that they have in `train`.
    """

    name = "cifar10"
    subset = ""

    def __init__(self, root: Path | None, split: str) -> None:
        require_split(self.name, split, tuple(_SPLITS))
        self.split = split
        self._official, self._rows = _SPLITS[split]
        self._files = _find_batch_files(require_root(self.name, root, _LAYOUT), self._official)
        self.class_names = _read_class_names(self._files[0].parent)
        self._batches: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for file in self._files:
            if file.suffix == ".bin" and file.stat().st_size != _ROWS * _RECORD:
                raise DataError(
                    f"{file} has {file.stat().st_size:,} bytes instead of {_ROWS * _RECORD:,}; "
                    "download and unpack the archive again"
                )

    def __getstate__(self) -> dict[str, Any]:
        # worker processes open the files themselves: a pickled memory map would contain all its bytes
        return {**self.__dict__, "_batches": {}}

    def __len__(self) -> int:
        return len(self._rows)

    def key(self, row: int) -> str:
        return f"cifar10/{self._official}/{self._rows[row]:05d}"

    def label(self, row: int) -> int:
        number, place = divmod(self._rows[row], _ROWS)
        return int(self._batch(number)[0][place])

    def origin(self, row: int) -> str:
        number, place = divmod(self._rows[row], _ROWS)
        return f"{self._files[number].name} image {place}"

    def sample(self, row: int) -> RawSample:
        number, place = divmod(self._rows[row], _ROWS)
        planes = self._batch(number)[1][place].reshape(3, 32, 32)
        pixels = np.ascontiguousarray(planes.transpose(1, 2, 0))
        return RawSample(self.key(row), self.label(row), "png", encode_png(pixels))

    def _batch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return labels [10000] and pixels uint8 [10000, 3072], each row a red, a green and a blue plane."""
        if number not in self._batches:
            file = self._files[number]
            self._batches[number] = _read_binary_batch(file) if file.suffix == ".bin" else _read_python_batch(file)
        return self._batches[number]


SOURCE = SourceType(
    Cifar10.name,
    Cifar10,
    splits=tuple(_SPLITS),
    published={(split, "all"): (len(rows), 10) for split, (_, rows) in _SPLITS.items()},
)


def _find_batch_files(root: Path, official: str) -> list[Path]:
    """Return the files of an official set from the first folder that has all of them."""
    missing: list[Path] = []
    for folder in (root, root / "cifar-10-batches-bin", root / "cifar-10-batches-py"):
        for suffix in (".bin", ""):
            files = [folder / f"{batch}{suffix}" for batch in _BATCHES[official]]
            absent = [file for file in files if not file.is_file()]
            if not absent:
                return files
            if len(absent) < len(files):
                missing = missing or absent
    if missing:
        raise DataError(f"{missing[0]} is missing; unpack the whole CIFAR-10 archive there: {_LAYOUT}")
    raise DataError(f"CIFAR-10 was not found in {root}. Expected there: {_LAYOUT}")


def _read_class_names(folder: Path) -> tuple[str, ...]:
    text, pickled = folder / "batches.meta.txt", folder / "batches.meta"
    if text.is_file():
        names = text.read_text(encoding="utf-8", errors="replace").split()
    elif pickled.is_file():
        found = _read_pickle(pickled).get(b"label_names")
        names = [_decode(name) for name in found] if isinstance(found, list) else []
    else:
        raise DataError(f"{text} (or {pickled.name}), which holds the class names, is missing")
    if len(names) != 10 or len(set(names)) != 10:
        raise DataError(f"{text if text.is_file() else pickled} does not contain 10 distinct class names")
    return tuple(names)


def _decode(name: Any) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)


def _read_binary_batch(file: Path) -> tuple[np.ndarray, np.ndarray]:
    records = np.memmap(file, dtype=np.uint8, mode="r", shape=(_ROWS, _RECORD))
    return records[:, 0], records[:, 1:]


def _read_python_batch(file: Path) -> tuple[np.ndarray, np.ndarray]:
    content = _read_pickle(file)
    pixels, labels = content.get(b"data"), content.get(b"labels")
    if not isinstance(pixels, _PickledArray) or not isinstance(labels, list) or len(labels) != _ROWS:
        raise DataError(f"{file} does not contain {_ROWS:,} CIFAR-10 images and labels; download it again")
    if not all(type(label) is int and 0 <= label < 10 for label in labels):
        raise DataError(f"{file} contains a label outside 0..9; download it again")
    return np.array(labels, dtype=np.int32), pixels.uint8(file, (_ROWS, _PIXELS))


def _read_pickle(file: Path) -> dict[Any, Any]:
    """Load the dictionary from one of the official pickle files; its keys are returned as bytes."""
    if file.stat().st_size > _LARGEST_PICKLE:
        raise DataError(f"{file} is larger than any file of CIFAR-10; download it again")
    try:
        content = _ArraysOnly(io.BytesIO(file.read_bytes()), encoding="bytes").load()
    except _Refused as refusal:
        raise DataError(f"{file} is not a CIFAR-10 file: its pickle loads {refusal}. Do not trust it") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{file} cannot be read ({type(error).__name__}); download it again") from error
    if not isinstance(content, dict):
        raise DataError(f"{file} is not a CIFAR-10 file; download it again")
    return {key.encode() if isinstance(key, str) else key: value for key, value in content.items()}


class _Refused(Exception):
    """The pickle would load something other than arrays."""


class _PickledType:
    """Stands in for ndarray and dtype while unpickling; only stores the constructor's arguments."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        """Ignore the state of a dtype: it is the byte order, which uint8 does not have."""


class _PickledArray:
    """The raw state of a pickled array, not passed to NumPy until its type and size are checked."""

    def __init__(self, *arguments: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def uint8(self, file: Path, shape: tuple[int, int]) -> np.ndarray:
        """Return the array; raises DataError if it is not a uint8 array of this shape."""
        try:
            _version, found_shape, dtype, column_major, content = self.state
            kind = _decode(dtype.arguments[0])
        except (TypeError, ValueError, AttributeError, IndexError):
            raise DataError(f"{file} contains an unreadable array; download it again") from None
        is_whole = isinstance(content, bytes) and len(content) == shape[0] * shape[1]
        if found_shape != shape or kind.lstrip("|") != "u1" or not is_whole:
            raise DataError(f"{file} contains an array of type {kind} and shape {found_shape}, not uint8 {shape}")
        return np.frombuffer(content, np.uint8).reshape(shape, order="F" if column_major else "C")


def _latin1(text: Any, encoding: Any) -> bytes:
    """Replaces `_codecs.encode`, with which protocol-2 pickles store bytes as text."""
    if not isinstance(text, str) or _decode(encoding) not in ("latin1", "latin-1"):
        raise _Refused("an encoding other than latin1")
    return text.encode("latin1")


class _ArraysOnly(pickle.Unpickler):
    """An unpickler that builds only containers, numbers, bytes and arrays, so that a pickle cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return _PickledArray
        if module == "numpy" and name in ("ndarray", "dtype"):
            return _PickledType
        if module == "_codecs" and name == "encode":
            return _latin1
        raise _Refused(f"{module}.{name}")
