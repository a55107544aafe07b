"""Reports the error that ends a command as one log line, and gives its exit code."""

import logging

from shards.errors import CommandStopped, InputError
from trainer.distributed.stop import EXIT_STOPPED

_log = logging.getLogger(__name__)


def report_error(error: CommandStopped | InputError) -> int:
    """Log the error; returns the exit code."""
    if isinstance(error, CommandStopped):
        _log.info("incv: %s", error)
        return EXIT_STOPPED
    _log.error("%s", error)
    return error.exit_code
