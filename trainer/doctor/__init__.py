"""`incv doctor`: diagnose a run from the files in its run directory.

Reads heartbeats, manifest and logs; writes nothing and does not import torch, so it is fast and works on any machine
that sees the directory. It may import trainer.report, trainer.records and trainer.config.
"""
