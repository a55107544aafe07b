"""`audit_ranks.py run -c ...`, under torchrun: `incv` with small parts of features, killed once on rank 1.

At the first attempt, rank 1 sends itself SIGKILL in the middle of the third part. The product has no test hooks; this
wraps one of its functions before it starts.
"""

import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

import trainer.passes.feature_store
import trainer.passes.sample_pass
from tests.support.killed_run import die
from trainer.cli import main

PIECE = 32
"""Images of a part."""
FINISHED_PARTS = 2


def kill_in_the_third_part() -> None:
    iterate_forward, passes = trainer.passes.sample_pass.iterate_forward, itertools.count()

    def killed(*arguments: Any) -> Iterator[Any]:
        due = next(passes) == FINISHED_PARTS
        for number, batch in enumerate(iterate_forward(*arguments)):
            if due and number == 1:
                die()
            yield batch

    trainer.passes.sample_pass.iterate_forward = killed


if __name__ == "__main__":
    trainer.passes.feature_store.PIECE = PIECE
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        kill_in_the_third_part()
    sys.exit(main(sys.argv[1:]))
