"""Commands of `incv` that need no run: `--version` and those about recipes. `trainer.cli` adds them to its parser."""
