"""Runs variants (`--vary`, or the runs of an experiment) interleaved in one process."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from shards.errors import CommandStopped, ConfigError, InputError
from trainer.config.sweep import Variant
from trainer.distributed.launch import detect_launch
from trainer.distributed.process_group import join_world
from trainer.distributed.stop import EXIT_STOPPED, StopRequest
from trainer.records.logs import current_target, set_target
from trainer.records.run_directory import RunDirectory
from trainer.run.exit_code import report_error
from trainer.run.runner import RunOptions, iterate_run
from trainer.training.interleave import Steps, interleave, run_to_end

_log = logging.getLogger(__name__)


def run_sweep(
    variants: Sequence[Variant],
    redo: Sequence[str],
    only: str | None,
    at_once: int,
    check_source: bool = False,
    on_finish: Callable[[Variant], None] = lambda variant: None,
    incv_from: Path | None = None,
) -> list[int]:
    """Run all variants, `at_once` at a time; returns their exit codes. A failure does not stop the others.

    All share the execution keys of the first. on_finish: called with each variant as soon as it has finished.
    incv_from: a run whose finished INCV stage each variant takes over.
    """
    if detect_launch().master_address is not None:
        raise ConfigError("--vary runs all variants in one process: start it without a launcher")
    stop = StopRequest()
    stop.listen()
    world = join_world(variants[0].recipe.execution)
    world.watchdog.stop()  # each run starts its own watchdog
    options = [
        RunOptions(
            variant.recipe,
            variant.recipe_name,
            RunDirectory(variant.root),
            redo,
            only,
            check_source=check_source,
            incv_from=incv_from,
        )
        for variant in variants
    ]
    runs = [
        _run_variant(variant, iterate_run(option), stop, on_finish)
        for variant, option in zip(variants, options, strict=True)
    ]
    return run_to_end(interleave(runs, world.device, at_once))


def _run_variant(
    variant: Variant, run: Steps[int], stop: StopRequest, on_finish: Callable[[Variant], None]
) -> Steps[int]:
    """Execute one run, with its name before every log line. `interleave` switches the log target between runs."""
    before = current_target()
    set_target(replace(before, prefix=f"{variant.name}: "))
    try:
        if stop.requested():  # requested before this run listens for stop signals itself
            _log.info("incv: not started, because a stop was requested")
            return EXIT_STOPPED
        code = yield from run
        if code == 0:
            on_finish(variant)
        return code
    except (CommandStopped, InputError) as error:
        return report_error(error)
    except Exception:  # the other runs continue
        _log.exception("this run failed")
        return 1
    finally:
        set_target(before)
