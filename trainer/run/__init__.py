"""A run, from recipe to report. `runner` makes all checks, locks the run directory and executes the stages that are
not done. `stages` implements each stage; `stage_graph` defines what it reads and writes. The other modules prepare a
run (recipe, splits, labels, preflight and start checks) or implement parts of a stage (evaluation, export);
`sweep_runner` interleaves the runs of `--vary`. The package may import trainer.report, trainer.incv, trainer.methods
and the layers below them.
"""
