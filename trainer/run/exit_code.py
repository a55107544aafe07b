"""How a command ends that cannot go on: a line that says why, and its exit code."""

import sys

from shards.errors import InputError
from shards.pack import PackStopped
from trainer.distributed.stop import EXIT_STOPPED


def report_error(error: PackStopped | InputError, whose: str = "") -> int:
    """The exit code, once the line is printed. whose: which of several runs it was, as in "seed=1: "."""
    if isinstance(error, PackStopped):
        print(f"incv: {whose}{error}", file=sys.stderr)
        return EXIT_STOPPED
    print(f"incv: error: {whose}{error}", file=sys.stderr)
    return error.exit_code
