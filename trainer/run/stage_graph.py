"""The stage graph: what each stage reads, needs and writes; whether it is done, half done or would be redone."""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from shards.errors import ConfigError, DataError
from trainer.config.schema import METHODS, STAGES, Recipe
from trainer.records.manifest import Manifest, now
from trainer.records.run_directory import RunDirectory

_NETWORK_KEYS = ("model", "image", "batch", "order", "precision")
_READS: Mapping[str, tuple[str, ...]] = {
    "labels": ("seed", "labels", "data.train"),
    "incv": (*_NETWORK_KEYS, "incv"),
    "standard": (*_NETWORK_KEYS, "standard"),
    "coteaching": (*_NETWORK_KEYS, "coteaching"),
    "coteaching_incv": (*_NETWORK_KEYS, "coteaching"),
    "evaluate": ("methods", "data.eval"),
    "export": ("methods",),
}
_NOT_READ: Mapping[str, tuple[str, ...]] = {
    "coteaching": ("coteaching.noise_of_selected", "coteaching.warmup_epochs"),
    "coteaching_incv": ("coteaching.forget_rate",),
}
_ALWAYS_RUN = ("pack", "report")  # pack only checks what is there; the report is made anew in a second

Keys = dict[str, Any]


def result_keys(recipe: Recipe) -> Keys:
    """Every result key of a recipe, dotted, with its value."""
    return dict(_flattened(recipe, ""))


def _flattened(value: Any, prefix: str) -> list[tuple[str, Any]]:
    if isinstance(value, BaseModel):
        pairs: list[tuple[str, Any]] = []
        for name, field in type(value).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("execution"):
                continue
            pairs += _flattened(getattr(value, name), f"{prefix}.{field.alias or name}")
        return pairs
    if isinstance(value, dict) and any(isinstance(inner, BaseModel) for inner in value.values()):
        return [pair for name, inner in value.items() for pair in _flattened(inner, f"{prefix}.{name}")]
    return [(prefix.removeprefix("."), json.loads(json.dumps(value)))]


def keys_hash(keys: Keys) -> str:
    return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()


def stages_of(recipe: Recipe) -> list[str]:
    """The stages this recipe has, in order."""
    return [
        stage
        for stage in STAGES
        if (stage not in METHODS or stage in recipe.methods)
        and (stage != "incv" or recipe.incv is not None)
        and (stage != "evaluate" or recipe.data.eval)
    ]


def require_stages(redo: Sequence[str], only: str | None, recipe: Recipe) -> None:
    """The stages the user names are stages of this recipe."""
    own = stages_of(recipe)[1:]
    said = {f"--redo {stage}": stage for stage in redo} | ({f"incv {only}": only} if only else {})
    for words, stage in said.items():
        if stage not in own:
            raise ConfigError(
                f"`{words}`: this recipe has no such stage; its stages are {', '.join(own)} "
                "(training methods are those listed under `methods`)"
            )


def inputs_of(stage: str, recipe: Recipe) -> list[str]:
    """The stages whose files this one reads."""
    if stage == "pack":
        return []
    if stage == "labels":
        return ["pack"]
    if stage in ("incv", "standard"):
        return ["labels"]
    if stage == "coteaching":
        return ["labels", "incv"] if recipe.coteaching_needs_estimate else ["labels"]
    if stage == "coteaching_incv":
        return ["incv"]
    if stage in ("evaluate", "export"):
        return list(recipe.methods)
    return [name for name in stages_of(recipe) if name not in ("pack", "export", "report")]


def stage_keys(recipe: Recipe, facts: Keys) -> dict[str, Keys]:
    """For each stage the result keys that it and its inputs read.

    facts: checksums that stand for files among the keys, `data.train.checksum` and the like.
    """
    every = {**result_keys(recipe), **facts}
    keys: dict[str, Keys] = {}
    for stage in stages_of(recipe):
        merged: Keys = {}
        for needed in inputs_of(stage, recipe):
            merged.update(keys.get(needed, {}))
        merged.update(
            {
                key: value
                for key, value in every.items()
                if _under(key, _READS.get(stage, ())) and not _under(key, _NOT_READ.get(stage, ()))
            }
        )
        keys[stage] = merged
    return keys


def _under(key: str, prefixes: Sequence[str]) -> bool:
    return any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)


@dataclass(frozen=True)
class StageStatus:
    stage: str
    state: str
    """`done`, `half done`, `to do`, or `changed`: begun with other result keys than the ones now asked for."""
    changes: tuple[str, ...] = ()


