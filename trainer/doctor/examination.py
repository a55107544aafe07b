"""Formats the doctor's report for the terminal: the run, a table of its ranks, the verdict and notes."""

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.doctor.ranks import ObservedRun, Rank, read_run
from trainer.doctor.verdict import format_spans, judge
from trainer.records.run_directory import RunDirectory
from trainer.report.sections.images import find_unreadable
from trainer.report.text import format_duration, shorten

WIDTH = 100
_MAX_SINGLE_ROWS = 8  # with more ranks, similar ones share a row
_LOG_LINES = 12
_LOG_BYTES = 16_384  # read from the end of a log
_STATE_LABELS = {"moving": "alive"}
_HEADER = ("ranks", "state", "where", "step", "idle", "host", "pid")
_GAP = "  "
_MAX_RANKS_WIDTH, _MIN_WHERE_WIDTH, _MAX_HOST_WIDTH = 14, 16, 16


def examine(root: Path, now: float) -> tuple[str, bool]:
    """Return the report, at most 100 columns wide, and whether the run is healthy.

    Raises ConfigError if `root` is not a run directory.
    """
    directory = RunDirectory(root)
    run = read_run(directory, now)
    verdict = judge(run, now)
    parts = [_format_heading(run, now), format_table(run.ranks, now), "\n".join(map(_wrap, verdict.sentences))]
    parts += [_wrap(note) for note in _collect_notes(run)]
    parts += _read_log_tail(directory, verdict.failed)
    return "\n\n".join(part for part in parts if part), verdict.healthy


def _format_heading(run: ObservedRun, now: float) -> str:
    facts = [f"{run.root}: recipe {run.recipe}" if run.recipe else str(run.root)]
    if run.began is not None:
        facts.append(f"start {run.starts} began {format_duration(now - run.began)} ago")
    by = f" by {run.launcher}" if run.launcher not in ("", "alone") else ""
    facts.append(f"{len(run.ranks)} rank{'s' * (len(run.ranks) > 1)}{by}")
    done = [name for name, stage in run.stages.items() if stage.get("state") == "done"]
    facts.append(f"stages done: {', '.join(done) or 'none'}")
    return _wrap("; ".join(facts))


def format_table(ranks: Sequence[Rank], now: float) -> str:
    """Format one row per rank. If there are many, similar ranks share a row, except for a few ranks in trouble."""
    if all(rank.state in ("unseen", "starting") for rank in ranks):
        return ""
    groups: dict[object, list[Rank]] = {}
    for rank in ranks:
        groups.setdefault(_similarity_key(rank) if len(ranks) > _MAX_SINGLE_ROWS else rank.number, []).append(rank)
    rows: list[tuple[str, ...]] = [_HEADER]
    for group in groups.values():
        alone = group[0].state in ("silent", "stalled", "failed") and len(group) <= _MAX_SINGLE_ROWS
        rows += [_format_row([rank], now) for rank in group] if alone else [_format_row(group, now)]
    return "\n".join(_align_columns(rows))


def _align_columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Align the columns; `where`, which can be long, is shortened to fit the line."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    others = sum(widths) - widths[_HEADER.index("where")] + len(_GAP) * (len(_HEADER) - 1)
    widths[_HEADER.index("where")] = min(widths[_HEADER.index("where")], max(WIDTH - others, _MIN_WHERE_WIDTH))
    for row in rows:
        cells = (shorten(cell, width, keep_end=True).ljust(width) for cell, width in zip(row, widths, strict=True))
        yield _GAP.join(cells).rstrip()


def _similarity_key(rank: Rank) -> object:
    """Return a key that is equal for ranks that can share a row. The step matters only for stalled ranks."""
    return rank.state, rank.where, rank.step if rank.state == "stalled" else None


def _format_row(group: Sequence[Rank], now: float) -> tuple[str, ...]:
    first = group[0]
    label = _STATE_LABELS.get(first.state, first.state)
    if first.state in ("unseen", "starting"):
        return _format_ranks(group), label, "", "", "", "", ""
    idle = format_duration(now - max(rank.moved for rank in group)) if first.alive or first.state == "silent" else ""
    hosts = list(dict.fromkeys(rank.host for rank in group))
    host = (
        shorten(hosts[0].partition(".")[0], _MAX_HOST_WIDTH, keep_end=True)
        if len(hosts) == 1
        else f"{len(hosts)} hosts"
    )
    return (
        _format_ranks(group),
        label,
        first.where,
        _format_steps(group),
        idle,
        host,
        str(first.pid) if len(group) == 1 else "",
    )


def _format_ranks(group: Sequence[Rank]) -> str:
    text = format_spans(rank.number for rank in group)
    return text if len(text) <= _MAX_RANKS_WIDTH else f"{len(group)} ranks"


def _format_steps(group: Sequence[Rank]) -> str:
    first, last = (end(rank.step for rank in group) for end in (min, max))
    step = f"{first}-{last}" if first != last else f"{first}"
    return f"{step}/{group[0].total}" if group[0].total else ""


def _collect_notes(run: ObservedRun) -> list[str]:
    notes = []
    if (run.root / "STOP").exists() and any(rank.alive for rank in run.ranks):
        notes.append("The STOP file requests a stop; the run has not stopped yet.")
    unreadable = find_unreadable(RunDirectory(run.root))["count"]
    if unreadable:
        images = "image" if unreadable == 1 else "images"
        notes.append(f"{unreadable:,} {images} could not be read: logs/unreadable-rank*.jsonl")
    return notes


def _read_log_tail(directory: RunDirectory, rank: Rank | None) -> list[str]:
    """Return the last lines that the last start wrote to a rank's log; empty if there are none."""
    if rank is None:
        return []
    path = directory.rank_log(rank.number)
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    starts = [number for number, line in enumerate(lines) if line.startswith("--- ")]
    last = [line for line in lines[starts[-1] + 1 if starts else 0 :] if line.strip()][-_LOG_LINES:]
    return ["\n".join([f"The end of {path}:", *(f"    {line}" for line in last)])] if last else []


def _wrap(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
