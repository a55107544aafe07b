"""Finds the original image files of samples, and makes sure that they are still those that the run has seen."""

from pathlib import Path

from shards.errors import DataError, list_some
from shards.regular_file import find_kind, read_regular
from shards.source_files import hash_content, read_source_files
from trainer.loading.sample_order import Ids
from trainer.outputs.finished_run import FinishedRun
from trainer.run.data_sets import find_key_root


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
