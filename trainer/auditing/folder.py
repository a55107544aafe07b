"""Finds the images and labels of a folder, and explains a folder that cannot be audited."""

import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shards.errors import ConfigError, DataError, list_some, suggest_near
from shards.sources import SourceOptions, open_source
from shards.sources.source import is_image, list_names

MIN_SAMPLES = 20
LAYOUT = "FOLDER/<class>/<image>, images with a CSV file of their paths and labels (--csv FILE), or WebDataset tars"
NO_OPTIONS = SourceOptions()
_SHOWN = 5  # of the largest classes, and of the smallest
_LISTS = (".csv", ".tsv")
_ARCHIVES = (".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".7z", ".rar")


@dataclass(frozen=True)
class FoundImages:
    """The images of a folder: the recipe's section `data.train`, and their numbers."""

    data: dict[str, Any]
    counts: dict[str, int]
    """Images by class name."""

    @property
    def samples(self) -> int:
        return sum(self.counts.values())

    @property
    def classes(self) -> int:
        return len(self.counts)


@dataclass(frozen=True)
class _Listing:
    """The names in a folder, sorted, without hidden ones."""

    folders: list[str]
    files: list[str]

    @property
    def images(self) -> list[str]:
        return [name for name in self.files if is_image(name)]

    def ending(self, *suffixes: str) -> list[str]:
        return [name for name in self.files if name.lower().endswith(suffixes)]


def find_images(folder: Path, options: SourceOptions = NO_OPTIONS) -> FoundImages:
    """Find the images of a folder; raises InputError that says what to do if it has none that an audit can use."""
    _require_folder(folder)
    root = folder.resolve()
    layout = find_layout(root, options.csv is not None)
    if layout["source"] == "image_folder":
        _require_class_folders(folder, layout["split"])
    csv = options.csv
    if csv is not None:  # relative to the working folder, or to the folder
        csv = next((os.path.abspath(each) for each in (Path(csv), root / csv) if each.is_file()), csv)
    options = replace(options, csv=csv)
    source = open_source(layout["source"], root, layout["split"], options=options)
    if len(source.class_names) < 2:
        raise DataError(
            f"{folder} has one class only, {source.class_names[0]!r}: an audit needs at least two. Expected: {LAYOUT}"
        )
    if len(source) < MIN_SAMPLES:
        raise DataError(
            f"{folder} has {len(source)} images: an audit needs at least {MIN_SAMPLES}, and hundreds to be of use"
        )
    counted = Counter(source.label(row) for row in range(len(source)))
    counts = {name: counted[number] for number, name in enumerate(source.class_names)}
    return FoundImages(layout | {"root": str(root)} | options.given(), counts)


def find_other_images(folder: Path, audited: Path, options: SourceOptions = NO_OPTIONS) -> dict[str, Any]:
    """Return the section `data.eval.NAME` of a folder in which the audited images are looked for.

    Labels do not matter: one class is enough, and classes may differ.
    """
    _require_folder(folder)
    root = folder.resolve()
    if root == audited.resolve():
        raise ConfigError(f"--against {folder} is the audited folder itself: name another one, such as a test set")
    layout = find_layout(root, False)
    place = folder / layout["split"]
    if layout["source"] == "image_folder" and not (here := _list(place)).folders:
        what = f"{len(here.images):,} images, but no folder of images" if here.images else "no images"
        raise DataError(f"{place} contains {what}: put them into one, such as {place / 'all'}/")
    options = SourceOptions(allow_outside=options.allow_outside and layout["source"] != "webdataset")
    open_source(layout["source"], root, layout["split"], options=options)
    return layout | {"root": str(root)} | options.given()


def describe_classes(counts: Mapping[str, int]) -> str:
    """Return the classes with their numbers of images, largest first; of many, the largest and the smallest."""
    ordered = [f"{name} ({counts[name]:,})" for name in sorted(counts, key=lambda name: -counts[name])]
    shown = ordered if len(ordered) <= 2 * _SHOWN else [*ordered[:_SHOWN], "…", *ordered[-_SHOWN:]]
    return ", ".join(shown)


def find_layout(root: Path, has_list: bool) -> dict[str, Any]:
    """Return source and split of a folder: a CSV file of labels, WebDataset tars, or one folder per class.

    Class folders may be in a folder `train`. has_list: whether the user named the CSV file.
    """
    if has_list:
        return {"source": "image_csv", "split": ""}
    here = _list(root)
    if not here.folders and here.ending(".tar"):
        return {"source": "webdataset", "split": ""}
    split = "train" if "train" in here.folders else ""
    inner = _list(root / split) if split else here
    if not inner.folders and (here.ending(*_LISTS) or inner.ending(*_LISTS)):
        return {"source": "image_csv", "split": split}
    return {"source": "image_folder", "split": split if inner.folders else ""}


def _list(folder: Path) -> _Listing:
    folders, files = ([name for name in names if not name.startswith(".")] for names in list_names(folder))
    return _Listing(folders, files)


def _require_folder(folder: Path) -> None:
    """Raise ConfigError unless this is a folder that a recipe can name."""
    try:
        os.fspath(folder.absolute()).encode("utf-8")
    except UnicodeEncodeError:
        shown = os.fsencode(folder).decode("utf-8", "backslashreplace")
        raise ConfigError(f"the name of the folder {shown} is not UTF-8: rename it") from None
    if folder.is_dir():
        return
    name = folder.name.lower()
    if not os.path.lexists(folder):
        parent = folder.parent
        known = _list(parent).folders if parent.is_dir() else []
        hint = suggest_near(folder.name, known, most=1, show=lambda name: str(parent / name))
        raise ConfigError(f"there is no folder {folder}: {hint or 'name the folder that contains the images'}")
    if name.endswith(_LISTS):
        advice = f"name the folder of the images, and the list with --csv {folder}"
    elif name.endswith(_ARCHIVES):
        advice = "unpack it, and name the folder that it gives"
    else:
        advice = "name the folder that contains the folders of all classes"
    raise ConfigError(f"{folder} is a file, not a folder: {advice}")


def _require_class_folders(folder: Path, split: str) -> None:
    """Raise DataError unless there is a folder for each class in FOLDER, or in FOLDER/train."""
    place = folder / split
    here = _list(place)
    if not here.folders:
        raise DataError(_explain_flat(place, here))
    inside = {name: _list(place / name) for name in here.folders}
    nested = [name for name, listing in inside.items() if not listing.images and listing.folders]
    several = any(len(inside[name].folders) > 1 for name in nested)
    if several and len(here.folders) > 1 and not find_repeated(inside):
        raise DataError(_explain_nested(place, nested, inside))
    if any(listing.images for listing in inside.values()):
        return  # an empty one is reported by the source
    if len(here.folders) == 1:
        (name,) = here.folders
        if len(inside[name].folders) > 1:
            raise DataError(
                f"{place} contains only the folder {name}, and the classes seem to be in it "
                f"({list_some(inside[name].folders)}): run `incv audit {place / name}`"
            )
    elif repeated := find_repeated(inside):
        raise DataError(
            f"the folders of {place} ({list_some(here.folders)}) seem to be parts of a data set, not classes: each "
            f"contains {list_some(repeated)}. Audit one of them: `incv audit {place / here.folders[0]}`"
        )


def _explain_nested(place: Path, nested: Sequence[str], inside: Mapping[str, _Listing]) -> str:
    """Describe folders of class folders, and how to make each of them a class."""
    leaves = [str(Path(name, leaf)) for name in nested for leaf in inside[name].folders]
    inner = f"{shlex.quote(str(place.resolve()))}/*/*/"
    return (
        f"{list_some(nested)} in {place} hold folders instead of images ({list_some(leaves)}), and an audit takes "
        f"only the folders of {place} for classes. If the inner folders are the classes, audit links to them: "
        f"`mkdir leaves && ln -s {inner} leaves && incv audit leaves --allow-outside`. If the outer ones are, move "
        "the images up into them"
    )


def find_repeated(inside: Mapping[str, _Listing]) -> list[str]:
    """Return the names of folders that all of these folders contain: the classes, if there are two or more."""
    shared = set.intersection(*(set(listing.folders) for listing in inside.values()))
    return sorted(shared) if len(shared) > 1 else []


def _explain_flat(place: Path, here: _Listing) -> str:
    """Describe a folder without folders, and what to do."""
    if here.images:
        absolute = place.absolute()
        parent = place.parent if place.name else absolute.parent
        beside = [name for name in _list(parent).folders if name != absolute.name and _list(parent / name).images]
        if beside:
            return (
                f"{place} contains {len(here.images):,} images, but no folders by class. If it is one of several "
                f"classes, beside {list_some(beside)}, audit the folder of them all: `incv audit {parent}`. "
                "Otherwise, name a list of paths and labels with --csv FILE"
            )
        return (
            f"{place} contains {len(here.images):,} images, but nothing that tells their labels: put them into one "
            f"folder per class ({place}/<class>/<image>), or name a list of paths and labels with --csv FILE"
        )
    if archives := here.ending(*_ARCHIVES):
        return f"{place} contains no images, but {list_some(archives)}: unpack it first"
    found = f"contains no images, only {list_some(here.files)}" if here.files else "is empty"
    return f"{place} {found}. Expected: {LAYOUT}"
