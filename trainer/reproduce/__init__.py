"""Experiments: which runs each needs, recorded runs (results/runs/), and tables and figures from them.

`experiments` has the paper's experiments and our own (`ablation`: how the rows of one change the recipes), and
`planning` the runs that each needs. `records` reads recorded runs, and `matching` joins the two by the identities
that `identity` finds. `tables` and `figures` turn the result into text and SVG, `outcome` combines all. `run_files`
reads a run directory, `recording` turns a finished run into a record, `runner` runs what is missing, and `command` is
the command line. `planning`, `matching`, `tables`, `figures` and `page` are pure functions.
"""
