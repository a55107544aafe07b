"""`incv shards pack` and `incv shards verify`."""

import argparse
import os
import sys
from pathlib import Path

from shards.errors import DataError
from shards.pack import pack
from shards.sample_index import SampleIndex
from shards.sources import SOURCES, open_source
from shards.verify import verify


def add_commands(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `shards` with its two verbs; each sets `func`, from the parsed arguments to an exit code."""
    shards = subparsers.add_parser("shards", help="pack images into tar shards, or check packed ones")
    verbs = shards.add_subparsers(dest="verb", required=True, metavar="pack | verify")

    packing = verbs.add_parser("pack", help="pack a data set; run again after a stop to go on")
    packing.add_argument("source", metavar="SOURCE", help=" | ".join(SOURCES))
    packing.add_argument("--root", type=Path, help="the folder of the raw images (digits needs none)")
    packing.add_argument("--out", type=Path, required=True, help="the folder to write, one for each split")
    packing.add_argument("--split", default="train", help="default: train")
    packing.add_argument("--workers", type=int, default=_cpus(), help="processes; default: the CPUs allotted")
    packing.add_argument("--samples-per-shard", type=int, default=1000, metavar="N", help="default: 1000")
    packing.add_argument(
        "--max-rejected", type=float, default=0.01, metavar="SHARE", help="of unusable images; default: 0.01"
    )
    packing.set_defaults(func=_pack, stop=lambda: False)  # the caller may put its own stop request there

    verifying = verbs.add_parser("verify", help="recount and re-checksum a packed folder")
    verifying.add_argument("folder", metavar="FOLDER", type=Path)
    verifying.add_argument("--workers", type=int, default=_cpus(), help="threads; default: the CPUs allotted")
    verifying.set_defaults(func=_verify)


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pack(arguments: argparse.Namespace) -> int:
    source = open_source(arguments.source, arguments.root, arguments.split)
    index = pack(
        source,
        arguments.out,
        workers=arguments.workers,
        samples_per_shard=arguments.samples_per_shard,
        max_rejected=arguments.max_rejected,
        stop=arguments.stop,
    )
    print(f"{arguments.out}: {_summary(index)}")
    return 0


def _summary(index: SampleIndex) -> str:
    dataset = index.dataset
    megabytes = sum(shard.nbytes for shard in dataset.shards) / 1e6
    rejected = dataset.count - dataset.usable
    return (
        f"{dataset.source}/{dataset.split}, {dataset.usable:,} images of {index.num_classes} classes in "
        f"{len(dataset.shards):,} shards ({megabytes:,.1f} MB), {rejected:,} rejected"
        + (" (listed in rejected.parquet)" if rejected else "")
        + f", index {index.checksum[:12]}"
    )


def _verify(arguments: argparse.Namespace) -> int:
    report = verify(arguments.folder, max(arguments.workers, 1))
    for problem in report.problems:
        print(f"{arguments.folder}: {problem}", file=sys.stderr)
    if report.problems:
        return DataError.exit_code
    print(f"{arguments.folder}: {report.samples:,} samples in {report.shards:,} shards, all as packed")
    return 0
