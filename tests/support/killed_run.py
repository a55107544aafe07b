"""`python killed_run.py POINT -- run -c ...`: an `incv` command that sends itself SIGKILL at POINT.

The product has no test hooks; this wraps one of its functions before it starts. What a kill -9 from outside
would do at that very moment, this does: no handler, no `finally`, no flush.
"""

import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import trainer.passes.sample_pass
import trainer.training.checkpoint
from trainer.cli import main
from trainer.incv.folds import FoldTask
from trainer.methods.coteaching import CoteachingTask
from trainer.methods.standard import StandardTask
from trainer.run.stages import StageRunner


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # in another thread than the one the kernel takes first: do nothing more
    raise AssertionError("killed, and still here")


def in_fold_training() -> None:
    """In the middle of the second fold of round 1: the first fold has 25 steps."""
    step, calls = StandardTask.step, itertools.count(1)

    def killed(self: StandardTask, batch: Any, at: Any) -> Any:
        if isinstance(self, FoldTask) and next(calls) == 38:
            die()
        return step(self, batch, at)

    StandardTask.step = killed  # type: ignore[method-assign]


def in_predict_pass() -> None:
    """At the second batch of the first predict pass that follows a finished fold training."""
    round_network, iterate_forward = FoldTask.round_network, trainer.passes.sample_pass.iterate_forward
    trained = []

    def noted(self: FoldTask) -> Any:
        trained.append(self)
        return round_network(self)

    def killed(*arguments: Any) -> Iterator[Any]:
        for number, batch in enumerate(iterate_forward(*arguments)):
            if trained and number == 1:
                die()
            yield batch

    FoldTask.round_network = noted  # type: ignore[method-assign]
    trainer.passes.sample_pass.iterate_forward = killed


def in_checkpoint_write() -> None:
    """With the files of coteaching_incv's first checkpoint after step 0 half written."""
    atomic_folder = trainer.training.checkpoint.atomic_folder

    @contextmanager
    def killed(path: Path) -> Iterator[Path]:
        with atomic_folder(path) as temporary:
            yield temporary
            if "coteaching_incv" in path.parts and path.name != "step-0000000000":
                for file in temporary.iterdir():
                    os.truncate(file, file.stat().st_size // 2)
                die()

    trainer.training.checkpoint.atomic_folder = killed


def in_coteaching() -> None:
    step, calls = CoteachingTask.step, itertools.count(1)

    def killed(self: CoteachingTask, batch: Any, at: Any) -> Any:
        if next(calls) == 13:
            die()
        return step(self, batch, at)

    CoteachingTask.step = killed  # type: ignore[method-assign]


def in_evaluation() -> None:
    """In the second method's pass."""
    count, iterate_forward = StageRunner._count, trainer.passes.sample_pass.iterate_forward
    calls = itertools.count(1)

    def noted(self: StageRunner, *arguments: Any) -> Any:
        if next(calls) == 2:
            trainer.passes.sample_pass.iterate_forward = killed
        return count(self, *arguments)

    def killed(*arguments: Any) -> Iterator[Any]:
        for batch in iterate_forward(*arguments):
            yield batch
            die()

    StageRunner._count = noted  # type: ignore[method-assign]


def in_relabelling_pass() -> None:
    """At the second batch of the second pass of `relabel_package`, which runs between two epochs."""
    iterate_forward, calls = trainer.passes.sample_pass.iterate_forward, itertools.count(1)

    def killed(*arguments: Any) -> Iterator[Any]:
        due = "relabel: re-labelling" in arguments and next(calls) == 2
        for number, batch in enumerate(iterate_forward(*arguments)):
            if due and number == 1:
                die()
            yield batch

    trainer.passes.sample_pass.iterate_forward = killed


def in_relabelled_epoch() -> None:
    """In the middle of an epoch that `relabel_package` has planned after a pass: an epoch has 7 steps."""
    step = StandardTask.step

    def killed(self: StandardTask, batch: Any, at: Any) -> Any:
        if not self.plans_ahead and at.step == 18:
            die()
        return step(self, batch, at)

    StandardTask.step = killed  # type: ignore[method-assign]


POINTS: dict[str, Callable[[], None]] = {
    "fold_training": in_fold_training,
    "predict_pass": in_predict_pass,
    "checkpoint_write": in_checkpoint_write,
    "coteaching": in_coteaching,
    "evaluation": in_evaluation,
    "relabelling_pass": in_relabelling_pass,
    "relabelled_epoch": in_relabelled_epoch,
}

if __name__ == "__main__":
    point, separator, *arguments = sys.argv[1:]
    assert separator == "--", __doc__
    POINTS[point]()
    sys.exit(main(arguments))
