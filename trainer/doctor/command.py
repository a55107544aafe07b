"""The commands `incv doctor` and `incv env`."""

import argparse
import time
from pathlib import Path

from shards.errors import ConfigError
from trainer.config.argument_types import path_argument
from trainer.doctor.environment import describe_environment
from trainer.doctor.machine import examine_machine
from trainer.doctor.ranks import describe_durable_point
from trainer.doctor.verdict import examine


def add_commands(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands; each sets `func`, which takes the parsed arguments and returns an exit code."""
    doctor = subparsers.add_parser(
        "doctor", help="examine this machine, or diagnose a run: which rank is stuck, and where"
    )
    doctor.add_argument("--run-dir", type=path_argument, help="the run directory to diagnose (read-only)")
    doctor.add_argument(
        "--progress", action="store_true", help="print one line that changes when the run has saved new progress"
    )
    doctor.add_argument(
        "--folder", type=path_argument, help="without --run-dir: where runs will be written; default: here"
    )
    doctor.add_argument(
        "--shards",
        type=path_argument,
        help="without --run-dir: a packed data set to load images from for some seconds",
    )
    doctor.set_defaults(func=_doctor)
    env = subparsers.add_parser("env", help="print the versions and facts that a bug report needs")
    env.set_defaults(func=_env)


def _doctor(parsed: argparse.Namespace) -> int:
    """Exit codes: 0: no problem; 1: a problem, or a rank that hangs, is silent or has failed; 2: wrong usage."""
    if parsed.run_dir is None:
        if parsed.progress:
            raise ConfigError("--progress describes a run: name it with --run-dir")
        text, well = examine_machine(parsed.folder or Path.cwd(), parsed.shards)
    elif parsed.folder is not None or parsed.shards is not None:
        raise ConfigError("--folder and --shards examine this machine: leave out --run-dir, or leave them out")
    elif parsed.progress:
        text, well = describe_durable_point(parsed.run_dir), True
    else:
        text, well = examine(parsed.run_dir, time.time())
    if text:
        print(text)
    return 0 if well else 1


def _env(parsed: argparse.Namespace) -> int:
    print(describe_environment())
    return 0
