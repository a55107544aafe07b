"""Variants with the same INCV stage run it once: one executes it, the others wait for it and take it over."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from shards.errors import DataError
from trainer.config.sweep import Variant
from trainer.distributed.stop import StopRequest
from trainer.records.manifest import Manifest
from trainer.records.run_directory import RunDirectory
from trainer.run.result_keys import hash_keys
from trainer.run.stage_graph import stage_keys
from trainer.training.interleave import Steps

_SECONDS_BETWEEN_LOOKS = 1.0
"""How often a waiting variant reads the other's manifest.json."""


def find_incv_sources(variants: Sequence[Variant], redo: Sequence[str], only: str | None) -> dict[Path, Variant]:
    """Return the variant from which another takes its INCV stage over, by the run directory of that other.

    Both have the same result keys of INCV and the same files; one that has finished INCV is preferred. Variants that
    are not among the keys need no other one. redo, only: stages to redo, and the one to execute; with most of them
    every variant is on its own.
    """
    if redo or only not in (None, "incv"):
        return {}
    finished = {variant.root for variant in variants if _has_finished_incv(variant.root)}
    first: dict[tuple[str, ...], Variant] = {}
    sources = {}
    for variant in sorted(variants, key=lambda each: each.root not in finished):
        recipe = variant.recipe
        keys = stage_keys(recipe, {}).get("incv")
        if keys is not None:
            files = (part.model_dump_json() for part in (recipe.data.train, recipe.labels, recipe.model))
            source = first.setdefault((hash_keys(keys), *files), variant)
            if source.root != variant.root and variant.root not in finished:
                sources[variant.root] = source
    return sources


def wait_for_incv(source: Variant, ended: Mapping[Path, int], stop: StopRequest) -> Steps[Path | None]:
    """Yield until the INCV stage of `source` has finished, and return its run directory; None if it never will.

    ended: the exit codes of the runs that have ended, by run directory.
    """
    next_look = 0.0
    while source.root not in ended and not stop.requested():
        if time.monotonic() >= next_look:
            if _has_finished_incv(source.root):
                return source.root
            next_look = time.monotonic() + _SECONDS_BETWEEN_LOOKS
        yield
    return source.root if ended.get(source.root) == 0 else None


def _has_finished_incv(root: Path) -> bool:
    run = RunDirectory(root)
    try:
        return run.has_manifest() and Manifest(run).stages.get("incv", {}).get("state") == "done"
    except DataError:  # a damaged manifest, of which its own run tells
        return False
