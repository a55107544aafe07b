"""Split a rank's batch into micro-batches."""


def micro_batches(rows: int, micro: int | None) -> list[slice]:
    """As few slices over `rows` as possible, of at most `micro` rows each; sizes differ by at most one.

    Near-equal, because BatchNorm's variance over a last micro-batch of two or three rows would be meaningless.
    """
    count = 1 if micro is None else max(1, -(-rows // micro))
    return [slice(part * rows // count, (part + 1) * rows // count) for part in range(count)]


def batchnorm_rows(batch: int, world: int, micro: int | None) -> int:
    """BatchNorm's batch size in a full step on S: the smallest micro-batch of a rank's share."""
    return min(part.stop - part.start for part in micro_batches(-(-batch // world), micro))
