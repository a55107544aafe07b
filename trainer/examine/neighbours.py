"""The most similar images of every image: exact, in bounded memory, and the same in blocks of any size."""

from collections.abc import Iterator

import torch
from torch.nn import functional as F

_GRID = 2.0**24
_MORE = 16  # proposed beyond k
_GROUP = 32
_NUMBERS = 2**24  # in the buffers of an exact product


def unit_rows(features: torch.Tensor) -> torch.Tensor:
    """Scale each row to length 1 and round to multiples of 2^-24: float32 [n, d].

    Products of two such numbers, and their sums over a row, are exact in float64: a similarity does not depend on the
    order of summation. A row of zeros stays.
    """
    if not bool(torch.isfinite(features).all()):
        raise ValueError("a row of the features is not finite: leave out images that could not be read")
    rows = features.float()
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64)
    rows = (rows / lengths.clamp_min(1e-30)).float()
    return rows.mul_(_GRID).round_().div_(_GRID)


def nearest(
    features: torch.Tensor,
    k: int,
    queries: torch.Tensor | None = None,
    exclude_self: bool = True,
    rows: range | None = None,
    block: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the k rows with the highest cosine similarity to each query.

    A fast product proposes more than k rows. They are scored again without rounding errors. Where the error bound of
    the fast product leaves a doubt, such as among many equal images, all rows are.

    Args:
        features: float [n, d], on a CPU or GPU, where the work is done and the result stays.
        queries: float [m, d], other images; None for the features themselves.
        exclude_self: whether a feature is not its own neighbour; without effect on `queries`.
        rows: the queries to answer, so that ranks can share the work; None for all.
        block: queries and features per matrix product: bounds the memory.

    Returns:
        ids, int64 [rows, k], and similarities, float32 [rows, k], from high to low and among equals by id. There are
        fewer columns if there are fewer than k other images.
    """
    units = unit_rows(features)
    asked = units if queries is None else unit_rows(queries)
    rows = range(len(asked)) if rows is None else rows
    own = queries is None and exclude_self
    k = min(k, len(units) - own)
    if k < 1 or len(rows) == 0:
        shape = (len(rows), max(k, 0))
        return torch.zeros(shape, dtype=torch.int64, device=units.device), torch.zeros(shape, device=units.device)
    height, width = block or ((4096, 65_536) if units.is_cuda else (1024, 32_768))
    found = [
        _search(units, asked, range(first, min(first + height, rows.stop)), k, width, own)
        for first in range(rows.start, rows.stop, height)
    ]
    ids, similarities, certain = (torch.cat(part) for part in zip(*found, strict=True))
    for doubtful in torch.nonzero(~certain)[:, 0].split(max(1, _NUMBERS // len(units))):
        query_ids = doubtful + rows.start
        ids[doubtful], similarities[doubtful] = _search_exactly(
            units, asked[query_ids], k, query_ids if own else None
        )
    return ids, similarities


def _search(
    units: torch.Tensor, asked: torch.Tensor, rows: range, k: int, width: int, own: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, similarities and whether these are proven to be the nearest, of a block of queries."""
    queries = asked[rows.start : rows.stop]
    proposed, bound = _propose(units, queries, rows if own else None, k + _MORE, width)
    proposed = proposed.sort(dim=1).values  # a stable sort by similarity then leaves equals in the order of ids
    step = max(1, _NUMBERS // (proposed.shape[1] * units.shape[1]))
    scores = torch.cat(
        [
            torch.bmm(units[ids].double(), one[:, :, None].double())[:, :, 0].float()
            for ids, one in zip(proposed.split(step), queries.split(step), strict=True)
        ]
    )
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    certain = bound < scores[:, k - 1]
    if proposed.shape[1] == len(units) - own:
        certain = torch.ones_like(certain)
    return proposed.gather(1, order[:, :k]), scores[:, :k], certain


def _propose(
    units: torch.Tensor, queries: torch.Tensor, own: range | None, count: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of `count` rows that are nearest by a fast product, int64 [queries, count] or all of them, and
    what the similarity of any other row is at most, float32 [queries]. own: the ids of the queries.
    """
    count = min(count, len(units) - (own is not None))
    best = queries.new_full((len(queries), 0), 0.0)
    ids = torch.zeros(best.shape, dtype=torch.int64, device=queries.device)
    for first, columns in _blocks(units, width):
        scores, error = _fast_product(queries, columns)
        if own is not None and (start := max(own.start, first)) < (stop := min(own.stop, first + len(columns))):
            here = scores[start - own.start : stop - own.start, start - first : stop - first]
            here.fill_diagonal_(-torch.inf)
        scores, places = _topk(scores, count)
        best, ids = torch.cat([best, scores], dim=1), torch.cat([ids, places + first], dim=1)
        best, chosen = best.topk(min(count, best.shape[1]), dim=1)
        ids = ids.gather(1, chosen)
    return ids, best[:, -1] + error


def _blocks(units: torch.Tensor, width: int) -> Iterator[tuple[int, torch.Tensor]]:
    for first in range(0, len(units), width):
        yield first, units[first : first + width]


def _fast_product(queries: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return similarities, float32 [queries, columns], and a bound of their error and that of a float32 rounding."""
    summing = (queries.shape[1] + 2) * 2.0**-23
    if queries.is_cuda:
        scores = torch.mm(queries.half(), columns.half().T, out_dtype=torch.float32)
        return scores, 2.0**-10 + 2 * summing
    return queries @ columns.T, summing


def _topk(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `torch.topk` of wide rows: only the groups with the highest maxima can hold what is sought."""
    if scores.shape[1] < 4 * count * _GROUP:
        return scores.topk(min(count, scores.shape[1]), dim=1)
    if missing := -scores.shape[1] % _GROUP:
        scores = F.pad(scores, (0, missing), value=-torch.inf)
    groups = scores.view(len(scores), _GROUP, -1)  # groups of distant columns: this maximum is the faster one
    chosen = groups.amax(dim=1).topk(count, dim=1, sorted=False).indices
    members = groups.gather(2, chosen[:, None].expand(-1, _GROUP, -1))
    best, places = members.view(len(scores), -1).topk(count, dim=1)
    return best, places // count * groups.shape[2] + chosen.gather(1, places % count)


def _search_exactly(
    units: torch.Tensor, queries: torch.Tensor, k: int, own: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and similarities from exact products with all rows. own: the ids of the queries."""
    scores = (queries.double() @ units.double().T).float()
    if own is not None:
        scores.scatter_(1, own[:, None], -torch.inf)
    border = scores.topk(k, dim=1).values[:, -1:]
    above, equal = scores > border, scores == border
    equal &= equal.cumsum(dim=1) <= k - above.sum(dim=1, keepdim=True)  # those with the lowest ids
    ids = torch.nonzero(above | equal)[:, 1].view(-1, k)
    best, order = scores.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return ids.gather(1, order), best
