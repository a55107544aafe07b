"""Writes CSV files whose text no spreadsheet runs as a formula, and undoes the escaping of their cells."""

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from shards.durable import write_atomically

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
