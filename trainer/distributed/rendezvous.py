"""Agree on a nonce that prefixes all store keys of one attempt, since the store may outlive its processes."""

import os
import time
from typing import Any

_POLL_SECONDS = 0.01


def agree_on_nonce(store: Any, rank: int, size: int, seconds: float) -> str:
    """Return a nonce shared by the processes of this attempt and by no earlier one.

    The store may still hold the keys of an attempt that died. Rank 0 publishes a nonce; each rank registers a token
    under it; rank 0 confirms with the list of tokens it read. A rank accepts the nonce only once its own token is
    confirmed. Leftovers of an earlier attempt cannot contain that token.
    """
    token = os.urandom(8).hex()
    deadline = time.monotonic() + seconds
    if rank == 0:
        store.set("attempt", token)
        store.set(f"{token}/registered/0", token)
        keys = [f"{token}/registered/{each}" for each in range(size)]
        while not store.check(keys):
            _sleep_or_raise(deadline, "not all ranks joined")
        store.set(f"{token}/confirmed", " ".join(found.decode() for found in store.multi_get(keys)))
        return token
    while True:
        if store.check(["attempt"]):
            nonce = store.get("attempt").decode()
            store.set(f"{nonce}/registered/{rank}", token)
            if store.check([f"{nonce}/confirmed"]) and token in store.get(f"{nonce}/confirmed").decode().split():
                return str(nonce)
        _sleep_or_raise(deadline, "rank 0 did not join")


def _sleep_or_raise(deadline: float, message: str) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(message)
    time.sleep(_POLL_SECONDS)
