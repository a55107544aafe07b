"""The report as text: a one-sentence verdict, and the plain-text summary printed at the end of a run."""

import textwrap
from collections.abc import Iterable
from typing import Any

from trainer.report.text import points, share, shorten, show_controls
from trainer.report.trust import explain_level

WIDTH = 90


def method_title(report: dict[str, Any], method: str) -> str:
    described = (report.get("methods") or {}).get(method) or {}
    return str(described.get("title") or method)


def method_with(report: dict[str, Any], role: str, among: Iterable[str]) -> str | None:
    """Return the first method in `among` with the role `headline` or `reference`; None if there is none."""
    roles = report.get("methods") or {}
    return next((method for method in among if (roles.get(method) or {}).get(role)), None)


def first_set(report: dict[str, Any]) -> tuple[str, dict[str, dict[str, Any]]] | None:
    """Return name and results of the first evaluation set, which the headline uses; None if there is none."""
    sets = report["accuracy"] or {}
    return next(iter(sets.items()), None)


def best_method(report: dict[str, Any], results: dict[str, dict[str, Any]]) -> str | None:
    """Return the method for the headline: the one marked `headline`, else the most accurate."""
    known = {method: result["top1"] for method, result in results.items() if result["top1"] is not None}
    headline = method_with(report, "headline", known)
    if headline is not None:
        return headline
    return max(known, key=lambda method: known[method]) if known else None


def gain(report: dict[str, Any], results: dict[str, dict[str, Any]], method: str) -> tuple[float, str] | None:
    """Return the top-1 gain in percentage points over the reference method, and its title; None if there is none."""
    reference = method_with(report, "reference", results)
    base = results[reference]["top1"] if reference is not None else None
    if reference is None or base is None or method == reference:
        return None
    return results[method]["top1"] - base, method_title(report, reference)


def compare_words(ahead: tuple[float, str]) -> str:
    """Format a gain, such as `6.7 points above standard training`."""
    points_ahead, title = ahead
    title = title[:1].lower() + title[1:]
    if abs(points_ahead) < 0.05:
        return f"equal to {title}"
    return f"{abs(points_ahead):.1f} points {'above' if points_ahead > 0 else 'below'} {title}"


def verdict(report: dict[str, Any]) -> str:
    """Summarise the run's result, as far as it is known, in one sentence."""
    parts = [part for part in (_noise_words(report), _kept_words(report), _accuracy_words(report)) if part]
    return _sentence("; ".join(parts))


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:] + "."


def _noise_words(report: dict[str, Any]) -> str:
    noise, samples = report["noise"], f"{report['samples']:,}"
    if noise["true"] is not None:
        return f"{share(noise['true'])} of the {samples} labels are wrong"
    estimate = claimed_noise(report)
    if estimate is not None:
        wrong, count = claim_words(report, estimate)
        return f"about {wrong} of the {samples} labels are wrong ({count})"
    return f"how many of the {samples} labels are wrong is unknown"


def correction_words(report: dict[str, Any]) -> str:
    """Say how many labels were checked by hand (labels.corrections), and how many are doubted; empty if none were."""
    counts = report.get("corrections") or {}
    known = [f"{counts[what]:,} {what}" for what in ("corrected", "confirmed", "excluded") if counts.get(what)]
    if not known:
        return ""
    words = f"Labels checked by hand: {', '.join(known)}."
    if second_look(report):
        count = counts["contradicted"]
        words += f" {count:,} of them {'is' if count == 1 else 'are'} worth a second look (named in the report)."
    return words


