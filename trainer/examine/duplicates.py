"""Duplicates: equal files, and images that are the same but for size, crop, compression, brightness or a flip."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from trainer.examine.neighbours import nearest
from trainer.examine.outliers import robust_limit

Ints = npt.NDArray[np.int64]

_PROPOSED = 4
_PROMISING = 0.6  # the correlation of whole thumbnails that makes a candidate
_NULL_NEIGHBOUR = 10
_NULL_PAIRS = 500
_THUMBNAIL = 32
_LOOK = 16
_ALIGNED = ((32, 1), (29, 1), (26, 1), (24, 1))  # sizes of windows, and rows between one place and the next
_COARSE = ((32, 1), (26, 2))
_PLAUSIBLE = 0.4  # the correlation at coarse places of which a better one is sought
_FLAT = 0.5  # the standard deviation of grey values of 0 to 255 of which a look has no details
_LOWEST, _HIGHEST = 0.82, 0.995
_DEVIATIONS = 4.5
_CHUNK = 256


@dataclass(frozen=True)
class ImagePairs:
    """Pairs of images that show the same, and how they were told from those that do not."""

    pairs: Ints
    """int64 [pairs, 2], sorted"""
    correlations: npt.NDArray[np.float32]
    """float32 [pairs], of the aligned thumbnails"""
    flipped: npt.NDArray[np.bool_]
    """bool [pairs], whether one image is the mirror image of the other"""
    threshold: float
    """The lowest correlation of a pair."""
    why: str


def checksum_groups(checksums: npt.NDArray[Any]) -> Ints:
    """Return the group of each image, the first with the same checksum: int64 [n]. checksums: [n] of any type."""
    _, first, inverse = np.unique(checksums, return_index=True, return_inverse=True)
    return first[inverse].astype(np.int64)


def connect_groups(count: int, pairs: Ints) -> Ints:
    """Return the group of each image, the smallest id that a chain of pairs leads to: int64 [count].

    Args:
        pairs: int64 [pairs, 2]; for the groups of images that are equal by two criteria, concatenate their pairs.
    """
    groups = np.arange(count)
    while True:
        ends = groups[pairs]
        joined = groups.copy()
        np.minimum.at(joined, ends, ends.min(axis=1, keepdims=True))
        while not np.array_equal(joined, joined[joined]):
            joined = joined[joined]
        if np.array_equal(joined, groups):
            return groups
        groups = joined


def group_pairs(groups: Ints) -> Ints:
    """Return pairs that `connect_groups` turns into these groups: int64 [n, 2]."""
    return np.stack([groups, np.arange(len(groups))], axis=1)


def conflicting(groups: Ints, labels: Ints) -> npt.NDArray[np.bool_]:
    """Tell whether the group of an image has several labels, of which all but one are wrong: bool [n]."""
    lowest, highest = labels.copy(), labels.copy()
    np.minimum.at(lowest, groups, labels)
    np.maximum.at(highest, groups, labels)
    return (lowest != highest)[groups]


def find_near_duplicates(
    features: torch.Tensor, thumbnails: torch.Tensor, neighbours: torch.Tensor | None = None
) -> ImagePairs:
    """Find pairs of images that are the same but for size, crop, compression, brightness or a flip.

    The nearest neighbours by features and by thumbnails are candidates. Their thumbnails decide: the highest
    correlation of details over crops of one and the other, sought if a few crops make it plausible. It must exceed
    what is usual between images that are similar but not the same, the tenth neighbours.

    Args:
        features: float [n, d].
        thumbnails: uint8 [n, 3, h, w], of whole images, of at least 32 pixels.
        neighbours: int64 [n, 10 or more], the ids that `nearest` finds by these features; None to search for them.
    """
    return _find(features, thumbnails, None, neighbours)


def find_leaks(
    features: torch.Tensor,
    thumbnails: torch.Tensor,
    other_features: torch.Tensor,
    other_thumbnails: torch.Tensor,
    neighbours: torch.Tensor | None = None,
) -> ImagePairs:
    """Find images of one set in another, such as training images among test images: pairs (id, id in the other set).

    See `find_near_duplicates`. neighbours: within the one set.
    """
    return _find(features, thumbnails, (other_features, other_thumbnails), neighbours)


def _find(
    features: torch.Tensor,
    thumbnails: torch.Tensor,
    other: tuple[torch.Tensor, torch.Tensor] | None,
    neighbours: torch.Tensor | None = None,
) -> ImagePairs:
    grey = _shrink(thumbnails)
    other_grey = grey if other is None else _shrink(other[1])
    usual = nearest(features, _NULL_NEIGHBOUR)[0] if neighbours is None else neighbours[:, :_NULL_NEIGHBOUR]
    rows = torch.arange(len(grey), device=grey.device)
    by_features = usual[:, :_PROPOSED] if other is None else nearest(other[0], _PROPOSED, features)[0]
    looks = F.adaptive_avg_pool2d(grey, _LOOK), F.adaptive_avg_pool2d(other_grey, _LOOK)
    flat = [_details(look) for look in looks]
    by_look, correlations = nearest(flat[1], _PROPOSED, None if other is None else flat[0])
    candidates = torch.cat(
        [
            torch.stack([rows[:, None].expand_as(ids)[chosen], ids[chosen]], dim=1)
            for ids, chosen in (
                (by_features, torch.ones_like(by_features, dtype=torch.bool)),
                (by_look, correlations >= _PROMISING),
            )
        ]
    )
    if other is None:
        candidates = candidates.sort(dim=1).values
    candidates = torch.unique(candidates, dim=0)
    threshold, why = _choose_threshold(grey, usual)
    candidates = candidates[_compare(grey, other_grey, candidates, _COARSE)[0] >= _PLAUSIBLE]
    best, mirrored = _compare(grey, other_grey, candidates)
    found = best >= threshold
    return ImagePairs(
        candidates[found].cpu().numpy(),
        best[found].cpu().numpy(),
        mirrored[found].cpu().numpy(),
        threshold,
        why,
    )


def _choose_threshold(grey: torch.Tensor, usual: torch.Tensor) -> tuple[float, str]:
    """usual: the neighbours, int64 [n, k], of which the last is hardly a duplicate."""
    if usual.shape[1] < _NULL_NEIGHBOUR:
        return _HIGHEST, f"correlation of thumbnails at least {_HIGHEST}: too few images to learn what is usual"
    rows = torch.linspace(0, len(grey) - 1, min(_NULL_PAIRS, len(grey)), device=grey.device).long()
    pairs = torch.stack([rows, usual[rows, -1]], dim=1)
    correlations = _compare(grey, grey, pairs)[0].clamp(-0.9999, 0.9999).atanh().cpu().numpy()
    unusual = float(np.tanh(robust_limit(correlations, _DEVIATIONS)))
    threshold = min(max(unusual, _LOWEST), _HIGHEST)
    return threshold, (
        f"correlation of thumbnails at least {threshold:.3f}: between similar images that are not the same, "
        f"{np.tanh(np.median(correlations)):.2f} is usual and more than {unusual:.3f} is not; at least {_LOWEST} and "
        f"at most {_HIGHEST}"
    )


def _shrink(thumbnails: torch.Tensor) -> torch.Tensor:
    """Return grey thumbnails: float32 [n, 32, 32]."""
    return F.adaptive_avg_pool2d(thumbnails.float().mean(dim=1), _THUMBNAIL)


def _details(looks: torch.Tensor) -> torch.Tensor:
    """Return rows whose products are correlations of details: float32 [..., 256]. A flat look gives a row of zeros.

    The mean over 5 x 5 cells is removed first: a bright sky over a dark ground is no sign of the same photo.
    """
    box = _box().to(looks.device)
    rows = (looks - box @ looks @ box.T).flatten(-2)
    rows = rows - rows.mean(dim=-1, keepdim=True)
    lengths = rows.norm(dim=-1, keepdim=True)
    return torch.where(lengths > _FLAT * _LOOK, rows / lengths.clamp_min(1e-6), 0.0)


def _box() -> torch.Tensor:
    """Return the matrix that averages 5 numbers around each: float32 [16, 16]."""
    near = (torch.arange(_LOOK)[:, None] + torch.arange(-2, 3)).clamp(0, _LOOK - 1)
    return F.one_hot(near, _LOOK).float().mean(dim=1)


def _compare(
    left: torch.Tensor, right: torch.Tensor, pairs: torch.Tensor, windows: tuple[tuple[int, int], ...] = _ALIGNED
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the highest correlation of one image with a crop of the other, for each pair, float32 [pairs], and
    whether it is that of a mirror image, bool [pairs].
    """
    crops = [_crop_matrices(size, step, left.device) for size, step in windows]
    results = [left.new_zeros(0, 2)]
    for part in pairs.split(_CHUNK):
        one, two = left[part[:, 0]], right[part[:, 1]]
        results.append(torch.maximum(_correlate_crops(one, two, crops), _correlate_crops(two, one, crops)))
    straight, mirrored = torch.cat(results).unbind(dim=1)
    return torch.maximum(straight, mirrored), mirrored > straight


