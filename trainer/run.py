"""A run from start to end: check everything, take the directory, carry out the stages that are not done."""

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shards.durable import write_bytes, write_json
from shards.errors import ConfigError, InputError
from shards.sample_index import SampleIndex
from trainer.config import Recipe
from trainer.data_sets import open_splits
from trainer.label_file import file_checksum
from trainer.manifest import Manifest, now
from trainer.methods.micro_batches import batchnorm_rows
from trainer.preflight import preflight, preflight_evaluation
from trainer.recipe_file import recipe_yaml
from trainer.run_directory import RunDirectory
from trainer.stage_bodies import StageBodies
from trainer.stages import Keys, StageBook, require_stages, stages_of
from trainer.stop_request import EXIT_STOPPED, Stopped, StopRequest
from trainer.train_loop import Surroundings
from trainer.world import join_world


def carry_out(recipe: Recipe, name: str, root: Path, redo: Sequence[str] = (), only: str | None = None) -> int:
    """Run all stages, or `only` one; returns the exit code of the command. A stopped packing raises PackStopped.

    Nothing is written to the run directory before recipe, shards and labels have been found good.
    """
    run, stop = RunDirectory(root), StopRequest(root)
    _refuse_other_recipe(run, name)
    require_stages(redo, only, recipe)
    stop.listen()
    world = join_world(recipe.execution)
    began = time.monotonic()
    index, eval_indices = open_splits(recipe, stop)
    packing = time.monotonic() - began
    labels = preflight(recipe, index, world.size)
    preflight_evaluation(recipe, eval_indices)
    run.take()
    try:
        manifest = Manifest(run)
        book = StageBook(recipe, facts_of(recipe, index, eval_indices), run, manifest)
        book.require_unchanged(redo)
        if only is not None:
            book.require_inputs(only)
        stop.forget_old_file()
        book.redo(redo)
        run.stopped.unlink(missing_ok=True)
        write_bytes(run.config, recipe_yaml(recipe).encode())
        manifest.content["dataset"] = _described(index)
        manifest.begin(name, world, batchnorm_rows(recipe.batch.global_, world.size, recipe.batch.micro))
        book.begin("pack")
        book.finish("pack", packing, done=True)
        around = Surroundings(world, recipe.execution, manifest, stop)
        bodies = StageBodies(recipe, run, around, index, eval_indices, labels)
        return _to_the_end(recipe, run, around, bodies, book, only)
    finally:
        run.release()


def _to_the_end(
    recipe: Recipe, run: RunDirectory, around: Surroundings, bodies: StageBodies, book: StageBook, only: str | None
) -> int:
    """Carry the stages out and record how this start ended."""
    try:
        stopped_in = _carry_out_stages(recipe, bodies, book, only)
    except InputError:
        with suppress(InputError):  # the disk may be full
            around.manifest.end("failed")
        raise
    finally:
        bodies.close()
    if stopped_in is None:
        around.manifest.end("finished")
        return 0
    stage, why = stopped_in
    around.manifest.end("stopped")
    record = {"stage": stage, "where": why.where, "step": why.step, "reason": why.reason, "time": now()}
    write_json(run.stopped, record)
    around.stop.settle()
    print(f"incv: {why}; run the same command again to go on", file=sys.stderr)
    return EXIT_STOPPED


def _carry_out_stages(
    recipe: Recipe, bodies: StageBodies, book: StageBook, only: str | None
) -> tuple[str, Stopped] | None:
    """Where and why the run was stopped, or None where it came to its end."""
    for stage in stages_of(recipe):
        if stage == "pack" or only not in (None, stage):
            continue
        if book.status(stage).state == "done":
            book.require_outputs(stage)
            print(f"{stage}: done before", file=sys.stderr)
            continue
        book.begin(stage)
        began = time.monotonic()
        done = False
        try:
            bodies.carry_out(stage)
            done = True
        except Stopped as stopped:
            return stage, stopped
        finally:
            seconds = time.monotonic() - began
            book.finish(stage, seconds, done)
        print(f"{stage}: done in {seconds:.1f} s", file=sys.stderr)
    return None


def facts_of(recipe: Recipe, index: SampleIndex, eval_indices: Mapping[str, SampleIndex]) -> Keys:
    """Checksums that stand for files among the result keys."""
    facts: Keys = {"data.train.checksum": index.checksum}
    facts |= {f"data.eval.{name}.checksum": each.checksum for name, each in eval_indices.items()}
    if recipe.labels.file is not None:
        facts["labels.file_checksum"] = file_checksum(Path(recipe.labels.file))
    return facts


def _refuse_other_recipe(run: RunDirectory, name: str) -> None:
    run.require_ours()
    if run.manifest.exists():
        other = Manifest(run).content["recipe"]
        if other not in (None, name):
            raise ConfigError(
                f"{run.root} is a run of the recipe {other!r}, not of {name!r}: choose another --run-dir"
            )


def _described(index: SampleIndex) -> dict[str, Any]:
    return {
        "source": index.dataset.source,
        "split": index.dataset.split,
        "samples": len(index),
        "class_names": list(index.class_names),
        "checksum": index.checksum,
    }
