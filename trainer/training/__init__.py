"""What every training method shares: the loop, checkpoints, optimisers, the guard against divergence, engines that
drive a module over ranks, and the interleaving of several trainings in one process.
"""