def _correlate_crops(whole: torch.Tensor, cut: torch.Tensor, crops: list[torch.Tensor]) -> torch.Tensor:
    """Return the highest correlation of a crop with the other image and with its mirror image: float32 [pairs, 2]."""
    look = _details(F.adaptive_avg_pool2d(cut, _LOOK))
    looks = torch.stack([look, look.unflatten(-1, (_LOOK, _LOOK)).flip(-1).flatten(-2)], dim=-1)
    best = look.new_full((len(look), 2), -1.0)
    for matrices in crops:
        rows = (matrices.flatten(0, 2) @ whole).view(len(whole), len(matrices), _LOOK, 2 * _THUMBNAIL)
        columns = (matrices * matrices.new_tensor([[1.0], [-1.0]])).flatten(-2)
        details = torch.einsum("noik,pjk->nopij", rows, columns).flatten(-2).flatten(1, 2)
        lengths = (details - details.mean(dim=-1, keepdim=True)).norm(dim=-1, keepdim=True)
        correlations = torch.where(lengths > _FLAT * _LOOK, details @ looks / lengths.clamp_min(1e-6), 0.0)
        best = torch.maximum(best, correlations.amax(dim=1))
    return best


def _crop_matrices(size: int, step: int, device: torch.device) -> torch.Tensor:
    """Return matrices that scale windows of `size` rows to looks, and to local means: float32 [places, 16, 2, 32]."""
    scale = _area_matrix(size)
    scales = torch.stack([scale, _box() @ scale], dim=1)
    places = range(0, _THUMBNAIL - size + 1, step)
    return torch.stack([F.pad(scales, (first, _THUMBNAIL - size - first)) for first in places]).to(device)


def _area_matrix(size: int) -> torch.Tensor:
    """Return the matrix that averages `size` numbers over 16 equal intervals: float32 [16, size]."""
    borders = torch.arange(_LOOK + 1) * size / _LOOK
    cells = torch.arange(size)
    overlap = torch.minimum(borders[1:, None], cells + 1) - torch.maximum(borders[:-1, None], cells)
    return overlap.clamp_min(0) * _LOOK / size
