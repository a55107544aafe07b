"""The commands `incv shards pack`, `incv shards verify` and `incv shards download`."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from shards.errors import DataError
from shards.image_store import DEFAULT_QUALITY
from shards.pack import PackOptions, is_packed, pack, pack_task
from shards.plan import ArrayTask
from shards.sample_index import SampleIndex
from shards.sources import SourceOptions, SourceType, list_sources, open_source
from shards.verify import verify


def add_commands(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]", listen: Callable[[], Callable[[], bool]]
) -> None:
    """Add the `shards` command and its subcommands; each sets `func`, which takes the parsed arguments and returns an
    exit code. listen: starts to listen for a stop signal, and returns a function that tells whether one has come.
    """
    shards = subparsers.add_parser("shards", help="pack images into tar shards; verify or download shards")
    verbs = shards.add_subparsers(dest="verb", required=True, metavar="pack | verify | download")
    _add_pack(verbs).set_defaults(func=lambda arguments: _pack(arguments, listen()))

    verifying = verbs.add_parser("verify", help="check the counts and checksums of every file in a packed folder")
    verifying.add_argument("folder", metavar="FOLDER", type=_path, help="the packed folder to check")
    verifying.add_argument(
        "--workers", type=int, default=_cpus(), help="number of threads; default: all available CPUs"
    )
    verifying.set_defaults(func=_verify)

    download = verbs.add_parser(
        "download", aliases=["stage"], help="copy a packed folder to a local disk; run again to resume"
    )
    download.add_argument("source", metavar="SRC", type=os.path.expanduser, help="the path or URL of a packed folder")
    download.add_argument("target", metavar="DST", type=_path, help="the local folder to copy it to")
    download.add_argument("--workers", type=int, default=4, help="number of parallel downloads; default: 4")
    download.set_defaults(func=lambda arguments: _download(arguments, listen()))


def _add_pack(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    packing: argparse.ArgumentParser = verbs.add_parser(
        "pack",
        help="pack a data set; run again to resume after an interruption",
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    packing.add_argument("-h", "--help", action=_PackHelp, nargs=0, help="show this help message and exit")
    packing.add_argument("source", metavar="SOURCE", help="the type of the data set; see the list below")
    packing.add_argument("--root", type=_path, help="the folder that contains the raw images")
    packing.add_argument(
        "--out", type=_path, required=True, help="the output folder; use a separate one for each split"
    )
    packing.add_argument("--split", default="train", help="the split to pack; default: train")
    packing.add_argument("--subset", help="the subset of the split to pack, if SOURCE has subsets")
    packing.add_argument(
        "--csv",
        metavar="FILE",
        type=os.path.expanduser,
        help="the list of paths and labels; default: the one in --root",
    )
    add_source_options(packing, "--root")
    packing.add_argument("--classes", type=int, metavar="K", help="pack only the first K classes; default: all")
    packing.add_argument(
        "--resize", type=int, metavar="PIXELS", help="resize the shorter side to PIXELS; default: keep the size"
    )
    packing.add_argument(
        "--quality",
        type=int,
        default=DEFAULT_QUALITY,
        help=f"JPEG quality of re-encoded images; default: {DEFAULT_QUALITY}",
    )
    packing.add_argument(
        "--workers", type=int, default=_cpus(), help="number of processes; default: all available CPUs"
    )
    packing.add_argument(
        "--samples-per-shard", type=int, default=1000, metavar="N", help="images per shard; default: 1000"
    )
    packing.add_argument(
        "--max-rejected",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="fail if more than this share of the images is unusable; default: 0.01",
    )
    packing.add_argument(
        "--task",
        metavar="I/N",
        help="write only the shards of task I of N (from 0); when all tasks are done, run without --task to merge",
    )
    packing.add_argument(
        "--dali-index", action="store_true", help="also write index files for DALI's own WebDataset reader"
    )
    packing.add_argument(
        "--check-source",
        action="store_true",
        help="compare a complete --out with --root even if it has more than 200,000 files",
    )
    return packing


def add_source_options(parser: argparse.ArgumentParser, root: str) -> None:
    """Add the options of SourceOptions, except --csv. root: the argument that names the folder of the images."""
    parser.add_argument("--path-column", metavar="NAME", help="the column of the paths; default: recognised by name")
    parser.add_argument(
        "--label-column", metavar="NAME", help="the column, or JSON key, of the labels; default: recognised by name"
    )
    parser.add_argument("--partial", action="store_true", help="ignore images without a label; default: refuse them")
    parser.add_argument(
        "--allow-outside", action="store_true", help=f"accept paths and links that leave {root}; default: refuse them"
    )


def read_source_options(arguments: argparse.Namespace) -> SourceOptions:
    """Return the options of `add_source_options`, and --csv, from the parsed arguments."""
    values = {option.name: getattr(arguments, option.name) for option in fields(SourceOptions)}
    csv = None if arguments.csv is None else os.fspath(arguments.csv)
    return SourceOptions(**values | {"csv": csv})


class _PackHelp(argparse.Action):
    """`incv shards pack --help`: lists the data sets only on demand, because the registry imports other packages."""

    def __call__(self, parser: argparse.ArgumentParser, *_parsed: Any) -> None:
        parser.epilog = "data sets:\n" + "\n".join(_describe_sources(list_sources()))
        parser.print_help()
        parser.exit()


def _describe_sources(sources: Iterable[SourceType]) -> list[str]:
    """Return one help line per source: its splits, subsets, whether it needs --root, and its note."""
    lines = []
    for source in sources:
        facts = [f"--split {', '.join(source.splits)}" if source.splits else "--split can be any folder in --root"]
        facts += [f"--subset {', '.join(source.subsets)}"] if source.subsets else []
        facts += [] if source.needs_root else ["no --root"]
        lines.append(f"  {source.name:<14} " + "; ".join(filter(None, [*facts, source.note])))
    return lines


def _path(given: str) -> Path:
    return Path(os.path.expanduser(given))


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pack(arguments: argparse.Namespace, stop: Callable[[], bool]) -> int:
    task = None if arguments.task is None else ArrayTask.parse(arguments.task)
    source = open_source(
        arguments.source,
        arguments.root,
        arguments.split,
        arguments.subset,
        arguments.classes,
        read_source_options(arguments),
    )
    names = ("workers", "samples_per_shard", "max_rejected", "resize", "quality", "dali_index", "check_source")
    options = PackOptions(stop=stop, **{name: getattr(arguments, name) for name in names})
    out: Path = arguments.out
    if task is None:
        print(f"{out}: {_summary(pack(source, out, options))}")
        return 0
    pack_task(source, out, task, options)
    left = (
        "the folder is complete" if is_packed(out) else "when all are done, run the command without --task to merge"
    )
    print(f"{out}: task {task} is done; {left}")
    return 0


def _summary(index: SampleIndex) -> str:
    dataset = index.dataset
    megabytes = sum(shard.nbytes for shard in dataset.shards) / 1e6
    rejected = dataset.count - dataset.usable
    ignored = len(index.read_rejected().filter(pc.is_null(pc.field("sample_id"))))
    converted = ", ".join(f"{count:,} {kind}" for kind, count in dataset.converted.items())
    return (
        "/".join(filter(None, (dataset.source, dataset.split, dataset.subset)))
        + f", {dataset.usable:,} images of {index.num_classes} classes in "
        + f"{len(dataset.shards):,} shards ({megabytes:,.1f} MB), {rejected:,} rejected"
        + (f", {ignored:,} files ignored" if ignored else "")
        + (" (listed in rejected.parquet)" if rejected or ignored else "")
        + (f", converted: {converted}" if converted else "")
        + (f", duplicates: {dataset.repeated:,} (listed in duplicates.parquet)" if dataset.repeated else "")
        + f", index {index.checksum[:12]}"
    )


def _verify(arguments: argparse.Namespace) -> int:
    report = verify(arguments.folder, max(arguments.workers, 1))
    for problem in report.problems:
        print(f"{arguments.folder}: {problem}", file=sys.stderr)
    if report.problems:
        return DataError.exit_code
    shards = f"{report.shards:,} shard{'' if report.shards == 1 else 's'}"
    print(f"{arguments.folder}: {report.samples:,} samples in {shards}, including rejected ones; no damage found")
    return 0


def _download(arguments: argparse.Namespace, stop: Callable[[], bool]) -> int:
    from shards.download import download_shards  # imported here: only this command needs its libraries

    report = download_shards(arguments.source, arguments.target, arguments.workers, stop)
    print(
        f"{arguments.target}: {report.copied:,} shards copied ({report.nbytes / 1e6:,.1f} MB), "
        f"{report.kept:,} already present"
    )
    return 0
