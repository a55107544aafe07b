"""A pass of frozen networks over samples, and its result: a table of device columns keyed by sample_id."""

from enum import IntEnum


class Status(IntEnum):
    """Whether the numbers of a row count; here, so that the report reads it without importing torch."""

    OK = 0
    UNREADABLE = 1
    NON_FINITE = 2
