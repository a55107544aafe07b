"""Fetches the files of a packed folder from a local path or a URL with one of the allowed schemes."""

import errno
import os
import re
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from shards.durable import hash_file, write_atomically
from shards.errors import ConfigError

_ATTEMPTS = 3
_SECONDS_BEFORE_RETRY = 1.0  # before the first retry; each later wait is four times as long
_SECONDS_TO_CONNECT, _SECONDS_OF_SILENCE = 30, 60
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?://)?")
_LOCAL = ("local", "file")
# scheme: (fsspec protocol, pip extra that installs its package). No other scheme is opened: fsspec's chained URLs
# (`simplecache::`) and WebDataset's `pipe:` would let a path run code.
_REMOTE = {
    "s3": ("s3", "s3"),
    "gs": ("gs", "gs"),
    "gcs": ("gs", "gs"),
    "http": ("http", "http"),
    "https": ("https", "http"),
}
SCHEMES = (*_LOCAL, *_REMOTE)
_REFUSALS = (401, 403, 404, 410)


class ReadFailed(Exception):
    """A file could not be read. `permanent`: a retry would not help."""

    def __init__(self, reason: str, permanent: bool = False) -> None:
        super().__init__(reason)
        self.permanent = permanent


class _Watch(fsspec.Callback):
    """Called by fsspec after every chunk: ends a transfer that is cancelled or too large."""

    def __init__(self, largest: int, cancelled: threading.Event) -> None:
        super().__init__()
        self._largest, self._cancelled = largest, cancelled

    def relative_update(self, inc: int = 1) -> None:
        self.value += inc
        if self._cancelled.is_set():
            raise ReadFailed("cancelled", permanent=True)
        _require_size(self.value, self._largest)


@dataclass(frozen=True)
class FolderUrl:
    """A local or remote folder. Its files are `base`/name; `shown`, for messages, hides any password."""

    shown: str
    base: str
    filesystem: Any = None
    """Of fsspec; None if the folder is local."""

    def fetch(
        self, name: str, path: Path, largest: int, cancelled: threading.Event, sha256: str | None = None
    ) -> None:
        """Copy one file atomically, retrying transient errors; raises ReadFailed.

        Args:
            largest: give up if the file has more bytes than this.
            cancelled: set by another thread to end the transfer.
            sha256: what the file must have, if known.
        """

        def write(temporary: Path) -> None:
            self._transfer(name, temporary, largest, cancelled)
            if sha256 is not None and hash_file(temporary) != sha256:
                raise ReadFailed("its SHA-256 does not match the one recorded in dataset.json")

        for attempt in range(_ATTEMPTS):
            if attempt:
                cancelled.wait(_SECONDS_BEFORE_RETRY * 4 ** (attempt - 1))
            try:
                return write_atomically(path, write)
            except ReadFailed as error:
                if error.permanent:
                    raise
                reason = str(error)
        raise ReadFailed(f"{reason} ({_ATTEMPTS} attempts)")

    def _transfer(self, name: str, path: Path, largest: int, cancelled: threading.Event) -> None:
        try:
            if self.filesystem is not None:
                self.filesystem.get_file(f"{self.base}/{name}", str(path), callback=_Watch(largest, cancelled))
                return
            file = Path(self.base, name)
            if not file.is_file():  # reading a pipe or a device would never end
                raise ReadFailed("file not found", permanent=True)
            _require_size(file.stat().st_size, largest)
            shutil.copyfile(file, path)
        except ReadFailed:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise  # the disk that is written to
            raise ReadFailed(_describe_error(error), _is_permanent(error)) from error

    def is_folder(self, folder: Path) -> bool:
        """Whether this is the same local folder as `folder`."""
        return self.filesystem is None and os.path.realpath(self.base) == os.path.realpath(folder)


def open_folder(source: str) -> FolderUrl:
    """Open a local path or a URL; raises ConfigError if its scheme is not allowed or its package is missing."""
    found = _SCHEME.match(source)
    scheme, rest = (found[1].lower(), source[found.end() :]) if found else ("local", source or ".")
    shown = _hide_password(source)
    if scheme in _LOCAL:
        return FolderUrl(rest.rstrip("/") or "/", os.path.abspath(rest))
    if scheme not in _REMOTE:
        raise ConfigError(
            f"cannot copy from {shown}: the scheme {scheme} is not one of {', '.join(SCHEMES)}. "
            f"If it is a local folder with a colon in its name, write ./{shown}"
        )
    if not rest.strip("/"):
        raise ConfigError(f"{shown} does not name a folder; write {scheme}://HOST_OR_BUCKET/FOLDER")
    if scheme in ("http", "https") and re.search(r"[?#]", rest):
        raise ConfigError(f"{shown} must be the address of a folder, without ? or #")
    protocol, extra = _REMOTE[scheme]
    base = f"{protocol}://{rest.strip('/')}"
    try:
        return FolderUrl(_hide_password(base), base, _open_filesystem(protocol))
    except ImportError as error:
        raise ConfigError(f"{scheme}:// needs a package that is missing: pip install 'incv[{extra}]'") from error


def _open_filesystem(protocol: str) -> Any:
    if protocol not in ("http", "https"):
        return fsspec.filesystem(protocol, use_listings_cache=False)
    import aiohttp  # optional dependency, also required by fsspec's http

    silence = aiohttp.ClientTimeout(total=None, sock_connect=_SECONDS_TO_CONNECT, sock_read=_SECONDS_OF_SILENCE)
    # trust_env: use the proxy set in the environment
    return fsspec.filesystem(protocol, client_kwargs={"timeout": silence, "trust_env": True})


def _hide_password(text: str) -> str:
    return re.sub(r"//[^/\s]*@", "//***@", text)


def _require_size(nbytes: int, largest: int) -> None:
    if nbytes > largest:
        raise ReadFailed(f"it is larger than expected (more than {largest:,} bytes)")


def _is_permanent(error: Exception) -> bool:
    gone = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)
    return isinstance(error, gone) or getattr(error, "status", None) in _REFUSALS


def _describe_error(error: Exception) -> str:
    """Return one line about an error of a backend, without addresses that may contain a password."""
    if isinstance(error, FileNotFoundError):
        return "file not found"
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    if status := getattr(error, "status", None):  # an HTTP status code
        return f"{status} {getattr(error, 'message', '')}".strip()
    lines = _hide_password(str(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__
