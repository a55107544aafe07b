"""Decides whether a run is healthy or which rank hangs, and reports it with a table of the ranks."""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.distributed.place import show_place
from trainer.doctor.ranks import ObservedRun, Rank, read_run
from trainer.records.run_directory import RunDirectory
from trainer.report.sections.images import find_unreadable
from trainer.report.text import align_table, format_duration, shorten

WIDTH = 100
_STALL_MARGIN = 5.0
"""If a rank stalled more than this many seconds before the others, it is the one they wait for."""
_MAX_WAIT = 60.0  # seconds that all ranks may wait at once
_RESUME_HINT = "Rerun the same command to resume from the last checkpoint."
_MAX_SINGLE_ROWS = 8  # with more ranks, similar ones share a row
_LOG_LINES = 12
_LOG_BYTES = 16_384  # read from the end of a log
_HEADER = ("ranks", "state", "where", "step", "idle", "host", "pid")
_WHERE = _HEADER.index("where")
_MAX_RANKS_WIDTH, _MIN_WHERE_WIDTH, _MAX_HOST_WIDTH = 14, 16, 16


def examine(root: Path, now: float) -> tuple[str, bool]:
    """Return the report, at most 100 columns wide, and whether the run is healthy.

    Raises ConfigError if `root` is not a run directory.
    """
    directory = RunDirectory(root)
    run = read_run(directory, now)
    verdict = judge(run, now)
    parts = [_wrap(_describe_run(run, now)), format_table(run.ranks, now), "\n".join(map(_wrap, verdict.sentences))]
    if (root / "STOP").exists() and any(rank.alive for rank in run.ranks):
        parts.append("The STOP file requests a stop; the run has not stopped yet.")
    if unreadable := find_unreadable(directory)["count"]:
        parts.append(f"Images that could not be read: {unreadable:,} (logs/unreadable-rank*.jsonl).")
    if verdict.failed is not None:
        parts.append(_read_log_tail(directory.rank_log(verdict.failed.number)))
    return "\n\n".join(part for part in parts if part), verdict.healthy


# --- the verdict: pure functions of the ranks' states ---------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    sentences: list[str]
    healthy: bool
    failed: Rank | None = None
    """The rank whose log explains the failure."""


def judge(run: ObservedRun, now: float) -> Verdict:
    """Return the verdict on a run. Checks, in order: run ended; failed, silent or unseen ranks; stalled ranks."""
    ranks = run.ranks
    if run.stopped is not None or run.ended == "stopped" or all(rank.state == "stopped" for rank in ranks):
        return Verdict([_report_stopped(run)], healthy=True)
    if run.ended == "finished" or all(rank.state == "finished" for rank in ranks):
        return Verdict([_report_finished(run)], healthy=True)
    failed = sorted(_select(ranks, "failed"), key=lambda rank: rank.written)
    silent, unseen, starting = (_select(ranks, state) for state in ("silent", "unseen", "starting"))
    sentences = []
    if silent:
        since = format_duration(now - max(rank.written for rank in silent))
        sentences.append(
            f"{_name(silent, 'has')} written no heartbeat for {since}: killed, frozen, or on a failed node."
        )
    if failed or run.ended == "failed":
        sentences.append("The last start failed.")
        sentences += [f"{_name(failed[:1])} failed first, in {failed[0].place}."] if failed else []
        return Verdict(sentences, healthy=False, failed=(failed or ranks)[0])
    if unseen:
        sentences.append(f"{_name(unseen, 'has')} written no heartbeat since the last start.")
    if sentences:
        return Verdict([*sentences, _RESUME_HINT], healthy=False)
    hanging, certain = find_hanging_ranks(ranks)
    if hanging:
        return Verdict(_report_hanging(hanging, certain, now), healthy=False)
    living = [rank for rank in ranks if rank.alive]
    if living and all(rank.state == "waiting" and now - rank.moved > _MAX_WAIT for rank in living):
        since = format_duration(now - max(rank.moved for rank in living))
        return Verdict([f"{_name(living, 'is')} waiting: no progress for {since}.", _RESUME_HINT], healthy=False)
    if starting:
        return Verdict([f"{_name(starting, 'is')} not seen yet: the run has just started."], healthy=True)
    return Verdict(["All is well: no rank hangs."], healthy=True)


def find_hanging_ranks(ranks: Sequence[Rank]) -> tuple[list[Rank], bool]:
    """Return the ranks that hang, so that the others wait for them, and whether that is certain.

    Among the ranks that stalled in the same part of the run, those at an earlier step hang, or those that stalled
    clearly earlier. If all stalled together, any of them may hang: all are returned, as uncertain.
    """
    groups: dict[str, list[Rank]] = {}
    for rank in _select(ranks, "stalled"):
        groups.setdefault(rank.where, []).append(rank)
    behind = [rank for group in groups.values() for rank in _find_behind(group)]
    if behind:
        return sorted(behind, key=lambda rank: rank.number), True
    oldest = min(groups.values(), key=lambda group: min(rank.moved for rank in group), default=[])
    return oldest, len(oldest) == 1


def _find_behind(group: Sequence[Rank]) -> list[Rank]:
    """Return the ranks of a group that are behind the others; empty if all stalled together."""
    first = min(rank.step for rank in group)
    last = [rank for rank in group if rank.step == first]
    if len(last) < len(group):
        return last
    oldest, newest = min(rank.moved for rank in group), max(rank.moved for rank in group)
    if newest - oldest <= _STALL_MARGIN:
        return []
    return [rank for rank in group if rank.moved - oldest <= _STALL_MARGIN and newest - rank.moved > _STALL_MARGIN]


