"""Split a rank's batch into micro-batches."""


def micro_batches(rows: int, micro: int | None) -> list[slice]:
    """Split `rows` into as few slices of at most `micro` rows as possible; their sizes differ by at most one.

    They are nearly equal, because BatchNorm's variance over a last micro-batch of two or three rows would be useless.
    """
    count = 1 if micro is None else max(1, -(-rows // micro))
    return [slice(part * rows // count, (part + 1) * rows // count) for part in range(count)]


def batchnorm_rows(batch: int, world: int, micro: int | None) -> int:
    """Return the smallest number of rows that BatchNorm sees at once in a full step on S.

    batch: global batch size; world: number of ranks; micro: maximum rows of a micro-batch.
    """
    return min(part.stop - part.start for part in micro_batches(-(-batch // world), micro))
