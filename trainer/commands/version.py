"""`incv --version`: the versions of incv and of the libraries that decide its results."""

import argparse
from collections.abc import Sequence
from typing import Any

from trainer.records.manifest import installed_versions

_SHOWN = ("incv", "torch", "timm")


class ShowVersion(argparse.Action):
    """Prints the versions and exits. They come from the packages' metadata: importing torch would take seconds."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_arguments: Any) -> None:
        print(describe_version())
        parser.exit()


def describe_version() -> str:
    """Return one line, such as `incv 0.1.0 (torch 2.14.1, timm 1.0.30, python 3.11.7)`."""
    found = installed_versions(_SHOWN)
    others = [f"{name} {found.get(name, 'not installed')}" for name in (*_SHOWN[1:], "python")]
    return f"incv {found.get('incv', 'not installed')} ({', '.join(others)})"
