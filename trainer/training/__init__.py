"""What all training methods share: the loop, checkpoints, optimisers, the guard against divergence, the engines that
drive a module over ranks, and the interleaving of several trainings in one process. The folder imports
trainer.records, trainer.loading, trainer.models, trainer.distributed and trainer.config.
"""
