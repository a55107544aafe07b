"""The trainer: from packed shards (package `shards`) to labels, noisy cross-validation, training methods, evaluation
and report. `cli` is the entry point. Each folder imports only from the folders below it; [tool.importlinter] in
pyproject.toml lists them from top to bottom.
"""
