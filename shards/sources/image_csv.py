"""Images in a folder of any shape, with a CSV file of their paths and labels, such as Hugging Face's metadata.csv."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from shards.csv_file import unescape_cell
from shards.errors import ConfigError, DataError, Fix
from shards.image_check import MAX_BYTES
from shards.image_formats import SUFFIXES, explain_ignored
from shards.sources.inside import open_inside, walk_files
from shards.sources.label_table import LabelRow, read_label_table
from shards.sources.source import (
    IgnoredFile,
    RawSample,
    SourceType,
    is_image,
    list_folder,
    require_root,
    sort_class_names,
    suffix_of,
    warn_of_ignored,
)

_LAYOUT = "images in any folders, and a CSV file with a column of paths and one of labels"
_LISTS = ("metadata.csv", "labels.csv")
_ROWS_TRIED = 200
_SHOWN = 3


class ImageCsv:
    """The rows of the CSV file, sorted by key; a key is the path relative to ROOT, or absolute if it is outside.

    If ROOT/<split> is a folder, only images in it count; otherwise the split is only a name.
    """

    name = "image_csv"
    subset = ""

    def __init__(
        self,
        root: Path | None,
        split: str,
        csv: str | None = None,
        path_column: str | None = None,
        label_column: str | None = None,
        partial: bool = False,
        allow_outside: bool = False,
    ) -> None:
        self.split = split
        self.root = require_root(self.name, root, _LAYOUT)
        assert root is not None
        self._allow_outside = allow_outside
        inner = _find_split_folder(self.root, split)
        self._csv = find_list(self.root, inner, split, csv)
        rows = read_label_table(self._csv, path_column, label_column)
        files = set(walk_files(inner, self.root, allow_outside))
        paths = _PathFinder(self.root, Path(os.path.abspath(root)), files, self._bases(inner), rows)
        self.ignored: list[IgnoredFile] = []
        found = self._collect(rows, paths, inner, partial)
        self._ignore_unlisted(files, {key for key, _ in found}, partial)
        self.class_names = sort_class_names(row.label for _, row in found)
        self._require_classes(found)
        label_of = {name: label for label, name in enumerate(self.class_names)}
        found.sort(key=lambda pair: pair[0])
        self._keys = [key for key, _ in found]
        self._labels = np.array([label_of[row.label] for _, row in found], np.int32)
        self._lines = np.array([row.line for _, row in found], np.int64)
        warn_of_ignored(self.root, self.ignored)

    def __len__(self) -> int:
        return len(self._keys)

    def key(self, row: int) -> str:
        return self._keys[row]

    def label(self, row: int) -> int:
        return int(self._labels[row])

    def origin(self, row: int) -> str:
        return f"{self._csv.name} line {self._lines[row]}"

    def file(self, row: int) -> Path:
        return self.root / self._keys[row]

    def sample(self, row: int) -> RawSample:
        key = self._keys[row]
        with open_inside(self.root, key, self.origin(row), self._allow_outside) as file:
            try:
                data = file.read(MAX_BYTES + 1)  # one extra byte, to detect an oversized image
            except OSError as error:
                raise DataError(f"{self.file(row)} cannot be read: {error.strerror}") from error
        return RawSample(key, self.label(row), SUFFIXES.get(suffix_of(key), ""), data)

    def _bases(self, inner: str) -> list[str]:
        """Return the folders that relative paths may refer to, relative to the root."""
        beside = self._csv.parent.resolve()
        inside = [beside.relative_to(self.root).as_posix()] if beside.is_relative_to(self.root) else []
        return list(dict.fromkeys("" if base == "." else base for base in ("", inner, *inside)))

    def _collect(
        self, rows: Sequence[LabelRow], paths: "_PathFinder", inner: str, partial: bool
    ) -> list[tuple[str, LabelRow]]:
        """Return the key of each row that counts; raises DataError for missing, repeated and unlabelled images."""
        found: list[tuple[str, LabelRow]] = []
        first_line: dict[str, int] = {}
        missing: list[LabelRow] = []
        prefix = f"{inner}/" if inner else ""
        for row in rows:
            key = paths.find(row.path)
            if key.startswith("/") and not self._allow_outside:
                raise self._error(row, f"it is outside {self.root}", Fix("allow such paths with {}", "allow_outside"))
            if not key.startswith(("/", prefix)):
                self.ignored.append(IgnoredFile(key, f"outside the split's folder {inner}"))
                continue
            if not paths.exists(key):
                missing.append(row)
                continue
            if key in first_line:
                raise self._error(row, f"it occurs twice, first on line {first_line[key]}", "remove one of the lines")
            first_line[key] = row.line
            if row.label:
                found.append((key, row))
            elif partial:
                self.ignored.append(IgnoredFile(key, f"no label in {self._csv.name}"))
            else:
                raise self._error(row, "it has no label", "add one", Fix("leave such images out with {}", "partial"))
        if missing:
            raise self._missing_error(missing)
        if not found:
            raise DataError(
                f"{self._csv} lists no image in {self.root / inner}; if the split is not a folder, use the empty "
                "split ''"
            )
        return found

    def _ignore_unlisted(self, files: Iterable[str], listed: set[str], partial: bool) -> None:
        """Add the files that are not rows to `ignored`; raises DataError for images, unless the list is partial."""
        known = listed | {file.path for file in self.ignored}
        others = sorted(path for path in files if path not in known and self.root / path != self._csv)
        images = [path for path in others if is_image(os.path.basename(path))]
        if images and not partial:
            shown = ", ".join(images[:_SHOWN])
            raise DataError(
                f"{self._csv} does not list {len(images):,} images of {self.root}, for example {shown}",
                fix=["add them", Fix("leave out unlisted images with {}", "partial")],
            )
        unlisted = f"not listed in {self._csv.name}"
        for path in others:
            reason = unlisted if is_image(os.path.basename(path)) else explain_ignored(path)
            self.ignored.append(IgnoredFile(path, reason))

    def _require_classes(self, found: Sequence[tuple[str, LabelRow]]) -> None:
        if len(found) == 1:
            raise DataError(f"{self._csv} labels one image only; at least two classes with an image each are needed")
        if len(self.class_names) == 1:
            raise DataError(
                f"all {len(found):,} images in {self._csv} have the label {self.class_names[0]!r}; at least two "
                "classes are needed",
                fix=Fix("if another column has the labels, name it with {}", "label_column"),
            )

    def _error(self, row: LabelRow, problem: str, *fixes: str | Fix) -> DataError:
        return DataError(f"{self._csv}, line {row.line} ({row.path[:200]!r}): {problem}", fix=fixes)

    def _missing_error(self, missing: Sequence[LabelRow]) -> DataError:
        shown = ", ".join(f"{row.path[:200]!r} (line {row.line})" for row in missing[:_SHOWN])
        url = ". URLs must be downloaded first" if "://" in missing[0].path else ""
        return DataError(
            f"{self._csv} lists {len(missing):,} images that are not in {self.root}, for example {shown}{url}. "
            "Paths are absolute, or relative to that folder, to the folder of the CSV file or to that of the split",
            fix=["correct the list", "restore the files"],
        )


SOURCE = SourceType(
    ImageCsv.name,
    ImageCsv,
    splits=(),
    keys_are_paths=True,
    has_files=True,
    options=("csv", "path_column", "label_column", "partial", "allow_outside"),
    note="or any name; with --csv FILE, and --path-column, --label-column, --partial",
)


class _PathFinder:
    """Turns the cells of the path column into keys."""

    def __init__(self, root: Path, given_root: Path, files: set[str], bases: Sequence[str], rows: Sequence[LabelRow]):
        """given_root: the root as the user wrote it, absolute. bases: folders that relative paths may refer to."""
        self._root, self._given_root, self._files = str(root), str(given_root), files
        tried = rows[:_ROWS_TRIED]
        self._base = max(bases, key=lambda base: sum(self._find_in(base, row.path) is not None for row in tried))

    def find(self, cell: str) -> str:
        """Return the key of an existing file, or the key that the cell would have if its file existed."""
        return self._find_in(self._base, cell) or self._key(self._base, cell.strip())

    def exists(self, key: str) -> bool:
        return os.path.isfile(key) if key.startswith("/") else key in self._files

    def _find_in(self, base: str, cell: str) -> str | None:
        return next((key for key in self._candidates(base, cell) if self.exists(key)), None)

    def _candidates(self, base: str, cell: str) -> Iterator[str]:
        """Yield the keys that a cell may mean: as it is, escaped, with backslashes, or without its suffix."""
        for text in dict.fromkeys((cell, cell.strip(), unescape_cell(cell.strip()), cell.strip().replace("\\", "/"))):
            if not text or text.endswith("/"):
                continue
            key = self._key(base, text)
            yield key
            if suffix_of(text) not in SUFFIXES:
                for suffix in SUFFIXES:
                    yield from (key + suffix, key + suffix.upper())

    def _key(self, base: str, text: str) -> str:
        path = os.path.normpath(os.path.join(self._root, base, text))
        for root in (self._root, self._given_root):
            if path.startswith(f"{root.rstrip('/')}/"):
                return path[len(root.rstrip("/")) + 1 :]
        return path


def _find_split_folder(root: Path, split: str) -> str:
    """Return the folder of the split relative to `root`; "" if it has none."""
    folder = root / split
    if not split or not folder.is_dir() or not folder.resolve().is_relative_to(root) or folder.resolve() == root:
        return ""
    return os.path.normpath(split)


def find_list(root: Path, inner: str, split: str, given: str | None) -> Path:
    """Return the CSV file: the given one, in the working folder or below `root`, or the one that `root` contains."""
    if given is not None:
        for path in (Path(given).expanduser(), root / given):
            if path.is_file():
                return path.resolve()
        raise DataError(f"{given} is not a file, neither in the working folder nor in {root}", field="csv")
    for folder in dict.fromkeys((root / inner, root)):
        lists = [path for path in list_folder(folder) if path.suffix.lower() in (".csv", ".tsv") and path.is_file()]
        preferred = [folder / name for name in (f"{split}.csv", *_LISTS) if folder / name in lists]
        if preferred or len(lists) == 1:
            return (preferred or lists)[0]
        if lists:
            shown = ", ".join(path.name for path in lists[:10])
            raise ConfigError(f"{folder} contains several lists ({shown})", fix=Fix("choose one with {}", "csv"))
    other = ["convert metadata.jsonl to metadata.csv"] if (root / inner / "metadata.jsonl").is_file() else []
    raise DataError(
        f"{root} contains no CSV file. Expected there: {_LAYOUT}", fix=[*other, Fix("name the file with {}", "csv")]
    )
