"""mixup: the partner and the share of each row, as pure functions of the ids of a step."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.loading.sample_order import Ids, StepIds, draw_uniforms, slice_for_rank


@dataclass(frozen=True, eq=False)
class RowMix:
    """How the rows of a request are mixed: row = shares * row + (1 - shares) * partner."""

    partners: npt.NDArray[np.int64]
    """[n]: the request row of each row's partner."""
    shares: npt.NDArray[np.float32]
    """[n]: 1 for rows that are not mixed."""


def partner_ids(ids: Ids) -> Ids:
    """Return the partner of each of a step's ids: the next one, and the first for the last.

    A step's ids are in random order, so partners are random too. Each rank has a contiguous part of the ids, and so
    needs one more image than its own, for any number of ranks.
    """
    return np.roll(ids, -1)


def mix_for_rank(ids: Ids, step: StepIds, stream: int, alpha: float, rank: int, world: int) -> tuple[Ids, RowMix]:
    """Return a rank's ids followed by the ids of partners that are not among them, and how to mix these rows.

    ids: the rank's part of the step, or all of it if the rank has none.
    """
    partner_of_s, partner_of_c = partner_ids(step.selected), partner_ids(step.candidates)
    partners = np.concatenate([slice_for_rank(partner_of_s, rank, world), slice_for_rank(partner_of_c, rank, world)])
    if not len(partners):
        partners = np.concatenate([partner_of_s, partner_of_c])
    shown = np.concatenate([ids, np.setdiff1d(partners, ids)])
    by_id = np.argsort(shown, kind="stable")
    rows = np.arange(len(shown))
    rows[: len(ids)] = by_id[np.searchsorted(shown[by_id], partners)]
    shares = np.ones(len(shown), np.float32)
    shares[: len(ids)] = draw_betas(stream, step.epoch, ids, alpha)
    return shown, RowMix(rows, shares)


def draw_betas(stream: int, epoch: int, ids: Ids, alpha: float) -> npt.NDArray[np.float64]:
    """Draw one number from Beta(alpha, alpha) per sample: float64 [len(ids)]."""
    first, second = (_draw_log_gammas(stream, epoch, ids, alpha, f"mixup {which}") for which in (0, 1))
    with np.errstate(over="ignore"):  # exp may be infinite, which gives the share 0
        return 1.0 / (1.0 + np.exp(second - first))


def _draw_log_gammas(stream: int, epoch: int, ids: Ids, alpha: float, what: str) -> npt.NDArray[np.float64]:
    """Draw the logarithm of one Gamma(alpha) number per sample, by the method of Marsaglia and Tsang (2000).

    Works with logarithms, because Gamma(alpha) underflows if alpha is small.
    """
    if alpha < 1:
        boost = np.log(_draw_positive(stream, epoch, ids, f"{what} boost")) / alpha
        return boost + _draw_log_gammas(stream, epoch, ids, alpha + 1, what)
    offset = alpha - 1 / 3
    logs = np.full(len(ids), np.nan)
    attempt = 0
    while len(left := np.flatnonzero(np.isnan(logs))):
        draws = [_draw_positive(stream, epoch, ids[left], f"{what} {attempt} {which}") for which in range(3)]
        normal = np.sqrt(-2 * np.log(draws[0])) * np.cos(2 * np.pi * draws[1])
        cube = np.maximum(1 + normal / np.sqrt(9 * offset), 0) ** 3
        with np.errstate(divide="ignore"):  # log(0) is -inf, which is rejected
            log_cube = np.log(cube)
        accepted = np.log(draws[2]) < normal**2 / 2 + offset * (1 - cube + log_cube)
        logs[left[accepted]] = np.log(offset) + log_cube[accepted]
        attempt += 1
    return logs


def _draw_positive(stream: int, epoch: int, ids: Ids, what: str) -> npt.NDArray[np.float64]:
    """Draw one uniform number in (0, 1] per sample."""
    return 1.0 - draw_uniforms(stream, epoch, ids, what)
