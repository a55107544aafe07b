"""Decides whether a run is healthy or which rank hangs, and where: pure functions of the ranks' states."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer.distributed.place import show_place
from trainer.doctor.ranks import ObservedRun, Rank
from trainer.report.text import format_duration

_STALL_MARGIN = 5.0
"""If a rank stalled more than this many seconds before the others, it is the one they wait for."""
_MAX_WAIT = 60.0  # seconds that all ranks may wait at once
_MAX_DESCRIBED = 3  # ranks named with host and pid in a sentence; the table lists all
_RESUME_HINT = "Rerun the same command to resume from the last checkpoint."


@dataclass(frozen=True)
class Verdict:
    sentences: list[str]
    healthy: bool
    failed: Rank | None = None
    """The rank whose log explains the failure."""


def judge(run: ObservedRun, now: float) -> Verdict:
    """Return the verdict on a run. Checks, in order: run ended; failed, silent or unseen ranks; stalled ranks."""
    ranks = run.ranks
    if run.stopped is not None or run.ended == "stopped" or _all_in_state(ranks, "stopped"):
        return Verdict([_report_stopped(run)], healthy=True)
    if run.ended == "finished" or _all_in_state(ranks, "finished"):
        return Verdict([_report_finished(run)], healthy=True)
    failed = sorted((rank for rank in ranks if rank.state == "failed"), key=lambda rank: rank.written)
    silent = [rank for rank in ranks if rank.state == "silent"]
    if failed or run.ended == "failed":
        return Verdict(
            [*_report_silent(silent, ranks, now), _report_failed(failed)], healthy=False, failed=(failed or ranks)[0]
        )
    unseen = [rank for rank in ranks if rank.state == "unseen"]
    if silent or unseen:
        sentences = [*_report_silent(silent, ranks, now), *_report_unseen(unseen)]
        return Verdict([*sentences, *_report_others(silent + unseen, ranks, now), _RESUME_HINT], healthy=False)
    return _judge_living(ranks, now)


def _judge_living(ranks: Sequence[Rank], now: float) -> Verdict:
    hanging, certain = find_hanging_ranks(ranks)
    if hanging:
        finding = _report_hanging(hanging, now) if certain else _report_stalled(hanging, now)
        first = ["The first step may take minutes."] if max(rank.step for rank in hanging) <= 1 else []
        return Verdict(
            [finding, *_report_others(hanging, ranks, now), *first, _debug_hint(hanging[0])], healthy=False
        )
    living = [rank for rank in ranks if rank.alive]
    if living and all(rank.state == "waiting" and now - rank.moved > _MAX_WAIT for rank in living):
        since = format_duration(now - max(rank.moved for rank in living))
        return Verdict(
            [f"{_name_all(living)} are waiting; none has made progress for {since}.", _RESUME_HINT], healthy=False
        )
    return Verdict([_report_healthy(ranks)], healthy=True)


def find_hanging_ranks(ranks: Sequence[Rank]) -> tuple[list[Rank], bool]:
    """Return the ranks that hang, so that the others wait for them, and whether that is certain.

    Among the ranks that stalled in the same part of the run, those at an earlier step hang, or those that stalled
    clearly earlier. If all stalled together, any of them may hang: all are returned, as uncertain.
    """
    groups: dict[str, list[Rank]] = {}
    for rank in ranks:
        if rank.state == "stalled":
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


def _all_in_state(ranks: Sequence[Rank], state: str) -> bool:
    return bool(ranks) and all(rank.state == state for rank in ranks)


def _report_stopped(run: ObservedRun) -> str:
    found = run.stopped or {}
    where = f" in {show_place(str(found['where']))} at step {found.get('step')}" if found.get("where") else ""
    why = f" by {found['reason']}" if found.get("reason") else ""
    when = f", {found['time']}" if found.get("time") else ""
    return f"The run was stopped{where}{why}{when}. Rerun the same command to resume."


def _report_finished(run: ObservedRun) -> str:
    if (run.stages.get("report") or {}).get("state") == "done":
        return f"The run has finished: {run.root / 'report.html'}."
    done = [name for name, stage in run.stages.items() if stage.get("state") == "done"]
    return f"The last start has finished; stages done so far: {', '.join(done) or 'none'}."


def _report_failed(failed: Sequence[Rank]) -> str:
    if not failed:
        return "The last start failed."
    rest = f", then {name_ranks(failed[1:])}" if len(failed) > 1 else ""
    return f"The last start failed: {describe_ranks(failed[:1])} in {failed[0].place}{rest}."


def _report_silent(silent: Sequence[Rank], ranks: Sequence[Rank], now: float) -> list[str]:
    """Describe the ranks whose heartbeat stopped: they are dead, or their node is down."""
    if not silent:
        return []
    who = _name_all(ranks) if len(silent) == len(ranks) > 1 else _capitalise(describe_ranks(silent))
    since = format_duration(now - max(rank.written for rank in silent))
    lost = f"{who} {_has(silent)} written no heartbeat for {since}: killed, frozen, or on a failed node."
    return [f"{lost} Last seen: {_describe_places(silent)}."]


def _report_unseen(unseen: Sequence[Rank]) -> list[str]:
    return (
        [f"{_capitalise(name_ranks(unseen))} {_has(unseen)} written no heartbeat since the last start."]
        if unseen
        else []
    )


def _report_others(these: Sequence[Rank], ranks: Sequence[Rank], now: float) -> list[str]:
    """Describe what the ranks that are not in `these` are doing."""
    others = [rank for rank in ranks if rank not in these]
    waiting = [rank for rank in others if rank.state in ("stalled", "waiting")]
    moving = [rank for rank in others if rank.state == "moving"]
    sentences = []
    if waiting:
        since = format_duration(now - max(rank.moved for rank in waiting))
        sentences.append(f"Stalled or waiting for {since}: {_describe_places(waiting)}.")
    if moving:
        sentences.append(f"Still running: {_describe_places(moving)}.")
    return sentences


def _report_hanging(hanging: Sequence[Rank], now: float) -> str:
    since = format_duration(now - min(rank.moved for rank in hanging))
    verb = "hangs" if len(hanging) == 1 else "hang"
    where = hanging[0].place if len({rank.place for rank in hanging}) == 1 else _describe_places(hanging)
    return f"{_capitalise(describe_ranks(hanging))} {verb} in {where}: no progress for {since}."


def _report_stalled(stalled: Sequence[Rank], now: float) -> str:
    since = format_duration(now - max(rank.moved for rank in stalled))
    return (
        f"{_capitalise(name_ranks(stalled))} stalled together in {stalled[0].place}: no progress for {since}. "
        "One of them, or a shared disk, hangs within the step; the records do not show which."
    )


def _debug_hint(rank: Rank) -> str:
    return (
        f"To see where it hangs, run `py-spy dump --pid {rank.pid}` on {rank.host}. "
        "To continue, end the run and start it again with the same command."
    )


def _report_healthy(ranks: Sequence[Rank]) -> str:
    starting = [rank for rank in ranks if rank.state == "starting"]
    if starting:
        return f"{_capitalise(name_ranks(starting))} of {len(ranks)} not seen yet; the run has just started."
    living = [rank for rank in ranks if rank.alive]
    if len(ranks) == 1:
        return f"All is well: {living[0].place}."
    ended = [rank for rank in ranks if not rank.alive]
    rest = f"; ended: {name_ranks(ended)}" if ended else ""
    return f"All is well: {_describe_places(living)}{rest}."


def _describe_places(ranks: Iterable[Rank]) -> str:
    """List the ranks, grouped by place. Steps in a group may differ slightly, as heartbeats differ in age."""
    groups: dict[str, list[Rank]] = {}
    for rank in ranks:
        groups.setdefault(rank.where, []).append(rank)
    return ", ".join(f"{name_ranks(group)} {_describe_place(group)}" for group in groups.values())


def _describe_place(group: Sequence[Rank]) -> str:
    first, last = (end(rank.step for rank in group) for end in (min, max))
    preposition = "" if group[0].state == "waiting" else "in "
    if first == last or not group[0].total:
        return f"{preposition}{group[0].place}"
    return f"{preposition}{group[0].where} at steps {first:,} to {last:,} of {group[0].total:,}"


def describe_ranks(ranks: Sequence[Rank]) -> str:
    """Name the ranks, with host and pid if there are few: `rank 3 (node2, pid 411)`."""
    if len(ranks) > _MAX_DESCRIBED:
        return name_ranks(ranks)
    return " and ".join(f"rank {rank.number} ({rank.host}, pid {rank.pid})" for rank in ranks)


def name_ranks(ranks: Iterable[Rank]) -> str:
    """Name the ranks: `rank 3`, `ranks 0-2, 5`."""
    numbers = [rank.number for rank in ranks]
    return f"rank{'s' * (len(numbers) > 1)} {format_spans(numbers)}"


def _name_all(ranks: Sequence[Rank]) -> str:
    return "Both ranks" if len(ranks) == 2 else f"All {len(ranks)} ranks"


def _capitalise(text: str) -> str:
    return text[:1].upper() + text[1:]  # str.capitalize() would lower-case host names


def format_spans(numbers: Iterable[int]) -> str:
    """Format 0 1 2 5 as `0-2, 5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _has(ranks: Sequence[Rank]) -> str:
    return "has" if len(ranks) == 1 else "have"
