"""Executes a run: all checks, then the lock on the run directory, then the stages that are not done."""

import logging
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shards.durable import read_json, write_bytes
from shards.errors import CommandStopped, ConfigError, InputError
from shards.sample_index import SampleIndex
from trainer.config.recipe_file import recipe_yaml
from trainer.config.schema import Recipe
from trainer.distributed.launch import check_launcher_options, check_world_size, detect_launch, get_launch_id
from trainer.distributed.process_group import abort, is_peer_failure, join_world, leave_world
from trainer.distributed.stop import EXIT_STOPPED, StopRequest
from trainer.distributed.watchdog import WorldError
from trainer.distributed.world import World
from trainer.incv.fold_placement import folds_side_by_side
from trainer.methods.micro_batches import batchnorm_rows
from trainer.models.weights import Weights
from trainer.records.heartbeat import Heartbeat
from trainer.records.logs import ANY_RANK, log_to_file
from trainer.records.manifest import Manifest, StartLog
from trainer.records.profile import Profile
from trainer.records.run_directory import RunDirectory
from trainer.records.trace import Trace
from trainer.records.trackers import tracker_settings
from trainer.report.sections.images import write_left_out
from trainer.run.data_sets import load_packed_splits, name_folders, open_splits, with_folders
from trainer.run.fitted_recipe import fit_recipe, log_trainings
from trainer.run.incv_takeover import check_takeover, open_finished_incv, plan_takeover
from trainer.run.initial_weights import share_weights
from trainer.run.label_file import file_checksum
from trainer.run.preflight import RunData, preflight, preflight_evaluation, refuse_other_recipe, refuse_own_list
from trainer.run.recipe_check import check_before_packing
from trainer.run.result_keys import Keys
from trainer.run.stage_graph import StageLedger, require_stages
from trainer.run.stage_loop import Claim, iterate_stages
from trainer.run.stages import StageRunner
from trainer.run.start_checks import code_hash, require_common_directory, require_same_start
from trainer.run.workload import work_after_stages
from trainer.training.interleave import Steps, run_to_end
from trainer.training.loop import RunContext

_CAUSE_POLLS, _SECONDS_BETWEEN_POLLS = 10, 0.2
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunOptions:
    """The recipe, the run directory and the command-line options of a run."""

    recipe: Recipe
    name: str
    run: RunDirectory
    redo: Sequence[str] = ()
    only: str | None = None
    """The only stage to run; None: all stages."""
    profile: str | None = None
    """`summary`: measure the phases of each training; `trace`: also trace a few steps; None: neither."""
    check_source: bool = False
    """Whether to compare a large source with what was packed from it; a small one is always compared."""
    incv_from: Path | None = None
    """The directory of a run whose finished INCV stage this run takes over; None: it runs INCV itself."""
    command: str | None = None
    """The command that executes this run alone, which the manifest records; None: the one that was typed."""


def run_recipe(
    recipe: Recipe,
    name: str,
    root: Path,
    redo: Sequence[str] = (),
    only: str | None = None,
    profile: str | None = None,
    check_source: bool = False,
    incv_from: Path | None = None,
) -> int:
    """Run all stages, or `only` one, in the directory `root`; returns the exit code. Call it on every rank.

    Nothing is written to the run directory until recipe, shards and labels have passed all checks. Raises
    CommandStopped if packing is stopped.
    """
    options = RunOptions(recipe, name, RunDirectory(root), redo, only, profile, check_source, incv_from)
    return run_to_end(iterate_run(options))


def iterate_run(options: RunOptions) -> Steps[int]:
    """Run a recipe as a generator that yields after every training step, so that runs can be interleaved."""
    recipe = options.recipe
    try:
        check_launcher_options(recipe.precision)
        check_world_size(detect_launch(), recipe.execution.world)
    except ConfigError as error:
        if detect_launch().rank > 0:  # rank 0 reports the same error
            return error.exit_code
        raise
    stop = StopRequest(options.run.root)
    stop.listen()
    world = join_world(recipe.execution, stop)
    try:
        code = yield from _run_on_rank(options, world, stop)
    except CommandStopped as stopped:
        if world.is_rank0:
            _log.info("incv: %s", stopped, extra=ANY_RANK)
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
    """Report the error, notify the other ranks and end the process. Without other ranks, leave that to the caller."""
    if world.rank_group is None:
        return
    if is_peer_failure(error):
        error = _find_cause(world, error)
    if not isinstance(error, InputError):
        _log.info("%s", "".join(traceback.format_exception(error)).rstrip(), extra=ANY_RANK)
    elif world.is_rank0 or not (isinstance(error, WorldError) and error.from_peer):
        _log.error("%s", error, extra=ANY_RANK)
    abort(world, str(error), error.exit_code if isinstance(error, InputError) else 1)


