"""A run, from recipe to report. `runner` makes all checks, locks the run directory and executes the stages that are
not done. `stage_graph` has one record for each stage, `ledger` its state; `stages` runs it. The other modules prepare
a run (recipe, splits, labels, preflight and start checks) or implement a stage or a part of it (evaluation, export);
`sweep_runner` interleaves the runs of `--vary`. The package may import trainer.report, trainer.incv, trainer.methods
and the layers below them.
"""
