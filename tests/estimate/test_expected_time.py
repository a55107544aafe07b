"""The time that is announced before a run: in words, from a few steps, without side effects."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.config.shipped import RECIPES
from trainer.estimate.measured import MeasuredNetwork, StepRates
from trainer.estimate.table import describe_time, estimate_cpu_seconds
from trainer.run.recipe import load_recipe


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "less than a minute"),
        (59, "less than a minute"),
        (61, "about 1 minute"),
        (720, "about 12 minutes"),
        (5300, "about 88 minutes"),
        (7300, "about 2 hours"),
    ],
)
def test_words(seconds: float, words: str) -> None:
    assert describe_time(seconds) == words


@given(st.floats(60, 1e6))
def test_words_are_right_within_a_quarter_to_a_half(seconds: float) -> None:
    _, number, unit = describe_time(seconds).split()
    said = int(number) * (3600 if unit.startswith("hour") else 60)
    assert 2 / 3 * seconds <= said <= 1.5 * seconds


def test_a_real_estimate_has_no_side_effects() -> None:
    recipe = load_recipe(RECIPES / "tiny.yaml", ["execution.threads=1"])
    torch.manual_seed(5)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    assert estimate_cpu_seconds(recipe, 400, 10) > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_at_equal_rates_an_estimate_grows_with_the_data_that_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """At equal rates, because two measurements on a busy machine can differ by any factor."""
    rates = StepRates(row_s=1 / 3000, fixed_s=0.005, forward_efficiency=1.0)
    probed = MeasuredNetwork("cnn", 32, rates, rates, 1e9, 10, "two cores", on_gpu=False)
    monkeypatch.setattr("trainer.estimate.table.probe_machine", lambda *_: probed)
    whole = load_recipe(RECIPES / "tiny.yaml", ["data.train.limit=null"])
    limited = load_recipe(RECIPES / "tiny.yaml", ["data.train.limit=400"])
    few, many = (estimate_cpu_seconds(whole, samples, 10) for samples in (400, 8000))
    assert 0 < 3 * few < many
    assert estimate_cpu_seconds(limited, 8000, 10) == few
