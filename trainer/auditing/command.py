"""The command `incv audit`."""

import argparse
from collections.abc import Callable
from pathlib import Path

from shards.command import add_source_options, read_source_options
from trainer.config.argument_types import TakeWords, path_argument
from trainer.records.run_directory import RunDirectory


def add_command(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]", tell: Callable[[Path, int, None, Path], None]
) -> None:
    """Add the command. tell: prints the results of a run, given its directory, exit code, stage and recipe."""
    audit = subparsers.add_parser("audit", help="find wrong labels in a folder of images; needs no recipe")
    audit.add_argument(
        "folder",
        type=path_argument,
        metavar="FOLDER",
        help="images in FOLDER/<class>/ or FOLDER/train/<class>/, images with a CSV file, or WebDataset tars",
    )
    audit.add_argument(
        "--csv",
        type=path_argument,
        metavar="FILE",
        help="paths and labels of images that are not in folders by class",
    )
    add_source_options(audit, "FOLDER")
    audit.add_argument(
        "--weights",
        type=path_argument,
        metavar="FILE",
        help="pretrained weights; default: timm's, from the hub or its cache",
    )
    audit.add_argument("--model", metavar="NAME", help="any timm network; default: chosen for this machine")
    audit.add_argument(
        "--train",
        action="store_true",
        help="train a network in each fold, which takes hours; default: use the features of pretrained weights",
    )
    audit.add_argument(
        "--embeddings",
        type=path_argument,
        metavar="FILE",
        help="features of the images, .npy or .parquet, instead of running a network",
    )
    audit.add_argument(
        "--predictions",
        type=path_argument,
        metavar="FILE",
        help="held-out probabilities of all classes, .npy or .parquet, which then judge the labels",
    )
    audit.add_argument(
        "--against",
        type=path_argument,
        metavar="FOLDER",
        help="also find images that are in this folder too, such as a test set",
    )
    audit.add_argument("--run-dir", type=path_argument, help="where to write; default: runs/audit-<name of FOLDER>")
    audit.add_argument(
        "--download",
        action=argparse.BooleanOptionalAction,
        help="whether pretrained weights may be downloaded; default: ask if there is a terminal, else yes",
    )
    audit.add_argument(
        "--redo", action="append", default=[], metavar="STAGE", help="rerun a finished stage; repeatable"
    )
    audit.add_argument(
        "overrides", action=TakeWords, metavar="KEY=VALUE", help="override recipe keys, for example incv.epochs=20"
    )
    audit.set_defaults(func=lambda parsed: _audit(parsed, tell))


def _audit(parsed: argparse.Namespace, tell: Callable[[Path, int, None, Path], None]) -> int:
    # Imported here: it imports torch, which takes seconds.
    from trainer.auditing.audit import AuditOptions, run_audit

    options = AuditOptions(
        parsed.folder,
        source=read_source_options(parsed),
        weights=parsed.weights,
        model=parsed.model,
        embeddings=parsed.embeddings,
        predictions=parsed.predictions,
        against=parsed.against,
        run_dir=parsed.run_dir,
        download=parsed.download,
        train=parsed.train,
        redo=parsed.redo,
        overrides=parsed.overrides,
    )
    code = run_audit(options)
    tell(options.run, code, None, RunDirectory(options.run).config)
    return code
