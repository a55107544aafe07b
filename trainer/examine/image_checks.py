"""Bad pictures, found by simple numbers: blank, dark, bright, blurred, tiny, of an odd shape."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.examine.outliers import robust_limit

Ints = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class ImageCheck:
    """What one check found, and why its threshold is what it is."""

    name: str
    found: npt.NDArray[np.bool_]
    """bool [n]"""
    values: npt.NDArray[np.float64]
    """float64 [n], what is compared with the threshold"""
    threshold: float
    why: str


@dataclass(frozen=True)
class _Rule:
    name: str
    what: str
    low: bool
    """Whether low values are bad, not high ones."""
    suspicious: float
    """A better value is never found, however unusual it is in the data set."""
    useless: float
    """A worse value is always found, however usual it is."""


_BLANK = _Rule("blank", "the standard deviation of the grey values of 0 to 255", True, 6.0, 1.0)
_RULES = (
    _Rule("dark", "the grey value of 0 to 255 that only 1 % of the pixels exceed", True, 70.0, 6.0),
    _Rule("bright", "the grey value of 0 to 255 that 99 % of the pixels exceed", False, 190.0, 250.0),
    _Rule("blurred", "the mean step between neighbouring pixels, in standard deviations of all", True, 0.12, 0.0),
    _Rule("tiny", "the shorter side in pixels", True, 64.0, 8.0),
    _Rule("odd_aspect", "the longer side divided by the shorter", False, 2.5, 20.0),
)


def check_images(thumbnails: npt.NDArray[np.uint8], width: Ints, height: Ints) -> dict[str, ImageCheck]:
    """Find bad pictures: those that are unusual in this data set and suspicious by themselves. Digits on black are
    then not all dark, and photos of 32 pixels not all tiny.

    Args:
        thumbnails: uint8 [n, 3, h, w].
        width: of the original images in pixels, int [n].
        height: likewise.
    """
    grey = thumbnails.mean(axis=1, dtype=np.float32)
    deviation = grey.std(axis=(1, 2))
    blank = _judge(_BLANK, deviation)
    steps = (np.abs(np.diff(grey, axis=1)).mean(axis=(1, 2)) + np.abs(np.diff(grey, axis=2)).mean(axis=(1, 2))) / 2
    short, long = np.minimum(width, height), np.maximum(width, height)
    values = {
        "dark": np.percentile(grey, 99, axis=(1, 2)),
        "bright": np.percentile(grey, 1, axis=(1, 2)),
        "blurred": np.where(blank.found, np.inf, steps / np.maximum(deviation, 1e-6)),
        "tiny": short,
        "odd_aspect": long / np.maximum(short, 1),
    }
    return {"blank": blank} | {rule.name: _judge(rule, values[rule.name]) for rule in _RULES}


def _judge(rule: _Rule, measured: npt.NDArray[Any]) -> ImageCheck:
    values = measured.astype(np.float64)
    sign = 1 if rule.low else -1
    unusual = -sign * robust_limit(-sign * values[np.isfinite(values)])
    threshold = sign * float(np.clip(sign * unusual, sign * rule.useless, sign * rule.suspicious))
    side = "below" if rule.low else "above"
    if threshold == unusual:
        reason = f"images {side} {threshold:.3g} are unusual in this data set"
    elif threshold == rule.suspicious:
        reason = f"images are suspicious only {side} {threshold:.3g}, though less is unusual in this data set"
    else:
        reason = f"images {side} {threshold:.3g} are useless, though usual in this data set"
    return ImageCheck(rule.name, sign * values < sign * threshold, values, threshold, f"{rule.what}: {reason}")
