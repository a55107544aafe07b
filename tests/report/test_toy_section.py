"""A section of another package: one file, found by its entry point, collected and shown after the built-in ones."""

import json
from pathlib import Path

import pytest

from tests.report.conftest import fabricate
from tests.support.installed_package import install_package, run_python

GROUP = "incv.report_sections"
TOY = '''"""The longest names of classes, as a report section."""
from markupsafe import Markup

from trainer.report.section import Section


def collect(run):
    return {"longest_names": sorted(run.samples.names, key=len)[-2:]}


def render(report, run):
    if not report["longest_names"]:
        return None
    return Markup("<p>The longest: {}</p>").format(", ".join(report["longest_names"]))


SECTION = Section("toy_names", "Names & lengths", collect, render)
'''
REPORT = """
from pathlib import Path
from trainer.records.run_directory import RunDirectory
from trainer.report import write_report
write_report(RunDirectory(Path("run")))
"""
NAMES = [*"abcdefgh", "ii", "<b>jjj</b>"]


def report(folder: Path, module: str, entry: str = "toy_names = toy_section:SECTION") -> str:
    """Write the report of a run with the package installed; returns what went to stderr."""
    install_package(folder, "toy_section", GROUP, entry, module)
    fabricate(folder / "run", names=NAMES)
    return run_python(folder, "-c", REPORT).stderr


def test_it_is_collected_and_shown_last(tmp_path: Path) -> None:
    assert report(tmp_path, TOY) == ""
    content = json.loads((tmp_path / "run/report.json").read_text())
    assert content["longest_names"] == ["ii", "<b>jjj</b>"]
    page = (tmp_path / "run/report.html").read_text()
    assert '<a href="#toy_names">Names &amp; lengths</a>\n</nav>' in page
    section = page.partition('<section id="toy_names">')[2]
    assert "<h2>Names &amp; lengths</h2>" in section
    assert "The longest: ii, &lt;b&gt;jjj&lt;/b&gt;" in section
    assert "<section" not in section


def test_it_is_left_out_where_it_has_nothing_to_show(tmp_path: Path) -> None:
    assert report(tmp_path, TOY.replace("[-2:]", "[:0]")) == ""
    assert "toy_names" not in (tmp_path / "run/report.html").read_text()


@pytest.mark.parametrize(
    ("module", "entry", "words"),
    [
        ("1 / 0", "toy_names = toy_section:SECTION", "the report section 'toy_names' of the package toy_section"),
        (TOY, "noise = toy_section:SECTION", "'noise', which is the name of a built-in one"),
        (TOY.replace("longest_names", "samples"), "toy_names = toy_section:SECTION", "adds 'samples'"),
    ],
)
def test_an_unusable_section_is_named(tmp_path: Path, module: str, entry: str, words: str) -> None:
    assert words in report(tmp_path, module, entry)
