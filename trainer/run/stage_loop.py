"""Runs the stages that are not done, one after the other, and records how this start ended."""

import logging
import time
from contextlib import suppress
from dataclasses import dataclass

from shards.durable import write_json
from shards.errors import InputError
from trainer.distributed.launch import get_launch_id
from trainer.distributed.stop import EXIT_STOPPED, Stopped
from trainer.distributed.watchdog import WorldError
from trainer.records.manifest import Manifest, now
from trainer.run.ledger import StageLedger
from trainer.run.plan import RunStart
from trainer.run.stage_graph import find_stage, stages_of
from trainer.run.stages import StageRunner
from trainer.training.interleave import Steps

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Claim:
    """What rank 0 holds after it has claimed the run directory."""

    manifest: Manifest
    ledger: StageLedger
    start: RunStart


def iterate_stages(stages: StageRunner, claim: Claim | None, only: str | None = None) -> Steps[int]:
    """Run all stages, or `only` one; record how this start ended, and return the exit code. claim: rank 0 only."""
    ctx, run = stages.ctx, stages.run
    ended, ledger = "failed", claim.ledger if claim is not None else None
    try:
        stopped_in = yield from _run_stages(stages, ledger, only)
        ended = "finished" if stopped_in is None else "stopped"
    except Exception:
        if claim is not None:
            with suppress(InputError):  # the disk may be full
                claim.manifest.end("failed")
        raise
    finally:
        stages.close()
        ctx.heartbeat.close(ended)
    if claim is not None:
        claim.manifest.end(ended)
    if stopped_in is None:
        ctx.world.barrier()  # no rank exits before rank 0 has written its files
        return 0
    stage, why = stopped_in
    if ctx.world.is_rank0:
        record = {"stage": stage, "where": why.where, "step": why.step, "reason": why.reason, "time": now()}
        write_json(run.stopped, record | {"launch": get_launch_id()})
        ctx.stop.mark_obeyed()
        _log.info("incv: %s; run the same command again to resume", why)
    with suppress(WorldError, RuntimeError):  # a rank that fails from here on has stopped anyway
        ctx.world.barrier()  # no rank exits before stopped.json is written: its agent may kill the others
    return 0 if ctx.world.stop_exits_zero else EXIT_STOPPED


def _run_stages(
    stages: StageRunner, ledger: StageLedger | None, only: str | None
) -> Steps[tuple[str, Stopped] | None]:
    """Run the stages; returns where and why the run was stopped, or None if it finished. ledger: rank 0 only."""
    ctx, world = stages.ctx, stages.ctx.world
    names = stages_of(stages.recipe)
    for stage in names:
        if find_stage(stage).run is None or only not in (None, stage):
            continue
        if not world.broadcast_from_rank0(lambda: _begins(stage, ledger)):  # noqa: B023 - called at once
            continue
        began = time.monotonic()
        done, stopped = False, None
        try:
            yield from stages.iterate(stage)
            done = True
        except Stopped as stop:
            stopped = stop
        finally:
            seconds = time.monotonic() - began
            if ledger is not None:
                ledger.finish(stage, seconds, done)
        ctx.heartbeat.update(f"waiting after {stage}", 0, 0)
        stops = world.barrier(stopped is not None)
        if stops:
            return stage, stopped or Stopped(stage, 0, ctx.stop.wait_for_reason())
        _log.info("%s: done in %.1f s", stage, seconds)
    return None


def _begins(stage: str, ledger: StageLedger | None) -> bool:
    """On rank 0: return whether the stage has to run; if so, record it as begun."""
    assert ledger is not None
    if ledger.status(stage).state == "done":
        ledger.require_outputs(stage)
        _log.info("%s: already done", stage)
        return False
    ledger.begin(stage)
    return True
