"""Training methods: one file a method, with its recipe section, its Task and its `Method` record (METHOD).

`registry` finds them by name: the built-in ones listed here, and those that other packages offer under the entry
point group `incv.methods`. `method` defines the record and what a method is given; `task` is the base of every Task;
`networks`, `buffers`, `micro_batches` and `predict` serve all methods and INCV's folds.
"""

BUILT_IN = ("standard", "coteaching", "coteaching_incv")
"""In the order in which a run trains them. A name is also the module that holds the method."""
