"""Turn packed shards into batches on the device: sample order, crops, and the resident, CPU and DALI loaders.

`image_set` opens a split and chooses the loader. `sample_order`, `augment`, `operations`, `mixup` and `requests` are
pure NumPy and decide what each step sees, regardless of loader and world size. The folder may import
trainer.distributed and below.
"""
