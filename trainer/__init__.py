"""The trainer: from packed shards (package `shards`) to labels, noisy cross-validation, training methods, evaluation
and report. `cli` is the entry point. Each folder imports only from the folders below it; [tool.importlinter] in
pyproject.toml lists them from top to bottom.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa


def audit(folder: Any, **options: Any) -> "pa.Table":
    """Audit the labels of an image folder; see `trainer.auditing.audit.audit` for the options."""
    # Imported here: it imports torch, which takes seconds, and `import trainer` must not.
    from trainer.auditing.audit import audit as run

    return run(folder, **options)
