"""Writes a cleaned data set (`incv clean`): an image folder, WebDataset shards or a list of keys.

Original image files are used only if they are still those that the run has seen.
"""

import json
import os
import shutil
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from shards.csv_file import write_csv
from shards.durable import atomic_folder, read_json, remove_leftovers_of, require_own
from shards.errors import CommandStopped, ConfigError, DataError, list_some
from shards.image_store import convert_image
from shards.progress import Progress
from shards.regular_file import find_kind, read_regular
from shards.shard_writer import ShardTar, member_key
from shards.source_files import hash_content, read_source_files
from trainer.incv.selection_index import State
from trainer.loading.sample_order import Ids
from trainer.loading.shard_reader import CorruptSample, ShardReader
from trainer.outputs.cleaned import CleanedSet, choose_samples, name_class_folders, name_files
from trainer.outputs.finished_run import FinishedRun
from trainer.run.data_sets import find_key_root

MARK = "incv_clean.json"
"""Marks a folder that `incv clean` wrote, which `--force` may replace; it lists the files with their sizes."""
_LIST_START = b'"key","label"\n'
SAMPLES_PER_SHARD = 1000
Stop = Callable[[], bool]
Item = TypeVar("Item")


@dataclass(frozen=True)
class CleanOptions:
    out: Path
    form: str = "folder"
    """`folder`, `shards` or `list`."""
    link: bool = False
    """In a folder, link to the original files instead of copying."""
    least_probability: float | None = None
    """Also keep contradicted samples, with the suggested label, from this probability on; None: leave them out."""
    from_shards: bool = False
    """Write the images as they were packed, instead of the original files."""
    force: bool = False
    """Replace an output of an earlier `incv clean`."""


def clean(run: FinishedRun, options: CleanOptions, stop: Stop = lambda: False) -> dict[str, Any]:
    """Write the cleaned data set; returns its description, which is also written beside the samples."""
    remove_leftovers_of(options.out)
    _require_free(run, options)
    chosen = choose_samples(run.selection, run.labels, run.checked, options.least_probability)
    if not len(chosen.ids):
        raise DataError(f"{run.directory.root} selected no sample: there is nothing to write")
    originals = None
    if options.form != "list" and not options.from_shards:
        originals = find_originals(run, chosen.ids)
    description = _describe(run, chosen, options, originals is not None)
    if options.form == "list":
        _write_list(run, chosen, options)
        return description
    with atomic_folder(options.out, check=lambda: _require_free(run, options)) as temporary:
        if options.form == "shards":
            _write_shards(run, chosen, originals, temporary, stop)
        elif originals is not None:
            _write_originals(run, chosen, originals, temporary, options.link, stop)
        else:
            _write_packed(run, chosen, temporary, options.link, stop)
        marked = description | {"files": {name: status.st_size for name, status in _list_files(temporary).items()}}
        (temporary / MARK).write_text(json.dumps(marked, indent=1) + "\n")
    return description


def _require_free(run: FinishedRun, options: CleanOptions) -> None:
    """Raise ConfigError if the output is among the images, or if it exists and --force may not replace it."""
    out = options.out
    if options.link and (options.form != "folder" or options.from_shards):
        raise ConfigError(
            "--link makes links to the original files: use it with `--as folder`, without --from-shards"
        )
    root = find_key_root(run.recipe.data.train)
    if root is not None and options.form == "folder" and out.resolve().is_relative_to(Path(root).resolve()):
        raise ConfigError(
            f"{out} is among the images of the run, where it would count as a class: choose another --out"
        )
    if options.form == "list":
        require_own(out, _LIST_START, options.force, "choose another --out")
        return
    if not os.path.lexists(out):
        return
    if (kind := find_kind(out) or "a file") != "a folder":
        raise ConfigError(f"{out} is {kind}: choose another --out")
    if not any(out.iterdir()):
        return
    if not (out / MARK).is_file():
        raise ConfigError(f"{out} is not empty and was not written by `incv clean`: choose another --out")
    if not options.force:
        raise ConfigError(f"{out} holds an earlier cleaned set: choose another --out, or replace it with --force")
    if others := _list_others(out):
        raise ConfigError(
            f"{out} has {len(others):,} files that `incv clean` did not write, or that have changed since: "
            f"{list_some(others)}; move them elsewhere, or choose another --out"
        )


