"""Commands of `incv` that need no run (`--version` and those about recipes), and the options of those that run.
`trainer.cli` adds them to its parser.
"""
