"""Set the directory where torch and Triton cache compiled code, so that later runs and other nodes can reuse it."""

import logging
import os
import stat
from pathlib import Path

_log = logging.getLogger(__name__)


def cache_directory() -> Path | None:
    """Return $INCV_COMPILE_CACHE, or ~/.cache/incv/compiled by default; None if the user has no home directory.

    Cached code is executed, so its location is neither a recipe key nor the run directory: both may be untrusted.
    """
    if named := os.environ.get("INCV_COMPILE_CACHE"):
        return Path(named).absolute()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "incv/compiled"
    except RuntimeError:
        return None


def use_compile_cache() -> None:
    """Point torch's and Triton's caches at `cache_directory`; call this before the first compilation.

    A copy of the directory works at any path, because torch keeps the Triton kernels inside its own cache entries.
    TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR take precedence. An unusable directory leaves torch's default.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # imported here: it takes a second

    directory = cache_directory()
    if directory is None:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _is_private(directory):
            _log.warning(
                "the compile cache %s is not used: other users can write to it, and cached code is executed. Run "
                "`chmod 700` on it, or set INCV_COMPILE_CACHE to a directory that you own",
                directory,
            )
            return
    except OSError as error:
        _log.warning("the compile cache %s cannot be used (%s)", directory, error)
        return
    # `import torch._dynamo` sets the variable to torch's default if the user has not set it.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, os.path.abspath(default_cache_dir())):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory / "inductor")
    os.environ.setdefault("TRITON_CACHE_DIR", str(directory / "triton"))


def _is_private(directory: Path) -> bool:
    """Whether the directory belongs to this user and is not writable by others."""
    found = directory.stat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
