"""The report in words: its verdict in one sentence, and a plain table for the end of a run."""

from typing import Any

METHOD_NAMES = {
    "standard": "Standard training",
    "coteaching": "Co-teaching",
    "coteaching_incv": "INCV + Co-teaching",
}
WIDTH = 90


def method_name(method: str) -> str:
    return METHOD_NAMES.get(method, method)


def share(value: float | None, digits: int = 1) -> str:
    """0.405 -> 40.5 %; an open value is a dash."""
    return "–" if value is None else f"{value * 100:.{digits}f} %"


def points(value: float | None) -> str:
    """93.04 (already percent) -> 93.0 %."""
    return "–" if value is None else f"{value:.1f} %"


def duration(seconds: float | None) -> str:
    """0.4 s, 12 s, 3 min 05 s, 2 h 07 min."""
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def first_set(report: dict[str, Any]) -> tuple[str, dict[str, dict[str, Any]]] | None:
    """The evaluation set that headlines are about: the first one."""
    sets = report["accuracy"] or {}
    return next(iter(sets.items()), None)


def best_method(results: dict[str, dict[str, Any]]) -> str | None:
    """The method a headline is about: Co-teaching on INCV's selection, or whatever was most accurate."""
    known = {method: result["top1"] for method, result in results.items() if result["top1"] is not None}
    if "coteaching_incv" in known:
        return "coteaching_incv"
    return max(known, key=lambda method: known[method]) if known else None


def gain(results: dict[str, dict[str, Any]], method: str) -> float | None:
    """Points of top-1 that `method` is above standard training."""
    base = (results.get("standard") or {}).get("top1")
    return None if base is None or method == "standard" else results[method]["top1"] - base


def verdict(report: dict[str, Any]) -> str:
    """One sentence of the run's result, built from what is known."""
    parts = [part for part in (_noise_words(report), _kept_words(report), _accuracy_words(report)) if part]
    text = "; ".join(parts)
    return text[0].upper() + text[1:] + "."


def _noise_words(report: dict[str, Any]) -> str:
    noise, samples = report["noise"], f"{report['samples']:,}"
    if noise["true"] is not None:
        return f"{share(noise['true'])} of the {samples} labels are wrong"
    estimate = noise["confident"] if noise["confident"] is not None else noise["paper"]
    if estimate is not None:
        return f"an estimated {share(estimate)} of the {samples} labels are wrong"
    return f"{samples} labels of unknown quality"


def _kept_words(report: dict[str, Any]) -> str:
    selection = report["selection"]
    if selection is None:
        return "INCV has not selected yet" if "coteaching_incv" in (report["config"].get("methods") or []) else ""
    words = f"INCV kept {selection['selected']:,}"
    precision = selection["label_precision"]
    return words if precision is None else f"{words} with {share(precision)} precision"


def _accuracy_words(report: dict[str, Any]) -> str:
    found = first_set(report)
    method = best_method(found[1]) if found else None
    if found is None or method is None:
        return "accuracy has not been measured yet"
    results = found[1]
    name = "Co-teaching on them" if method == "coteaching_incv" and report["selection"] else method_name(method)
    words = f"{name} reaches {points(results[method]['top1'])}"
    ahead = gain(results, method)
    if ahead is None:
        return words
    if abs(ahead) < 0.05:
        return f"{words}, level with standard training"
    return f"{words}, {abs(ahead):.1f} points {'above' if ahead > 0 else 'below'} standard training"


def summary_table(report: dict[str, Any]) -> str:
    """The report as a short plain table, at most 90 columns wide."""
    noise = report["noise"]
    about = [str(report["recipe"]), f"seed {report['seed']}", f"{report['samples']:,} samples"]
    lines = [" · ".join([*about, f"{report['classes']:,} classes"]), ""]
    lines.append("wrong labels   paper's estimate   confident estimate   truth")
    lines.append(f"{share(noise['paper']):>31}{share(noise['confident']):>21}{share(noise['true']):>8}")
    if report["rounds"]:
        lines += ["", "INCV     selected  candidates   removed   precision (theory)      recall (theory)"]
        lines += [_round_line(entry) for entry in report["rounds"]]
    for name, results in (report["accuracy"] or {}).items():
        lines += [
            "",
            f"{_cut('accuracy on ' + name, 30):<30}{'top-1':>8}{'top-5':>10}{'ensemble':>11}   each network",
        ]
        lines += [_method_line(method, result, report["classes"]) for method, result in results.items()]
    unreadable = report["unreadable"]["count"]
    if unreadable:
        lines += ["", f"{unreadable:,} image(s) could not be read: the report lists them."]
    lines += ["", *report["missing"].values()]
    return "\n".join(piece for line in lines for piece in _wrapped(line)).rstrip()


def _round_line(entry: dict[str, Any]) -> str:
    theory = entry["theory"] or {}
    columns = [
        f"round {entry['round']:<3}",
        f"{entry['selected']:>8,}{entry['candidates']:>12,}{entry['removed']:>10,}",
    ]
    for key in ("label_precision", "label_recall"):
        expected = f"({share(theory[key])})" if key in theory else "(–)"
        columns.append(f"{share(entry[key]):>12} {expected:>8}")
    return columns[0] + columns[1] + columns[2] + columns[3]


def _method_line(method: str, result: dict[str, Any], classes: int) -> str:
    each = " ".join(points(value).removesuffix(" %") for value in result["top1_each"])
    name = _cut(method_name(method), 30)
    top5 = points(result["top5"] if classes > 5 else None)  # of five classes any answer is among the first five
    top = f"{points(result['top1']):>8}{top5:>10}{points(result['top1_ensemble']):>11}"
    return f"{name:<30}{top}   {_cut(each, 28)}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _wrapped(line: str) -> list[str]:
    """A sentence that is too long, broken at spaces."""
    pieces = [""]
    if len(line) <= WIDTH:
        return [line]
    for word in line.split(" "):
        if pieces[-1] and len(pieces[-1]) + 1 + len(word) > WIDTH:
            pieces.append("")
        pieces[-1] = f"{pieces[-1]} {word}" if pieces[-1] else word[:WIDTH]
    return pieces