def _find_cause(world: World, error: Exception) -> WorldError:
    """Return the cause that the failed rank has reported or that the watchdog finds within a few polls."""
    try:
        for _ in range(_CAUSE_POLLS):
            world.watchdog.raise_if_failed()
            time.sleep(_SECONDS_BETWEEN_POLLS)
    except WorldError as cause:
        return cause
    return WorldError(
        f"the other ranks no longer respond ({str(error).splitlines()[0]}): a process was killed or a node failed. "
        "Run the same command again to resume from the last checkpoint"
    )


def _run_on_rank(options: RunOptions, world: World, stop: StopRequest) -> Steps[int]:
    """Execute the whole run on this rank; returns the exit code."""
    run = options.run
    if world.stop_exits_zero and world.broadcast_from_rank0(lambda: _stopped_by_this_launch(run)):
        return 0  # the elastic agent restarted this process because a worker failed after the stop
    weights = share_weights(world, options.recipe.model)
    opened = world.run_on_rank0(lambda: _open_data(options, world, stop, weights))
    folders = world.broadcast_from_rank0(
        lambda: name_folders(opened.data.train, opened.data.eval) if opened is not None else {}
    )
    recipe = with_folders(options.recipe, folders)
    data = opened.data if opened is not None else _check_data(recipe, world, *load_packed_splits(recipe), weights)
    options = replace(options, recipe=(recipe := fit_recipe(recipe, data.train)))
    require_same_start(world, recipe, {"train": data.train, **data.eval}, weights)
    try:
        claim = world.run_on_rank0(
            lambda: _claim_directory(options, world, stop, data, opened.packing_seconds if opened else 0.0)
        )
        shared = world.broadcast_from_rank0(lambda: claim.shared() if claim is not None else None)
        require_common_directory(world, run)
        with log_to_file(run.rank_log(world.rank), world.rank, world.size):
            ctx = _build_context(options, world, stop, shared["start"], len(data.labels.trained))
            stages = StageRunner(recipe, run, ctx, data, shared["identities"], shared["incv_from"])
            return (yield from iterate_stages(run, recipe, ctx, stages, claim, options.only))
    finally:
        run.release()


def _build_context(options: RunOptions, world: World, stop: StopRequest, start: int, samples: int) -> RunContext:
    """samples: number of samples that networks train on."""
    recipe, run = options.recipe, options.run
    heartbeat = Heartbeat(run.heartbeat(world.rank), world.rank, world.size, world.launcher)
    world.watchdog.on_heartbeat, world.watchdog.on_exit = heartbeat.write, lambda: heartbeat.close("failed")
    heartbeat.write()
    trace = Trace(run.trace(world.rank)) if recipe.execution.trace else None
    profile = Profile(world.device, start, options.profile == "trace") if options.profile else None
    trackers = tracker_settings(run.root, options.name, recipe)
    work_after = work_after_stages(recipe, samples, options.only)
    return RunContext(
        world, recipe.execution, StartLog(run, start), stop, heartbeat, trace, profile, trackers, work_after
    )


def _stopped_by_this_launch(run: RunDirectory) -> bool:
    return run.stopped.exists() and read_json(run.stopped).get("launch") == get_launch_id()


@dataclass(frozen=True)
class _Opened:
    """The data that rank 0 opens before the other ranks."""

    data: RunData
    packing_seconds: float


