"""Which rank hangs where, or that all is well: pure functions over what the ranks have said."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer.doctor.ranks import Rank, RunRecord

_CLEAR_MARGIN = 5.0
"""Seconds by which a rank must have stopped moving before the others to be the one they wait for."""
_WAITED_TOO_LONG = 60.0  # seconds, where all wait at once
_NAMED = 3  # ranks whose host and process are told in a sentence; the table has all
_AGAIN = "The same command goes on from the last checkpoint."


@dataclass(frozen=True)
class Verdict:
    sentences: list[str]
    well: bool
    failed: Rank | None = None
    """Whose log tells why a start failed."""


def judge(run: RunRecord, now: float) -> Verdict:
    ranks = run.ranks
    if run.stopped is not None or run.ended == "stopped" or _all(ranks, "stopped"):
        return Verdict([_stopped(run)], well=True)
    if run.ended == "finished" or _all(ranks, "finished"):
        return Verdict([_finished(run)], well=True)
    failed = sorted((rank for rank in ranks if rank.state == "failed"), key=lambda rank: rank.written)
    silent = [rank for rank in ranks if rank.state == "silent"]
    if failed or run.ended == "failed":
        return Verdict([*_silent(silent, ranks, now), _failed(failed)], well=False, failed=(failed or ranks)[0])
    unseen = [rank for rank in ranks if rank.state == "unseen"]
    if silent or unseen:
        said = [*_silent(silent, ranks, now), *_unseen(unseen)]
        return Verdict([*said, *_company(silent + unseen, ranks, now), _AGAIN], well=False)
    return _of_living(ranks, now)


def _of_living(ranks: Sequence[Rank], now: float) -> Verdict:
    hanging, sure = find_hanging_ranks(ranks)
    if hanging:
        said = _hang(hanging, now) if sure else _stand(hanging, now)
        first = ["A first step may take minutes."] if max(rank.step for rank in hanging) <= 1 else []
        return Verdict([said, *_company(hanging, ranks, now), *first, _look_at(hanging[0])], well=False)
    living = [rank for rank in ranks if rank.alive]
    if living and all(rank.state == "waiting" and now - rank.moved > _WAITED_TOO_LONG for rank in living):
        since = duration(now - max(rank.moved for rank in living))
        return Verdict([f"{_everyone(living)} wait, and nobody has been at work for {since}.", _AGAIN], well=False)
    return Verdict([_well(ranks)], well=True)


def find_hanging_ranks(ranks: Sequence[Rank]) -> tuple[list[Rank], bool]:
    """The ranks that others wait for, and whether it is sure that each of them hangs.

    Of ranks that stand in one place of the run, those at an earlier step hang, or those that have stood for
    longer by a clear margin. Where all stopped together one of them hangs, and the files cannot tell which.
    """
    groups: dict[str, list[Rank]] = {}
    for rank in ranks:
        if rank.state == "still":
            groups.setdefault(rank.where, []).append(rank)
    behind = [rank for group in groups.values() for rank in _behind(group)]
    if behind:
        return sorted(behind, key=lambda rank: rank.number), True
    oldest = min(groups.values(), key=lambda group: min(rank.moved for rank in group), default=[])
    return oldest, len(oldest) == 1


def _behind(group: Sequence[Rank]) -> list[Rank]:
    """Those of a group that the rest of it has left behind; none where it stands together."""
    first = min(rank.step for rank in group)
    last = [rank for rank in group if rank.step == first]
    if len(last) < len(group):
        return last
    oldest, newest = min(rank.moved for rank in group), max(rank.moved for rank in group)
    if newest - oldest <= _CLEAR_MARGIN:
        return []
    return [rank for rank in group if rank.moved - oldest <= _CLEAR_MARGIN and newest - rank.moved > _CLEAR_MARGIN]


def _all(ranks: Sequence[Rank], state: str) -> bool:
    return bool(ranks) and all(rank.state == state for rank in ranks)


def _stopped(run: RunRecord) -> str:
    found = run.stopped or {}
    where = f" in {found['where']} at step {found.get('step')}" if found.get("where") else ""
    why = f" by {found['reason']}" if found.get("reason") else ""
    when = f", {found['time']}" if found.get("time") else ""
    return f"The run was stopped{where}{why}{when}. The same command goes on from there."


def _finished(run: RunRecord) -> str:
    if (run.stages.get("report") or {}).get("state") == "done":
        return f"The run is finished: {run.root / 'report.html'}."
    done = [name for name, stage in run.stages.items() if stage.get("state") == "done"]
    return f"The last start is finished; stages done so far: {', '.join(done) or 'none'}."


def _failed(failed: Sequence[Rank]) -> str:
    if not failed:
        return "The last start failed."
    rest = f", then {named(failed[1:])}" if len(failed) > 1 else ""
    return f"The last start failed: {described(failed[:1])} in {failed[0].place}{rest}."


def _silent(silent: Sequence[Rank], ranks: Sequence[Rank], now: float) -> list[str]:
    """Dead, or on a node that is gone."""
    if not silent:
        return []
    who = _everyone(ranks) if len(silent) == len(ranks) > 1 else _upper(described(silent))
    since = duration(now - max(rank.written for rank in silent))
    gone = f"{who} {_has(silent)} given no sign of life for {since}: killed, frozen, or on a node that is gone."
    return [f"{gone} Last seen: {_places(silent)}."]


def _unseen(unseen: Sequence[Rank]) -> list[str]:
    return [f"{_upper(named(unseen))} {_has(unseen)} given no sign of life since the last start."] if unseen else []


def _company(these: Sequence[Rank], ranks: Sequence[Rank], now: float) -> list[str]:
    """What the others do meanwhile."""
    others = [rank for rank in ranks if rank not in these]
    waiting = [rank for rank in others if rank.state in ("still", "waiting")]
    moving = [rank for rank in others if rank.state == "moving"]
    said = []
    if waiting:
        since = duration(now - max(rank.moved for rank in waiting))
        said.append(f"Standing for {since}: {_places(waiting)}.")
    if moving:
        said.append(f"Going on: {_places(moving)}.")
    return said


def _hang(hanging: Sequence[Rank], now: float) -> str:
    since = duration(now - min(rank.moved for rank in hanging))
    verb = "hangs" if len(hanging) == 1 else "hang"
    where = hanging[0].place if len({rank.place for rank in hanging}) == 1 else _places(hanging)
    return f"{_upper(described(hanging))} {verb} in {where}: no movement for {since}."


def _stand(standing: Sequence[Rank], now: float) -> str:
    since = duration(now - max(rank.moved for rank in standing))
    return (
        f"{_upper(named(standing))} stand together in {standing[0].place}: no movement for {since}. "
        "One of them, or a disk they share, hangs inside the step; the files cannot tell which."
    )


def _look_at(rank: Rank) -> str:
    return (
        f"To see where: `py-spy dump --pid {rank.pid}` on {rank.host}. "
        "To go on: end the run and start it with the same command."
    )


def _well(ranks: Sequence[Rank]) -> str:
    starting = [rank for rank in ranks if rank.state == "starting"]
    if starting:
        return f"{_upper(named(starting))} of {len(ranks)} not seen yet: the run has just been started."
    living = [rank for rank in ranks if rank.alive]
    if len(ranks) == 1:
        return f"All is well: {living[0].place}."
    ended = [rank for rank in ranks if not rank.alive]
    rest = f"; ended: {named(ended)}" if ended else ""
    return f"All is well: {_places(living)}{rest}."


def _places(ranks: Iterable[Rank]) -> str:
    """Who is where. Ranks of one training are seen at slightly different steps: their files are written in turn."""
    groups: dict[str, list[Rank]] = {}
    for rank in ranks:
        groups.setdefault(rank.where, []).append(rank)
    return ", ".join(f"{named(group)} {_place(group)}" for group in groups.values())


def _place(group: Sequence[Rank]) -> str:
    first, last = (end(rank.step for rank in group) for end in (min, max))
    preposition = "" if group[0].state == "waiting" else "in "
    if first == last or not group[0].total:
        return f"{preposition}{group[0].place}"
    return f"{preposition}{group[0].where} at steps {first:,} to {last:,} of {group[0].total:,}"


def described(ranks: Sequence[Rank]) -> str:
    """With host and process, if there are few: `rank 3 (node2, pid 411)`."""
    if len(ranks) > _NAMED:
        return named(ranks)
    return " and ".join(f"rank {rank.number} ({rank.host}, pid {rank.pid})" for rank in ranks)


def named(ranks: Iterable[Rank]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    numbers = [rank.number for rank in ranks]
    return f"rank{'s' * (len(numbers) > 1)} {format_spans(numbers)}"


def _everyone(ranks: Sequence[Rank]) -> str:
    return "Both ranks" if len(ranks) == 2 else f"All {len(ranks)} ranks"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]  # capitalize() would also change a host's name


def format_spans(numbers: Iterable[int]) -> str:
    """0 1 2 5 -> 0-2, 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def duration(seconds: float) -> str:
    for unit, length in (("days", 172_800.0), ("h", 7_200.0), ("min", 120.0)):
        if seconds >= length:
            return f"{seconds / (length / 2):.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"


def _has(ranks: Sequence[Rank]) -> str:
    return "has" if len(ranks) == 1 else "have"
