"""A run from recipe to report: `runner` checks everything, claims the run directory and executes the stages that are
not done; `stages` holds what each stage does, `stage_graph` what it reads and writes. The other modules prepare a run
(recipe, splits, labels, preflight and start checks) or serve single stages (evaluation, export); `sweep_runner`
interleaves the runs of `--vary`. The folder imports trainer.report, trainer.incv, trainer.methods and all below.
"""
