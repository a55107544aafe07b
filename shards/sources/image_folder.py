"""Your own images in class folders: ROOT/<split>/<class>/.../<image>."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from shards.errors import ConfigError, DataError, did_you_mean
from shards.image_check import MAX_BYTES
from shards.sources.inside import refuse_undecodable_name
from shards.sources.source import SUFFIXES, RawSample, SourceType, is_image, require_root, suffix_of

_LAYOUT = "<split>/<class>/<image>.jpg or .png (with --split '': <class>/<image>)"


class ImageFolder:
    """The classes are the sorted subfolders of the split; a key is the path relative to ROOT, with suffix."""

    name = "image_folder"
    subset = ""

    def __init__(self, root: Path | None, split: str) -> None:
        self.split = split
        self._root = require_root(self.name, root, _LAYOUT)
        classes = _list_class_folders(self._root, split)
        self.class_names = tuple(Path(folder).name for folder in classes)
        self._paths: list[str] = []
        self._labels: list[int] = []
        ignored = 0
        for label, folder in enumerate(classes):
            files = sorted(_list_files(folder, self._root))
            images = [file for file in files if is_image(os.path.basename(file))]
            if not images:
                raise DataError(f"the class folder {self._root / folder} contains no .jpg, .jpeg or .png image")
            ignored += len(files) - len(images)
            self._paths += images
            self._labels += [label] * len(images)
        if ignored:
            logging.getLogger(__name__).warning(
                "%s: %d files that are not .jpg, .jpeg or .png were ignored", self._root / split, ignored
            )

    def __len__(self) -> int:
        return len(self._paths)

    def key(self, row: int) -> str:
        return self._paths[row]

    def label(self, row: int) -> int:
        return self._labels[row]

    def origin(self, row: int) -> str:
        return self._paths[row]

    def sample(self, row: int) -> RawSample:
        path = self._root / self._paths[row]
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)  # one extra byte, to detect an oversized image
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        return RawSample(self._paths[row], self._labels[row], SUFFIXES[suffix_of(path.name)], data)


SOURCE = SourceType(
    ImageFolder.name,
    ImageFolder,
    splits=(),
    keys_are_paths=True,
    note="'' if the class folders are in --root itself",
)


def _list_class_folders(root: Path, split: str) -> list[str]:
    """Return the sorted class folders of `split`, as paths relative to `root`."""
    folder = root / split
    if not folder.is_dir() or not folder.resolve().is_relative_to(root):
        known = [entry.name for entry in root.iterdir() if entry.is_dir()]
        raise ConfigError(
            f"{root} has no folder {split!r}; {did_you_mean(split, known)}. If {root} itself contains the class "
            "folders, use the empty split ''"
        )
    prefix = folder.relative_to(root).as_posix()
    prefix = "" if prefix == "." else prefix + "/"
    names = [e.name for e in folder.iterdir() if e.is_dir() and not e.name.startswith(".")]
    if not names:
        raise DataError(f"{folder} has no class folders. Expected under --root: {_LAYOUT}")
    return [prefix + name for name in sorted(names)]


def _list_files(folder: str, root: Path) -> Iterator[str]:
    """Yield all files below `folder`, as paths relative to `root`. Links may point only inside `root`."""
    _refuse_bad_link(folder, root)
    with os.scandir(root / folder) as entries:
        for entry in entries:
            path = f"{folder}/{entry.name}"
            refuse_undecodable_name(path, root)
            if entry.is_dir():
                if not entry.name.startswith("."):
                    yield from _list_files(path, root)
                continue
            if entry.is_symlink():
                _refuse_bad_link(path, root)
            if entry.is_file():
                yield path


def _refuse_bad_link(path: str, root: Path) -> None:
    link = root / path
    if not link.is_symlink():
        return
    target = link.resolve()
    if not target.is_relative_to(root):
        raise DataError(f"{link} is a link that leaves {root} (to {target}); copy the images instead")
    if not target.exists():
        raise DataError(f"{link} is a link to {target}, which does not exist; remove it or restore the file")
    if link.is_relative_to(target):
        raise DataError(f"{link} is a link to {target}, which contains it; remove it")
