"""Writes a cleaned data set: an image folder, WebDataset shards or a list of keys (`incv clean`)."""

import json
import os
import shutil
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from shards.csv_file import write_csv
from shards.durable import atomic_folder, disk_errors
from shards.errors import CommandStopped, ConfigError, DataError
from shards.progress import Progress
from shards.shard_writer import member_key
from shards.tar_stream import ShardTar
from trainer.incv.selection_index import State
from trainer.loading.shard_reader import CorruptSample, ShardReader
from trainer.outputs.cleaned import CleanedSet, choose_samples, name_class_folders, name_files
from trainer.outputs.finished_run import FinishedRun
from trainer.run.data_sets import find_key_root

MARK = "incv_clean.json"
"""Marks a folder that `incv clean` wrote, which `--force` may replace."""
SAMPLES_PER_SHARD = 1000
Stop = Callable[[], bool]


@dataclass(frozen=True)
class CleanOptions:
    out: Path
    form: str = "folder"
    """`folder`, `shards` or `list`."""
    link: bool = False
    """In a folder, link to the original files instead of copying."""
    least_probability: float | None = None
    """Also keep contradicted samples, with the suggested label, from this probability on; None: leave them out."""
    force: bool = False
    """Replace an output of an earlier `incv clean`."""


def clean(run: FinishedRun, options: CleanOptions, stop: Stop = lambda: False) -> dict[str, Any]:
    """Write the cleaned data set; returns its description, which is also written beside the samples."""
    _require_free(options)
    chosen = choose_samples(run.selection, run.labels, run.checked, options.least_probability)
    if not len(chosen.ids):
        raise DataError(f"{run.directory.root} selected no sample: there is nothing to write")
    description = _describe(run, chosen, options)
    if options.form == "list":
        _write_list(run, chosen, options.out)
        return description
    with atomic_folder(options.out) as temporary:
        if options.form == "shards":
            _write_shards(run, chosen, temporary, stop)
        else:
            _write_folder(run, chosen, temporary, options.link, stop)
        (temporary / MARK).write_text(json.dumps(description, indent=1) + "\n")
    return description


def _require_free(options: CleanOptions) -> None:
    """Raise ConfigError if the output exists, unless --force may replace it."""
    out = options.out
    if options.link and options.form != "folder":
        raise ConfigError("--link makes links in an image folder: use it with `--as folder`")
    if not out.exists() and not out.is_symlink():
        return
    if options.form == "list":
        if out.is_dir():
            raise ConfigError(f"{out} is a folder: `--as list` writes a CSV file, so name a file")
        if not options.force:
            raise ConfigError(f"{out} exists: choose another --out, or replace it with --force")
        return
    if not out.is_dir():
        raise ConfigError(f"{out} is a file: choose another --out")
    if not any(out.iterdir()):
        return
    if not (out / MARK).is_file():
        raise ConfigError(f"{out} is not empty and was not written by `incv clean`: choose another --out")
    if not options.force:
        raise ConfigError(f"{out} holds an earlier cleaned set: choose another --out, or replace it with --force")


def _describe(run: FinishedRun, chosen: CleanedSet, options: CleanOptions) -> dict[str, Any]:
    return {
        "run": str(run.directory.root.resolve()),
        "form": options.form,
        "samples": len(chosen.ids),
        "relabelled": int(chosen.relabelled.sum()),
        "checked": int(run.checked[chosen.ids].sum()),
        "left_out": int((run.labels >= 0).sum()) - len(chosen.ids),
        "removed": int((run.selection.state == State.REMOVED).sum()),
        "least_probability": options.least_probability,
        "class_names": list(run.index.class_names),
        "selection": run.selection.checksum(),
    }


def _stored(run: FinishedRun, chosen: CleanedSet, what: str, stop: Stop) -> Generator[bytes, None, None]:
    """Yield the encoded image of each chosen sample, with a progress bar."""
    reader = ShardReader(run.index)
    try:
        with Progress(what, len(chosen.ids)) as progress:
            for sample_id in chosen.ids:
                if stop():
                    raise CommandStopped("stopped; nothing was written. Run the same command again")
                yield reader.read(int(sample_id))
                progress.advance()
    except CorruptSample as error:
        raise DataError(str(error)) from error
    finally:
        reader.close()


def _suffix(data: bytes) -> str:
    return "png" if data.startswith(b"\x89PNG") else "jpg"


def _write_shards(run: FinishedRun, chosen: CleanedSet, folder: Path, stop: Stop) -> None:
    """Write `.jpg` or `.png`, `.cls` and `.json` members, as WebDataset and DALI readers expect them."""
    keys = run.index.keys(chosen.ids)
    names = run.index.class_names
    stored = _stored(run, chosen, "writing shards", stop)
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


def _write_folder(run: FinishedRun, chosen: CleanedSet, folder: Path, link: bool, stop: Stop) -> None:
    """Write <class>/<image>, linked to or copied from the original files, or copied from the shards."""
    class_folders = name_class_folders(run.index.class_names)
    folders = [class_folders[label] for label in chosen.labels]
    for name in sorted(set(class_folders)):
        (folder / name).mkdir()
    keys = run.index.keys(chosen.ids)
    originals = find_originals(run, keys)
    if originals is not None:
        suffixes = [path.suffix.lstrip(".") or "jpg" for path in originals]
        names = name_files(keys, suffixes, chosen.ids, folders)
        with Progress("linking" if link else "copying", len(names)) as progress:
            for original, name in zip(originals, names, strict=True):
                if stop():
                    raise CommandStopped("stopped; nothing was written. Run the same command again")
                if link:
                    os.symlink(original, folder / name)
                else:
                    shutil.copyfile(original, folder / name)
                progress.advance()
        return
    if link:
        raise ConfigError(
            "--link needs the original image files, but this run's source has none at data.train.root: leave --link "
            "out to copy the images from the shards"
        )
    suffixes = []  # an image shows its format only when it is read, so it is named afterwards
    for row, data in enumerate(_stored(run, chosen, "copying", stop)):
        (folder / f".{row}").write_bytes(data)
        suffixes.append(_suffix(data))
    names = name_files(keys, suffixes, chosen.ids, folders)
    for row, name in enumerate(names):
        os.replace(folder / f".{row}", folder / name)


def find_originals(run: FinishedRun, keys: list[str]) -> list[Path] | None:
    """Return the original file of each key, or None if the source has no files or one of them is missing."""
    root = find_key_root(run.recipe.data.train)
    if root is None:
        return None
    paths = [Path(root) / key for key in keys]
    return paths if all(path.is_file() for path in paths) else None


def _write_list(run: FinishedRun, chosen: CleanedSet, out: Path) -> None:
    """Write key,label, in the form that `labels.file` reads."""
    keys = pa.array(run.index.keys(chosen.ids), pa.string())
    names = pa.array(run.index.class_names, pa.string()).take(pa.array(chosen.labels))
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_csv(out, pa.table({"key": keys, "label": names}))
