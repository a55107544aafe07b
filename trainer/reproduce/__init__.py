"""The paper's experiments: which runs each needs, recorded runs (results/runs/), and tables and figures from them.

`experiments` says which runs an experiment needs, `records` reads recorded runs, and `matching` joins the two by the
identities that `identity` finds. `tables` and `figures` turn the result into text and SVG, `outcome` combines all.
`recording` turns a finished run into a record, `runner` runs what is missing, and `command` is the command line.
`experiments`, `matching`, `tables`, `figures` and `page` are pure functions.
"""
