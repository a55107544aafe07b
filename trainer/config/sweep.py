"""Variants of one recipe (`--vary`), such as different seeds or noise ratios; each is a separate run."""

import hashlib
import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shards.errors import ConfigError
from trainer.config.schema import Recipe

AT_ONCE = 8
"""Default maximum number of runs in progress in one process."""
_SWEEP_OPTIONS = ("--vary", "--at-once")


@dataclass(frozen=True)
class Variant:
    """One variant: its overrides, its recipe and its run directory."""

    overrides: tuple[str, ...]
    recipe: Recipe
    root: Path
    recipe_name: str
    """The name of the recipe, which the run records."""
    command: str
    """The command that executes this variant alone, which the run records."""
    label: str = ""
    """Name of the variant in log lines; "": its overrides."""

    @property
    def name(self) -> str:
        return self.label or " ".join(self.overrides)


def sweep_file(variants: Sequence[Variant], name: str) -> Path:
    """Return the file for the table over the runs; its name depends on the run directories, not on their order."""
    roots = sorted(str(variant.root) for variant in variants)
    digits = hashlib.sha256("\n".join(roots).encode()).hexdigest()[:8]
    return variants[0].root.parent / f"{name}-vary-{digits}.json"


def command_alone(words: Sequence[str], overrides: Sequence[str]) -> str:
    """Return the command that executes one variant alone: the words of the sweep's command without the options of
    sweeps, and the variant's overrides."""
    kept: list[str] = []
    is_value = False
    for word in words:
        if not is_value and word.partition("=")[0] not in _SWEEP_OPTIONS:
            kept.append(word)
        is_value = not is_value and word in _SWEEP_OPTIONS  # `--vary seed=0,1`, but `--vary=seed=0,1` is one word
    return shlex.join([*kept, *overrides])


def _values(text: str) -> list[str]:
    """Split at the commas that are not inside [...] or {...}."""
    values, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            values.append("")
        else:
            values[-1] += character
    return [value.strip() for value in values if value.strip()]


def combinations(vary: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the overrides of each variant: `seed=0,1` and `labels.ratio=0.2,0.5` give four; no `vary` gives one."""
    every = []
    for one in vary:
        key, equals, values = one.partition("=")
        if key.startswith("execution."):
            raise ConfigError(
                f"--vary {key}: all variants run in one process and share execution keys; vary result keys"
            )
        found = _values(values)
        if not equals or not key or len(set(found)) < len(found) or not found:
            raise ConfigError(f"--vary {one!r}: give a key and distinct values, as in seed=0,1,2")
        every.append([f"{key}={value}" for value in found])
    return list(itertools.product(*every))
