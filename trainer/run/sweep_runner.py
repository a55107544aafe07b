"""The runs of several variants of a recipe, side by side in one process."""

import sys
import traceback
from collections.abc import Sequence
from typing import Any, TextIO, cast

from shards.errors import ConfigError, InputError
from shards.pack import PackStopped
from trainer.config.sweep import Variant
from trainer.distributed.launch import detect_launch
from trainer.distributed.process_group import join_world
from trainer.distributed.stop import EXIT_STOPPED, StopRequest
from trainer.records.run_directory import RunDirectory
from trainer.run.exit_code import report_error
from trainer.run.runner import RunOptions, iterate_run
from trainer.training.interleave import Steps, interleave, run_to_end


def run_sweep(
    variants: Sequence[Variant], name: str, redo: Sequence[str], only: str | None, at_once: int
) -> list[int]:
    """The exit code of each; one that cannot run does not keep the others from it."""
    if detect_launch().master_address is not None:
        raise ConfigError("--vary runs its variants side by side in one process: start it without a launcher")
    stop = StopRequest()
    stop.listen()
    world = join_world(variants[0].recipe.execution)
    world.watchdog.stop()  # each variant has a world of its own
    options = [RunOptions(one.recipe, name, RunDirectory(one.root), redo, only) for one in variants]
    steps = [_survived(one.name, iterate_run(run), stop) for one, run in zip(variants, options, strict=True)]
    return run_to_end(interleave(steps, world.device, at_once))


def _survived(name: str, run: Steps[int], stop: StopRequest) -> Steps[int]:
    if stop.requested():  # before this one had begun to listen
        print(f"incv: {name}: not begun, since a stop was asked for", file=sys.stderr)
        return EXIT_STOPPED
    try:
        return (yield from _named(name, run))
    except (PackStopped, InputError) as error:
        return report_error(error, f"{name}: ")
    except Exception:  # the others have checkpoints to make
        print(f"incv: {name}:\n{traceback.format_exc()}", file=sys.stderr)
        return 1


def _named(name: str, run: Steps[int]) -> Steps[int]:
    """What it prints says whose it is; each run has the process's output for itself while it is at work."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _NamedStream(stream, name)) for stream in before)
    try:
        return (yield from run)
    finally:
        sys.stdout, sys.stderr = before


class _NamedStream:
    """A text stream whose lines begin with a name. No terminal: bars of several runs would write over each other."""

    def __init__(self, below: TextIO, name: str) -> None:
        self._below, self._start = below, f"{name}: "
        self._begins = True

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            self._below.write(self._start + line if self._begins and line.strip() else line)
            self._begins = line.endswith("\n")
        return len(text)

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)
