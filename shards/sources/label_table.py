"""Reads a CSV file of paths and labels: delimiter and columns are recognised, or named by the user."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from shards.csv_file import DELIMITERS, BadCsv, column_name, read_csv_text, read_records, unescape_cell
from shards.errors import ConfigError, DataError, Fix, did_you_mean
from shards.sources.source import is_image

PATH_COLUMNS: Final = (
    *("path", "file", "filename", "file_name", "filepath", "file_path"),
    *("image", "images", "image_path", "image_file"),
    *("image_name", "imagename", "imagepath", "image_id", "img", "img_path", "photo", "picture", "key", "id", "name"),
)
LABEL_COLUMNS: Final = (
    *("label", "labels", "class", "classes", "category", "target", "class_name", "classname", "label_name"),
    *("category_name", "tag", "y", "given_label", "corrected_label"),
)
_STRONG = 10  # of PATH_COLUMNS; the others are used only where none of these occurs


class LabelRow(NamedTuple):
    """One row of the file. path: the cell as it is; label: without spaces around it, empty if there is none."""

    line: int
    path: str
    label: str


class Columns(NamedTuple):
    path: int
    label: int


def read_label_table(path: Path, path_column: str | None, label_column: str | None) -> list[LabelRow]:
    """Read all rows; raises ConfigError for unknown columns and DataError for invalid rows."""
    text = read_csv_text(path, "the list")
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise DataError(f"{path}, line {line}: it contains a NUL byte; save the list as CSV in UTF-8")
    delimiter = choose_delimiter(_first_line(text), path_column, label_column)
    rows: list[LabelRow] = []
    columns, width = None, 0
    try:
        for line, cells in read_records(text, delimiter):
            if columns is None:
                width = len(cells)
                columns, is_header = _find_columns(path, cells, path_column, label_column)
                if is_header:
                    continue
            if len(cells) != width:
                raise DataError(
                    f"{path}, line {line}: {len(cells)} cells, but the first line has {width}: {cells!r:.80}"
                )
            rows.append(LabelRow(line, cells[columns.path], unescape_cell(cells[columns.label].strip())))
    except BadCsv as problem:
        raise DataError(f"{path}, line {problem.line}: {problem}") from None
    if not rows:
        raise DataError(f"{path} has no rows; expected one per image, with its path and label")
    return rows


def choose_delimiter(line: str, *named: str | None) -> str:
    """Return the delimiter that gives the first line the most known columns, and then the most columns."""
    known = {*PATH_COLUMNS, *LABEL_COLUMNS, *(column_name(name) for name in named if name is not None)}

    def rate(delimiter: str) -> tuple[int, int]:
        try:
            cells = [column_name(cell) for _, cells in read_records(line, delimiter) for cell in cells]
        except BadCsv:
            return 0, 0
        return len(known & set(cells)), len(cells)

    return max(DELIMITERS, key=rate)


def _first_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "")


def _find_columns(
    path: Path, cells: Sequence[str], path_column: str | None, label_column: str | None
) -> tuple[Columns, bool]:
    """Return the columns, and whether the first line is a header."""
    names = [column_name(cell) for cell in cells]
    images = [place for place, cell in enumerate(cells) if is_image(cell.strip())]
    if len(images) == 1 and len(cells) == 2 and path_column is None and label_column is None:
        return Columns(images[0], 1 - images[0]), False
    found = Columns(
        _find_column(path, names, path_column, _prefer_strong(names), "path"),
        _find_column(path, names, label_column, [name for name in LABEL_COLUMNS if name in names], "label"),
    )
    if found.path == found.label:
        raise ConfigError(
            f"{path}: {names[found.path]!r} is the column of both paths and labels. Columns: {', '.join(names)}",
            fix=[Fix("choose another with {}", "path_column"), Fix("with {}", "label_column")],
        )
    return found, True


def _prefer_strong(names: Sequence[str]) -> list[str]:
    found = [name for name in PATH_COLUMNS if name in names]
    return [name for name in found if name in PATH_COLUMNS[:_STRONG]] or found


def _find_column(path: Path, names: Sequence[str], named: str | None, known: Sequence[str], what: str) -> int:
    """Return the place of a column: the one that the user named, or the only known one. known: those that occur."""
    field = f"{what}_column"
    if named is not None:
        if column_name(named) not in names:
            hint = did_you_mean(column_name(named), names)
            raise ConfigError(f"{path} has no column {named!r}", field=field, fix=hint)
        known = [column_name(named)]
    shown = ", ".join(names)[:300]
    if not known:
        raise ConfigError(
            f"{path}: no column is recognised as the {what}s of the images. Columns: {shown}",
            fix=Fix("name it with {}", field),
        )
    if len(known) > 1:
        both = " and ".join(known)
        fix = Fix("choose one with {}", field)
        raise ConfigError(f"{path}: {both} could be the {what}s. Columns: {shown}", fix=fix)
    if names.count(known[0]) > 1:
        raise ConfigError(f"{path}: the column {known[0]!r} occurs twice; rename one. Columns: {shown}")
    return names.index(known[0])
