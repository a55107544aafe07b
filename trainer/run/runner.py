"""Executes a run: all checks, then the lock on the run directory, then the stages that are not done."""

import logging
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shards.durable import read_json, write_bytes
from shards.errors import CommandStopped, ConfigError, InputError
from shards.sample_index import SampleIndex
from trainer.config.fitting import batchnorm_rows
from trainer.config.recipe_file import recipe_yaml
from trainer.config.schema import Recipe
from trainer.distributed.launch import check_launcher_options, check_world_size, detect_launch, get_launch_id
from trainer.distributed.process_group import abort, is_peer_failure, join_world, leave_world
from trainer.distributed.stop import EXIT_STOPPED, StopRequest
from trainer.distributed.watchdog import WorldError
from trainer.distributed.world import World
from trainer.incv.folds import folds_side_by_side
from trainer.methods.registry import methods_of
from trainer.models.weights import Weights, find_weights, load_found_weights
from trainer.records.heartbeat import Heartbeat
from trainer.records.logs import ANY_RANK, log_to_file
from trainer.records.manifest import INCV_FROM, Manifest, StartLog
from trainer.records.run_directory import RunDirectory
from trainer.records.trace import Trace
from trainer.records.trackers import tracker_settings
from trainer.report.sections.images import write_left_out
from trainer.run.data_sets import load_packed_splits, name_folders, open_splits, with_folders
from trainer.run.given_arrays import given_checksum, given_files
from trainer.run.incv_takeover import check_takeover, open_finished_incv, plan_takeover
from trainer.run.label_file import file_checksum
from trainer.run.ledger import StageLedger
from trainer.run.plan import RunOptions, RunPlan, RunStart
from trainer.run.preflight import (
    RunData,
    check_before_packing,
    fit_recipe,
    log_trainings,
    preflight,
    preflight_evaluation,
    refuse_other_recipe,
    refuse_own_list,
)
from trainer.run.result_keys import WEIGHTS_CHECKSUM, Keys
from trainer.run.stage_graph import require_stages, stages_of
from trainer.run.stage_loop import Claim, iterate_stages
from trainer.run.stages import StageRunner
from trainer.run.start_checks import code_hash, require_common_directory, require_same_start
from trainer.training.interleave import Steps, run_to_end
from trainer.training.loop import RunContext

_CAUSE_POLLS, _SECONDS_BETWEEN_POLLS = 10, 0.2
_log = logging.getLogger(__name__)


