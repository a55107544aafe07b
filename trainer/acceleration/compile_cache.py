"""Compiled blocks as one file a training: a second run, or another node, need not compile what the first one did."""

import hashlib
import os
import platform
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import nn
from torch._dynamo.utils import counters

from shards.durable import write_bytes
from shards.errors import InputError

Shapes = tuple[object, ...]

_LENGTH = 8
_PARTS: list[bytes] = []
"""What torch has given out at each save of this process. It takes back only the last of several that it has put into
one, and another training, or another shape, shares most of its blocks with the ones before."""


def default_folder() -> Path | None:
    """INCV_COMPILE_CACHE, or ~/.cache/incv/compiled. Not a recipe's business: what is in it is executed."""
    if named := os.environ.get("INCV_COMPILE_CACHE"):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "incv/compiled"
    except RuntimeError:  # a user without a home
        return None


class CompiledCache:
    """torch's own caches of this process, written to a file after the first step and read back before it.

    They are pickles. So the file lies with its user and not in a run directory, which may come from anywhere, and is
    read only where nobody else could have written it.
    """

    def __init__(self, folder: Path, module: nn.Module, kind: str, device: torch.device, writes: bool) -> None:
        """kind: what else the compilation depends on; writes: False on ranks that leave it to the first."""
        self._folder, self._writes = folder, writes
        self._identity = _identity(module, kind, device)
        self._known: set[Shapes] = set()

    @contextmanager
    def kept(self, shapes: Shapes) -> Iterator[None]:
        """Around a step on inputs of these shapes."""
        if shapes in self._known:
            yield
            return
        self._known.add(shapes)
        path = self.file(shapes)
        there, before = self._read(path), _compiled_anew()
        yield
        if self._writes and not (there and _compiled_anew() == before):
            self._write(path)

    def file(self, shapes: Shapes) -> Path:
        digest = hashlib.sha256(f"{self._identity} {shapes}".encode()).hexdigest()[:16]
        return self._folder / f"{digest}.bin"

    def _read(self, path: Path) -> bool:
        """Whether the file was there and good."""
        try:
            if not _only_ours(path):
                print(f"warning: {path} could have been written by others and is not used", file=sys.stderr)
                return False
            good = _load(path.read_bytes())
        except FileNotFoundError:
            return False
        except OSError as error:
            print(f"warning: {path} cannot be read ({error}); compiling anew", file=sys.stderr)
            return False
        if not good:
            print(f"warning: {path} is of no use; compiling anew", file=sys.stderr)
        return good

    def _write(self, path: Path) -> None:
        try:
            made = _saved()
            if made:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_bytes(path, made)
                path.chmod(0o600)
        except (OSError, InputError, RuntimeError) as error:  # a cache: the training goes on without
            print(f"warning: the compiled blocks could not be kept in {path} ({error})", file=sys.stderr)


def _saved() -> bytes:
    """All that this process has compiled so far, or found in caches: parts, each behind its length."""
    made = torch.compiler.save_cache_artifacts()
    if made is not None:
        _PARTS.append(made[0])
        with suppress(ImportError, AttributeError):  # not public: the next part would have this one in it too
            from torch.compiler._cache import CacheArtifactManager

            CacheArtifactManager.clear()
    return b"".join(len(part).to_bytes(_LENGTH) + part for part in _PARTS)


def _load(parts: bytes) -> bool:
    """Whether all of them are good."""
    at, good = 0, bool(parts)
    while good and at < len(parts):
        length = int.from_bytes(parts[at : at + _LENGTH])
        part = parts[at + _LENGTH : at + _LENGTH + length]
        good = len(part) == length and torch.compiler.load_cache_artifacts(part) is not None
        at += _LENGTH + length
    return good


def _compiled_anew() -> int:
    """How often this process found nothing in torch's caches: a file of older code may be good and serve nothing."""
    return counters["inductor"]["fxgraph_cache_miss"] + counters["aot_autograd"]["autograd_cache_miss"]


def _only_ours(path: Path) -> bool:
    """Whether file and folder belong to this user, and nobody else may write there."""
    found = [path.stat(), path.parent.stat()]
    return all(each.st_uid == os.getuid() and not each.st_mode & (stat.S_IWGRP | stat.S_IWOTH) for each in found)


def _identity(module: nn.Module, kind: str, device: torch.device) -> str:
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    weights = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in module.state_dict().items()]
    said = (torch.__version__, platform.python_version(), gpu, kind, weights)
    return hashlib.sha256(repr(said).encode()).hexdigest()
