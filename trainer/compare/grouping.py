"""Joins runs that differ in the seed alone, and finds what differs between the groups; pure functions."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.compare.runs import ComparedRun, describe_environment
from trainer.reproduce.runs import (
    CHOOSES_EPOCH,
    Identity,
    by_date,
    comparable_keys,
    find_differences,
    is_checksum,
)

OWN = "<method>"
"""Stands for the method's own section, so that `standard.epochs` and `coteaching.epochs` are compared."""

_OPTIONAL = ("incv",)
"""Sections that runs of one method may have or not."""

NOT_SET, NOT_USED = "not set", "not used"
"""A key at its default, or that the method does not have; a key of a section that a run does not read."""


@dataclass(frozen=True)
class Group:
    """Runs of one recipe and one method that differ in the seed alone."""

    number: int
    """Counted from 1, in the order in which the runs were given."""
    runs: tuple[ComparedRun, ...]
    """One for each seed, in the order of the seeds."""
    repeated: tuple[ComparedRun, ...] = ()
    """Further runs of a seed, which do not count."""
    variant: str = ""
    """What tells it from most groups of its recipe and method, as `batch.global=64`; empty if nothing does."""
    family: str = ""
    """The recipe that its own extends, if it is compared too: `cifar10_sym50` of `cifar10_sym50_plus`; or its own."""

    @property
    def recipe(self) -> str:
        return self.runs[0].record.recipe

    @property
    def method(self) -> str:
        return self.runs[0].record.method

    @property
    def title(self) -> str:
        """The method, and how its recipe extends that of the family, as `standard, plus`."""
        extension = self.recipe.removeprefix(self.family).lstrip("_") if self.family else ""
        return f"{self.method}, {extension}" if extension else self.method

    @property
    def row(self) -> str:
        return f"{self.title}, {self.variant}" if self.variant else self.title

    @property
    def name(self) -> str:
        return f"{self.recipe}, {self.method}, {self.variant}" if self.variant else f"{self.recipe}, {self.method}"


@dataclass(frozen=True)
class Difference:
    """A recipe key, or a fact about the machine, that is not the same in all groups."""

    key: str
    values: tuple[tuple[str, tuple[int, ...]], ...]
    """Each value with the numbers of the groups that have it."""


def group_runs(runs: Sequence[ComparedRun]) -> list[Group]:
    """Group the runs. Of several runs with one seed in a group, a finished one counts, then the first by date."""
    members: list[list[ComparedRun]] = []
    for run in runs:
        own = next((group for group in members if _are_alike(group[0], run)), None)
        if own is None:
            members.append([run])
        else:
            own.append(run)
    variants = name_variants([group[0] for group in members])
    recipes = {run.record.recipe for run in runs}
    return [
        _build_group(number, group, variant, _find_family(group[0].record.recipe, recipes))
        for number, (group, variant) in enumerate(zip(members, variants, strict=True), start=1)
    ]


def _find_family(recipe: str, recipes: Iterable[str]) -> str:
    """Return the shortest of the recipes that this one extends by its name, or its own."""
    return min((other for other in recipes if f"{recipe}_".startswith(f"{other}_")), key=len)


def _build_group(number: int, members: Sequence[ComparedRun], variant: str, family: str) -> Group:
    by_seed: dict[int, list[ComparedRun]] = {}
    for run in members:
        by_seed.setdefault(run.record.seed, []).append(run)
    counted, repeated = [], []
    for _, same in sorted(by_seed.items()):
        first, *others = sorted(same, key=lambda run: (bool(run.unfinished), *by_date(run.record, run.name)))
        counted.append(first)
        repeated += others
    return Group(number, tuple(counted), tuple(repeated), variant, family)


def _are_alike(one: ComparedRun, other: ComparedRun) -> bool:
    """Whether only the seed differs. A checksum that one of them does not know is not compared."""
    if (one.record.recipe, one.record.method) != (other.record.recipe, other.record.method):
        return False
    return not find_differences(*(_without_seed(run.identity) for run in (one, other)))


def _without_seed(identity: Identity) -> Identity:
    keys = {key: value for key, value in identity.keys.items() if key != "seed"}
    return Identity(keys, identity.numerics)


def name_variants(firsts: Sequence[ComparedRun]) -> list[str]:
    """Name each group, given by its first run, by the keys that differ inside its recipe and method.

    Usual values are left out: those that more than half of these groups have, or else more than half of all groups of
    the method. A section that only some of the groups use is told as a whole, as `without incv`.
    """
    runs = [_KeyedRun(run, _decisive_keys(run)) for run in firsts]
    methods: dict[str, list[_KeyedRun]] = {}
    cells: dict[tuple[str, str], list[_KeyedRun]] = {}
    for each in runs:
        methods.setdefault(each.cell[0], []).append(each)
        cells.setdefault(each.cell, []).append(each)
    usual = {cell: _find_usual_words(alike, methods[cell[0]]) for cell, alike in cells.items()}
    return [_name_variant(each, usual[each.cell]) for each in runs]


@dataclass(frozen=True)
class _KeyedRun:
    """A run with its decisive keys."""

    run: ComparedRun
    keys: Mapping[str, Any]

    @property
    def cell(self) -> tuple[str, str]:
        return self.run.record.method, self.run.record.recipe

    def uses(self, key: str) -> bool:
        return _uses(self.run, key)

    def tell(self, key: str) -> str:
        """Return the value of a key, as `batch.global=64`; empty if the run does not use its section."""
        if key in _OPTIONAL:
            return f"{'with' if self.uses(key) else 'without'} {key}"
        return f"{key.replace(OWN, self.cell[0])}={_show(self.keys, key)}" if self.uses(key) else ""


