"""Experiments: which runs each needs, recorded runs (results/runs/), and tables and figures from them.

`experiments` has the paper's experiments and our own, from experiments.yaml, and `paper` the paper's numbers.
`records` reads recorded runs; `runs` plans the runs of an experiment, and joins them with the recorded ones that have
the same keys. `tables` and `figures` turn the result into text and SVG, `outcome` combines all. `run_files` reads a
run directory, `recording` turns a finished run into a record, `runner` runs what is missing, and `command` is the
command line. `tables` and `figures` are pure functions.
"""
