"""A rank's rows cut into parts that fit on its GPU."""


def micro_batches(rows: int, micro: int | None) -> list[slice]:
    """Slices over `rows` of at most `micro` rows each, as few as possible, sizes differing by at most one.

    Near-equal, since a last part of two or three rows would give BatchNorm a meaningless variance.
    """
    count = 1 if micro is None else max(1, -(-rows // micro))
    return [slice(part * rows // count, (part + 1) * rows // count) for part in range(count)]


def batchnorm_rows(batch: int, world: int, micro: int | None) -> int:
    """Rows of S that BatchNorm sees together in a full step: the smallest part of a rank's share of the batch."""
    return min(part.stop - part.start for part in micro_batches(-(-batch // world), micro))
