"""Plan and estimate of `--dry-run`: state and work of each stage, then time, cost and memory of a recipe on N GPUs,
from measured rates and counted FLOPs. The folder imports trainer.run and below.
"""
