"""A run from start to end: check everything, take the directory, carry out the stages that are not done."""

import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shards.durable import read_json, write_bytes, write_json
from shards.errors import ConfigError, InputError
from shards.pack import PackStopped
from shards.sample_index import SampleIndex
from trainer.config import Recipe
from trainer.data_sets import open_splits, seen_splits
from trainer.heartbeat import Heartbeat
from trainer.incv.rounds import folds_side_by_side
from trainer.joining import abandon, join_world, leave, lost_company
from trainer.label_file import file_checksum
from trainer.launch import launch_name, recognised, require_precision, require_promised
from trainer.manifest import Manifest, StartNotes, now
from trainer.methods.micro_batches import batchnorm_rows
from trainer.preflight import RunLabels, preflight, preflight_evaluation
from trainer.profile import Profile, gather
from trainer.pulse import WorldError
from trainer.rank_log import aloud, rank_log
from trainer.recipe_file import recipe_yaml
from trainer.run_directory import RunDirectory
from trainer.side_by_side import Steps, to_the_end
from trainer.stage_bodies import StageBodies
from trainer.stages import Keys, StageBook, keys_hash, require_stages, stage_keys, stages_of
from trainer.start_checks import code_hash, require_common_directory, require_same_start
from trainer.stop_request import EXIT_STOPPED, Stopped, StopRequest
from trainer.trace import Trace
from trainer.train_loop import Surroundings
from trainer.world import World

_LOOKS, _SECONDS_BETWEEN_LOOKS = 10, 0.2


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for."""

    recipe: Recipe
    name: str
    run: RunDirectory
    redo: Sequence[str] = ()
    only: str | None = None
    """One stage alone; None: all."""
    profile: bool = False
    """Whether to measure where the time of trainings goes."""


def carry_out(
    recipe: Recipe,
    name: str,
    root: Path,
    redo: Sequence[str] = (),
    only: str | None = None,
    profile: bool = False,
) -> int:
    """Run all stages, or `only` one; returns the exit code of the command. A stopped packing raises PackStopped.

    Every rank calls it. Nothing is written to the run directory before recipe, shards and labels were found good.
    """
    return to_the_end(run_steps(Wanted(recipe, name, RunDirectory(root), redo, only, profile)))


def run_steps(wanted: Wanted) -> Steps[int]:
    """`carry_out`, a step of a training at a time: for whoever has several runs side by side."""
    recipe = wanted.recipe
    try:
        require_precision(recipe.precision)
        require_promised(recognised(), recipe.execution.world)
    except ConfigError as error:
        if recognised().rank > 0:  # rank 0 says the same
            return error.exit_code
        raise
    stop = StopRequest(wanted.run.root)
    stop.listen()
    world = join_world(recipe.execution, stop)
    try:
        code = yield from _together(wanted, world, stop)
    except PackStopped as stopped:
        if world.is_first:
            aloud(f"incv: {stopped}")
        abandon(world, str(stopped), 0 if world.by_marker else EXIT_STOPPED)
        raise
    except Exception as error:
        _give_up(world, error)
        raise
    finally:
        world.pulse.end()
    leave(world, code)
    return code


def _give_up(world: World, error: Exception) -> None:
    """With company: say why, tell the others, and end. Alone: whoever called says why."""
    if world.ties is None:
        return
    if lost_company(error):
        error = _explained(world, error)
    if isinstance(error, InputError):
        if world.is_first or not (isinstance(error, WorldError) and error.of_another):
            aloud(f"incv: error: {error}")
    else:
        aloud(traceback.format_exc())
    abandon(world, str(error), error.exit_code if isinstance(error, InputError) else 1)


def _explained(world: World, error: Exception) -> WorldError:
    """A rank that does not answer may have said why, or be about to be missed."""
    try:
        for _ in range(_LOOKS):
            world.pulse.require_well()
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    except WorldError as told:
        return told
    return WorldError(
        f"the other ranks do not answer any more ({str(error).splitlines()[0]}): a process was killed or a node is "
        "gone. The same command goes on from the last checkpoint"
    )


def _together(wanted: Wanted, world: World, stop: StopRequest) -> Steps[int]:
    """The whole run, on every rank."""
    recipe, run = wanted.recipe, wanted.run
    if world.by_marker and world.share(lambda: _stopped_by_this_launch(run)):
        return 0  # an agent that found a worker ending badly after the stop has started us again
    opened: list[Opened] = []
    packing = world.share(lambda: _open(wanted, world, stop, opened))
    index, eval_indices, labels = opened[0] if opened else _checked(recipe, world, *seen_splits(recipe))
    require_same_start(world, recipe, {"train": index, **eval_indices})
    books: list[tuple[Manifest, StageBook]] = []
    facts = facts_of(recipe, index, eval_indices)
    try:
        start = world.share(lambda: _take(wanted, world, stop, facts, packing, index, books))
        require_common_directory(world, run)
        with rank_log(run.rank_log(world.rank), world.rank, world.size):
            heart = Heartbeat(run.heartbeat(world.rank), world.rank, world.size, world.launcher)
            world.pulse.beat, world.pulse.last_words = heart.beat, lambda: heart.close("failed")
            heart.beat()
            trace = Trace(run.trace(world.rank)) if recipe.execution.trace else None
            notes = StartNotes(run, start)
            profile = Profile(world.device, start) if wanted.profile else None
            around = Surroundings(world, recipe.execution, notes, stop, heart, trace, profile)
            identities = {stage: keys_hash(keys) for stage, keys in stage_keys(recipe, facts).items()}
            bodies = StageBodies(recipe, run, around, index, eval_indices, labels, identities)
            return (yield from _to_the_end(wanted, around, bodies, books[0] if books else None))
    finally:
        run.release()


def _stopped_by_this_launch(run: RunDirectory) -> bool:
    return run.stopped.exists() and read_json(run.stopped).get("launch") == launch_name()


Opened = tuple[SampleIndex, dict[str, SampleIndex], RunLabels]


def _open(wanted: Wanted, world: World, stop: StopRequest, opened: list[Opened]) -> float:
    """What the first rank finds before the others look; returns the seconds that packing took."""
    began = time.monotonic()
    _refuse_other_recipe(wanted.run, wanted.name)
    require_stages(wanted.redo, wanted.only, wanted.recipe)
    index, eval_indices = open_splits(wanted.recipe, stop)
    packing = time.monotonic() - began
    opened.append(_checked(wanted.recipe, world, index, eval_indices))
    return packing


def _checked(recipe: Recipe, world: World, index: SampleIndex, eval_indices: dict[str, SampleIndex]) -> Opened:
    labels = preflight(recipe, index, world)
    preflight_evaluation(recipe, eval_indices)
    return index, eval_indices, labels


def _take(
    wanted: Wanted,
    world: World,
    stop: StopRequest,
    facts: Keys,
    packing: float,
    index: SampleIndex,
    books: list[tuple[Manifest, StageBook]],
) -> int:
    """The first rank takes the directory and records this start; returns the start's number."""
    recipe, run = wanted.recipe, wanted.run
    run.take()
    manifest = Manifest(run)
    book = StageBook(recipe, facts, run, manifest)
    book.require_unchanged(wanted.redo)
    if wanted.only is not None:
        book.require_inputs(wanted.only)
    stop.forget_old_file()
    book.redo(wanted.redo)
    run.stopped.unlink(missing_ok=True)
    write_bytes(run.config, recipe_yaml(recipe).encode())
    manifest.content["dataset"] = _described(index)
    notes = manifest.begin(wanted.name, world, _batchnorm_rows(recipe, world), code_hash())
    book.begin("pack")
    book.finish("pack", packing, done=True)
    books.append((manifest, book))
    return notes.number


