"""The stage graph: the inputs, result keys, outputs and state of each stage."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shards.errors import ConfigError, DataError, list_some
from trainer.config.schema import Recipe
from trainer.incv import NUMERICS as INCV_NUMERICS
from trainer.methods.registry import get_method, method_names
from trainer.records.manifest import INCV_FROM, Manifest, now
from trainer.records.run_directory import RunDirectory
from trainer.run.result_keys import FORMAT, Keys, default_keys, hash_keys, result_keys, select_keys, upgrade_keys

_NETWORK_KEYS = ("model", "image", "batch", "order", "precision")
_READS: Mapping[str, tuple[str, ...]] = {
    "labels": ("seed", "labels", "data.train", "data.eval_fraction"),
    "incv": (*_NETWORK_KEYS, "incv"),
    "evaluate": ("methods", "data.eval"),
    "export": ("methods",),
}
_ALWAYS_RUN = ("pack", "report")  # pack only verifies existing shards; the report takes a second


def all_stages() -> tuple[str, ...]:
    """Return all stages in order, by the names used on the command line, in the manifest and in the report."""
    return ("pack", "labels", "incv", *method_names(), "evaluate", "export", "report")


def stages_of(recipe: Recipe) -> list[str]:
    """Return the stages of this recipe, in order."""
    return [
        stage
        for stage in all_stages()
        if (stage not in method_names() or stage in recipe.methods)
        and (stage != "incv" or recipe.incv is not None)
        and (stage != "evaluate" or ((recipe.data.eval or recipe.data.eval_fraction) and recipe.methods))
        and (stage != "export" or recipe.methods)
    ]


def require_stages(redo: Sequence[str], only: str | None, recipe: Recipe) -> None:
    """Raise ConfigError if `redo` or `only` names a stage that this recipe does not have."""
    own = stages_of(recipe)[1:]
    named = {f"--redo {stage}": stage for stage in redo if stage != "pack"} | ({f"incv {only}": only} if only else {})
    for words, stage in named.items():
        if stage not in own:
            raise ConfigError(
                f"`{words}`: this recipe has no such stage; its stages are {', '.join(own)} "
                "(only the training methods listed under `methods`)"
            )


def inputs_of(stage: str, recipe: Recipe) -> list[str]:
    """Return the stages whose files this stage reads."""
    if stage == "pack":
        return []
    if stage == "labels":
        return ["pack"]
    if stage == "incv":
        return ["labels"]
    if stage in recipe.methods:
        method = get_method(stage)
        others = method.reads_methods(recipe)
        if method.reads_selection(recipe):
            return ["incv", *others]
        return ["labels", *(["incv"] if method.reads_incv(recipe) else []), *others]
    if stage in ("evaluate", "export"):
        return list(recipe.methods)
    return [name for name in stages_of(recipe) if name not in ("pack", "export", "report")]


def stage_keys(recipe: Recipe, facts: Keys) -> dict[str, Keys]:
    """Return, for each stage, the result keys that it and its inputs read.

    facts: checksums that represent files among the keys, such as `data.train.checksum`.
    """
    every = {**result_keys(recipe), **facts}
    keys: dict[str, Keys] = {}
    for stage in stages_of(recipe):
        merged: Keys = {}
        for needed in inputs_of(stage, recipe):
            merged.update(keys.get(needed, {}))
        reads = _method_reads(stage, recipe) if stage in recipe.methods else _READS.get(stage, ())
        keys[stage] = merged | select_keys(every, reads)
    return keys


def _method_reads(method: str, recipe: Recipe) -> tuple[str, ...]:
    chosen_on = recipe.evaluation.choose_on
    return (*_NETWORK_KEYS, "evaluation", method, *([f"data.eval.{chosen_on}"] if chosen_on else []))


def numerics_of(stage: str) -> int | None:
    """Return the version of a stage's numbers; None for a stage that trains nothing."""
    if stage == "incv":
        return INCV_NUMERICS
    return get_method(stage).numerics if stage in method_names() else None


def numerics_behind(stage: str, recipe: Recipe) -> dict[str, int]:
    """Return the versions of the numbers of a stage and of all stages that it builds on."""
    found: dict[str, int] = {}
    for needed in inputs_of(stage, recipe):
        found |= numerics_behind(needed, recipe)
    version = numerics_of(stage)
    return found if version is None else found | {stage: version}


