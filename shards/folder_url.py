"""Reads the files of a packed folder from a local path or a URL with one of the allowed schemes."""

import errno
import os
import re
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from shards.errors import ConfigError

CHUNK = 4 * 2**20
_READ_AHEAD = 16 * 2**20  # bytes per request to an object store
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


@dataclass(frozen=True)
class FolderUrl:
    """A local or remote folder. Files are opened as `base`/name; `shown`, for messages, hides any password."""

    shown: str
    base: str
    local: bool
    _filesystem: Any
    _options: dict[str, Any]

    def chunks(self, name: str) -> Generator[bytes, None, None]:
        """Yield the content of one file in chunks. Any error of the backend becomes ReadFailed."""
        try:
            with self._filesystem.open(f"{self.base}/{name}", "rb", **self._options) as file:
                while chunk := file.read(CHUNK):
                    yield chunk
        except Exception as error:
            raise ReadFailed(_describe_error(error), _is_permanent(error)) from error

    def holds(self, name: str) -> bool:
        """Whether the folder has this file; raises ReadFailed if that cannot be determined."""
        try:
            with closing(self.chunks(name)) as chunks:
                next(chunks, b"")
        except ReadFailed as error:
            if error.permanent:
                return False
            raise
        return True

    def is_folder(self, folder: Path) -> bool:
        """Whether this is the same local folder as `folder`."""
        if not self.local:
            return False
        return os.path.realpath(self.base) == os.path.realpath(folder)


def open_folder(source: str) -> FolderUrl:
    """Open a local path or a URL; raises ConfigError if its scheme is not allowed or its package is missing."""
    scheme, rest = _split(source)
    if scheme in _LOCAL:
        path = os.path.abspath(rest)
        return FolderUrl(rest.rstrip("/") or "/", path, True, fsspec.filesystem("file"), {})
    if scheme not in _REMOTE:
        raise ConfigError(
            f"cannot copy from {source}: the scheme {scheme} is not one of {', '.join(SCHEMES)}. "
            f"If it is a local folder with a colon in its name, write ./{source}"
        )
    if not rest.strip("/"):
        raise ConfigError(f"{source} does not name a folder; write {scheme}://HOST_OR_BUCKET/FOLDER")
    if scheme in ("http", "https") and re.search(r"[?#]", rest):
        raise ConfigError(f"{source} must be the address of a folder, without ? or #")
    protocol, extra = _REMOTE[scheme]
    base = f"{protocol}://{rest.strip('/')}"
    try:
        filesystem, options = _remote(protocol)
    except ImportError as error:
        raise ConfigError(f"{scheme}:// needs a package that is missing: pip install 'incv[{extra}]'") from error
    return FolderUrl(re.sub(r"//[^/]*@", "//***@", base), base, False, filesystem, options)


def _split(source: str) -> tuple[str, str]:
    """Split into (scheme, rest); the scheme of a plain path is `local`."""
    found = _SCHEME.match(source)
    if not source or found is None:
        return "local", source or "."
    return found[1].lower(), source[found.end() :]


def _remote(protocol: str) -> tuple[Any, dict[str, Any]]:
    """Return the fsspec file system and the options that open a file for one sequential read."""
    if protocol not in ("http", "https"):
        filesystem = fsspec.filesystem(protocol, use_listings_cache=False)
        return filesystem, {"block_size": _READ_AHEAD, "cache_type": "readahead"}
    import aiohttp  # optional dependency, also required by fsspec's http

    silence = aiohttp.ClientTimeout(total=None, sock_connect=_SECONDS_TO_CONNECT, sock_read=_SECONDS_OF_SILENCE)
    client = {"timeout": silence, "trust_env": True}  # use the proxy set in the environment
    # block_size 0 streams the file; with any `size` set, fsspec does not request the real one
    return fsspec.filesystem(protocol, client_kwargs=client), {"block_size": 0, "size": 1}


def _is_permanent(error: Exception) -> bool:
    gone = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)
    return isinstance(error, gone) or getattr(error, "status", None) in _REFUSALS


def _describe_error(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "file not found"
    if isinstance(error, OSError) and error.errno is not None and error.errno in errno.errorcode:
        return os.strerror(error.errno)
    status, message = getattr(error, "status", None), getattr(error, "message", "")
    if status:  # an HTTP status code
        return f"{status} {message}".strip()
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
