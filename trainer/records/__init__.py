"""Files that a run writes about itself: run directory, manifest, metrics, heartbeats, logs, profile and traces.
Results (checkpoints, predictions, reports) are written elsewhere. `incv doctor` reads these files without torch, so
the modules it uses import torch only for types. The folder may import trainer.loading, trainer.distributed and
trainer.config.
"""
