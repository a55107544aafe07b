"""A packed folder by path or URL: which schemes may be read, and reading its files by name."""

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
_READ_AHEAD = 16 * 2**20  # bytes an object store is asked for at once
_SECONDS_TO_CONNECT, _SECONDS_OF_SILENCE = 30, 60
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?://)?")
_LOCAL = ("local", "file")
# scheme: (fsspec's name of it, the extra that brings its package). Nothing else is ever opened: a scheme such as
# fsspec's own `simplecache::` or WebDataset's `pipe:` would run what a path says.
_REMOTE = {
    "s3": ("s3", "s3"),
    "gs": ("gs", "gs"),
    "gcs": ("gs", "gs"),
    "http": ("http", "http"),
    "https": ("https", "http"),
}
SCHEMES = (*_LOCAL, *_REMOTE)
_REFUSALS = (401, 403, 404, 410)


class Unreadable(Exception):
    """A file of the folder could not be read; `lasting` where asking again would not help."""

    def __init__(self, reason: str, lasting: bool = False) -> None:
        super().__init__(reason)
        self.lasting = lasting


@dataclass(frozen=True)
class FolderUrl:
    """`base` with a slash and a name behind it is what the file system opens; `shown` is for people."""

    shown: str
    base: str
    local: bool
    _filesystem: Any
    _options: dict[str, Any]

    def chunks(self, name: str) -> Generator[bytes, None, None]:
        """The content of one file, piece by piece; raises Unreadable, whatever the backend raises."""
        try:
            with self._filesystem.open(f"{self.base}/{name}", "rb", **self._options) as file:
                while chunk := file.read(CHUNK):
                    yield chunk
        except Exception as error:
            raise Unreadable(_reason(error), _lasting(error)) from error

    def holds(self, name: str) -> bool:
        """Whether a file is there; raises Unreadable where that cannot be told."""
        try:
            with closing(self.chunks(name)) as chunks:
                next(chunks, b"")
        except Unreadable as error:
            if error.lasting:
                return False
            raise
        return True

    def is_folder(self, folder: Path) -> bool:
        """Whether it is the very folder `folder` of this machine."""
        if not self.local:
            return False
        return os.path.realpath(self.base) == os.path.realpath(folder)


def open_folder(source: str) -> FolderUrl:
    """A local path, or a URL of an allowed scheme."""
    scheme, rest = _split(source)
    if scheme in _LOCAL:
        path = os.path.abspath(rest)
        return FolderUrl(rest.rstrip("/") or "/", path, True, fsspec.filesystem("file"), {})
    if scheme not in _REMOTE:
        raise ConfigError(
            f"{source} cannot be copied from: {scheme}: is not one of {', '.join(SCHEMES)}. "
            f"A folder of this machine with a colon in its name is written ./{source}"
        )
    if not rest.strip("/"):
        raise ConfigError(f"{source} names no folder: say {scheme}://HOST_OR_BUCKET/FOLDER")
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
    """Scheme and what follows; a path without scheme is local."""
    found = _SCHEME.match(source)
    if not source or found is None:
        return "local", source or "."
    return found[1].lower(), source[found.end() :]


def _remote(protocol: str) -> tuple[Any, dict[str, Any]]:
    """fsspec's file system, and how to open a file of it for one read from beginning to end."""
    if protocol not in ("http", "https"):
        filesystem = fsspec.filesystem(protocol, use_listings_cache=False)
        return filesystem, {"block_size": _READ_AHEAD, "cache_type": "readahead"}
    import aiohttp  # fsspec's http needs it too, and it is installed only where wanted

    silence = aiohttp.ClientTimeout(total=None, sock_connect=_SECONDS_TO_CONNECT, sock_read=_SECONDS_OF_SILENCE)
    client = {"timeout": silence, "trust_env": True}  # a cluster's proxy is named in the environment
    # a block size of 0 streams; a size, any size, spares the question for it
    return fsspec.filesystem(protocol, client_kwargs=client), {"block_size": 0, "size": 1}


def _lasting(error: Exception) -> bool:
    gone = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)
    return isinstance(error, gone) or getattr(error, "status", None) in _REFUSALS


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "it is not there"
    if isinstance(error, OSError) and error.errno is not None and error.errno in errno.errorcode:
        return os.strerror(error.errno)
    status, message = getattr(error, "status", None), getattr(error, "message", "")
    if status:  # an answer of a web server
        return f"{status} {message}".strip()
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
