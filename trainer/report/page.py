"""The page of the report: one self-contained HTML file, with a head, a navigation and the sections."""

import base64
import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from trainer.report.collect import list_sections
from trainer.report.run import ReportRun
from trainer.report.section import Report, Section
from trainer.report.summary import (
    best_method,
    claim_words,
    claimed_noise,
    compare_words,
    correction_words,
    first_set,
    gain,
    method_title,
    verdict,
)
from trainer.report.text import format_duration, points, share, short_names, show_controls
from trainer.report.trust import explain_level

TEMPLATES = Path(__file__).parent / "template"
SCRIPTS = ("tables.js", "corrections.js", "viewer.js", "gallery.js", "start.js")
"""In the order in which they run."""


def render_page(report: Report, run: ReportRun) -> str:
    """Render the HTML page of a report; templates escape all text that comes from data.

    What the sections find missing while they read images is added to the gaps of the report.
    """
    environment = make_environment(TEMPLATES)
    sections, end_of_page = _render_sections(environment, report, run)
    report["gaps"] |= run.gaps
    estimate = claimed_noise(report)
    script = "\n".join((TEMPLATES / name).read_text() for name in SCRIPTS)
    return environment.get_template("page.html").render(
        report=report,
        name=report["data"] or report["recipe"] or "unknown data set",
        verdict=verdict(report),
        correction_words=correction_words(report),
        trust_words=explain_level(report["trust"]["level"]) if report["trust"] else "",
        claim=None if estimate is None else claim_words(report, estimate),
        accuracy=_show_accuracy(report),
        seconds=[value for value in report["time_s"].values() if value is not None],
        hardware=(report["starts"]["list"] or [{}])[-1].get("hardware"),
        sections=sections,
        end_of_page=end_of_page,
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode(),
    )


def make_environment(*folders: Path) -> Environment:
    """Return the Jinja environment of pages whose templates are in these folders."""
    environment = Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=show_controls,
    )
    environment.filters |= {"share": share, "points": points, "duration": format_duration, "tight": _tighten}
    environment.filters["number"] = "{:,}".format
    return environment


def _render_sections(
    environment: Environment, report: Report, run: ReportRun
) -> tuple[list[tuple[Section, Markup]], Markup]:
    """Return the sections to show, in order, each with its HTML, and what they add at the end of the page."""
    shared: dict[str, Any] = {"report": report, "names": short_names(report["class_names"])}
    shared["m"] = environment.get_template("macros.html").make_module(shared)
    sections, end_of_page = [], Markup()
    for section in sorted(list_sections(), key=lambda section: not section.leads):
        content = section.render(report, run)
        if content is None:
            continue
        if section.template is not None:
            assert not isinstance(content, str)
            end_of_page += content.get("end_of_page", "")
            text = environment.from_string(section.template.read_text()).render(shared | dict(content))
            content = Markup(text)
        sections.append((section, Markup.escape(content)))
    return sections, end_of_page


def _tighten(text: str) -> str:
    """Forbid line breaks before a percent sign and inside the names of methods."""
    for words in (" %", "INCV + "):
        text = text.replace(words, words.replace(" ", "\u00a0"))
    return text.replace("Co-t", "Co\u2011t")


def _show_accuracy(report: Report) -> dict[str, Any] | None:
    """Return evaluation set, accuracy and a comparison of the method in the headline; None without an accuracy."""
    evaluated = first_set(report)
    method = best_method(report, evaluated[1]) if evaluated else None
    if evaluated is None or method is None:
        return None
    where, results = evaluated
    ahead = gain(report, results, method)
    note = method_title(report, method) if ahead is None else compare_words(ahead)
    return {"where": where, "top1": results[method]["top1"], "note": note}