def _select(ranks: Sequence[Rank], state: str) -> list[Rank]:
    return [rank for rank in ranks if rank.state == state]


def _report_stopped(run: ObservedRun) -> str:
    found = run.stopped or {}
    where = f" in {show_place(str(found['where']))} at step {found.get('step')}" if found.get("where") else ""
    why = f" by {found['reason']}" if found.get("reason") else ""
    when = f", {found['time']}" if found.get("time") else ""
    return f"The run was stopped{where}{why}{when}. Rerun the same command to resume."


def _report_finished(run: ObservedRun) -> str:
    if "report" in run.stages_done:
        return f"The run has finished: {run.root / 'report.html'}."
    return f"The last start has finished; stages done so far: {', '.join(run.stages_done) or 'none'}."


def _report_hanging(hanging: Sequence[Rank], certain: bool, now: float) -> list[str]:
    first = hanging[0]
    if certain:
        since = format_duration(now - min(rank.moved for rank in hanging))
        sentences = [f"{_name(hanging, 'hangs')} in {first.place}: no progress for {since}."]
    else:
        since = format_duration(now - max(rank.moved for rank in hanging))
        sentences = [
            f"{_name(hanging)} stalled together in {first.place}: no progress for {since}. "
            "One of them, or a shared disk, hangs within the step; the records do not show which."
        ]
    if max(rank.step for rank in hanging) <= 1:
        sentences.append("The first step may take minutes.")
    return [
        *sentences,
        f"To see where it hangs, run `py-spy dump --pid {first.pid}` on {first.host}. "
        "To continue, end the run and start it again with the same command.",
    ]


def _name(ranks: Sequence[Rank], verb: str = "") -> str:
    """Name the ranks: `Rank 3 (node2, pid 411)` or `Ranks 0-2, 5`, followed by the verb in the right form."""
    if len(ranks) == 1:
        (rank,) = ranks
        seen = f" ({rank.host}, pid {rank.pid})" if rank.pid else ""
        return f"Rank {rank.number}{seen} {verb}".rstrip()
    plural = {"has": "have", "is": "are", "hangs": "hang"}.get(verb, "")
    return f"Ranks {format_spans(rank.number for rank in ranks)} {plural}".rstrip()


def format_spans(numbers: Iterable[int]) -> str:
    """Format 0 1 2 5 as `0-2, 5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


# --- the text around it ---------------------------------------------------------------------------------------


def _describe_run(run: ObservedRun, now: float) -> str:
    facts = [f"{run.root}: recipe {run.recipe}" if run.recipe else str(run.root)]
    if run.began is not None:
        facts.append(f"start {run.starts} began {format_duration(now - run.began)} ago")
    by = f" by {run.launcher}" if run.launcher not in ("", "alone") else ""
    facts.append(f"{len(run.ranks)} rank{'s' * (len(run.ranks) > 1)}{by}")
    facts.append(f"stages done: {', '.join(run.stages_done) or 'none'}")
    return "; ".join(facts)


def format_table(ranks: Sequence[Rank], now: float) -> str:
    """Format one row per rank. If there are many, similar ranks share a row, except for a few ranks in trouble."""
    if all(rank.state in ("unseen", "starting") for rank in ranks):
        return ""
    groups: dict[object, list[Rank]] = {}
    for rank in ranks:
        similar = (rank.state, rank.where, rank.step if rank.state == "stalled" else None)
        groups.setdefault(similar if len(ranks) > _MAX_SINGLE_ROWS else rank.number, []).append(rank)
    rows = [_HEADER]
    for group in groups.values():
        alone = group[0].state in ("silent", "stalled", "failed") and len(group) <= _MAX_SINGLE_ROWS
        rows += [_format_row([rank], now) for rank in group] if alone else [_format_row(group, now)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = WIDTH - sum(widths) + widths[_WHERE] - 2 * (len(_HEADER) - 1)
    where = [shorten(row[_WHERE], max(room, _MIN_WHERE_WIDTH), keep_end=True) for row in rows]
    short = [(*row[:_WHERE], each, *row[_WHERE + 1 :]) for row, each in zip(rows, where, strict=True)]
    return align_table(short, left=len(_HEADER))


def _format_row(group: Sequence[Rank], now: float) -> tuple[str, str, str, str, str, str, str]:
    first, last = group[0], max(rank.step for rank in group)
    spans = format_spans(rank.number for rank in group)
    name = spans if len(spans) <= _MAX_RANKS_WIDTH else f"{len(group)} ranks"
    if first.state in ("unseen", "starting"):
        return name, first.state, "", "", "", "", ""
    step = min(rank.step for rank in group)
    steps = f"{step}-{last}/{first.total}" if step != last else f"{step}/{first.total}"
    idle = format_duration(now - max(rank.moved for rank in group)) if first.alive or first.state == "silent" else ""
    hosts = {rank.host for rank in group}
    host = f"{len(hosts)} hosts"
    if len(hosts) == 1:
        host = shorten(first.host.partition(".")[0], _MAX_HOST_WIDTH, keep_end=True)
    state = "alive" if first.state == "moving" else first.state
    pid = str(first.pid) if len(group) == 1 else ""
    return name, state, first.where, steps if first.total else "", idle, host, pid


def _read_log_tail(path: Path) -> str:
    """Return the last lines that the last start wrote to a rank's log; empty if there are none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("--- ")]
    last = [line for line in lines[starts[-1] + 1 if starts else 0 :] if line.strip()][-_LOG_LINES:]
    return "\n".join([f"The end of {path}:", *(f"    {line}" for line in last)]) if last else ""


def _wrap(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