def _batchnorm_rows(recipe: Recipe, world: World) -> dict[str, int]:
    """Rows that BatchNorm sees together, in a fold of INCV and in a method."""
    halves = 2 if recipe.incv is not None and folds_side_by_side(recipe.execution, world) else 1
    return {
        stage: batchnorm_rows(recipe.batch.global_, ranks, recipe.batch.micro)
        for stage, ranks in (("incv", world.size // halves), ("methods", world.size))
    }


def _to_the_end(
    wanted: Wanted, around: Surroundings, bodies: StageBodies, books: tuple[Manifest, StageBook] | None
) -> Steps[int]:
    """Carry the stages out and record how this start ended. books: the first rank's."""
    manifest, book = books if books is not None else (None, None)
    ended = "failed"
    try:
        stopped_in = yield from _carry_out_stages(wanted, around, bodies, book)
        ended = "finished" if stopped_in is None else "stopped"
    except Exception:
        if manifest is not None:
            with suppress(InputError):  # the disk may be full
                manifest.end("failed")
        raise
    finally:
        bodies.close()
        around.heart.close(ended)
    if manifest is not None:
        manifest.end(ended)
    if stopped_in is None:
        around.world.meet()  # nobody falls silent while rank 0 still writes
        return 0
    stage, why = stopped_in
    if around.world.is_first:
        record = {"stage": stage, "where": why.where, "step": why.step, "reason": why.reason, "time": now()}
        write_json(wanted.run.stopped, record | {"launch": launch_name()})
        around.stop.settle()
        print(f"incv: {why}; run the same command again to go on", file=sys.stderr)
    with suppress(WorldError, RuntimeError):  # who is lost from here on has stopped all the same
        around.world.meet()  # nobody leaves before the marker is written: an agent may end those who stay behind
    return 0 if around.world.by_marker else EXIT_STOPPED


def _carry_out_stages(
    wanted: Wanted, around: Surroundings, bodies: StageBodies, book: StageBook | None
) -> Steps[tuple[str, Stopped] | None]:
    """Where and why the run was stopped, or None where it came to its end."""
    world = around.world
    for stage in stages_of(wanted.recipe):
        if stage == "pack" or wanted.only not in (None, stage):
            continue
        if not world.share(lambda: _begins(stage, book)):  # noqa: B023 - called at once
            continue
        began = time.monotonic()
        done, stopped = False, None
        try:
            yield from bodies.steps(stage)
            done = True
        except Stopped as stop:
            stopped = stop
        finally:
            seconds = time.monotonic() - began
            if book is not None:
                book.finish(stage, seconds, done)
        around.heart.at(f"waiting after {stage}", 0, 0)
        stops = world.meet(stopped is not None)
        if world.is_first:
            gather(wanted.run.root)
        if stops:
            return stage, stopped or Stopped(stage, 0, around.stop.shared_reason())
        print(f"{stage}: done in {seconds:.1f} s", file=sys.stderr)
    return None


def _begins(stage: str, book: StageBook | None) -> bool:
    """Whether a stage is to be carried out; recorded as begun, if so. The first rank decides."""
    assert book is not None
    if book.status(stage).state == "done":
        book.require_outputs(stage)
        print(f"{stage}: done before", file=sys.stderr)
        return False
    book.begin(stage)
    return True


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
