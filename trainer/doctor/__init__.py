"""`incv doctor`: diagnoses a run from the files in its run directory.

It reads heartbeats, manifest and logs, and writes nothing. It does not import torch, so it is fast and works on any
machine that can access the directory. The package may import trainer.report, trainer.records and trainer.config.
"""
