"""Runs variants (`--vary`, or the runs of an experiment) interleaved in one process."""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from shards.errors import CommandStopped, ConfigError, InputError
from trainer.config.sweep import Variant
from trainer.distributed.launch import detect_launch
from trainer.distributed.process_group import join_world
from trainer.distributed.stop import EXIT_STOPPED, StopRequest
from trainer.records.logs import current_target, report_error, set_target
from trainer.records.run_directory import RunDirectory
from trainer.run.plan import RunOptions
from trainer.run.runner import iterate_run
from trainer.run.shared_incv import find_incv_sources, wait_for_incv
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

    All share the execution keys of the first. Variants with the same INCV stage run it once, unless stages are
    redone. on_finish: called with each variant as soon as it has finished. incv_from: a run whose finished INCV stage
    each variant takes over.
    """
    if detect_launch().master_address is not None:
        raise ConfigError("--vary runs all variants in one process: start it without a launcher")
    stop = StopRequest()
    stop.listen()
    world = join_world(variants[0].recipe.execution)
    world.watchdog.stop()  # each run starts its own watchdog
    sources = find_incv_sources(variants, redo, only, incv_from)
    # Those that wait for the INCV stage of another come last: a slot is better used by a run that trains.
    ordered = sorted(variants, key=lambda variant: variant.root in sources)
    ended: dict[Path, int] = {}
    successors: dict[Path, Variant] = {}
    runs = []
    for variant in ordered:
        options = RunOptions(
            variant.recipe,
            variant.recipe_name,
            RunDirectory(variant.root),
            redo,
            only,
            check_source=check_source,
            incv_from=incv_from,
            command=variant.command,
        )
        take = partial(_take_incv_over, variant, sources.get(variant.root), ended, successors, stop)
        runs.append(_run_variant(variant, options, take, ended, stop, on_finish))
    run_to_end(interleave(runs, world.device, at_once))
    return [ended[variant.root] for variant in variants]


def _run_variant(
    variant: Variant,
    options: RunOptions,
    take_incv_over: Callable[[], Steps[Path | None]],
    ended: dict[Path, int],
    stop: StopRequest,
    on_finish: Callable[[Variant], None],
) -> Steps[None]:
    """Execute one run, with its name before every log line. `interleave` switches the log target between runs.

    take_incv_over: waits for the INCV stage of another variant, if that is to be taken over, and returns its run
    directory; ended: the exit codes by run directory, to which it adds its own.
    """
    before = current_target()
    set_target(replace(before, prefix=f"{variant.name}: "))
    try:
        if (taken := (yield from take_incv_over())) is not None:
            options = replace(options, incv_from=taken)
        ended[variant.root] = yield from _execute(options, stop)
        if ended[variant.root] == 0:
            on_finish(variant)
    except (CommandStopped, InputError) as error:
        ended[variant.root] = report_error(error)
    except Exception:  # the other runs continue
        _log.exception("this run failed")
        ended[variant.root] = 1
    finally:
        set_target(before)


def _take_incv_over(
    variant: Variant,
    source: Variant | None,
    ended: Collection[Path],
    successors: dict[Path, Variant],
    stop: StopRequest,
) -> Steps[Path | None]:
    """Wait for the INCV stage of `source`, and return its run directory; None if this variant executes INCV itself.

    ended: the directories of the runs that have ended; successors: the variant that executes INCV instead of one that
    ended without finishing it, by the run directory of that one; the first variant that waits adds itself.
    """
    while source is not None and not stop.requested():
        _log.info("incv: the same as that of %s, which executes it", source.name)
        if (root := (yield from wait_for_incv(source, ended, stop))) is not None:
            return root
        if stop.requested():
            break
        successor = successors.setdefault(source.root, variant)
        _log.info("incv: %s has ended without finishing it", source.name)
        source = None if successor.root == variant.root else successor
    return None


def _execute(options: RunOptions, stop: StopRequest) -> Steps[int]:
    if stop.requested():  # requested before this run listens for stop signals itself
        _log.info("incv: not started, because a stop was requested")
        return EXIT_STOPPED
    return (yield from iterate_run(options))
