"""The commands `incv clean` and `incv predict`."""

import argparse
from collections.abc import Callable
from pathlib import Path

from trainer.config.argument_types import path_argument, probability_argument


def add_commands(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]", listen: Callable[[], Callable[[], bool]]
) -> None:
    """Add both commands; each sets `func`, which takes the parsed arguments and returns an exit code.

    listen: starts to listen for a stop signal, and returns a function that tells whether one has come.
    """
    _add_clean(subparsers).set_defaults(func=lambda arguments: _clean(arguments, listen()))
    _add_predict(subparsers).set_defaults(func=lambda arguments: _predict(arguments, listen()))


def _add_clean(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    clean = subparsers.add_parser("clean", help="write the samples that a run selected as a data set of their own")
    clean.add_argument(
        "run", type=path_argument, metavar="RUN", help="the directory of a run whose `incv` stage has finished"
    )
    clean.add_argument(
        "--out", type=path_argument, required=True, help="the folder (for `--as list`: the CSV file) to create"
    )
    clean.add_argument(
        "--as",
        dest="form",
        choices=("folder", "shards", "list"),
        default="folder",
        help="an image folder <class>/<image>, WebDataset shards (.jpg, .cls, .json), or a CSV of key,label; "
        "default: folder",
    )
    clean.add_argument("--link", action="store_true", help="in a folder, link to the original files; default: copy")
    clean.add_argument(
        "--from-shards",
        action="store_true",
        help="write the images as they were packed; default: the original files, if the source has any",
    )
    clean.add_argument(
        "--apply-suggestions",
        nargs="?",
        type=probability_argument,
        const=0.9,
        metavar="P",
        help="also keep samples whose label was contradicted, with the suggested label, if its probability is at "
        "least P (0.9 if not given)",
    )
    clean.add_argument("--force", action="store_true", help="replace the output of an earlier `incv clean`")
    return clean


def _add_predict(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    predict = subparsers.add_parser("predict", help="classify new images with the networks of a run")
    predict.add_argument(
        "images", type=path_argument, metavar="FOLDER", help="a folder, with its subfolders, or one file"
    )
    predict.add_argument("--run", type=path_argument, required=True, help="the directory of a finished run")
    predict.add_argument("-o", "--out", type=path_argument, required=True, help="the CSV file to write")
    predict.add_argument("--method", help="the training method whose networks to use; default: the recipe's last one")
    predict.add_argument(
        "--network",
        choices=("a", "b", "mean"),
        default="mean",
        help="one network, or the mean of all; default: mean",
    )
    predict.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    predict.add_argument("--workers", type=int, default=2, help="decoding threads; default: 2")
    predict.add_argument("--force", action="store_true", help="replace the output of an earlier `incv predict`")
    return predict


def _clean(arguments: argparse.Namespace, stop: Callable[[], bool]) -> int:
    # Imported here: these import torch, which takes seconds.
    from trainer.outputs.clean import CleanOptions, clean
    from trainer.outputs.finished_run import load_finished_run

    options = CleanOptions(
        arguments.out,
        arguments.form,
        arguments.link,
        arguments.apply_suggestions,
        arguments.from_shards,
        arguments.force,
    )
    written = clean(load_finished_run(arguments.run), options, stop)
    relabelled = f", {written['relabelled']:,} of them with the suggested label" if written["relabelled"] else ""
    checked = f", {written['checked']:,} of them checked by hand" if written["checked"] else ""
    excluded = f", {written['excluded']:,} excluded by hand" if written["excluded"] else ""
    left_out = f"{written['left_out']:,} left out{excluded}"
    print(f"{arguments.out}: {written['samples']:,} samples{checked}{relabelled}; {left_out}")
    if str(written["images"]).startswith("packed"):
        print(f"These are not the original files, but the images as they were {written['images']}.")
    return 0


def _predict(arguments: argparse.Namespace, stop: Callable[[], bool]) -> int:
    from trainer.outputs.classify import classify, load_classifier, require_free
    from trainer.outputs.finished_run import open_run

    out: Path = arguments.out
    require_free(out, arguments.force)
    run, recipe = open_run(arguments.run)
    classifier = load_classifier(run, recipe, arguments.method, arguments.network, arguments.device)
    classified, unusable = classify(classifier, arguments.images, out, arguments.workers, stop, arguments.force)
    problems = f"; {unusable:,} files could not be used (column `problem`)" if unusable else ""
    print(f"{out}: {classified:,} images classified{problems}")
    return 0
