"""The output of `--dry-run`: the state and work of each stage, then an estimate of time, cost and memory on N GPUs,
from measured rates and counted FLOPs. The package may import trainer.run and lower layers.
"""
