"""The generated parts of docs/results.md, each between two markers; pure functions."""

from collections.abc import Mapping

from shards.errors import DataError


def begin_marker(name: str) -> str:
    return f"<!-- {name}: written by `incv reproduce --write`; do not edit -->"


def end_marker(name: str) -> str:
    return f"<!-- end of {name} -->"


def fill_page(page: str, parts: Mapping[str, str]) -> str:
    """Replace what stands between the markers of each part; a part that the page does not mark is left out.

    Raises DataError if a marker has no partner.
    """
    for name, text in parts.items():
        begin, end = begin_marker(name), end_marker(name)
        if begin not in page and end not in page:
            continue
        before, found, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        if not found or not ended:
            raise DataError(f"docs/results.md: a part needs both markers, `{begin}` and then `{end}`")
        page = f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}"
    return page
