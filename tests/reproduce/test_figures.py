"""Figures from made-up records: measured points lie where the theory expects them; without runs, nothing is drawn."""

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.support.paper_formulas import symmetric_accuracy
from trainer.reproduce.experiments import EXPERIMENTS
from trainer.reproduce.figures import DRAWINGS, mean_over_rounds
from trainer.reproduce.records import RunRecord
from trainer.reproduce.runs import PlannedRun, plan_runs
from trainer.theory import symmetric_transition


def record(run: PlannedRun, **fields: Any) -> RunRecord:
    content = {"recipe": run.recipe, "method": run.stage, "seed": run.seed, "command": "", "accuracy": {}}
    content |= {"keys": {}, "numerics": {}}
    return RunRecord.model_validate(content | fields)


def draw(name: str, runs: dict[PlannedRun, RunRecord]) -> str:
    """The figure, which is valid XML."""
    figure = DRAWINGS[name](EXPERIMENTS[name], runs)
    assert figure is not None
    ElementTree.fromstring(figure)
    return figure


def paths(figure: str) -> list[list[tuple[float, float]]]:
    """The points of every curve, without the legend."""
    found = re.findall(r'd="M([^"h]+)"', figure)
    return [[tuple(map(float, pair.split())) for pair in re.split(r" ?[LM] ?", path)] for path in found]


def dots(chart: str) -> list[tuple[float, float]]:
    """The dots that a pointer names, so not those of the legend."""
    return [(float(x), float(y)) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"[^>]*><title>', chart)]


@pytest.mark.parametrize("name", sorted(set(DRAWINGS) - {"figure1"}))
def test_nothing_is_drawn_without_runs(name: str) -> None:
    assert DRAWINGS[name](EXPERIMENTS[name], {}) is None


def test_measured_points_on_the_theory_lie_on_its_curve() -> None:
    ratios = {"sym10": 0.1, "sym30": 0.3, "sym50": 0.5, "sym70": 0.7}
    runs = {}
    for run in plan_runs(EXPERIMENTS["figure2"], (0,)):
        if run.setting in ratios:
            ratio = ratios[run.setting]
            lp = (1 - ratio) ** 2 / symmetric_accuracy(ratio, 10)
            entry = {"agreement": symmetric_accuracy(ratio, 10), "label_precision": lp, "label_recall": 1 - ratio}
            runs[run] = record(run, rounds=[entry])
    figure = draw("figure2", runs)
    assert "asymmetric:" not in figure
    panels = [(curve, dots(chart)) for chart in figure.split("<svg ")[2:] for curve in paths(chart)]
    assert len(panels) == 3
    for theory, measured in panels:
        assert len(measured) == len(ratios)
        assert set(measured) <= set(theory)


def test_m_stands_beside_t() -> None:
    (run,) = plan_runs(EXPERIMENTS["figure3"], (0,))
    t = symmetric_transition(0.7, 10).tolist()
    figure = draw("figure3", {run: record(run, confusion={"predicted": t, "transition": t})})
    assert [figure.count(f">{name}, symmetric 0.7</text>") for name in "MT"] == [1, 1]
    assert figure.count(">30</text>") == 20  # the diagonals, in percent


def test_suspects_have_their_image_and_both_classes() -> None:
    (run,) = plan_runs(EXPERIMENTS["figure5"], (0,))
    suspects = [
        {"given": "cat & dog", "predicted": "dog", "image": "data:image/png;base64,AAAA"},
        {"given": "ship", "predicted": "truck", "image": None},
    ]
    figure = draw("figure5", {run: record(run, suspects=suspects)})
    assert "labelled cat &amp; dog" in figure
    assert "predicted dog" in figure
    assert "ship" not in figure  # its image could not be read
    assert figure.count("<image ") == 1


def test_rounds_are_averaged_as_far_as_all_runs_have_them() -> None:
    first, second = plan_runs(EXPERIMENTS["figure4"], (0,))[:2]
    entries = [{"label_recall": value} for value in (0.2, 0.6, 0.8)]
    records = [record(first, rounds=entries), record(second, rounds=[{"label_recall": 0.4}, {"label_recall": None}])]
    assert mean_over_rounds(records, lambda entry: entry["label_recall"]) == [(1, pytest.approx(0.3)), (2, 0.6)]
