"""Iterative Noisy Cross-Validation: folds, predictions, noise estimates, selection."""

NUMERICS = 1
"""Version of INCV's numbers, as `Method.numerics` is that of a method's."""
