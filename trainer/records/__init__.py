"""The records of a run: run directory, manifest, metrics, heartbeats, logs and traces. Its results
(checkpoints, predictions, reports) are written elsewhere. `incv doctor` reads these records without torch, so the
modules it uses import torch only for type annotations. This package may import trainer.loading, trainer.distributed
and trainer.config.
"""
