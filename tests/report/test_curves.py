"""The curves of the report: evaluations between the lines of steps, a line for each network, gaps."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from trainer.report.metrics_file import MOST_POINTS, read_metrics, read_pace
from trainer.report.plots import Series, line_chart
from trainer.report.sections.curves import curve_panels, metric_lines

STEPS, EVERY = 3000, 100


def write(path: Path, *, pair: bool = True, evaluations: bool = True) -> Path:
    """A training with a line every step and an evaluation every 100 steps, which are one epoch."""
    lines: list[dict[str, Any]] = []
    for step in range(1, STEPS + 1):
        line = {"step": step, "epoch": step / EVERY, "learning_rate": 0.1, "loss": 1.0, "train_accuracy": 0.5}
        lines.append(line | ({"loss_a": 0.9, "loss_b": 1.1} if pair else {}))
        if evaluations and step % EVERY == 0:
            of_test = {"accuracy.test": step / STEPS}
            if pair:
                of_test |= {"accuracy_a.test": step / STEPS - 0.01, "accuracy_b.test": step / STEPS + 0.01}
            lines.append({"step": step, "epoch": step // EVERY, **of_test})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def drawn(columns: dict[str, list[float | None]], key: str) -> dict[str, Series]:
    return {line.about: line for line in metric_lines({"": columns}, key)}


def test_thinning_keeps_every_evaluation_and_both_ends(tmp_path: Path) -> None:
    columns = read_metrics(write(tmp_path / "metrics.jsonl"))
    accuracies = [value for value in columns["accuracy.test"] if value is not None]
    assert accuracies == pytest.approx([(number + 1) * EVERY / STEPS for number in range(STEPS // EVERY)], abs=1e-6)
    losses = [place for place, value in enumerate(columns["loss"]) if value is not None]
    assert len(losses) == MOST_POINTS
    assert (columns["step"][losses[0]], columns["step"][-1]) == (1, STEPS)
    assert columns["step"] == sorted(value for value in columns["step"] if value is not None)


def test_the_pace_of_a_training_is_the_mean_over_its_steps(tmp_path: Path) -> None:
    """Of 1,000 steps with 10 images, 900 take 0.1 s each and 100 take 1 s, all of it waiting."""
    lines = [
        {"step": 1},
        {"step": 901, "images_per_s": 100.0, "data_wait": 0.5},
        {"step": 901, "accuracy.test": 0.3},
        {"step": 1001, "images_per_s": 10.0, "data_wait": 1.0},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_pace(path) == pytest.approx((10_000 / 190, 145 / 190))
    path.write_text(json.dumps(lines[0]))
    assert read_pace(path) is None


def test_each_network_of_a_pair_has_an_unbroken_line(tmp_path: Path) -> None:
    columns = read_metrics(write(tmp_path / "metrics.jsonl"))
    accuracies, losses = drawn(columns, "accuracy"), drawn(columns, "loss")
    assert accuracies.keys() == {"test, network a", "test, network b"}
    assert losses.keys() == {"network a", "network b"}
    for line in (*accuracies.values(), *losses.values()):
        assert all(y is not None for _, y in line.points)
    assert accuracies["test, network a"].points[-1] == (STEPS / EVERY, pytest.approx(0.99))
    assert accuracies["test, network b"].dashed
    assert len({line.colour for line in accuracies.values()}) == 2


def test_with_several_sets_the_colour_is_the_sets(tmp_path: Path) -> None:
    columns = read_metrics(write(tmp_path / "metrics.jsonl"))
    columns |= {name.replace("test", "val"): column for name, column in columns.items() if "test" in name}
    lines = drawn(columns, "accuracy")
    assert {about: (line.label, line.colour, line.dashed) for about, line in lines.items()} == {
        "test, network a": ("test", 0, False),
        "test, network b": ("test", 0, True),
        "val, network a": ("val", 1, False),
        "val, network b": ("val", 1, True),
    }
    plot = str(line_chart(list(lines.values()), title="accuracy"))
    assert plot.count(">test</text>") == plot.count(">val</text>") == 1, "one entry of the legend"


def test_a_run_of_an_earlier_version_has_the_mean_over_its_networks(tmp_path: Path) -> None:
    columns = read_metrics(write(tmp_path / "metrics.jsonl", pair=False))
    assert drawn(columns, "accuracy").keys() == {"test"}
    assert drawn(columns, "loss").keys() == {"loss"}
    assert drawn(columns, "train_accuracy").keys() == {"train_accuracy"}


def test_a_loss_that_is_not_finite_breaks_the_line(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", pair=False)
    lines = [json.loads(line) for line in path.read_text().splitlines()][-EVERY:]
    lines[EVERY // 2]["loss"] = math.nan
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (loss,) = drawn(read_metrics(path), "loss").values()
    assert [y for _, y in loss.points].count(None) == 1


def test_the_panels_of_a_pair_show_both_networks(tmp_path: Path) -> None:
    columns = read_metrics(write(tmp_path / "metrics.jsonl"))
    report = {
        "config": {"methods": ["coteaching_incv"]},
        "curves": {"rounds": {}, "methods": {"coteaching_incv": columns}},
        "methods": {},
    }
    (group,) = curve_panels(report)
    (panel,) = group["panels"]
    plots = {chart["label"]: str(chart["plot"]) for chart in panel["charts"]}
    for label in ("training loss", "accuracy on evaluation sets"):
        assert "network a" in plots[label]
        assert "network b" in plots[label]
