"""Two nodes on one machine: network namespaces joined by a veth link, with one launcher and one rank each."""

import os
import shutil
import subprocess
from pathlib import Path

from tests.support import storm_processes

ADDRESSES = ("10.213.7.1", "10.213.7.2")
PORT = 29577
CABLE = "incv0"
"""Each node's end of the cable has this name."""


class NoNamespaces(Exception):
    """Why this machine cannot play two."""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)


class TwoNodes:
    """Made on entry, removed on exit, with everything that runs inside."""

    def __init__(self) -> None:
        self._names = [f"incv-{os.getpid()}-{node}" for node in (0, 1)]

    def __enter__(self) -> "TwoNodes":
        if os.getuid() != 0:
            raise NoNamespaces("network namespaces are for root to make")
        if shutil.which("ip") is None:
            raise NoNamespaces("there is no program `ip` (Debian: apt install iproute2)")
        try:
            for name in self._names:
                _ip("netns", "add", name)
            first, second = self._names
            _ip("link", "add", CABLE, "netns", first, "type", "veth", "peer", "name", CABLE, "netns", second)
            for node, address in enumerate(ADDRESSES):
                _ip("-n", self._names[node], "addr", "add", f"{address}/24", "dev", CABLE)
                _ip("-n", self._names[node], "link", "set", "lo", "up")
                self.link(node, up=True)
        except (OSError, subprocess.SubprocessError) as error:
            self.__exit__()
            raise NoNamespaces(f"`ip netns` is forbidden here: {getattr(error, 'stderr', error)}") from None
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30)

    def link(self, node: int, up: bool) -> None:
        """Plug the cable in at one end, or out."""
        _ip("-n", self._names[node], "link", "set", CABLE, "up" if up else "down")

    def start(self, node: int, arguments: list[str], cwd: Path, log: Path) -> "subprocess.Popen[bytes]":
        """Without its name in /etc/hosts of the other: gloo is told which network to use."""
        inside = ["ip", "netns", "exec", self._names[node], *arguments]
        return storm_processes.start(inside, cwd, log, {"GLOO_SOCKET_IFNAME": CABLE})


def launcher(node: int, restarts: int) -> tuple[str, ...]:
    """torchrun's options on a node."""
    return (
        "--nnodes=2",
        f"--node-rank={node}",
        "--nproc-per-node=1",
        f"--max-restarts={restarts}",
        "--rdzv-backend=c10d",
        "--rdzv-id=two-nodes",
        f"--rdzv-endpoint={ADDRESSES[0]}:{PORT}",
        f"--rdzv-conf=is_host={int(node == 0)}",
        f"--local-addr={ADDRESSES[node]}",
    )
