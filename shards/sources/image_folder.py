"""Your own images in class folders: ROOT/<split>/<class>/.../<image>."""

import os
from pathlib import Path

from shards.errors import ConfigError, DataError, did_you_mean
from shards.image_check import MAX_BYTES
from shards.image_formats import SUFFIXES, explain_ignored
from shards.regular_file import read_regular
from shards.sources.inside import walk_files
from shards.sources.source import (
    IgnoredFile,
    RawSample,
    SourceType,
    is_image,
    list_folder,
    require_root,
    suffix_of,
    warn_of_ignored,
)

_LAYOUT = "<split>/<class>/<image>.jpg, .png, .webp, ... (for the split '': <class>/<image>)"


class ImageFolder:
    """The classes are the sorted subfolders of the split; a key is the path relative to ROOT, with suffix."""

    name = "image_folder"
    subset = ""

    def __init__(self, root: Path | None, split: str, allow_outside: bool = False) -> None:
        """allow_outside: links may leave `root`."""
        self.split = split
        self.root = require_root(self.name, root, _LAYOUT)
        classes, stray = _list_class_folders(self.root, split)
        self.class_names = tuple(Path(folder).name for folder in classes)
        self.ignored = [
            IgnoredFile(path, "not in a class folder" if is_image(os.path.basename(path)) else explain_ignored(path))
            for path in stray
        ]
        self._paths: list[str] = []
        self._labels: list[int] = []
        for label, folder in enumerate(classes):
            files = sorted(walk_files(folder, self.root, allow_outside))
            images = [file for file in files if is_image(os.path.basename(file))]
            ignored = [
                IgnoredFile(path, explain_ignored(path)) for path in files if not is_image(os.path.basename(path))
            ]
            if not images:
                raise DataError(_describe_empty_class(self.root / folder, ignored))
            self.ignored += ignored
            self._paths += images
            self._labels += [label] * len(images)
        warn_of_ignored(self.root / split, self.ignored)

    def __len__(self) -> int:
        return len(self._paths)

    def key(self, row: int) -> str:
        return self._paths[row]

    def label(self, row: int) -> int:
        return self._labels[row]

    def origin(self, row: int) -> str:
        return self._paths[row]

    def file(self, row: int) -> Path:
        return self.root / self._paths[row]

    def sample(self, row: int) -> RawSample:
        path = self.file(row)
        try:
            data = read_regular(path, MAX_BYTES + 1)  # one extra byte, to detect an oversized image
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        return RawSample(self._paths[row], self._labels[row], SUFFIXES[suffix_of(path.name)], data)


SOURCE = SourceType(
    ImageFolder.name,
    ImageFolder,
    splits=(),
    keys_are_paths=True,
    has_files=True,
    options=("allow_outside",),
    note="'' if the class folders are in --root itself",
)


def _list_class_folders(root: Path, split: str) -> tuple[list[str], list[str]]:
    """Return the class folders of `split` and the files beside them, both sorted, as paths relative to `root`."""
    folder = root / split
    if not folder.is_dir() or not folder.resolve().is_relative_to(root):
        known = [entry.name for entry in list_folder(root) if entry.is_dir()]
        raise ConfigError(
            f"{root} has no folder {split!r}; {did_you_mean(split, known)}. If {root} itself contains the class "
            "folders, use the empty split ''"
        )
    prefix = folder.relative_to(root).as_posix()
    prefix = "" if prefix == "." else prefix + "/"
    entries = list_folder(folder)
    names = [e.name for e in entries if e.is_dir() and not e.name.startswith(".")]
    files = [e.name for e in entries if e.is_file()]
    if not names:
        lists = [name for name in files if name.endswith((".csv", ".tsv"))]
        hint = f". For images with a list of labels ({lists[0]}), use the data set image_csv" if lists else ""
        raise DataError(f"{folder} has no class folders. Expected under {root}: {_LAYOUT}{hint}")
    return [prefix + name for name in names], [prefix + name for name in files]


def _describe_empty_class(folder: Path, ignored: list[IgnoredFile]) -> str:
    found = f"; {len(ignored):,} other files, such as {ignored[0].path} ({ignored[0].reason})" if ignored else ""
    return (
        f"{folder} contains no image (.jpg, .png, .webp, .gif, .bmp, .tif){found}, and every folder beside it is "
        "taken for a class. If this is one, add its images; if not, move the folder elsewhere"
    )