def _list_others(out: Path) -> list[str]:
    """Return the files that were added to an earlier output, or changed in it."""
    mark = read_json(out / MARK)
    written = mark.get("files", {}) if isinstance(mark, dict) else {}
    marked = (out / MARK).stat().st_mtime_ns
    return sorted(
        name
        for name, status in _list_files(out).items()
        if name != MARK and (written.get(name) != status.st_size or status.st_mtime_ns > marked)
    )


def _list_files(folder: Path) -> dict[str, os.stat_result]:
    """Return the status of all that is in a folder and is no folder itself, by path; links are not followed."""

    def fail(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error

    found = {}
    for root, folders, files in os.walk(folder, onerror=fail):
        for name in (*files, *(each for each in folders if os.path.islink(os.path.join(root, each)))):
            path = os.path.join(root, name)
            found[os.path.relpath(path, folder)] = os.lstat(path)
    return found


def _describe(run: FinishedRun, chosen: CleanedSet, options: CleanOptions, original: bool) -> dict[str, Any]:
    corrections = read_json(run.directory.corrections) if run.directory.corrections.exists() else {}
    return {
        "run": str(run.directory.root.resolve()),
        "form": options.form,
        "samples": len(chosen.ids),
        "relabelled": int(chosen.relabelled.sum()),
        "checked": int(run.checked[chosen.ids].sum()),
        "left_out": int((run.labels >= 0).sum()) - len(chosen.ids),
        "excluded": int(corrections.get("excluded", 0)),
        "images": None if options.form == "list" else "original" if original else f"packed{describe_resize(run)}",
        "removed": int((run.selection.state == State.REMOVED).sum()),
        "least_probability": options.least_probability,
        "class_names": list(run.index.class_names),
        "selection": run.selection.checksum(),
    }


def _report_progress(items: Iterable[Item], what: str, total: int, stop: Stop) -> Generator[Item, None, None]:
    """Yield the items, with a progress bar; raises CommandStopped if a stop is requested."""
    with Progress(what, total) as progress:
        for item in items:
            if stop():
                raise CommandStopped("stopped; nothing was written. Run the same command again")
            yield item
            progress.advance()


def _converted(originals: list[Path], what: str, stop: Stop) -> Generator[bytes, None, None]:
    """Yield each original image as JPEG or PNG, in its own size, with a progress bar."""
    for path in _report_progress(originals, what, len(originals), stop):
        image = convert_image(read_regular(path))
        if image.verdict != "ok":
            raise DataError(f"{path} cannot be converted ({image.verdict}): add --from-shards")
        yield image.data


def _stored(run: FinishedRun, chosen: CleanedSet, what: str, stop: Stop) -> Generator[bytes, None, None]:
    """Yield the encoded image of each chosen sample from the shards, with a progress bar."""
    reader = ShardReader(run.index)
    try:
        for sample_id in _report_progress(chosen.ids, what, len(chosen.ids), stop):
            yield reader.read(int(sample_id))
    except CorruptSample as error:
        raise DataError(str(error)) from error
    finally:
        reader.close()


def _suffix(data: bytes) -> str:
    return "png" if data.startswith(b"\x89PNG") else "jpg"


def _write_shards(
    run: FinishedRun, chosen: CleanedSet, originals: list[Path] | None, folder: Path, stop: Stop
) -> None:
    """Write `.jpg` or `.png`, `.cls` and `.json` members, as WebDataset and DALI readers expect them."""
    keys = run.index.keys(chosen.ids)
    names = run.index.class_names
    what = "writing shards"
    stored = _stored(run, chosen, what, stop) if originals is None else _converted(originals, what, stop)
    for first in range(0, len(chosen.ids), SAMPLES_PER_SHARD):
        rows = range(first, min(first + SAMPLES_PER_SHARD, len(chosen.ids)))
        with (folder / f"shard-{first // SAMPLES_PER_SHARD:06d}.tar").open("wb") as file, ShardTar(file) as tar:
            for row, data in zip(rows, stored, strict=False):
                sample_id, label = int(chosen.ids[row]), int(chosen.labels[row])
                facts = {
                    "key": keys[row],
                    "sample_id": sample_id,
                    "label": label,
                    "class_name": names[label],
                    "given_label": int(run.labels[sample_id]),
                    "relabelled": bool(chosen.relabelled[row]),
                }
                name = member_key(sample_id)
                tar.add(name, _suffix(data), data)
                tar.add(name, "cls", str(label).encode())
                tar.add(name, "json", json.dumps(facts, sort_keys=True).encode())
            tar.finish()
    stored.close()
    (folder / "classes.txt").write_text("".join(f"{name}\n" for name in names))


def _make_class_folders(run: FinishedRun, chosen: CleanedSet, folder: Path) -> list[str]:
    """Create a folder for each class; returns that of each chosen sample."""
    class_folders = name_class_folders(run.index.class_names)
    for name in sorted(set(class_folders)):
        (folder / name).mkdir()
    return [class_folders[label] for label in chosen.labels]


def _write_originals(
    run: FinishedRun, chosen: CleanedSet, originals: list[Path], folder: Path, link: bool, stop: Stop
) -> None:
    """Write <class>/<image>, linked to or copied from the original files."""
    folders = _make_class_folders(run, chosen, folder)
    suffixes = [path.suffix.lstrip(".") or "jpg" for path in originals]
    names = name_files(run.index.keys(chosen.ids), suffixes, chosen.ids, folders)
    place = os.symlink if link else shutil.copyfile
    pairs = zip(originals, names, strict=True)
    with closing(_report_progress(pairs, "linking" if link else "copying", len(names), stop)) as reported:
        for original, name in reported:
            place(original, folder / name)


def _write_packed(run: FinishedRun, chosen: CleanedSet, folder: Path, link: bool, stop: Stop) -> None:
    """Write <class>/<image> with the images of the shards."""
    if link:
        raise ConfigError(
            "--link needs the original image files, but this run's source has none at data.train.root: leave --link "
            "out to copy the images from the shards"
        )
    folders, keys = _make_class_folders(run, chosen, folder), run.index.keys(chosen.ids)
    suffixes = []  # an image shows its format only when it is read, so it is named afterwards
    for row, data in enumerate(_stored(run, chosen, "copying", stop)):
        (folder / f".{row}").write_bytes(data)
        suffixes.append(_suffix(data))
    names = name_files(keys, suffixes, chosen.ids, folders)
    for row, name in enumerate(names):
        os.replace(folder / f".{row}", folder / name)


def _write_list(run: FinishedRun, chosen: CleanedSet, options: CleanOptions) -> None:
    """Write key,label, in the form that `labels.file` reads."""
    keys = pa.array(run.index.keys(chosen.ids), pa.string())
    names = pa.array(run.index.class_names, pa.string()).take(pa.array(chosen.labels))
    _require_free(run, options)
    write_csv(options.out, pa.table({"key": keys, "label": names}))


def find_originals(run: FinishedRun, ids: Ids) -> list[Path] | None:
    """Return the original file of each sample; None if the source has no files, or its folder is not here.

    Raises DataError if a file is missing or has changed since it was packed.
    """
    root = find_key_root(run.recipe.data.train)
    if root is None or not Path(root).is_dir():
        return None
    paths = [Path(root) / key for key in run.index.keys(ids)]
    problems = _find_problems(run, ids, paths)
    if problems:
        shown = list_some(problems, separator="; ")
        raise DataError(
            f"{len(problems):,} of the {len(paths):,} images in {root} are missing or have changed since they were "
            f"packed: {shown}. Restore them, run again with `--redo pack`, or add --from-shards to write the images "
            f"as they were packed{describe_resize(run)}"
        )
    return paths


def describe_resize(run: FinishedRun) -> str:
    """Return a clause on the size of the images in the shards; empty if they have their original size."""
    resize = run.recipe.data.train.resize
    return f" (shorter side at most {resize} pixels)" if resize is not None else ""


def _find_problems(run: FinishedRun, ids: Ids, paths: list[Path]) -> list[str]:
    """Return each file that is missing or was changed. Without a record of the files, only missing ones are found."""
    recorded = read_source_files(run.index.folder, run.index.dataset)
    columns: list[list[object]] = [[None] * len(paths)] * 3
    if recorded is not None:
        rows = recorded.table.take(ids)
        columns = [rows[name].to_pylist() for name in ("file_nbytes", "mtime_ns", "content")]
    problems = []
    for path, nbytes, time, content in zip(paths, *columns, strict=True):
        try:
            if kind := find_kind(path, follow=True):
                problems.append(f"{path.name} is {kind}")
                continue
            status = path.stat()
            same = nbytes is None or (status.st_size == nbytes and status.st_mtime_ns == time)
            if not same and (status.st_size != nbytes or hash_content(read_regular(path)) != content):
                problems.append(f"{path.name} has changed")
        except OSError as error:
            problems.append(f"{path.name}: {error.strerror}")
    return problems
