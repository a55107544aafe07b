"""The two mistakes a user can make; each carries the exit code of the command that meets it."""


class InputError(Exception):
    """Something the user gave is wrong. The message says what, why, and what to do next."""

    exit_code = 1


class ConfigError(InputError):
    """A recipe, an override or a command line that cannot be run as it stands."""

    exit_code = 2


class DataError(InputError):
    """Images, shards, labels, checkpoints or a disk that cannot be used as they stand."""

    exit_code = 3
