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
    script = "\n".join((TEMPLATES / name).read_text() for name in SCRIPTS)
    return environment.get_template("page.html").render(
        report=report,
        verdict=verdict(report),
        correction_words=correction_words(report),
        trust_words=explain_level(report["trust"]["level"]) if report["trust"] else "",
        tiles=tiles(report),
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
    return environment


def _render_sections(
    environment: Environment, report: Report, run: ReportRun
) -> tuple[list[tuple[Section, Markup]], Markup]:
    """Return the sections to show, in order, each with its HTML, and what they add at the end of the page."""
    shared: dict[str, Any] = {"report": report, "names": short_names(report["class_names"])}
    shared["m"] = environment.get_template("macros.html").make_module(shared)
    sections, end_of_page = [], Markup()
    own_data = report["noise"]["true"] is None
    for section in sorted(list_sections(), key=lambda section: not (own_data and section.leads)):
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


def tiles(report: Report) -> list[dict[str, str]]:
    """Return the key figures, each with value, label and a note for comparison."""
    found = [_came_in_tile(report)]
    if noise := _noise_tile(report):
        found.append(noise)
    selection, rounds = report["selection"], report["rounds"]
    if selection is not None:
        part = selection["selected"] / report["samples"] if report["samples"] else None
        found.append(
            _tile(f"{selection['selected']:,}", "labels kept by INCV", f"{share(part)} of {report['samples']:,}")
        )
        if report["noise"]["true"] is None:
            held_out = report["held_out"]["flagged"]
            note = f"{held_out:,} of them held out of training" if held_out else "see the gallery"
            found.append(_tile(f"{report['flagged']:,}", "labels flagged", note))
        expected = (rounds[-1]["theory"] if rounds else None) or {}
        for key, name in (("label_precision", "label precision"), ("label_recall", "label recall")):
            if selection[key] is not None:
                note = f"theory {share(expected.get(key))}" if expected else ""
                found.append(_tile(share(selection[key]), name, note))
    evaluated = first_set(report)
    method = best_method(report, evaluated[1]) if evaluated else None
    if evaluated and method:
        ahead = gain(report, evaluated[1], method)
        note = method_title(report, method) if ahead is None else compare_words(ahead)
        found.append(_tile(points(evaluated[1][method]["top1"]), f"top-1 on {evaluated[0]}", note))
    seconds = [value for value in report["time_s"].values() if value is not None]
    if seconds:
        found.append(_tile(format_duration(sum(seconds)), "total time", _hardware(report)))
    return found


def _came_in_tile(report: Report) -> dict[str, str]:
    counts = report["left_out"]["counts"]
    rejected = counts.get("rejected", 0) + report["unreadable"]["count"]
    skipped = f"{rejected:,} could not be used" if rejected else "all could be used"
    held_out = report["held_out"]["samples"]
    label = "images to train on" if held_out else "images came in"
    more = f"{held_out:,} more held out for evaluation; " if held_out else ""
    return _tile(f"{report['samples']:,}", label, f"{report['classes']:,} classes; {more}{skipped}")


def _hardware(report: Report) -> str:
    """Return the hardware of the last start, or how many stages there are."""
    start = (report["starts"]["list"] or [{}])[-1]
    return str(start.get("hardware") or f"{len(report['time_s'])} stages")


def _noise_tile(report: Report) -> dict[str, str] | None:
    noise = report["noise"]
    if noise["true"] is not None:
        return _tile(share(noise["true"]), "of labels are wrong", f"estimated {share(noise['confident'])}")
    estimate = claimed_noise(report)
    if estimate is None:
        return None
    wrong, count = claim_words(report, estimate)
    return _tile(wrong, "of labels estimated wrong", f"{count} of {report['samples']:,}")


def _tile(value: str, label: str, note: str) -> dict[str, str]:
    return {"value": value, "label": label, "note": note}
