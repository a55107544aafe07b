"""How the CPU threads of torch wait for each other: asleep, so that a busy machine does not slow training down."""

from collections.abc import MutableMapping

WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables that say how OpenMP's threads wait: of any OpenMP, of GNU's and of Intel's and LLVM's."""


def let_waiting_threads_sleep(environ: MutableMapping[str, str]) -> None:
    """Choose OpenMP's passive wait policy, unless the user has set one. Call it before torch is imported.

    By default, threads spin while they wait at the end of a parallel loop. If other processes need the cores, the
    threads that spin take them from the one that is waited for. Results do not depend on the policy.
    """
    if not any(name in environ for name in WAIT_VARIABLES):
        environ["OMP_WAIT_POLICY"] = "PASSIVE"
