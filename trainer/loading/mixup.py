"""mixup and CutMix: the partner, the share and the box of each row, as pure functions of the ids of a step."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.loading.epoch_plan import Mixing
from trainer.loading.sample_order import Ids, Views, draw_uniforms


@dataclass(frozen=True, eq=False)
class RowMix:
    """How the rows of a request are mixed: row = shares * row + (1 - shares) * partner."""

    partners: npt.NDArray[np.int64]
    """[n]: the request row of each row's partner."""
    shares: npt.NDArray[np.float32]
    """[n]: 1 for rows that are not mixed."""
    guests: int
    """Number of the batch's rows, after those of the rank, that partners of other ranks have at most."""
    boxes: npt.NDArray[np.int32] | None = None
    """[n, 4]: left, top, right and bottom of what a row shows of its partner with CutMix; None with mixup."""


def partner_rows(starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the partner of each row of a step: the next row of its block, and the first for the last.

    A step's ids are in random order, so partners are random too. Each rank has contiguous rows of a block, and so
    needs one more image of it than its own, for any number of ranks.

    Args:
        starts: The first row of each block, that is, of a part and a look; and the number of all rows.
    """
    partners = np.arange(1, starts[-1] + 1)
    filled = np.flatnonzero(np.diff(starts))
    partners[starts[filled + 1] - 1] = starts[filled]
    return partners


def draw_mix(
    mixing: Mixing, stream: int, epoch: int, ids: Ids, views: Views, size: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int32] | None]:
    """Draw the share of each row in its mixture, and with CutMix the box that shows its partner.

    Args:
        size: Side of an image, in pixels.
    """
    shares = draw_betas(stream, epoch, ids, mixing.alpha, views)
    if mixing.kind == "mixup":
        return shares, None
    side = np.rint(size * np.sqrt(1 - shares)).astype(np.int64)
    corners = []
    for axis in "xy":
        centre = (draw_uniforms(stream, epoch, ids, f"cutmix {axis}", views) * size).astype(np.int64)
        first = centre - side // 2
        corners.append((np.clip(first, 0, size), np.clip(first + side, 0, size)))
    (left, right), (top, bottom) = corners
    boxes = np.stack([left, top, right, bottom], axis=1).astype(np.int32)
    return 1 - (right - left) * (bottom - top) / size**2, boxes


def draw_betas(stream: int, epoch: int, ids: Ids, alpha: float, views: Views = 0) -> npt.NDArray[np.float64]:
    """Draw one number from Beta(alpha, alpha) per row: float64 [len(ids)]."""
    first, second = (_draw_log_gammas(stream, epoch, ids, alpha, f"mixup {which}", views) for which in (0, 1))
    with np.errstate(over="ignore"):  # exp may be infinite, which gives the share 0
        return 1.0 / (1.0 + np.exp(second - first))


def _draw_log_gammas(
    stream: int, epoch: int, ids: Ids, alpha: float, what: str, views: Views
) -> npt.NDArray[np.float64]:
    """Draw the logarithm of one Gamma(alpha) number per row, by the method of Marsaglia and Tsang (2000).

    Works with logarithms, because Gamma(alpha) underflows if alpha is small.
    """
    if alpha < 1:
        boost = np.log(_draw_positive(stream, epoch, ids, f"{what} boost", views)) / alpha
        return boost + _draw_log_gammas(stream, epoch, ids, alpha + 1, what, views)
    offset = alpha - 1 / 3
    logs = np.full(len(ids), np.nan)
    attempt = 0
    while len(left := np.flatnonzero(np.isnan(logs))):
        own = views if isinstance(views, int) else views[left]
        draws = [_draw_positive(stream, epoch, ids[left], f"{what} {attempt} {which}", own) for which in range(3)]
        normal = np.sqrt(-2 * np.log(draws[0])) * np.cos(2 * np.pi * draws[1])
        cube = np.maximum(1 + normal / np.sqrt(9 * offset), 0) ** 3
        with np.errstate(divide="ignore"):  # log(0) is -inf, which is rejected
            log_cube = np.log(cube)
        accepted = np.log(draws[2]) < normal**2 / 2 + offset * (1 - cube + log_cube)
        logs[left[accepted]] = np.log(offset) + log_cube[accepted]
        attempt += 1
    return logs


def _draw_positive(stream: int, epoch: int, ids: Ids, what: str, views: Views) -> npt.NDArray[np.float64]:
    """Draw one uniform number in (0, 1] per row."""
    return 1.0 - draw_uniforms(stream, epoch, ids, what, views)
