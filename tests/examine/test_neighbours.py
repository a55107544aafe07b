"""Neighbours against scikit-learn's, and that blocks, ranks and ties change nothing."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.examine.neighbours import nearest, unit_rows

neighbors = pytest.importorskip("sklearn.neighbors")


def make_features(n: int, d: int = 24, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def search_by_sorting(features: torch.Tensor, k: int, rows: range | None = None) -> torch.Tensor:
    """The neighbours by definition: all similarities, sorted, equals by id."""
    units = unit_rows(features).double()
    rows = rows or range(len(features))
    scores = (units[rows.start : rows.stop] @ units.T).float()
    scores[range(len(rows)), rows] = -2
    return scores.sort(dim=1, descending=True, stable=True).indices[:, : min(k, len(features) - 1)]


def test_they_are_those_of_scikit_learn() -> None:
    features, queries = make_features(700), make_features(90, seed=1)
    oracle = neighbors.NearestNeighbors(n_neighbors=10, algorithm="brute", metric="cosine").fit(features)
    for asked in (None, queries):
        distances, expected = oracle.kneighbors(asked)
        ids, similarities = nearest(features, 10, asked)
        assert ids.dtype == torch.int64
        np.testing.assert_array_equal(ids, expected)
        np.testing.assert_allclose(similarities, 1 - distances, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 120),
    k=st.integers(1, 40),
    distinct=st.integers(1, 120),
    height=st.integers(1, 130),
    width=st.integers(1, 130),
    split=st.integers(0, 120),
)
def test_blocks_ranks_and_ties_change_nothing(
    n: int, k: int, distinct: int, height: int, width: int, split: int
) -> None:
    """Many rows are equal where `distinct` is small."""
    features = make_features(distinct)[torch.arange(n) % distinct]
    ids, similarities = nearest(features, k, block=(height, width))
    torch.testing.assert_close(ids, search_by_sorting(features, k), rtol=0, atol=0)
    split = min(split, n)
    shares = [nearest(features, k, rows=rows) for rows in (range(split), range(split, n))]
    assert torch.equal(torch.cat([share[0] for share in shares]), ids)
    assert torch.equal(torch.cat([share[1] for share in shares]), similarities)


def test_wide_blocks_find_the_same_as_sorting() -> None:
    """Wide enough for the search in groups of columns; with a hundred blank images."""
    features = make_features(9001, 8)
    features[200:300] = 1.0
    rows = range(270, 330)
    ids, _ = nearest(features, 5, rows=rows, block=(64, 4000))
    torch.testing.assert_close(ids, search_by_sorting(features, 5, rows), rtol=0, atol=0)


def test_an_image_can_be_its_own_neighbour() -> None:
    features = make_features(50)
    ids, similarities = nearest(features, 3, exclude_self=False)
    assert torch.equal(ids[:, 0], torch.arange(50))
    assert torch.allclose(similarities[:, 0], torch.ones(50))


@pytest.mark.parametrize(("n", "columns"), [(0, 0), (1, 0), (2, 1), (4, 3)])
def test_few_images_have_few_neighbours(n: int, columns: int) -> None:
    ids, similarities = nearest(make_features(n), 7)
    assert ids.shape == similarities.shape == (n, columns)


def test_rows_that_are_not_finite_are_refused() -> None:
    features = make_features(5)
    features[2, 3] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        nearest(features, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_finds_the_same() -> None:
    features = make_features(20_000, 96)
    features[300:500] = 1.0
    expected = nearest(features, 12)
    ids, similarities = nearest(features.cuda(), 12)
    assert torch.equal(ids.cpu(), expected[0])
    assert torch.equal(similarities.cpu(), expected[1])
