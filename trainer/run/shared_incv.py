"""Variants with the same INCV stage run it once: one executes it, the others wait for it and take it over."""

import time
from collections.abc import Collection, Sequence
from pathlib import Path

from shards.errors import InputError
from trainer.config.sweep import Variant
from trainer.distributed.stop import StopRequest
from trainer.records.run_directory import RunDirectory
from trainer.run.incv_takeover import open_finished_incv
from trainer.run.result_keys import hash_keys
from trainer.run.stage_graph import stage_keys
from trainer.training.interleave import Steps

_SECONDS_BETWEEN_LOOKS = 1.0
"""How often a waiting variant reads the other's manifest.json."""


def find_incv_sources(
    variants: Sequence[Variant], redo: Sequence[str], only: str | None, incv_from: Path | None
) -> dict[Path, Variant]:
    """Return the variant from which another takes its INCV stage over, by the run directory of that other.

    Both have the same result keys of INCV and the same files; one that has finished INCV is preferred, then the one
    that is furthest. Variants that are not among the keys need no other one. redo: stages to redo; only: the one
    stage to execute; incv_from: a run from which all variants take INCV over. Nothing is shared if a stage is redone,
    INCV is not executed, or all take it over.
    """
    if redo or only not in (None, "incv") or incv_from is not None:
        return {}
    finished = {variant.root for variant in variants if _has_finished_incv(variant.root)}
    first: dict[tuple[str, ...], Variant] = {}
    sources = {}
    for variant in sorted(variants, key=lambda each: (each.root not in finished, -_count_judged(each.root))):
        recipe = variant.recipe
        keys = stage_keys(recipe, {}).get("incv")
        if keys is not None:
            files = (part.model_dump_json() for part in (recipe.data.train, recipe.labels, recipe.model))
            source = first.setdefault((hash_keys(keys), *files), variant)
            if source.root != variant.root and variant.root not in finished:
                sources[variant.root] = source
    return sources


def wait_for_incv(source: Variant, ended: Collection[Path], stop: StopRequest) -> Steps[Path | None]:
    """Yield until the INCV stage of `source` has finished, and return its run directory; None if it never will.

    It may finish even if the run fails later. ended: the directories of the runs that have ended.
    """
    next_look = 0.0
    while source.root not in ended and not stop.requested():
        if time.monotonic() >= next_look:
            if _has_finished_incv(source.root):
                return source.root
            next_look = time.monotonic() + _SECONDS_BETWEEN_LOOKS
        yield
    return source.root if not stop.requested() and _has_finished_incv(source.root) else None


def _count_judged(root: Path) -> int:
    """Return how many folds of INCV a run has finished; one that has begun the first counts as more than none."""
    rounds = RunDirectory(root).rounds
    return rounds.is_dir() + len(list(rounds.glob("*/fold*/predictions.parquet")))


def _has_finished_incv(root: Path) -> bool:
    """Whether an INCV stage can be taken over from this run."""
    try:
        open_finished_incv(root)
    except InputError:  # what is wrong with the directory, its own run tells
        return False
    return True
