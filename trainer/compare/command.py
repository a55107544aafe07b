"""The command `incv compare`."""

import argparse
from pathlib import Path

from shards.durable import remove_leftovers_of, require_replaceable, write_bytes
from trainer.config.argument_types import path_argument

_PAGE_START = b"<!doctype html>\n<!-- incv compare -->\n"


def add_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command; it sets `func`, which takes the parsed arguments and returns an exit code."""
    compare = subparsers.add_parser(
        "compare", help="runs side by side: what differs in the recipe, accuracy, label precision, curves, time"
    )
    compare.add_argument(
        "runs",
        nargs="+",
        type=path_argument,
        metavar="RUN",
        help="a run directory, finished or not, or the file of a recorded run (results/runs/*.json)",
    )
    compare.add_argument(
        "--html", type=path_argument, metavar="FILE", help="also write the comparison as one HTML page"
    )
    compare.add_argument("--force", action="store_true", help="replace FILE even if `incv compare` did not write it")
    compare.set_defaults(func=_compare)


def _compare(parsed: argparse.Namespace) -> int:
    # Imported here: pyarrow and numpy take their time, and `incv --help` need not wait for them.
    from trainer.compare.comparison import compare_runs
    from trainer.compare.runs import read_runs
    from trainer.compare.text import format_comparison

    if parsed.html is not None:
        _require_free(parsed.html, parsed.force)
    comparison = compare_runs(read_runs(parsed.runs))
    print(format_comparison(comparison))
    if parsed.html is not None:
        from trainer.compare.page import render_page

        write_bytes(parsed.html, render_page(comparison).encode())
        print(f"\npage: {parsed.html}")
    return 0


def _require_free(html: Path, force: bool) -> None:
    remove_leftovers_of(html)
    require_replaceable(html, _PAGE_START, force, "page of `incv compare`", "choose another --html")
