"""The options of `incv run` and of the commands that run a single stage."""

import argparse
from typing import Any

from shards.errors import ConfigError
from trainer.commands.recipes import add_recipe_arguments
from trainer.config.argument_types import (
    count_argument,
    counts_argument,
    path_argument,
    price_argument,
    profile_argument,
)

PRINTED = {
    "run-dir": "the run directory that these arguments would use",
    "stages": "the stages of the recipe",
    "splits": "one line per split (recipe key, shards folder, arguments for `incv shards pack`)",
}
"""The facts that `--print-<name>` prints."""


def add_run_arguments(parser: argparse.ArgumentParser, stage: str | None = None) -> None:
    """Add the options of a run. stage: the only stage that the command runs; None: all."""
    parser.set_defaults(incv_from=None)
    add_recipe_arguments(parser)
    parser.add_argument(
        "--run-dir",
        type=path_argument,
        help="where to write; default: runs/<recipe>, plus a hash if overrides change results",
    )
    parser.add_argument(
        "--redo",
        action="append",
        default=[],
        metavar="STAGE",
        help="rerun a finished stage and those that depend on it; `pack` packs changed images into a new folder and "
        "reruns the stages that read them; repeatable",
    )
    if stage in (None, "incv"):
        parser.add_argument(
            "--incv-from",
            type=path_argument,
            metavar="RUN_DIR",
            help="take over the finished INCV stage of another run instead of running it; both must have the same "
            "data and the same values of all keys that INCV depends on",
        )
    parser.add_argument(
        "--check-source",
        action="store_true",
        help="compare more than 200,000 image files with what was packed too; fewer are always compared",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the plan with its estimated time and cost, and exit"
    )
    parser.add_argument(
        "--profile",
        nargs="?",
        const="summary",
        type=profile_argument,
        metavar="trace",
        help="add the time spent per phase to the report; with `trace`, also trace a few steps with torch.profiler",
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=V,W",
        help="start one run per value, concurrently in one process; if repeated, one per combination",
    )
    parser.add_argument(
        "--at-once", type=count_argument, metavar="N", help="maximum number of --vary runs at a time; default: 8"
    )
    estimate = parser.add_argument_group("options for --dry-run")
    estimate.add_argument(
        "--gpus",
        type=counts_argument,
        metavar="1,8,64",
        help="GPU counts to estimate; default: the number of processes",
    )
    estimate.add_argument(
        "--gpu-price", type=price_argument, metavar="DOLLARS", help="price of a GPU hour; default: 4"
    )
    estimate.add_argument(
        "--samples",
        type=count_argument,
        metavar="N",
        help="number of training samples; default: as packed, otherwise the published size of the data set",
    )
    estimate.add_argument("--probe", action="store_true", help="measure this machine with a few steps")
    for what, described in PRINTED.items():
        parser.add_argument(f"--print-{what}", action="store_true", help=f"print {described} and exit")


def take_estimate_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the estimate that were given; raises ConfigError without --dry-run."""
    given = {"gpus": parsed.gpus, "price": parsed.gpu_price, "samples": parsed.samples, "probe": parsed.probe or None}
    asked = {name: value for name, value in given.items() if value is not None}
    if asked and not parsed.dry_run:
        raise ConfigError(
            "--gpus, --gpu-price, --samples and --probe are for the estimate of --dry-run: add it, or leave them"
        )
    if parsed.probe and parsed.gpus:
        raise ConfigError("--probe measures this machine, and --gpus estimates for others: leave out one of them")
    return asked
