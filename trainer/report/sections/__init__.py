"""The sections of the page, one module and one template each; `trainer.report.collect` lists them in order."""
