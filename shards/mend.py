"""Writing the damaged shards of a finished folder anew, to the very bytes they had."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from shards.durable import sync
from shards.errors import DataError
from shards.plan import Plan
from shards.progress import Progress
from shards.sample_index import Dataset, pack_again
from shards.shard_writer import file_sha256, read_part, write_shard
from shards.sources.source import Source


def damaged_shards(out: Path, dataset: Dataset) -> list[int]:
    """Those that are missing, or not the bytes that were packed."""
    damaged = []
    for number, shard in enumerate(dataset.shards):
        path = out / shard.file
        whole = path.is_file() and path.stat().st_size == shard.nbytes and file_sha256(path) == shard.sha256
        if not whole:
            damaged.append(number)
    return damaged


def mend(source: Source, out: Path, plan: Plan, damaged: Sequence[int]) -> None:
    """Write these shards anew. The caller is the only writer; what is whole is not touched."""
    dataset = Dataset.load(out)
    place = out / ".parts" / "mended"
    with Progress(f"mend {plan.source}/{plan.split}", len(damaged), unit="shards") as progress:
        for number in damaged:
            place.mkdir(parents=True, exist_ok=True)
            write_shard(source, place, plan, number)
            made = read_part(place, plan, number)
            if made is None or made.shard != dataset.shards[number]:
                raise DataError(
                    f"{out / dataset.shards[number].file} is damaged, and {plan.source} gives other bytes now: its "
                    f"images have changed, or the library that writes them. {pack_again(out, dataset)}"
                )
            os.replace(place / made.shard.file, out / made.shard.file)
            sync(out)
            progress.advance()
    shutil.rmtree(out / ".parts", ignore_errors=True)
