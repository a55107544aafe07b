"""Step three of the report: render one self-contained HTML file."""

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from trainer.report import figures, tables
from trainer.report.class_names import short_names
from trainer.report.left_out import describe_counts
from trainer.report.next_steps import Step
from trainer.report.profile import profile_words
from trainer.report.summary import (
    best_method,
    claim_words,
    claimed_noise,
    compare_words,
    correction_words,
    first_set,
    gain,
    method_title,
    points,
    second_look,
    share,
    verdict,
)
from trainer.report.suspects import OPEN, STRONG
from trainer.report.text import format_duration, show_controls
from trainer.report.trust import explain_level

TEMPLATES = Path(__file__).parent / "template"
SCRIPTS = ("tables.js", "corrections.js", "viewer.js", "gallery.js", "start.js")
"""In the order in which they run."""


def render_page(
    report: dict[str, Any],
    thumbnails: dict[int, dict[str, Any]],
    steps: Sequence[Step] = (),
    gallery: dict[str, Any] | None = None,
) -> str:
    """Render the HTML page of a report; the template escapes all text that comes from data.

    thumbnails: of the samples that are shown where scripts are off; steps: what the user can do next; gallery: the
    data of the gallery (`build_gallery`).
    """
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=show_controls,
    )
    environment.filters |= {"share": share, "points": points, "duration": format_duration}
    environment.filters["method"] = partial(method_title, report)
    environment.filters["tight"] = _tighten
    script = "\n".join((TEMPLATES / name).read_text() for name in SCRIPTS)
    return environment.get_template(
        "page.html"
    ).render(
        report=report,
        verdict=verdict(report),
        correction_words=correction_words(report),
        second_look=second_look(report),
        second_look_words=second_look_words(report),
        trust_words=explain_level(report["trust"]["level"]) if report["trust"] else "",
        own_data=report["noise"]["true"] is None,  # then the images to look at come first
        steps=steps,
        opened=OPEN,
        tiles=tiles(report),
        noise_words=noise_words(report),
        claims_noise=report["noise"]["true"] is not None or claimed_noise(report) is not None,
        selection_words=selection_words(report),
        loss_words=loss_words(report),
        suspect_words=suspect_words(report),
        profile_words=profile_words(report),
        names=short_names(report["class_names"]),
        filled=(report["filled_classes"] or [])[: tables.LISTED],
        left_out_words=describe_counts(report["left_out"]["counts"]),
        figures=figures,
        tables=tables,
        thumbnails=thumbnails,
        gallery=gallery,
        gallery_data=Markup(script_json(gallery)),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode(),
        config=yaml.safe_dump(report["config"], sort_keys=False, allow_unicode=True),
        starts=tables.start_rows(report),
        versions=(report["starts"]["list"] or [{}])[-1].get("versions") or {},
    )


def _tighten(text: str) -> str:
    """Forbid line breaks before a percent sign and inside the names of methods."""
    for words in (" %", "INCV + "):
        text = text.replace(words, words.replace(" ", "\u00a0"))
    return text.replace("Co-t", "Co\u2011t")


