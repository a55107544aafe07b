"""Find wrong labels from Python: in a folder of images, or from labels and held-out probabilities.

import incv

result = incv.audit("photos")                               # a folder with one folder per class
issues = incv.find_label_issues(labels, probabilities)      # arrays
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.auditing.audit import audit as audit
    from trainer.auditing.result import AuditResult as AuditResult
    from trainer.incv.arrays import LabelIssues as LabelIssues
    from trainer.incv.arrays import estimate_noise as estimate_noise
    from trainer.incv.arrays import find_label_issues as find_label_issues

_HOMES = {
    "audit": "trainer.auditing.audit",
    "AuditResult": "trainer.auditing.result",
    "LabelIssues": "trainer.incv.arrays",
    "estimate_noise": "trainer.incv.arrays",
    "find_label_issues": "trainer.incv.arrays",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import what is used, when it is used: torch takes seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module 'incv' has no attribute {name!r}: it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)