@dataclass(frozen=True)
class StageStatus:
    stage: str
    state: str
    """`done`, `half done`, `to do`, or `changed`: begun with result keys that differ from the recipe's."""
    changes: tuple[str, ...] = ()
    """The changed keys with both values, as text."""
    changed_keys: tuple[str, ...] = ()


class StageLedger:
    """Tracks the state of each stage by comparing the manifest with the current recipe."""

    def __init__(self, recipe: Recipe, facts: Keys, run: RunDirectory, manifest: Manifest) -> None:
        self._recipe, self._run, self._manifest = recipe, run, manifest
        self._keys = stage_keys(recipe, facts)

    def has_stage(self, stage: str) -> bool:
        """Whether the recipe has this stage."""
        return stage in self._keys

    def compare(self, stage: str, record: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the keys, with both values, in which a stage of another run differs. record: its manifest entry."""
        before = upgrade_keys(record, stage, self._recipe)
        return _changes(before, self._keys[stage], default_keys(self._recipe))[0]

    def status(self, stage: str) -> StageStatus:
        recorded = self._manifest.stages.get(stage)
        if recorded is None or stage in _ALWAYS_RUN:
            return StageStatus(stage, "to do")
        keys, before = self._keys[stage], upgrade_keys(recorded, stage, self._recipe)
        if before != keys:
            return StageStatus(stage, "changed", *_changes(before, keys, default_keys(self._recipe)))
        return StageStatus(stage, "done" if recorded["state"] == "done" else "half done")

    def identities(self) -> dict[str, str]:
        """Return the hash that identifies each stage's checkpoints: the recorded one if it resumes or is done."""
        return {
            stage: hash_keys(keys) if self.status(stage).state in ("to do", "changed") else self._recorded_hash(stage)
            for stage, keys in self._keys.items()
        }

    def _recorded_hash(self, stage: str) -> str:
        recorded: str = self._manifest.stages[stage]["hash"]
        return recorded

    def require_unchanged(self, redo: Sequence[str]) -> None:
        """Raise ConfigError if a stage has changed keys and is neither in `redo` nor downstream of it."""
        redone = self.with_followers(redo)
        statuses = [self.status(stage) for stage in stages_of(self._recipe)]
        changed = [status for status in statuses if status.state == "changed" and status.stage not in redone]
        if not changed:
            return
        changes = list(dict.fromkeys(change for status in changed for change in status.changes))
        stages = ", ".join(status.stage for status in changed)
        first = [
            status.stage
            for status in changed
            if not any(needed in {s.stage for s in changed} for needed in inputs_of(status.stage, self._recipe))
        ]
        flags = " ".join(f"--redo {stage}" for stage in first)
        shown = list_some(changes, 6, "; ")
        raise ConfigError(
            f"{self._run.root} has stages that were run with other values: {shown}. To redo {stages}, "
            f"add `{flags}` (the old outputs move to {self._run.old}), or choose another --run-dir"
        )

    def redo(self, stages: Sequence[str]) -> None:
        """Move the outputs of these stages and of all downstream stages to old/.

        If this continues an interrupted redo, stages that it has already begun again are kept and resume.
        """
        if not stages:
            return
        again = self._manifest.content.get("redo") == sorted(stages)
        stamp = _stamp()
        redone = self.with_followers(stages)
        for stage in redone:
            if not (again and stage in self._manifest.stages and self._can_go_on(stage)):
                self.set_aside(stage, stamp)
        if "incv" in redone and "incv" not in self._manifest.stages:
            self._manifest.content.pop(INCV_FROM, None)  # `--incv-from` of an earlier start
        self._manifest.content["redo"] = sorted(stages)  # until the run finishes
        self._manifest.save()

    def set_aside(self, stage: str, stamp: str | None = None) -> None:
        """Move the outputs of a stage to old/`stamp` and forget it; does nothing if it has not begun."""
        if stage not in self._manifest.stages:
            return
        folder = self._run.old / (stamp or _stamp())
        for output in outputs_of(stage, self._run):
            if output.exists():
                target = folder / output.relative_to(self._run.root)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(output, target)
        del self._manifest.stages[stage]

    def require_inputs(self, stage: str) -> None:
        for needed in inputs_of(stage, self._recipe):
            if needed not in _ALWAYS_RUN and self.status(needed).state != "done":
                raise ConfigError(
                    f"stage {stage} needs {needed}, which is not done in {self._run.root}: run `incv {needed}` "
                    "first, or `incv run` for all stages"
                )

    def require_outputs(self, stage: str) -> None:
        """Raise DataError if a stage recorded as done has lost a required file."""
        for output in outputs_of(stage, self._run, needed=True):
            if not output.exists():
                raise DataError(
                    f"stage {stage} is recorded as done, but {output} is missing: restore it, or run the stage again "
                    f"with `--redo {stage}`"
                )

    def begin(self, stage: str) -> None:
        earlier = self._manifest.stages.get(stage, {})
        identity = self.identities()[stage]
        self._manifest.stages[stage] = {
            "state": "running",
            "seconds": earlier.get("seconds", 0.0),
            "hash": identity,
            "format": FORMAT,
            "keys": self._keys[stage],
        }
        if (version := numerics_of(stage)) is not None:  # that of the first start, if this one resumes
            self._manifest.stages[stage]["numerics"] = earlier.get("numerics", 1) if earlier else version
        self._manifest.save()

    def finish(self, stage: str, seconds: float, done: bool) -> None:
        record = self._manifest.stages[stage]
        record["seconds"] = round(record["seconds"] + seconds, 3)
        if done:
            record["state"] = "done"
            record["finished"] = now()
        self._manifest.save()

    def with_followers(self, stages: Sequence[str]) -> list[str]:
        """Return these stages and all that depend on them; for `pack`, only those whose data have changed."""
        chosen = {stage for stage in stages if stage != "pack"}
        if "pack" in stages:
            chosen |= {stage for stage in stages_of(self._recipe) if self._only_data_changed(stage)}
        for stage in stages_of(self._recipe):
            if chosen & set(inputs_of(stage, self._recipe)):
                chosen.add(stage)
        return [stage for stage in all_stages() if stage in chosen]

    def _only_data_changed(self, stage: str) -> bool:
        changed = self.status(stage).changed_keys
        return bool(changed) and all(key.startswith("data.") for key in changed)

    def _can_go_on(self, stage: str) -> bool:
        """Whether a stage was begun with the current keys, and every training with logged steps has a checkpoint.

        Folds that were taken over from another run have none.
        """
        if stage == "incv" and INCV_FROM in self._manifest.content:
            return self.status(stage).state in ("done", "half done")
        logged = [log.parent for folder in outputs_of(stage, self._run) for log in folder.rglob("metrics.jsonl")]
        whole = all(any((training / "checkpoints").glob("step-*")) for training in logged)
        return whole and self.status(stage).state in ("done", "half done")


def _stamp() -> str:
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")


def _changes(old: Keys, new: Keys, defaults: Keys) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the changed keys, with both values and alone; keys missing from `old` or `new` are at their default."""
    before, after = {**defaults, **old}, {**defaults, **new}
    in_both = before.keys() & after.keys()  # listed first: they cause the added and removed keys
    missing = object()
    keys = [*sorted(in_both), *sorted(before.keys() ^ after.keys())]
    changed = tuple(key for key in keys if before.get(key, missing) != after.get(key, missing))
    return (
        tuple(f"{key} ({json.dumps(before.get(key))} -> {json.dumps(after.get(key))})" for key in changed),
        changed,
    )


def outputs_of(stage: str, run: RunDirectory, needed: bool = False) -> list[Path]:
    """Return the files and folders that a stage writes. needed: only those without which it is not done."""
    if stage == "labels":
        return [run.labels] if needed else [run.labels, run.true_labels, run.corrections]
    if stage == "incv":
        written = [run.rounds, run.selection, run.incv, run.labels_review_csv, run.labels_review_parquet]
        return [run.selection, run.incv] if needed else written
    if stage in method_names():
        return [run.method(stage)]
    if stage == "evaluate":
        return [run.evaluation] if needed else [run.evaluation, run.evaluation_progress]
    if stage == "export":
        return [] if needed else sorted(run.methods.glob("*/export"))
    return [] if needed else [run.report_json, run.report_html]