def _name_variant(run: _KeyedRun, usual: Mapping[str, str | None]) -> str:
    words = {key: run.tell(key) for key in usual}
    return ", ".join(word for key, word in words.items() if word and word != usual[key])


def _find_usual_words(alike: Sequence[_KeyedRun], same_method: Sequence[_KeyedRun]) -> dict[str, str | None]:
    """Return the usual value of each key that differs between the runs that are alike; None if no value is usual."""
    differing = sorted(_find_differing(alike), key=lambda key: (is_checksum(key), key))
    return {key: _find_usual(key, alike, same_method) for key in differing}


def _find_usual(key: str, *circles: Sequence[_KeyedRun]) -> str | None:
    """Return what more than half of the runs tell of the key, in the first circle where there is such an answer."""
    for runs in circles:
        word, count = Counter(run.tell(key) for run in runs).most_common(1)[0]
        if 2 * count > len(runs):
            return word
    return None


def _find_differing(runs: Sequence[_KeyedRun]) -> set[str]:
    """Return the keys whose values differ, and the optional sections that only some of the runs use."""
    found = set()
    for key in {key for run in runs for key in run.keys}:
        using = [run for run in runs if run.uses(key)]
        deciding = [run for run in using if CHOOSES_EPOCH in run.keys or not _accompanies_choice(key)]
        if len({_show(run.keys, key) for run in deciding}) > 1:
            found.add(key)
        if len(using) < len(runs):
            found.add(key.partition(".")[0])
    return found


def find_group_differences(groups: Sequence[Group]) -> list[Difference]:
    """Return the result keys that differ between groups, the method's own section as `<method>`."""
    keys = [_decisive_keys(group.runs[0]) for group in groups]
    optional = {*_OPTIONAL, *(group.method for group in groups)}
    every = sorted({key for each in keys for key in each}, key=lambda key: (key.startswith(OWN), key))
    shown = [
        _compare(
            key,
            [
                (group.number, _show(each, key))
                for group, each in zip(groups, keys, strict=True)
                if _uses(group.runs[0], key, optional) and (CHOOSES_EPOCH in each or not _accompanies_choice(key))
            ],
            0 if _accompanies_choice(key) else len(groups),
        )
        for key in every
        if not is_checksum(key) or all(key in each for each in keys)
    ]
    return _join_sections([each for each in shown if len(each.values) > 1])


def _accompanies_choice(key: str) -> bool:
    """Whether a key decides the result only because an evaluation chooses the epoch; see `comparable_keys`."""
    return key.startswith("evaluation.") and key != CHOOSES_EPOCH


def _join_sections(differences: Sequence[Difference]) -> list[Difference]:
    """Replace the keys that differ only because some groups do not use their section by one line for the section."""
    joined: dict[str, Difference] = {}
    for each in differences:
        if [value for value, _ in each.values][1:] == [NOT_USED]:
            section = each.key.partition(".")[0]
            joined[section] = Difference(section, (("used", each.values[0][1]), each.values[1]))
        else:
            joined[each.key] = each
    return list(joined.values())


def find_environment_differences(groups: Sequence[Group]) -> list[Difference]:
    """Return the versions and machines that are not the same in all runs."""
    facts = [(group.number, describe_environment(run.record)) for group in groups for run in group.runs]
    every = dict.fromkeys(key for _, each in facts for key in each)
    shown = [
        _compare(key, [(number, str(each[key])) for number, each in facts if each[key] is not None]) for key in every
    ]
    return [each for each in shown if len(each.values) > 1]


def _uses(run: ComparedRun, key: str, optional: Collection[str] = _OPTIONAL) -> bool:
    """Whether the run's result depends on the section of a key: its method's, INCV, or another method's.

    On all other sections it does.
    """
    section = key.partition(".")[0]
    if section not in (OWN, *optional):
        return True
    named = (key.partition(".")[0] for key in run.identity.keys)
    stages = {run.record.method, *run.identity.numerics, *named, *(["incv"] if run.record.rounds else [])}
    return section in {_name_section(run, stage) for stage in stages}


def _name_section(run: ComparedRun, section: str) -> str:
    """Return the name under which a section is compared: `<method>` for the method's own, unless that is INCV.

    INCV keeps its name in a run of INCV alone too: other runs have it beside their method.
    """
    return OWN if section == run.record.method and section not in _OPTIONAL else section


def _compare(key: str, values: Sequence[tuple[int, str]], groups: int = 0) -> Difference:
    """groups: their number, if the others do not use the key; 0: what they have is not known."""
    found: dict[str, dict[int, None]] = {}
    for number, value in values:
        found.setdefault(value, {})[number] = None
    used = {number for number, _ in values}
    if others := [number for number in range(1, groups + 1) if number not in used]:
        found[NOT_USED] = dict.fromkeys(others)
    return Difference(key, tuple((value, tuple(numbers)) for value, numbers in found.items()))


def _decisive_keys(run: ComparedRun) -> dict[str, Any]:
    """Return the keys that decide the result, without the seed, with their sections named as they are compared."""
    keys = comparable_keys(run.identity.keys)
    versions = {f"numerics of {stage}": number for stage, number in run.identity.numerics.items() if number != 1}
    split = [(*key.partition("."), value) for key, value in keys.items() if key != "seed"]
    return {f"{_name_section(run, section)}{dot}{rest}": value for section, dot, rest, value in split} | versions


def _show(keys: Mapping[str, Any], key: str) -> str:
    """Return a value as in a recipe."""
    if key not in keys:
        return "1" if key.startswith("numerics of ") else NOT_SET
    value = keys[key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