class StageLedger:
    """What the manifest says of each stage, held against the recipe now asked for."""

    def __init__(self, recipe: Recipe, facts: Keys, run: RunDirectory, manifest: Manifest) -> None:
        self._recipe, self._run, self._manifest = recipe, run, manifest
        self._keys = stage_keys(recipe, facts)

    def status(self, stage: str) -> StageStatus:
        recorded = self._manifest.stages.get(stage)
        if recorded is None or stage in _ALWAYS_RUN:
            return StageStatus(stage, "to do")
        keys = self._keys[stage]
        if recorded["hash"] != keys_hash(keys):
            return StageStatus(stage, "changed", tuple(_changes(recorded["keys"], keys)))
        return StageStatus(stage, "done" if recorded["state"] == "done" else "half done")

    def require_unchanged(self, redo: Sequence[str]) -> None:
        """Refuse keys that would redo a stage, unless the user asked for just that."""
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
        shown = "; ".join(changes[:6]) + (f"; and {len(changes) - 6} more" if len(changes) > 6 else "")
        raise ConfigError(
            f"{self._run.root} holds stages made with other values: {shown}. They would be redone: {stages}. "
            f"Say so with `{flags}` (the old outputs move to {self._run.old}), or choose another --run-dir"
        )

    def redo(self, stages: Sequence[str]) -> None:
        """Move the outputs of these stages and of all that follow from them to old/.

        Where this very command was interrupted, what it has done since is kept and goes on.
        """
        if not stages:
            return
        again = self._manifest.content.get("redo") == sorted(stages)
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
        for stage in self.with_followers(stages):
            if stage not in self._manifest.stages:
                continue
            if again and self._can_go_on(stage):
                continue
            for output in outputs_of(stage, self._run):
                if output.exists():
                    target = self._run.old / stamp / output.relative_to(self._run.root)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.move(output, target)
            del self._manifest.stages[stage]
        self._manifest.content["redo"] = sorted(stages)  # until the run comes to its end
        self._manifest.save()

    def require_inputs(self, stage: str) -> None:
        for needed in inputs_of(stage, self._recipe):
            if needed not in _ALWAYS_RUN and self.status(needed).state != "done":
                raise ConfigError(
                    f"stage {stage} needs {needed}, which is not done in {self._run.root}: run `incv {needed}` "
                    "first, or `incv run` for all stages"
                )

    def require_outputs(self, stage: str) -> None:
        """A stage recorded as done must still have its files."""
        for output in outputs_of(stage, self._run, needed=True):
            if not output.exists():
                raise DataError(
                    f"stage {stage} is recorded as done, but {output} is missing: put it back, or make it again "
                    f"with `--redo {stage}`"
                )

    def begin(self, stage: str) -> None:
        earlier = self._manifest.stages.get(stage, {})
        self._manifest.stages[stage] = {
            "state": "running",
            "seconds": earlier.get("seconds", 0.0),
            "hash": keys_hash(self._keys[stage]),
            "keys": self._keys[stage],
        }
        self._manifest.save()

    def finish(self, stage: str, seconds: float, done: bool) -> None:
        record = self._manifest.stages[stage]
        record["seconds"] = round(record["seconds"] + seconds, 3)
        if done:
            record["state"] = "done"
            record["finished"] = now()
        self._manifest.save()

    def with_followers(self, stages: Sequence[str]) -> list[str]:
        chosen = set(stages)
        for stage in stages_of(self._recipe):
            if chosen & set(inputs_of(stage, self._recipe)):
                chosen.add(stage)
        return [stage for stage in STAGES if stage in chosen and stage != "pack"]

    def _can_go_on(self, stage: str) -> bool:
        """Begun with these keys, and every training of it that has logged progress still has a checkpoint."""
        logged = [log.parent for folder in outputs_of(stage, self._run) for log in folder.rglob("metrics.jsonl")]
        whole = all(any((training / "checkpoints").glob("step-*")) for training in logged)
        return whole and self.status(stage).state in ("done", "half done")


def _changes(old: Keys, new: Keys) -> list[str]:
    missing = object()
    everywhere = old.keys() & new.keys()  # first, since a key that came or went follows from one of these
    return [
        f"{key} ({json.dumps(old.get(key))} -> {json.dumps(new.get(key))})"
        for key in [*sorted(everywhere), *sorted(old.keys() ^ new.keys())]
        if old.get(key, missing) != new.get(key, missing)
    ]


def outputs_of(stage: str, run: RunDirectory, needed: bool = False) -> list[Path]:
    """The files and folders a stage writes; `needed`: only those without which it cannot count as done."""
    if stage == "labels":
        return [run.labels] if needed else [run.labels, run.true_labels]
    if stage == "incv":
        return [run.selection, run.incv] if needed else [run.rounds, run.selection, run.incv]
    if stage in METHODS:
        return [run.method(stage)]
    if stage == "evaluate":
        return [run.evaluation] if needed else [run.evaluation, run.evaluation_progress]
    if stage == "export":
        return [] if needed else sorted(run.methods.glob("*/export"))
    return [] if needed else [run.report_json, run.report_html]
