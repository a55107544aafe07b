"""Apply torch.compile to each block of a network (blocks of a kind share one compilation), and set its cache."""

import logging
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.fx import GraphModule

from trainer.acceleration.narrow_convs import replace_narrow_convolutions
from trainer.acceleration.rewrite_convs import fold_batchnorms, fuse_convolutions

_log = logging.getLogger(__name__)

_MOST_VERSIONS = 256
"""Maximum number of compiled versions of one block's code (per shape, mode and width). Beyond the limit, 8 by
default, torch silently falls back to eager execution."""


def rewrite_and_compile(graph: GraphModule, examples: list[torch.Tensor]) -> Callable[..., object]:
    """A torch.compile backend: fold BatchNorms, fuse or replace convolutions, then compile with inductor."""
    fold_batchnorms(graph)
    fuse_convolutions(graph)
    replace_narrow_convolutions(graph)
    compiled: Callable[..., object] = torch._dynamo.lookup_backend("inductor")(graph, examples)
    return compiled


def compile_blocks(network: nn.Module, backend: str | Callable[..., object] = rewrite_and_compile) -> int:
    """Compile each block in place, which keeps the parameter names; return the number of blocks.

    A block is compiled at its first call. The ten kinds of block in Inception-ResNet-v2 take 80 s together; compiling
    the whole network at once would take 150 s or more and run no faster.
    """
    use_compile_cache()
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_VERSIONS)
    torch._dynamo.config.accumulated_recompile_limit = max(
        torch._dynamo.config.accumulated_recompile_limit, 16 * _MOST_VERSIONS
    )
    blocks = list(iterate_blocks(network))
    for block in blocks:
        block.compile(dynamic=False, backend=backend)
    return len(blocks)


def iterate_blocks(network: nn.Module) -> Iterator[nn.Module]:
    """Yield the child modules that have parameters, descending into containers; every parameter is in exactly one."""
    for child in network.children():
        if isinstance(child, nn.Sequential | nn.ModuleList):
            yield from iterate_blocks(child)
        elif any(True for _ in child.parameters()):
            yield child


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
