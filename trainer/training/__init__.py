"""What all training methods share: the loop, checkpoints, optimisers, the divergence guard, the engines that run a
module's steps on one or more ranks, and the interleaving of several training jobs in one process. The folder imports
trainer.records, trainer.loading, trainer.models, trainer.distributed and trainer.config.
"""
