"""The status of a held-out prediction; apart from the predictions, so that reading it does not import torch."""

from enum import IntEnum


class Status(IntEnum):
    OK = 0
    UNREADABLE = 1
    NON_FINITE = 2
