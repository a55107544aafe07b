"""The name of one start of a run's processes, under which they keep all they say in a store that outlives them."""

import os
import time
from typing import Any

_PAUSE = 0.01


def agree_on_nonce(store: Any, rank: int, size: int, seconds: float) -> str:
    """A name that the processes of this very start share: the store may outlive them, with all they said in it.

    Rank 0 offers a name; each rank signs it with a word of its own; rank 0 confirms with the words it has read. Who
    finds its word confirmed is among the living. What is left of an earlier attempt has none of these words.
    """
    word = os.urandom(8).hex()
    limit = time.monotonic() + seconds
    if rank == 0:
        store.set("attempt", word)
        store.set(f"{word}/signed/0", word)
        keys = [f"{word}/signed/{each}" for each in range(size)]
        while not store.check(keys):
            _pause_until(limit, "not all ranks came")
        store.set(f"{word}/confirmed", " ".join(found.decode() for found in store.multi_get(keys)))
        return word
    while True:
        if store.check(["attempt"]):
            name = store.get("attempt").decode()
            store.set(f"{name}/signed/{rank}", word)
            if store.check([f"{name}/confirmed"]) and word in store.get(f"{name}/confirmed").decode().split():
                return str(name)
        _pause_until(limit, "rank 0 did not come")


def _pause_until(limit: float, why: str) -> None:
    if time.monotonic() > limit:
        raise RuntimeError(why)
    time.sleep(_PAUSE)