def _open_data(options: RunOptions, world: World, stop: StopRequest, weights: Weights | None) -> _Opened:
    """On rank 0: pack or verify the splits, and check them against the recipe."""
    began = time.monotonic()
    refuse_other_recipe(options.run, options.name)
    refuse_own_list(options.recipe, options.run)
    require_stages(options.redo, options.only, options.recipe)
    if options.incv_from is not None and Manifest(options.run).stages.get("incv", {}).get("state") != "done":
        open_finished_incv(options.incv_from)  # whether it fits is checked when the data are known
    check_before_packing(options.recipe, options.run, weights)
    redo = "pack" in options.redo
    train, eval_sets = open_splits(options.recipe, stop, options.run, redo, options.check_source)
    packing = time.monotonic() - began
    data = _check_data(options.recipe, world, train, eval_sets, weights)
    log_trainings(fit_recipe(options.recipe, train), len(data.labels.trained))
    return _Opened(data, packing)


def _check_data(
    recipe: Recipe, world: World, train: SampleIndex, eval_sets: dict[str, SampleIndex], weights: Weights | None
) -> RunData:
    recipe = fit_recipe(recipe, train)
    labels = preflight(recipe, train, world, weights)
    preflight_evaluation(recipe, eval_sets)
    return RunData(train, eval_sets, labels, weights)


def _claim_directory(
    options: RunOptions, world: World, stop: StopRequest, data: RunData, packing_seconds: float
) -> Claim:
    """On rank 0: lock the directory, refuse or redo changed stages, and record this start."""
    recipe, run = options.recipe, options.run
    facts = checksum_keys(recipe, data.train, data.eval, data.weights)
    if options.incv_from is not None:
        before = StageLedger(recipe, facts, run, Manifest(run))
        check_takeover(options.incv_from, before, run, data.labels, options.redo)
    run.acquire()
    manifest = Manifest(run)
    ledger = StageLedger(recipe, facts, run, manifest)
    ledger.require_unchanged(options.redo)
    if options.only is not None:
        ledger.require_inputs(options.only)
    stop.remove_stale_file()
    ledger.redo(options.redo)
    if options.only in (None, "incv"):
        plan_takeover(options.incv_from, ledger, manifest, run, data.labels)
    run.stopped.unlink(missing_ok=True)
    write_bytes(run.config, recipe_yaml(recipe).encode())
    write_left_out(run, {"train": data.train, **data.eval})
    manifest.content["dataset"] = _describe(data.train)
    batchnorm = _batchnorm_rows(recipe, world)
    start = manifest.begin(options.name, world, batchnorm, code_hash(), options.command)
    ledger.begin("pack")
    ledger.finish("pack", packing_seconds, done=True)
    return Claim(manifest, ledger, start.number)


def _batchnorm_rows(recipe: Recipe, world: World) -> dict[str, int]:
    """Return the rows that BatchNorm sees at once, in a fold of INCV and in a training method."""
    apart = recipe.incv is not None and folds_side_by_side(recipe.incv.trained_folds, recipe.execution, world)
    return {
        stage: batchnorm_rows(recipe.batch.rows, ranks, recipe.batch.micro)
        for stage, ranks in (("incv", world.size // 2 if apart else world.size), ("methods", world.size))
    }


def checksum_keys(
    recipe: Recipe, index: SampleIndex, eval_indices: Mapping[str, SampleIndex], weights: Weights | None = None
) -> Keys:
    """Return the checksums that represent shards, label files and initial weights among the result keys."""
    facts: Keys = {"data.train.checksum": index.checksum}
    facts |= {f"data.eval.{name}.checksum": each.checksum for name, each in eval_indices.items()}
    if recipe.labels.file is not None:
        facts["labels.file_checksum"] = file_checksum(Path(recipe.labels.file), "labels.file")
    if recipe.labels.corrections is not None:
        path = Path(recipe.labels.corrections)
        facts["labels.corrections_checksum"] = file_checksum(path, "labels.corrections")
    if weights is not None:
        facts["model.weights_checksum"] = weights.checksum
    return facts


def _describe(index: SampleIndex) -> dict[str, Any]:
    return {
        "source": index.dataset.source,
        "split": index.dataset.split,
        "samples": len(index),
        "class_names": list(index.class_names),
        "checksum": index.checksum,
    }
