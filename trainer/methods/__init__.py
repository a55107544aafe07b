"""Training methods: one file per method, with its recipe section, its Task and its `Method` record (METHOD).

`registry` looks them up by name: the built-in methods listed here, and those of installed packages (entry point group
`incv.methods`). `method` defines the record and a method's inputs; `task` holds the base class of every Task;
`networks`, `buffers`, `micro_batches` and `predict` are shared by all methods and INCV's folds.
"""

BUILT_IN = (
    "standard",
    "forward_correction",
    "decoupling",
    "coteaching",
    "mentornet",
    "d2l",
    "coteaching_incv",
    "standard_incv",
)
"""Built-in methods, in training order. Each is defined in the module of the same name."""