def run_recipe(
    recipe: Recipe,
    name: str,
    root: Path,
    redo: Sequence[str] = (),
    only: str | None = None,
    profile: bool = False,
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
    opened = _open_data(options, world, stop) if world.is_rank0 else None
    plan = RunPlan.from_json(world.broadcast_from_rank0(lambda: opened and opened.plan.to_json()))
    data = opened.data if opened is not None else _load_data(plan, world)
    require_same_start(world, options.recipe, {"train": data.train, **data.eval}, data.weights)
    try:
        claim = None if opened is None else _claim_directory(options, plan, world, stop, opened)
        start = RunStart(**world.broadcast_from_rank0(lambda: claim and asdict(claim.start)))
        require_common_directory(world, run)
        with log_to_file(run.rank_log(world.rank), world.rank, world.size):
            ctx = _build_context(options, plan, world, stop, start.number, len(data.labels.trained))
            stages = StageRunner(plan.recipe, run, ctx, data, start)
            return (yield from iterate_stages(stages, claim, options.only))
    finally:
        run.release()


def _build_context(
    options: RunOptions, plan: RunPlan, world: World, stop: StopRequest, start: int, samples: int
) -> RunContext:
    """start: its number; samples: number of samples that networks train on."""
    recipe, run = plan.recipe, options.run
    heartbeat = Heartbeat(run.heartbeat(world.rank), world.rank, world.size, world.launcher)
    world.watchdog.on_heartbeat, world.watchdog.on_exit = heartbeat.write, lambda: heartbeat.close("failed")
    heartbeat.write()
    trace = Trace(run.trace(world.rank)) if recipe.execution.trace else None
    trackers = tracker_settings(run.root, options.name, recipe)
    work_after = work_after_stages(recipe, samples) if options.only is None else {}
    notes = StartLog(run, start)
    return RunContext(world, recipe.execution, notes, stop, heartbeat, trace, options.profile, trackers, work_after)


def work_after_stages(recipe: Recipe, samples: int) -> dict[str, float]:
    """Return, by stage, the image passes through a network of all trainings in later stages.

    samples: in the training set; a method that trains on a selection has fewer.
    """
    work = {
        method.name: float(samples * method.config(recipe).epochs * method.networks) for method in methods_of(recipe)
    }
    stages = stages_of(recipe)
    return {stage: sum(work.get(later, 0.0) for later in stages[i + 1 :]) for i, stage in enumerate(stages)}


def _stopped_by_this_launch(run: RunDirectory) -> bool:
    return run.stopped.exists() and read_json(run.stopped).get("launch") == get_launch_id()


@dataclass(frozen=True)
class _Opened:
    """What rank 0 has opened and planned before the other ranks."""

    plan: RunPlan
    data: RunData
    packing_seconds: float


def _open_data(options: RunOptions, world: World, stop: StopRequest) -> _Opened:
    """On rank 0: find the weights, pack or verify the splits, and check all of it against the recipe."""
    recipe, run = options.recipe, options.run
    weights = find_weights(recipe.model)
    if weights is not None:
        _log.info("initial weights: %s", weights.path)
    began = time.monotonic()
    refuse_other_recipe(run, options.name)
    refuse_own_list(recipe, run)
    require_stages(options.redo, options.only, recipe)
    if options.incv_from is not None and Manifest(run).stages.get("incv", {}).get("state") != "done":
        open_finished_incv(options.incv_from)  # whether it fits is checked when the data are known
    check_before_packing(recipe, run, weights)
    train, eval_sets = open_splits(recipe, stop, run, "pack" in options.redo, options.check_source)
    packing = time.monotonic() - began
    fitted = fit_recipe(with_folders(recipe, name_folders(train, eval_sets)), train)
    plan = RunPlan(fitted, None if weights is None else weights.path)
    data = _check_data(plan, world, train, eval_sets, weights)
    log_trainings(plan.recipe, len(data.labels.trained))
    return _Opened(plan, data, packing)


def _load_data(plan: RunPlan, world: World) -> RunData:
    """On the other ranks: load what rank 0 has opened."""
    model = plan.recipe.model
    weights = None if plan.weights is None else load_found_weights(plan.weights, model)
    return _check_data(plan, world, *load_packed_splits(plan.recipe), weights)


def _check_data(
    plan: RunPlan, world: World, train: SampleIndex, eval_sets: dict[str, SampleIndex], weights: Weights | None
) -> RunData:
    labels = preflight(plan.recipe, train, world, weights)
    preflight_evaluation(plan.recipe, eval_sets)
    return RunData(train, eval_sets, labels, weights)


def _claim_directory(options: RunOptions, plan: RunPlan, world: World, stop: StopRequest, opened: _Opened) -> Claim:
    """On rank 0: lock the directory, refuse or redo changed stages, and record this start."""
    recipe, run, data = plan.recipe, options.run, opened.data
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
    log = manifest.begin(options.name, world, batchnorm, code_hash(), options.command)
    ledger.begin("pack")
    ledger.finish("pack", opened.packing_seconds, done=True)
    start = RunStart(log.number, ledger.identities(), manifest.content.get(INCV_FROM))
    return Claim(manifest, ledger, start)


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
    """Return the checksums that represent shards, files and initial weights among the result keys."""
    facts: Keys = {"data.train.checksum": index.checksum}
    facts |= {f"data.eval.{name}.checksum": each.checksum for name, each in eval_indices.items()}
    if recipe.labels.file is not None:
        facts["labels.file_checksum"] = file_checksum(Path(recipe.labels.file), "labels.file")
    if recipe.labels.corrections is not None:
        path = Path(recipe.labels.corrections)
        facts["labels.corrections_checksum"] = file_checksum(path, "labels.corrections")
    for key, path in given_files(recipe).items():
        facts[f"{key}_checksum"] = given_checksum(key, path)
    if weights is not None:
        facts[WEIGHTS_CHECKSUM] = weights.checksum
    return facts


def _describe(index: SampleIndex) -> dict[str, Any]:
    return {
        "source": index.dataset.source,
        "split": index.dataset.split,
        "samples": len(index),
        "class_names": list(index.class_names),
        "checksum": index.checksum,
    }
