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
from trainer.config.recipe_file import recipe_yaml
from trainer.config.schema import Recipe
from trainer.distributed.launch import check_launcher_options, check_world_size, detect_launch, get_launch_id
from trainer.distributed.process_group import abort, is_peer_failure, join_world, leave_world
from trainer.distributed.stop import EXIT_STOPPED, Stopped, StopRequest
from trainer.distributed.watchdog import WorldError
from trainer.distributed.world import World
from trainer.incv.rounds import folds_side_by_side
from trainer.methods.micro_batches import batchnorm_rows
from trainer.records.heartbeat import Heartbeat
from trainer.records.manifest import Manifest, StartLog, now
from trainer.records.profile import Profile, merge_profiles
from trainer.records.rank_log import print_from_any_rank, rank_log
from trainer.records.run_directory import RunDirectory
from trainer.records.trace import Trace
from trainer.run.data_sets import load_packed_splits, open_splits
from trainer.run.label_file import file_checksum
from trainer.run.preflight import RunLabels, preflight, preflight_evaluation
from trainer.run.stage_graph import Keys, StageLedger, keys_hash, require_stages, stage_keys, stages_of
from trainer.run.stages import StageRunner
from trainer.run.start_checks import code_hash, require_common_directory, require_same_start
from trainer.training.interleave import Steps, run_to_end
from trainer.training.loop import RunContext

_LOOKS, _SECONDS_BETWEEN_LOOKS = 10, 0.2


@dataclass(frozen=True)
class RunOptions:
    """What the command line asks for."""

    recipe: Recipe
    name: str
    run: RunDirectory
    redo: Sequence[str] = ()
    only: str | None = None
    """One stage alone; None: all."""
    profile: bool = False
    """Whether to measure where the time of trainings goes."""