def script_json(value: Any) -> str:
    """Return JSON that cannot end the script element that holds it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def tiles(report: dict[str, Any]) -> list[dict[str, str]]:
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


def _came_in_tile(report: dict[str, Any]) -> dict[str, str]:
    counts = report["left_out"]["counts"]
    rejected = counts.get("rejected", 0) + report["unreadable"]["count"]
    skipped = f"{rejected:,} could not be used" if rejected else "all could be used"
    held_out = report["held_out"]["samples"]
    label = "images to train on" if held_out else "images came in"
    more = f"{held_out:,} more held out for evaluation; " if held_out else ""
    return _tile(f"{report['samples']:,}", label, f"{report['classes']:,} classes; {more}{skipped}")


def _hardware(report: dict[str, Any]) -> str:
    """Return the hardware of the last start, or how many stages there are."""
    start = (report["starts"]["list"] or [{}])[-1]
    return str(start.get("hardware") or f"{len(report['time_s'])} stages")


def _noise_tile(report: dict[str, Any]) -> dict[str, str] | None:
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


def noise_words(report: dict[str, Any]) -> str:
    """Explain the noise estimates in words, and compare them with the true ratio if known."""
    paper, confident, true = (report["noise"][key] for key in ("paper", "confident", "true"))
    words = (
        "The paper's estimator computes the noise ratio from how often held-out predictions agree with the given "
        "labels. It assumes that the network memorises wrong labels; a network that generalises agrees with more "
        "labels, so the estimate is too low. The confident estimate counts, for each class, the held-out samples "
        "that the network confidently assigns to another class, and does not need this assumption."
    )
    if report["noise"].get("confidence_curve") is not None:
        words += (
            " The confidence curve follows how often the given labels contradict predictions of growing confidence, "
            "and takes the share that this tends to."
        )
    if report["noise"]["confirmed"] is not None:
        words += (
            " Confirmed twice is the share of labels that networks of two rounds, trained on different samples, "
            "contradict by the same class, the last one confidently."
        )
    if true is None and claimed_noise(report) is not None:
        name = {
            "paper": "the paper's estimate",
            "confident": "the confident estimate",
            "confidence_curve": "the estimate from the confidence curve",
            "confirmed": "the share that is confirmed twice",
        }[report["noise"]["stated"]]
        words += f" This report states {name}."
    if true is None or paper is None or confident is None:
        return words
    far = [f"the paper's estimate is {_off(paper - true)}", f"the confident one {_off(confident - true)}"]
    if (curve := report["noise"].get("confidence_curve")) is not None:
        far.append(f"the one from the confidence curve {_off(curve - true)}")
    return f"{words} Here the true noise ratio is {share(true)}: {', '.join(far)}."


def _off(difference: float) -> str:
    size = abs(difference) * 100
    return "within 0.05 points" if size < 0.05 else f"{size:.1f} points too {'low' if difference < 0 else 'high'}"


def selection_words(report: dict[str, Any]) -> str:
    """Compare the measured selection with the theory of a memorising network, in words."""
    if not report["rounds"]:
        return ""
    last = report["rounds"][-1]
    if last["label_precision"] is None or last["theory"] is None:
        return "Cumulative counts after each round."
    kept = f"After {_plural(last['round'], 'round')}, {last['selected']:,} samples are selected: "
    kept += f"{share(last['label_precision'])} of them have the correct label (precision), and they are "
    kept += f"{share(last['label_recall'])} of all correctly labelled samples (recall)."
    theory = last["theory"]
    return (
        f"{kept} For a network that only memorises the noise, theory predicts {share(theory['label_precision'])} and "
        f"{share(theory['label_recall'])} with the same noise matrix (dashed lines)."
    )


def loss_words(report: dict[str, Any]) -> str:
    """Explain the histograms of the losses, with the median of each state."""
    if report["losses"] is None:
        return ""
    medians = [f"{median:.2f} of the {name}" for name, median in report["losses"]["medians"].items()]
    return (
        "The held-out loss of a sample is the negative logarithm of the probability that a network which did not "
        "train on it gives to its label. The less the outlines overlap, the better the networks tell right labels "
        f"from wrong ones. The median is {', '.join(medians)}. Each outline has the same area; the last bin holds "
        "all larger losses."
    )


def suspect_words(report: dict[str, Any]) -> str:
    """Describe the suspects and, if the truth is known, how many of them are mislabelled."""
    suspects = report["suspicious"] or []
    words = (
        f"{report['flagged'] or 0:,} samples are flagged: a network that did not train on the sample contradicts its "
        "label, and INCV never selected it. Most suspicious first; below each image: given label → suggested label."
    )
    held_out = report["held_out"]
    if held_out["flagged"]:
        words += (
            f" {held_out['flagged']:,} of them are among the {held_out['samples']:,} samples held out of training."
        )
    estimate = claimed_noise(report) if report["noise"]["true"] is None else None
    if estimate is not None and round(estimate * report["samples"]) < report["flagged"] - held_out["flagged"]:
        _, count = claim_words(report, estimate)
        words += (
            f" An estimated {count} of the {report['samples']:,} labels are wrong; the other flagged samples "
            "are probably just difficult."
        )
    judged = [suspect for suspect in suspects if suspect["true"] is not None]
    if not judged:
        return words
    wrong = sum(suspect["true"] != suspect["given"] for suspect in judged)
    right = sum(suspect["true"] == suspect["predicted"] for suspect in judged)
    judgement = f"{wrong} are mislabelled; for {right} the prediction is the true class."
    return f"{words} Of the {len(judged)} most suspicious, {judgement}"


def second_look_words(report: dict[str, Any]) -> str:
    """Explain the checked labels on the page that are worth a second look; empty if there are none."""
    shown = second_look(report)
    if not shown:
        return ""
    count = report["corrections"]["contradicted"]
    words = (
        f"{'One label that was' if count == 1 else f'{count:,} labels that were'} checked by hand "
        f"{'is' if count == 1 else 'are'} contradicted by a network that did not train on the image, with a "
        f"probability of at least {share(STRONG, 0)}. You may well be right: the label counts as checked and is not "
        "flagged. Below each image: checked label → predicted label."
    )
    return words if count == len(shown) else f"{words} The {len(shown)} strongest are shown."


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