def second_look(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the checked labels that are strongly contradicted; none if the predictions cannot be trusted."""
    if (report.get("trust") or {}).get("level") == "do not use":
        return []
    return (report.get("corrections") or {}).get("second_look") or []


def claimed_noise(report: dict[str, Any]) -> float | None:
    """Return the share of wrong labels that the report may state; None if there is none, or no trust in it."""
    stated = report["noise"]["stated"]
    if stated is None or not (report["trust"] or {"claims_noise": True})["claims_noise"]:
        return None
    estimate: float = report["noise"][stated]
    return estimate


def states_noise(report: dict[str, Any]) -> bool:
    """Whether the report shows shares of wrong labels: they are known, or estimated with enough trust."""
    return report["noise"]["true"] is not None or claimed_noise(report) is not None


def claim_words(report: dict[str, Any], estimate: float) -> tuple[str, str]:
    """Return the share of wrong labels and their number, no more precise than they are. estimate: `claimed_noise`.

    One number to a decimal if the result is trusted; else rounded, and a range if the estimates are far apart.
    """
    trust, samples = report["trust"] or {}, report["samples"]
    if trust.get("level", "trusted") == "trusted":
        return share(estimate), f"{round(estimate * samples):,}"
    if (estimates := trust.get("noise_range")) is None:
        return share(estimate, 0), f"{round(estimate * samples):,}"
    low, high = estimates
    return f"{low * 100:.0f} to {share(high, 0)}", f"{round(low * samples):,} to {round(high * samples):,}"


def _kept_words(report: dict[str, Any]) -> str:
    selection = report["selection"]
    if selection is None:
        return "INCV has not selected any samples yet" if report["config"].get("incv") else ""
    words = f"INCV kept {selection['selected']:,}"
    precision = selection["label_precision"]
    return words if precision is None else f"{words} with {share(precision)} precision"


def _accuracy_words(report: dict[str, Any]) -> str:
    if not report["methods"]:
        return ""
    found = first_set(report)
    method = best_method(report, found[1]) if found else None
    if found is None or method is None:
        return "accuracy has not been measured yet"
    words = f"{method_title(report, method)} reaches {points(found[1][method]['top1'])}"
    ahead = gain(report, found[1], method)
    return words if ahead is None else f"{words}, {compare_words(ahead)}"


def shows_removed(report: dict[str, Any]) -> bool:
    """Whether to show how many samples were removed: not if the truth is unknown and none were, as in an audit."""
    return report["noise"]["true"] is not None or any(entry["removed"] for entry in report["rounds"])


def summary_table(report: dict[str, Any]) -> str:
    """Format the report as a short plain text with tables, at most 90 columns wide."""
    about = [str(report["recipe"]), f"seed {report['seed']}", f"{report['samples']:,} samples"]
    lines = [" · ".join([*about, f"{report['classes']:,} classes"]), ""]
    if checked := correction_words(report):
        lines.insert(1, checked)
    lines += _noise_lines(report)
    if report["rounds"]:
        measured = any(entry["label_precision"] is not None for entry in report["rounds"])
        compared = "   precision (theory)      recall (theory)" if measured else ""
        removed = shows_removed(report)
        lines += ["", "INCV     selected  candidates" + ("   removed" if removed else "") + compared]
        lines += [_round_line(entry, removed, measured) for entry in report["rounds"]]
    for name, results in (report["accuracy"] or {}).items():
        lines += [
            "",
            f"{shorten('accuracy on ' + name, 30):<30}{'top-1':>8}{'top-5':>10}{'ensemble':>11}   each network",
        ]
        lines += [_method_line(report, method, result) for method, result in results.items()]
        if name == report.get("chosen_on"):
            lines.append(f"{name} was used for choosing the epochs of these networks, so its accuracy is too high.")
    unreadable = report["unreadable"]["count"]
    if unreadable:
        lines += ["", f"{unreadable:,} image(s) could not be read; the report lists them."]
    missing = [words for part, words in report["missing"].items() if part != "truth"]
    if missing := [*report.get("gaps", {}).values(), *missing]:
        lines += ["", *missing]
    if report["trust"] is not None:
        lines += ["", *trust_lines(report["trust"])]
    return "\n".join(piece for line in lines for piece in _wrapped(show_controls(line))).rstrip()


def _noise_lines(report: dict[str, Any]) -> list[str]:
    """Return the noise estimates beside the truth, or, if it is unknown, the stated estimate in a sentence."""
    noise = report["noise"]
    if noise["true"] is None:
        withheld = noise["stated"] is not None and claimed_noise(report) is None
        return [_sentence(_noise_words(report) + (": see `trust` below" if withheld else ""))]
    columns = {"paper's estimate": noise["paper"], "confident estimate": noise["confident"]}
    if noise.get("confidence_curve") is not None:
        columns["confidence curve"] = noise["confidence_curve"]
    if noise["confirmed"] is not None:
        columns["confirmed twice"] = noise["confirmed"]
    columns["truth"] = noise["true"]
    header = "wrong labels" + "".join(f"{title:>{len(title) + 3}}" for title in columns)
    values = "".join(f"{share(value):>{len(title) + 3}}" for title, value in columns.items())
    return [header, " " * len("wrong labels") + values]


def trust_lines(trust: dict[str, Any]) -> list[str]:
    """Return the level of trust, what it means, and its reasons, each with what to change."""
    lines = [f"trust: {trust['level']}", explain_level(trust["level"])]
    for reason in trust["reasons"]:
        lines.append(f"- {reason['text']} {reason['advice']}".rstrip())
    return lines


def _round_line(entry: dict[str, Any], removed: bool, measured: bool) -> str:
    """Format a round. removed: show the removed samples; measured: compare precision and recall with the theory."""
    theory = entry["theory"] or {}
    columns = [f"round {entry['round']:<3}{entry['selected']:>8,}{entry['candidates']:>12,}"]
    if removed:
        columns.append(f"{entry['removed']:>10,}")
    for key in ("label_precision", "label_recall") if measured else ():
        expected = f"({share(theory[key])})" if key in theory else "(–)"
        columns.append(f"{share(entry[key]):>12} {expected:>8}")
    return "".join(columns)


def _method_line(report: dict[str, Any], method: str, result: dict[str, Any]) -> str:
    each = " ".join(points(value).removesuffix(" %") for value in result["top1_each"])
    name = shorten(method_title(report, method), 30)
    top5 = points(result["top5"] if report["classes"] > 5 else None)  # with up to five classes, top-5 is always right
    top = f"{points(result['top1']):>8}{top5:>10}{points(result['top1_ensemble']):>11}"
    return f"{name:<30}{top}   {shorten(each, 28)}"


def _wrapped(line: str) -> list[str]:
    """Wrap a line at spaces to at most WIDTH columns; the lines of a list item are indented."""
    if len(line) <= WIDTH:
        return [line]
    return textwrap.wrap(line, WIDTH, subsequent_indent="  " if line.startswith("- ") else "", break_on_hyphens=False)
