"""From packed shards to batches on the device: sample order, crops, and the resident, CPU and DALI loaders.

`image_set` opens a split and chooses the loader. `sample_order`, `augment` and `requests` are pure NumPy and decide
what each step sees, for every loader and world size alike. The folder may import trainer.distributed and below.
"""
