"""The trainer: labels, noisy cross-validation, Co-teaching, evaluation and report over packed shards."""
