"""Packs raw images into verified tar shards with a sample index, and verifies, repairs and downloads packed folders.

`sources/` reads the data sets. `image_*.py` check and convert images. `pack.py`, `verify.py` and `download.py`
implement the subcommands defined in `command.py`. Nothing here imports `trainer`.
"""
