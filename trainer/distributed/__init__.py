"""Processes and GPUs of a run: launcher detection, rendezvous, collectives, stop requests and the watchdog.

This is the only folder that imports torch.distributed; the rest of the trainer calls the methods of `World`. Within
the trainer it may import only trainer.config.
"""
