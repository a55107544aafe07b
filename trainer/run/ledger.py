"""The ledger of a run: the state of each stage, and which outputs a redo moves away."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from shards.errors import ConfigError, DataError, list_some
from trainer.config.schema import Recipe
from trainer.records.manifest import INCV_FROM, Manifest, now
from trainer.records.run_directory import RunDirectory
from trainer.run.result_keys import Keys, default_keys, hash_keys
from trainer.run.stage_graph import all_stages, find_stage, numerics_of, stage_keys, stages_of


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
        return _changes(record["keys"], self._keys[stage], default_keys(self._recipe))[0]

    def status(self, stage: str) -> StageStatus:
        recorded = self._manifest.stages.get(stage)
        if recorded is None or find_stage(stage).is_repeated:
            return StageStatus(stage, "to do")
        keys, before = self._keys[stage], recorded["keys"]
        if before != keys:
            return StageStatus(stage, "changed", *_changes(before, keys, default_keys(self._recipe)))
        return StageStatus(stage, "done" if recorded["state"] == "done" else "half done")

    def identities(self) -> dict[str, str]:
        """Return the hash that identifies each stage's checkpoints."""
        return {stage: hash_keys(keys) for stage, keys in self._keys.items()}

    def require_unchanged(self, redo: Sequence[str]) -> None:
        """Raise ConfigError if a stage has changed keys and is neither in `redo` nor downstream of it."""
        redone = self.with_followers(redo)
        statuses = [self.status(stage) for stage in stages_of(self._recipe)]
        changed = [status for status in statuses if status.state == "changed" and status.stage not in redone]
        if not changed:
            return
        changes = list(dict.fromkeys(change for status in changed for change in status.changes))
        stages = [status.stage for status in changed]
        first = [stage for stage in stages if not {*stages} & {*find_stage(stage).inputs(self._recipe)}]
        flags = " ".join(f"--redo {stage}" for stage in first)
        shown = list_some(changes, 6, "; ")
        raise ConfigError(
            f"{self._run.root} has stages that were run with other values: {shown}. To redo {', '.join(stages)}, "
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
        for output in find_stage(stage).outputs(self._run):
            if output.exists():
                target = folder / output.relative_to(self._run.root)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(output, target)
        del self._manifest.stages[stage]

    def require_inputs(self, stage: str) -> None:
        for needed in find_stage(stage).inputs(self._recipe):
            if not find_stage(needed).is_repeated and self.status(needed).state != "done":
                raise ConfigError(
                    f"stage {stage} needs {needed}, which is not done in {self._run.root}: run `incv {needed}` "
                    "first, or `incv run` for all stages"
                )

    def require_outputs(self, stage: str) -> None:
        """Raise DataError if a stage recorded as done has lost a required file."""
        for output in find_stage(stage).required_outputs(self._run):
            if not output.exists():
                raise DataError(
                    f"stage {stage} is recorded as done, but {output} is missing: restore it, or run the stage again "
                    f"with `--redo {stage}`"
                )

    def begin(self, stage: str) -> None:
        earlier = self._manifest.stages.get(stage, {})
        record = {
            "state": "running",
            "seconds": earlier.get("seconds", 0.0),
            "hash": hash_keys(self._keys[stage]),
            "keys": self._keys[stage],
        }
        if (version := numerics_of(stage, self._recipe)) is not None:  # that of the first start, if this one resumes
            record["numerics"] = earlier.get("numerics", version)
        self._manifest.set_stage(stage, record, all_stages())
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
            if chosen & set(find_stage(stage).inputs(self._recipe)):
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
        logged = [
            log.parent for folder in find_stage(stage).outputs(self._run) for log in folder.rglob("metrics.jsonl")
        ]
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