def run_recipe(
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
    return run_to_end(iterate_run(RunOptions(recipe, name, RunDirectory(root), redo, only, profile)))


def iterate_run(options: RunOptions) -> Steps[int]:
    """`carry_out`, a step of a training at a time: for whoever has several runs side by side."""
    recipe = options.recipe
    try:
        check_launcher_options(recipe.precision)
        check_world_size(detect_launch(), recipe.execution.world)
    except ConfigError as error:
        if detect_launch().rank > 0:  # rank 0 says the same
            return error.exit_code
        raise
    stop = StopRequest(options.run.root)
    stop.listen()
    world = join_world(recipe.execution, stop)
    try:
        code = yield from _together(options, world, stop)
    except PackStopped as stopped:
        if world.is_rank0:
            print_from_any_rank(f"incv: {stopped}")
        abort(world, str(stopped), 0 if world.stop_exits_zero else EXIT_STOPPED)
        raise
    except Exception as error:
        _give_up(world, error)
        raise
    finally:
        world.watchdog.stop()
    leave_world(world, code)
    return code


def _give_up(world: World, error: Exception) -> None:
    """With company: say why, tell the others, and end. Alone: whoever called says why."""
    if world.rank_group is None:
        return
    if is_peer_failure(error):
        error = _explained(world, error)
    if isinstance(error, InputError):
        if world.is_rank0 or not (isinstance(error, WorldError) and error.from_peer):
            print_from_any_rank(f"incv: error: {error}")
    else:
        print_from_any_rank(traceback.format_exc())
    abort(world, str(error), error.exit_code if isinstance(error, InputError) else 1)


def _explained(world: World, error: Exception) -> WorldError:
    """A rank that does not answer may have said why, or be about to be missed."""
    try:
        for _ in range(_LOOKS):
            world.watchdog.raise_if_failed()
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    except WorldError as told:
        return told
    return WorldError(
        f"the other ranks do not answer any more ({str(error).splitlines()[0]}): a process was killed or a node is "
        "gone. The same command goes on from the last checkpoint"
    )


def _together(options: RunOptions, world: World, stop: StopRequest) -> Steps[int]:
    """The whole run, on every rank."""
    recipe, run = options.recipe, options.run
    if world.stop_exits_zero and world.broadcast_from_rank0(lambda: _stopped_by_this_launch(run)):
        return 0  # an agent that found a worker ending badly after the stop has started us again
    opened: list[Opened] = []
    packing = world.broadcast_from_rank0(lambda: _open(options, world, stop, opened))
    index, eval_indices, labels = opened[0] if opened else _checked(recipe, world, *load_packed_splits(recipe))
    require_same_start(world, recipe, {"train": index, **eval_indices})
    books: list[tuple[Manifest, StageLedger]] = []
    facts = checksum_keys(recipe, index, eval_indices)
    try:
        start = world.broadcast_from_rank0(lambda: _take(options, world, stop, facts, packing, index, books))
        require_common_directory(world, run)
        with rank_log(run.rank_log(world.rank), world.rank, world.size):
            heartbeat = Heartbeat(run.heartbeat(world.rank), world.rank, world.size, world.launcher)
            world.watchdog.on_heartbeat, world.watchdog.on_exit = heartbeat.write, lambda: heartbeat.close("failed")
            heartbeat.write()
            trace = Trace(run.trace(world.rank)) if recipe.execution.trace else None
            start_log = StartLog(run, start)
            profile = Profile(world.device, start) if options.profile else None
            ctx = RunContext(world, recipe.execution, start_log, stop, heartbeat, trace, profile)
            identities = {stage: keys_hash(keys) for stage, keys in stage_keys(recipe, facts).items()}
            bodies = StageRunner(recipe, run, ctx, index, eval_indices, labels, identities)
            return (yield from _to_the_end(options, ctx, bodies, books[0] if books else None))
    finally:
        run.release()


def _stopped_by_this_launch(run: RunDirectory) -> bool:
    return run.stopped.exists() and read_json(run.stopped).get("launch") == get_launch_id()


Opened = tuple[SampleIndex, dict[str, SampleIndex], RunLabels]


def _open(options: RunOptions, world: World, stop: StopRequest, opened: list[Opened]) -> float:
    """What the first rank finds before the others look; returns the seconds that packing took."""
    began = time.monotonic()
    _refuse_other_recipe(options.run, options.name)
    require_stages(options.redo, options.only, options.recipe)
    index, eval_indices = open_splits(options.recipe, stop)
    packing = time.monotonic() - began
    opened.append(_checked(options.recipe, world, index, eval_indices))
    return packing


def _checked(recipe: Recipe, world: World, index: SampleIndex, eval_indices: dict[str, SampleIndex]) -> Opened:
    labels = preflight(recipe, index, world)
    preflight_evaluation(recipe, eval_indices)
    return index, eval_indices, labels


def _take(
    options: RunOptions,
    world: World,
    stop: StopRequest,
    facts: Keys,
    packing: float,
    index: SampleIndex,
    books: list[tuple[Manifest, StageLedger]],
) -> int:
    """The first rank takes the directory and records this start; returns the start's number."""
    recipe, run = options.recipe, options.run
    run.acquire()
    manifest = Manifest(run)
    book = StageLedger(recipe, facts, run, manifest)
    book.require_unchanged(options.redo)
    if options.only is not None:
        book.require_inputs(options.only)
    stop.remove_stale_file()
    book.redo(options.redo)
    run.stopped.unlink(missing_ok=True)
    write_bytes(run.config, recipe_yaml(recipe).encode())
    manifest.content["dataset"] = _described(index)
    start_log = manifest.begin(options.name, world, _batchnorm_rows(recipe, world), code_hash())
    book.begin("pack")
    book.finish("pack", packing, done=True)
    books.append((manifest, book))
    return start_log.number


def _batchnorm_rows(recipe: Recipe, world: World) -> dict[str, int]:
    """Rows that BatchNorm sees together, in a fold of INCV and in a method."""
    halves = 2 if recipe.incv is not None and folds_side_by_side(recipe.execution, world) else 1
    return {
        stage: batchnorm_rows(recipe.batch.global_, ranks, recipe.batch.micro)
        for stage, ranks in (("incv", world.size // halves), ("methods", world.size))
    }


def _to_the_end(
    options: RunOptions, ctx: RunContext, bodies: StageRunner, books: tuple[Manifest, StageLedger] | None
) -> Steps[int]:
    """Carry the stages out and record how this start ended. books: the first rank's."""
    manifest, book = books if books is not None else (None, None)
    ended = "failed"
    try:
        stopped_in = yield from _carry_out_stages(options, ctx, bodies, book)
        ended = "finished" if stopped_in is None else "stopped"
    except Exception:
        if manifest is not None:
            with suppress(InputError):  # the disk may be full
                manifest.end("failed")
        raise
    finally:
        bodies.close()
        ctx.heartbeat.close(ended)
    if manifest is not None:
        manifest.end(ended)
    if stopped_in is None:
        ctx.world.barrier()  # nobody falls silent while rank 0 still writes
        return 0
    stage, why = stopped_in
    if ctx.world.is_rank0:
        record = {"stage": stage, "where": why.where, "step": why.step, "reason": why.reason, "time": now()}
        write_json(options.run.stopped, record | {"launch": get_launch_id()})
        ctx.stop.mark_obeyed()
        print(f"incv: {why}; run the same command again to go on", file=sys.stderr)
    with suppress(WorldError, RuntimeError):  # who is lost from here on has stopped all the same
        ctx.world.barrier()  # nobody leaves before the marker is written: an agent may end those who stay behind
    return 0 if ctx.world.stop_exits_zero else EXIT_STOPPED


def _carry_out_stages(
    options: RunOptions, ctx: RunContext, bodies: StageRunner, book: StageLedger | None
) -> Steps[tuple[str, Stopped] | None]:
    """Where and why the run was stopped, or None where it came to its end."""
    world = ctx.world
    for stage in stages_of(options.recipe):
        if stage == "pack" or options.only not in (None, stage):
            continue
        if not world.broadcast_from_rank0(lambda: _begins(stage, book)):  # noqa: B023 - called at once
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
        ctx.heartbeat.update(f"waiting after {stage}", 0, 0)
        stops = world.barrier(stopped is not None)
        if world.is_rank0:
            merge_profiles(options.run.root)
        if stops:
            return stage, stopped or Stopped(stage, 0, ctx.stop.wait_for_reason())
        print(f"{stage}: done in {seconds:.1f} s", file=sys.stderr)
    return None


def _begins(stage: str, book: StageLedger | None) -> bool:
    """Whether a stage is to be carried out; recorded as begun, if so. The first rank decides."""
    assert book is not None
    if book.status(stage).state == "done":
        book.require_outputs(stage)
        print(f"{stage}: done before", file=sys.stderr)
        return False
    book.begin(stage)
    return True


def checksum_keys(recipe: Recipe, index: SampleIndex, eval_indices: Mapping[str, SampleIndex]) -> Keys:
    """Checksums that stand for files among the result keys."""
    facts: Keys = {"data.train.checksum": index.checksum}
    facts |= {f"data.eval.{name}.checksum": each.checksum for name, each in eval_indices.items()}
    if recipe.labels.file is not None:
        facts["labels.file_checksum"] = file_checksum(Path(recipe.labels.file))
    return facts


def _refuse_other_recipe(run: RunDirectory, name: str) -> None:
    run.require_run_directory()
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
