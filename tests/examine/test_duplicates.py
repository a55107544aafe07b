"""Duplicates of images made by hand, and groups against a plain search of connected components."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from trainer.examine.duplicates import (
    checksum_groups,
    conflicting,
    connect_groups,
    find_leaks,
    find_near_duplicates,
    group_pairs,
)
from trainer.examine.neighbours import nearest


def make_images(n: int, seed: int = 0) -> torch.Tensor:
    """Smooth random images: uint8 [n, 3, 64, 64]."""
    cells = torch.rand(n, 3, 12, 12, generator=torch.Generator().manual_seed(seed)) * 255
    return F.interpolate(cells, size=(64, 64), mode="bicubic").clamp(0, 255).to(torch.uint8)


def describe(images: torch.Tensor) -> torch.Tensor:
    """Features as those of a network would be: near for near images and for mirror images."""
    cells = F.adaptive_avg_pool2d(images.float(), 4) - 128
    return (cells + cells.flip(-1)).flatten(1)


def test_changed_copies_are_found_and_nothing_else() -> None:
    images = make_images(60)
    window = F.interpolate(images[:1, :, 5:56, 7:58].float(), size=(64, 64), mode="bilinear").to(torch.uint8)
    small = F.interpolate(images[1:2].float(), size=(24, 24), mode="area")
    coarse = F.interpolate(small, size=(64, 64), mode="bilinear").to(torch.uint8)
    dark = (images[2:3].float() * 0.6).to(torch.uint8)
    mirrored = images[3:4].flip(-1)
    blank = torch.full((4, 3, 64, 64), 90, dtype=torch.uint8)
    everything = torch.cat([images, window, coarse, dark, mirrored, blank])
    found = find_near_duplicates(describe(everything), everything)
    assert found.pairs.tolist() == [[0, 60], [1, 61], [2, 62], [3, 63]]
    assert found.flipped.tolist() == [False, False, False, True]
    assert f"{found.threshold:.3f}" in found.why
    neighbours, _ = nearest(describe(everything), 12)
    assert find_near_duplicates(describe(everything), everything, neighbours).pairs.tolist() == found.pairs.tolist()
    leaks = find_leaks(describe(images), images, describe(everything[60:]), everything[60:])
    assert leaks.pairs.tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]


def test_few_images() -> None:
    images = make_images(3)
    for count in range(4):
        assert len(find_near_duplicates(describe(images[:count]), images[:count]).pairs) == 0
    twice = torch.cat([images, images])
    assert find_near_duplicates(describe(twice), twice).pairs.tolist() == [[0, 3], [1, 4], [2, 5]]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 39), st.integers(0, 39)), max_size=50))
def test_groups_are_the_connected_components(count: int, drawn: list[tuple[int, int]]) -> None:
    pairs = np.array([pair for pair in drawn if max(pair) < count], np.int64).reshape(-1, 2)
    expected = list(range(count))
    for _ in range(count):
        for left, right in pairs.tolist():
            expected[left] = expected[right] = min(expected[left], expected[right])
    groups = connect_groups(count, pairs)
    assert groups.tolist() == expected
    np.testing.assert_array_equal(connect_groups(count, group_pairs(groups)), groups)


def test_equal_files_and_conflicting_labels() -> None:
    groups = checksum_groups(np.array(["b", "a", "b", "c", "a"]))
    assert groups.tolist() == [0, 1, 0, 3, 1]
    assert conflicting(groups, np.array([5, 2, 6, 1, 2])).tolist() == [True, False, True, False, False]
