"""Training methods: `built_in` has their recipe sections and records; each has a module of its Task.

`registry` looks them up by name: ours and those of installed packages (entry point group `incv.methods`). `method`
defines the record, `inputs` what a method gets to build its Task; `task` holds the base class of every Task;
`networks`, `buffers` and `predict` are shared by all methods and INCV's folds.
"""

WEIGHTS_NUMERICS = 1
"""Added to the version of a training's numbers if it starts from given weights; see `start_classifier`."""
