"""The doctor's answer for the terminal: the run, a table of its ranks, a verdict, and what else helps."""

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.doctor.ranks import Rank, RunRecord, read_run
from trainer.doctor.verdict import duration, format_spans, judge
from trainer.records.run_directory import RunDirectory
from trainer.report.unreadable import find_unreadable

WIDTH = 100
_ROWS = 8  # ranks that are listed one by one; more are put together where they are alike
_LOG_LINES = 12
_LOG_BYTES = 16_384  # of a log's end, looked at
_WORDS = {"moving": "alive", "waiting": "waits", "starting": "starts"}
_HEAD = ("ranks", "state", "where", "step", "unmoved", "host", "pid")
_GAP = "  "
_RANKS, _WHERE, _HOST = 14, 16, 16  # columns: at most, at least, at most


def examine(root: Path, now: float) -> tuple[str, bool]:
    """Text of at most 100 columns, and whether all is well. Raises ConfigError for what is no run directory."""
    directory = RunDirectory(root)
    run = read_run(directory, now)
    verdict = judge(run, now)
    parts = [_heading(run, now), table(run.ranks, now), "\n".join(map(_wrapped, verdict.sentences))]
    parts += [_wrapped(note) for note in _notes(run)]
    parts += _log_of(directory, verdict.failed)
    return "\n\n".join(part for part in parts if part), verdict.well


def _heading(run: RunRecord, now: float) -> str:
    facts = [f"{run.root}: recipe {run.recipe}" if run.recipe else str(run.root)]
    if run.began is not None:
        facts.append(f"start {run.starts} began {duration(now - run.began)} ago")
    by = f" by {run.launcher}" if run.launcher not in ("", "alone") else ""
    facts.append(f"{len(run.ranks)} rank{'s' * (len(run.ranks) > 1)}{by}")
    done = [name for name, stage in run.stages.items() if stage.get("state") == "done"]
    facts.append(f"stages done: {', '.join(done) or 'none'}")
    return _wrapped("; ".join(facts))


def table(ranks: Sequence[Rank], now: float) -> str:
    """One row a rank; of many ranks, one for those that are alike. Troubled ones stand alone if they are few."""
    if all(rank.state in ("unseen", "starting") for rank in ranks):
        return ""
    groups: dict[object, list[Rank]] = {}
    for rank in ranks:
        groups.setdefault(_likeness(rank) if len(ranks) > _ROWS else rank.number, []).append(rank)
    rows: list[tuple[str, ...]] = [_HEAD]
    for group in groups.values():
        alone = group[0].state in ("silent", "still", "failed") and len(group) <= _ROWS
        rows += [_row([rank], now) for rank in group] if alone else [_row(group, now)]
    return "\n".join(_aligned(rows))


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Columns as wide as they need; places, which can be long, get what is left of the line."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    others = sum(widths) - widths[_HEAD.index("where")] + len(_GAP) * (len(_HEAD) - 1)
    widths[_HEAD.index("where")] = min(widths[_HEAD.index("where")], max(WIDTH - others, _WHERE))
    for row in rows:
        cells = (_short(cell, width).ljust(width) for cell, width in zip(row, widths, strict=True))
        yield _GAP.join(cells).rstrip()


def _likeness(rank: Rank) -> object:
    """Moving ranks are seen at slightly different steps; for standing ones the step is what matters."""
    return rank.state, rank.where, rank.step if rank.state == "still" else None


def _row(group: Sequence[Rank], now: float) -> tuple[str, ...]:
    first = group[0]
    word = _WORDS.get(first.state, first.state)
    if first.state in ("unseen", "starting"):
        return _ranks(group), word, "", "", "", "", ""
    unmoved = duration(now - max(rank.moved for rank in group)) if first.alive or first.state == "silent" else ""
    hosts = list(dict.fromkeys(rank.host for rank in group))
    host = _short(hosts[0].partition(".")[0], _HOST) if len(hosts) == 1 else f"{len(hosts)} hosts"
    return _ranks(group), word, first.where, _steps(group), unmoved, host, str(first.pid) if len(group) == 1 else ""


def _ranks(group: Sequence[Rank]) -> str:
    text = format_spans(rank.number for rank in group)
    return text if len(text) <= _RANKS else f"{len(group)} ranks"


def _steps(group: Sequence[Rank]) -> str:
    first, last = (end(rank.step for rank in group) for end in (min, max))
    step = f"{first}-{last}" if first != last else f"{first}"
    return f"{step}/{group[0].total}" if group[0].total else ""


def _short(text: str, widest: int) -> str:
    """The middle is left out: names differ at their ends."""
    if len(text) <= widest:
        return text
    head = (widest - 1) // 2
    return f"{text[:head]}…{text[head + 1 - widest :]}"


def _notes(run: RunRecord) -> list[str]:
    notes = []
    if (run.root / "STOP").exists() and any(rank.alive for rank in run.ranks):
        notes.append("A stop is asked for by the file STOP, and not obeyed yet.")
    unreadable = find_unreadable(run.root)["count"]
    if unreadable:
        images = "image" if unreadable == 1 else "images"
        notes.append(f"{unreadable:,} {images} could not be read: logs/unreadable-rank*.jsonl")
    return notes


def _log_of(directory: RunDirectory, rank: Rank | None) -> list[str]:
    """The last lines of the last start in a rank's log."""
    if rank is None:
        return []
    path = directory.rank_log(rank.number)
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    begun = [number for number, line in enumerate(lines) if line.startswith("--- ")]
    last = [line for line in lines[begun[-1] + 1 if begun else 0 :] if line.strip()][-_LOG_LINES:]
    return ["\n".join([f"The end of {path}:", *(f"    {line}" for line in last)])] if last else []


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
