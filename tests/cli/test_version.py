"""`incv --version`."""

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version

import pytest

from tests.support.command_line import Answer
from trainer.commands import parser as command_parser

Incv = Callable[..., Answer]


def test_the_version_names_the_libraries_that_decide_results(incv: Incv) -> None:
    answer = incv("--version")
    assert answer.code == 0
    assert re.fullmatch(r"incv \S+ \(torch (\S+), timm \S+, python 3\.\d+\.\d+\)\n", answer.out)
    assert f"torch {version('torch')}" in answer.out


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_parser, "installed_versions", lambda _names: {"python": "3.11.7", "incv": "1.2"})
    assert command_parser.describe_version() == "incv 1.2 (torch not installed, timm not installed, python 3.11.7)"


def test_the_version_does_not_import_torch() -> None:
    program = """
import sys
from trainer.cli import main
try:
    main(["--version"])
finally:
    print("torch" in sys.modules, "timm" in sys.modules)
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stdout.splitlines()[-1]) == (0, "False False"), answer.stderr
