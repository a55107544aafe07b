"""Step three of the report: one self-contained HTML file."""

from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from trainer.report import figures
from trainer.report.by_class import class_tables
from trainer.report.class_names import short_names
from trainer.report.profile import profile_words, shares, shown_phases
from trainer.report.summary import (
    best_method,
    compare_words,
    first_set,
    gain,
    method_title,
    points,
    share,
    verdict,
)
from trainer.report.text import format_duration

LISTED = 50  # maximum rows of an unbounded table


def render_page(report: dict[str, Any], thumbnails: dict[int, dict[str, Any]]) -> str:
    """The page of a report; the template escapes everything that comes from data."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"share": share, "points": points, "duration": format_duration}
    environment.filters["method"] = partial(method_title, report)
    # No line break before a percent sign or inside Co-teaching.
    environment.filters["tight"] = lambda text: text.replace(" %", "\u00a0%").replace("Co-t", "Co\u2011t")
    return environment.get_template("page.html").render(
        report=report,
        verdict=verdict(report),
        tiles=tiles(report),
        noise_words=noise_words(report),
        selection_words=selection_words(report),
        suspect_words=suspect_words(report),
        profile_words=profile_words(report),
        phases=shown_phases(report["profile"] or []),
        shares=shares,
        names=short_names(report["class_names"]),
        class_tables=class_tables(report),
        filled=(report["filled_classes"] or [])[:LISTED],
        unreadable=report["unreadable"]["samples"][:LISTED],
        figures=figures,
        thumbnails=thumbnails,
        config=yaml.safe_dump(report["config"], sort_keys=False, allow_unicode=True),
        starts=start_rows(report),
        versions=(report["starts"]["list"] or [{}])[-1].get("versions") or {},
    )


def tiles(report: dict[str, Any]) -> list[dict[str, str]]:
    """The key figures: value, label, and a line of comparison."""
    noise = _noise_tile(report)
    found = [noise] if noise else []
    selection, rounds = report["selection"], report["rounds"]
    if selection is not None:
        part = selection["selected"] / report["samples"] if report["samples"] else None
        found.append(
            _tile(f"{selection['selected']:,}", "labels kept by INCV", f"{share(part)} of {report['samples']:,}")
        )
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
        found.append(_tile(format_duration(sum(seconds)), "in all", f"{len(seconds)} stages"))
    return found


def _noise_tile(report: dict[str, Any]) -> dict[str, str] | None:
    noise = report["noise"]
    if noise["true"] is not None:
        return _tile(share(noise["true"]), "labels that are wrong", f"estimated {share(noise['confident'])}")
    estimate = noise["confident"] if noise["confident"] is not None else noise["paper"]
    return _tile(share(estimate), "labels estimated wrong", "truth not known") if estimate is not None else None


def _tile(value: str, label: str, note: str) -> dict[str, str]:
    return {"value": value, "label": label, "note": note}


def noise_words(report: dict[str, Any]) -> str:
    """The two noise estimates in words, against the true ratio if known."""
    paper, confident, true = (report["noise"][key] for key in ("paper", "confident", "true"))
    words = (
        "The paper's estimator turns the agreement of held-out predictions with the given labels into a "
        "noise ratio. It assumes a network that memorises its wrong labels; one that generalises agrees with "
        "more labels than that, and the estimate reads low. The confident estimate counts, for each class, "
        "the held-out samples that the network places confidently elsewhere, and needs no such assumption."
    )
    if true is None or paper is None or confident is None:
        return words
    far = [f"the paper's is {_off(paper - true)}", f"the confident one {_off(confident - true)}"]
    return f"{words} Here, against a true {share(true)}, {far[0]} and {far[1]}."


def _off(difference: float) -> str:
    size = abs(difference) * 100
    return "right to 0.05 points" if size < 0.05 else f"{size:.1f} points {'low' if difference < 0 else 'high'}"


def selection_words(report: dict[str, Any]) -> str:
    """The measured selection against the theory of a memorising network, in words."""
    if not report["rounds"]:
        return ""
    last = report["rounds"][-1]
    if last["label_precision"] is None or last["theory"] is None:
        return "Counts after each round, over all rounds so far."
    kept = f"After {_plural(last['round'], 'round')} {last['selected']:,} samples are selected: "
    kept += f"{share(last['label_precision'])} of them are labelled rightly (precision), and they are "
    kept += f"{share(last['label_recall'])} of all rightly labelled samples (recall)."
    theory = last["theory"]
    return (
        f"{kept} A network that only memorised the noise would give {share(theory['label_precision'])} and "
        f"{share(theory['label_recall'])} under the same noise matrix: the dashed lines."
    )


def suspect_words(report: dict[str, Any]) -> str:
    """How many suspects are actually mislabelled, in words."""
    suspects = report["suspicious"] or []
    words = (
        "Samples that were never selected and whose label the held-out network contradicts most strongly, "
        "largest loss first. Below each: the given label → the prediction."
    )
    judged = [suspect for suspect in suspects if suspect["true"] is not None]
    if not judged:
        return words
    wrong = sum(suspect["true"] != suspect["given"] for suspect in judged)
    right = sum(suspect["true"] == suspect["predicted"] for suspect in judged)
    return f"{words} Of these {len(judged)}, {wrong} are mislabelled; for {right} the prediction is the truth."


def start_rows(report: dict[str, Any]) -> list[dict[str, str]]:
    """Each start of the run in words; rounds and folds count from 1, as throughout the report."""
    rows = []
    for start in report["starts"]["list"]:
        place = start.get("resumed_from") or {}
        words = [str(place["stage"])] if place.get("stage") is not None else []
        words += [f"{key} {place[key] + 1}" for key in ("round", "fold") if place.get(key) is not None]
        words += [f"step {place['step']:,}"] if place.get("step") is not None else []
        row = {key: str(start.get(key) or "–") for key in ("time", "command", "threads")}
        row["time"] = row["time"].replace("T", " ").replace("+00:00", " UTC")
        row["ranks"] = f"{start.get('world', 1)} on {str(start.get('device') or 'cpu').partition(':')[0]}"
        if start.get("launcher", "alone") != "alone":
            row["ranks"] += f", {start['launcher']}"
        rows.append({**row, "resumed": ", ".join(words) or "–"})
    return rows


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
