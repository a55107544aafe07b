"""Any subset of the shards as batches, in an order and with crops that are pure functions of the seed."""
