"""Iterative Noisy Cross-Validation: folds, predictions, noise estimates, selection."""
