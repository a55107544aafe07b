"""Rewrites the damaged shards of a packed folder, bit-identical to the originals."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from shards.durable import hash_file, sync
from shards.errors import DataError
from shards.plan import Plan
from shards.progress import Progress
from shards.sample_index import Dataset, suggest_packing
from shards.shard_writer import read_part, write_shard
from shards.sources.source import Source


def find_damaged(out: Path, dataset: Dataset) -> list[int]:
    """Return the numbers of the shards that are missing or whose bytes have changed."""
    damaged = []
    for number, shard in enumerate(dataset.shards):
        path = out / shard.file
        whole = path.is_file() and path.stat().st_size == shard.nbytes and hash_file(path) == shard.sha256
        if not whole:
            damaged.append(number)
    return damaged


def repair(source: Source, out: Path, plan: Plan, damaged: Sequence[int]) -> None:
    """Rewrite the damaged shards from the source. The caller must hold the lock of the folder."""
    dataset = Dataset.load(out)
    place = out / ".parts" / "repaired"
    with Progress(f"repair {plan.source}/{plan.split}", len(damaged), unit="shards") as progress:
        for number in damaged:
            place.mkdir(parents=True, exist_ok=True)
            write_shard(source, place, plan, number)
            made = read_part(place, plan, number)
            if made is None or made.shard != dataset.shards[number]:
                raise DataError(
                    f"{out / dataset.shards[number].file} is damaged and cannot be repaired: "
                    f"{plan.source} now gives different bytes, because its images or the image library changed. "
                    + suggest_packing(out, dataset)
                )
            os.replace(place / made.shard.file, out / made.shard.file)
            sync(out)
            progress.advance()
    shutil.rmtree(out / ".parts", ignore_errors=True)
