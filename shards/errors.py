"""Errors that the user can correct, each with its exit code."""


class InputError(Exception):
    """Invalid input. The message says what is wrong, why, and what to do next."""

    exit_code = 1


class ConfigError(InputError):
    """An invalid recipe, override or command line."""

    exit_code = 2


class DataError(InputError):
    """Unusable images, shards, labels or checkpoints, or an unusable disk."""

    exit_code = 3
