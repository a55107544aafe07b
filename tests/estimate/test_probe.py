"""The estimate for this machine: rates from a few real steps, and the command line around them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.cli import main
from trainer.config.shipped import RECIPES
from trainer.estimate.cost import CostModel
from trainer.estimate.measured import fit_rates
from trainer.estimate.probe import count_network, probe_machine
from trainer.estimate.table import EstimateOptions, would_run_on_cpu
from trainer.run.recipe import load_recipe

TINY = str(RECIPES / "tiny.yaml")


@given(st.integers(1, 512), st.integers(1, 512), st.floats(1e-4, 100), st.floats(1e-4, 100))
def test_rates_are_never_negative(few, many, quick, slow):
    rates = fit_rates((min(few, many), max(few, many)), (quick, slow))
    assert rates.row_s > 0
    assert rates.fixed_s >= -1e-9 * slow
    step = rates.fixed_s + max(few, many) * rates.row_s
    assert step == pytest.approx(slow, rel=1e-6)  # the larger batch is the recipe's: its time is kept


def test_a_probe_measures_the_recipes_network():
    recipe = load_recipe(RECIPES / "tiny.yaml")
    cost = count_network(recipe.model.name, 10, recipe.image.size, recipe.model.options)
    probed = probe_machine(recipe, 10, cost, torch.device("cpu"))
    assert not probed.on_gpu
    assert probed.name == recipe.model.name
    model = CostModel(recipe, cost, 300, 10, (), probed)
    (training,) = (phase for phase in model.cost_run(1) if phase.stage == "standard")
    step_s = probed.eager.fixed_s + recipe.batch.rows * probed.eager.row_s
    assert training.seconds == pytest.approx(training.count * step_s, rel=0.01)
    more = CostModel(recipe, cost, 3000, 10, (), probed)
    assert sum(phase.seconds for phase in more.cost_run(1)) > 3 * sum(phase.seconds for phase in model.cost_run(1))


@pytest.mark.parametrize(
    ("gpus", "device", "asked", "on_cpu"),
    [
        (0, "auto", (), True),
        (0, "auto", (8,), False),
        (0, "cuda", (), False),
        (1, "auto", (), False),
        (1, "cpu", (), True),
    ],
)
def test_a_machine_without_a_gpu_is_estimated_itself(monkeypatch, gpus, device, asked, on_cpu):
    monkeypatch.setattr("trainer.distributed.process_group.count_visible_gpus", lambda: gpus)
    recipe = load_recipe(RECIPES / "tiny.yaml", [f"execution.device={device}"])
    assert would_run_on_cpu(recipe, EstimateOptions(gpus=asked)) == on_cpu
    of_many = load_recipe(RECIPES / "tiny.yaml", [f"execution.device={device}", "execution.world=8"])
    assert would_run_on_cpu(of_many, EstimateOptions()) == (device == "cpu")


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    overrides = ["execution.device=cpu", "--samples", "300"]
    assert main(["run", "-c", TINY, "--dry-run", *overrides]) == 0
    assert "estimate for the whole recipe on this machine (" in capsys.readouterr().out
    assert main(["run", "-c", TINY, "--dry-run", "--gpus", "1", *overrides]) == 0
    assert "no estimate: execution.device is cpu, but --gpus" in capsys.readouterr().out
    assert main(["run", "-c", TINY, "--dry-run", "--probe", *overrides]) == 0
    printed = capsys.readouterr().out
    assert "on this machine (" in printed
    assert "total time" in printed
    assert "dollars" not in printed
    assert not list(tmp_path.iterdir())
    assert main(["run", "-c", TINY, "--probe"]) == 2
    assert "--dry-run" in capsys.readouterr().err
    assert main(["run", "-c", TINY, "--dry-run", "--probe", "--gpus", "8"]) == 2
