"""Asks before weights are downloaded, or says what is downloaded where nobody can be asked."""

import logging
import os
import sys

from trainer.auditing.backbones import find_backbone
from trainer.models.factory import create_model
from trainer.models.pretrained import NoPretrained, find_licence, require_reachable

_PERMISSIVE = ("apache-2.0", "mit", "bsd-3-clause", "bsd-2-clause", "bsd")
_MEGABYTE = 1e6
_log = logging.getLogger(__name__)


def require_consent(name: str, download: bool | None) -> None:
    """Raise NoPretrained unless the weights of a model may be downloaded.

    Args:
        download: whether they may; None: ask on a terminal. Elsewhere nobody can be asked, and only weights with a
            permissive licence are downloaded.
    """
    licence = find_licence(name) or "no licence stated"
    what = f"{name} (about {_find_megabytes(name):,} MB, {licence}) from the Hugging Face hub"
    if download is None and can_ask():
        if not _ask(f"Download {what}?"):
            raise NoPretrained(f"the weights of {name} were not downloaded", f"the download of {name} was declined")
        return
    if download is None and licence.lower() not in _PERMISSIVE:
        why = f"{name} is not downloaded unasked, because of its licence ({licence}): read it, and add --download"
        raise NoPretrained(why)
    _log.info("audit: downloading %s; --no-download forbids it", what)


def require_downloads(name: str, download: bool | None) -> None:
    """Raise NoPretrained if nothing can be downloaded, so that no question is asked in vain."""
    if download is False:
        why = "none in the cache of the Hugging Face hub, and --no-download is given"
        raise NoPretrained(f"the weights of {name}: {why}", why)
    require_reachable(name)


def can_ask() -> bool:
    """Whether a question reaches a person. A background job that reads from its terminal would be stopped."""
    try:
        return sys.stdin.isatty() and sys.stderr.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (AttributeError, OSError, ValueError):  # closed or replaced
        return False


def _ask(question: str) -> bool:
    print(f"{question} [Y/n] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()  # empty at the end of the input
    return bool(answer) and answer.strip().lower() in ("", "y", "yes")


def _find_megabytes(name: str) -> int:
    backbone = find_backbone(name)
    if backbone is not None:
        return backbone.megabytes
    network = create_model(name, 1000, 0)
    return round(sum(tensor.numel() * tensor.element_size() for tensor in network.state_dict().values()) / _MEGABYTE)
