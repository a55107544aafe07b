"""Reads the time per phase of each training, summed over the starts of a run, as measured with `--profile`."""

from typing import Any

from shards.durable import read_json
from shards.errors import DataError
from trainer.methods.registry import title_of
from trainer.records.run_directory import RunDirectory

PHASES = (
    ("data_wait", "data wait", "var(--c3)"),
    ("step", "step", "var(--c2)"),
    ("forward", "forward", "var(--c5)"),
    ("backward", "backward", "var(--c2)"),
    ("optimiser", "optimiser", "var(--c1)"),
    ("exchange", "exchange", "var(--c0)"),
    ("predict", "predict", "var(--c6)"),
    ("checkpoint", "checkpoint", "var(--c7)"),
    ("warm_up", "warm-up", "var(--c4)"),
    ("other", "other", "var(--faint)"),
)
"""Key, label and colour. Only older runs have forward, backward, optimiser and exchange; they have no `step`."""


def read_profile(run: RunDirectory) -> list[dict[str, Any]] | None:
    """Return steps and seconds of each training, in run order, numbered from 1; None if there is no profile."""
    trainings: dict[tuple[Any, ...], dict[str, Any]] = {}
    try:
        for entry in read_json(run.profile):
            name = tuple(entry[key] for key in ("stage", "round", "fold"))
            _add(trainings.setdefault(name, _nothing(*name)), entry)
    except (
        DataError,
        KeyError,
        TypeError,
        ValueError,
    ):  # missing or malformed: the report is written without it
        return None
    return list(trainings.values()) or None


def _nothing(stage: str, round_: int | None, fold: int | None) -> dict[str, Any]:
    from_one = [None if number is None else number + 1 for number in (round_, fold)]
    return {
        "training": title_of(stage) if round_ is None else f"Round {from_one[0]}, fold {from_one[1]}",
        "stage": stage,
        "round": from_one[0],
        "fold": from_one[1],
        "devices": [],
        "starts": 0,
        "steps": 0,
        "wall_s": 0.0,
        "seconds": {},
    }


def _add(training: dict[str, Any], entry: dict[str, Any]) -> None:
    training["starts"] += 1
    training["steps"] += int(entry["steps"])
    training["wall_s"] += float(entry["wall_s"])
    if str(entry["device"]) not in training["devices"]:
        training["devices"].append(str(entry["device"]))
    for phase, seconds in entry["seconds"].items():
        training["seconds"][phase] = training["seconds"].get(phase, 0.0) + float(seconds)


def shares(training: dict[str, Any]) -> dict[str, float]:
    """Return the share of a training's time by phase; the shares sum to 1."""
    seconds = training["seconds"]
    whole = sum(seconds.values()) or 1.0
    return {phase: seconds.get(phase, 0.0) / whole for phase, _, _ in PHASES}


def shown_phases(trainings: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Return key, label and colour of the phases that occur in at least one training."""
    return [each for each in PHASES if any(each[0] in training["seconds"] for training in trainings)]


def profile_words(report: dict[str, Any]) -> str:
    """Explain the columns of the profile table, and name the devices that were measured."""
    trainings = report["profile"] or []
    devices = sorted({device for training in trainings for device in training["devices"]})
    named = ["the CPU" if device == "CPU" else device for device in devices]
    waiting, rest = "the time spent waiting for a batch", " and the work between epochs"
    predicting = "Predict is the pass over the held-out half after an epoch. "
    if not any("predict" in training["seconds"] for training in trainings):
        predicting = ""
    if any(device != "CPU" for device in devices):
        waiting = "the time that the GPU was idle while waiting for a batch; step is GPU time"
        rest = ", the work between epochs, and any other time in which the GPU was idle"
    return (
        f"Shares of each training's time, measured on {' and '.join(named)}. Data wait is {waiting}. {predicting}"
        "Checkpoint is the time to load a checkpoint and the time that training paused to write them. Warm-up is the "
        f"first batch and the first step of each start. Other is logging{rest}."
    )
