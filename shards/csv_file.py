"""Reads CSV files, and writes them so that no spreadsheet runs their text as a formula."""

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from shards.durable import write_atomically
from shards.errors import DataError, describe_unreadable
from shards.regular_file import read_regular

DELIMITERS: Final = ",;\t"

_LARGEST_FILE = 2**30
_STARTS_FORMULA = r"[=+\-@\t\r\n]"
_TO_ESCAPE = rf"^'*{_STARTS_FORMULA}"  # also text that already looks escaped, so that unescaping restores every text
_ESCAPED = re.compile(rf"'+{_STARTS_FORMULA}")


def write_csv(path: Path, table: pa.Table) -> None:
    """Write a table as UTF-8 CSV with a header; nulls become empty cells, and texts are escaped."""
    escaped = escape_texts(table)
    write_atomically(path, lambda temporary: pyarrow.csv.write_csv(escaped, temporary))


def escape_texts(table: pa.Table) -> pa.Table:
    """Prefix every text that a spreadsheet would run as a formula with an apostrophe."""
    for place, field in enumerate(table.schema):
        if pa.types.is_string(field.type):
            table = table.set_column(place, field, _escape(table.column(place)))
    return table


def _escape(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    risky = pc.match_substring_regex(texts, _TO_ESCAPE)
    return pc.if_else(risky, pc.binary_join_element_wise("'", texts, ""), texts)


def unescape_cell(text: str) -> str:
    """Return the text that `escape_texts` turned into this cell."""
    return text[1:] if _ESCAPED.match(text) else text


def read_csv_text(path: Path, what: str) -> str:
    """Read a CSV file as text. what: the file in error messages, such as its recipe key."""
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise DataError(f"{what} {path} has more than {_LARGEST_FILE:,} bytes, too many for a list")
        return read_regular(path).decode("utf-8-sig")  # spreadsheets write a byte order mark
    except OSError as error:
        raise DataError(describe_unreadable(what, path, error)) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{what} {path} cannot be read: {error}. Save it as CSV in UTF-8") from error


def read_records(text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each record that is not blank, with the number of its first line; raises BadCsv."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    line = 1
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield line, cells
            line = reader.line_num + 1
    except csv.Error as error:
        raise BadCsv(line, f"not valid CSV ({error})") from None


class BadCsv(Exception):
    """A line that is not valid CSV."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.line = line


def column_name(cell: str) -> str:
    """Return a cell of a header in the form in which names are compared."""
    return cell.strip().strip('"').strip().lower()
