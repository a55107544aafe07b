"""Raw images to verified tar shards and the sample index. Imports nothing from `trainer`."""
