"""Generalised cross-entropy: its values and gradients, and where a recipe may ask for it."""

import copy
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shards.errors import ConfigError
from tests.support import RECIPES
from tests.support.installed_package import install_package, run_python
from tests.support.toy_networks import RATE, batch_of, linear, setting, step_at
from trainer.config.losses import GceConfig, LossConfig
from trainer.config.recipe_file import recipe_yaml
from trainer.methods.built_in import StandardConfig
from trainer.methods.losses import build_row_losses, generalised_losses, target_losses
from trainer.methods.standard import StandardTask
from trainer.run.recipe import load_recipe
from trainer.run.result_keys import result_keys

DEMO = RECIPES / "demo.yaml"
CLASSES = 4


def rows(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    logits = 3 * torch.randn(6, CLASSES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return logits.to(dtype), torch.arange(6) % CLASSES


def test_values_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]])
    found = generalised_losses(logits, torch.tensor([0, 1]), 0.5)
    torch.testing.assert_close(found, torch.tensor([2 * (1 - math.sqrt(0.25)), 2 * (1 - math.sqrt(0.5))]))


@given(st.floats(0.05, 1.0))
def test_the_gradient_is_that_of_the_cross_entropy_times_a_power_of_the_probability(q: float) -> None:
    logits, labels = rows()
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    generalised_losses(ours, labels, q).sum().backward()
    target_losses(plain, labels).sum().backward()
    power = logits.softmax(1).gather(1, labels[:, None]) ** q
    torch.testing.assert_close(ours.grad, power * plain.grad)


def test_its_limits_are_the_cross_entropy_and_the_mean_absolute_error() -> None:
    logits, labels = rows()
    torch.testing.assert_close(generalised_losses(logits, labels, 1e-9), target_losses(logits, labels))
    wrong = (logits.softmax(1) - torch.eye(CLASSES)[labels]).abs().sum(1) / 2
    torch.testing.assert_close(generalised_losses(logits, labels, 1.0), wrong)


def test_mixed_and_smoothed_targets_are_sums_over_their_classes() -> None:
    logits, labels = rows()
    other = labels.flip(0)
    eye = torch.eye(CLASSES, dtype=torch.float64)
    mixed = generalised_losses(logits, 0.3 * eye[labels] + 0.7 * eye[other], 0.7)
    expected = 0.3 * generalised_losses(logits, labels, 0.7) + 0.7 * generalised_losses(logits, other, 0.7)
    torch.testing.assert_close(mixed, expected)
    spread = generalised_losses(logits, 0.8 * eye[labels] + 0.2 / CLASSES, 0.7)
    torch.testing.assert_close(generalised_losses(logits, labels, 0.7, smoothing=0.2), spread)


def test_it_is_fp32_also_under_bf16_and_keeps_what_is_not_finite() -> None:
    logits, labels = rows(torch.bfloat16)
    assert generalised_losses(logits, labels, 0.7).dtype == torch.float32
    logits[2, 0] = torch.nan
    assert torch.isnan(generalised_losses(logits, labels, 0.7)).tolist() == [row == 2 for row in range(6)]


def test_a_label_without_any_probability_has_a_finite_gradient() -> None:
    logits = torch.tensor([[200.0, -200.0]], requires_grad=True)
    loss = generalised_losses(logits, torch.tensor([1]), 0.7)
    torch.testing.assert_close(loss, torch.tensor([1 / 0.7]))
    loss.sum().backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros(1, 2))


def test_a_step_takes_its_gradient() -> None:
    network, batch = linear(1), batch_of(8, real=5)
    section = StandardConfig(epochs=1, loss=GceConfig(kind="gce", q=0.7))
    task = StandardTask(copy.deepcopy(network), setting(), build_row_losses(section))
    report = task.step(batch, step_at(5))
    p = network(batch.images[:5]).softmax(1).gather(1, batch.labels[:5, None])[:, 0]
    loss = ((1 - p**0.7) / 0.7).mean()
    torch.testing.assert_close(report["loss"], loss.detach())
    loss.backward()
    torch.testing.assert_close(task.module[1].weight, network[1].weight - RATE * network[1].weight.grad)


def test_only_trainings_on_the_given_labels_take_it() -> None:
    recipe = load_recipe(DEMO, ["incv.loss={kind: gce, q: 0.5}", "standard.loss.kind=gce", "standard.loss.q=0.7"])
    assert recipe.incv is not None
    assert recipe.incv.loss == GceConfig(kind="gce", q=0.5)
    assert recipe.section("standard").loss == GceConfig(kind="gce", q=0.7)
    with pytest.raises(ConfigError, match=r"coteaching\.loss"):
        load_recipe(DEMO, ["coteaching.loss={kind: gce, q: 0.7}"])


@pytest.mark.parametrize("q", ["0", "-0.1", "1.5"])
def test_a_power_outside_its_range_is_refused(q: str) -> None:
    with pytest.raises(ConfigError, match=r"`incv\.loss\.q`"):
        load_recipe(DEMO, ["incv.loss.kind=gce", f"incv.loss.q={q}"])


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("{kind: gcee, q: 0.7}", "unknown loss 'gcee'; did you mean gce"),
        ("{kind: gce}", "missing key `incv.loss.q`"),
        ("{kind: gce, p: 0.7}", "unknown key `incv.loss.p`"),
        ("{q: 0.7}", "unknown key `incv.loss.q`"),
        ("gce", "`incv.loss`"),
        ("null", "`incv.loss`"),
    ],
)
def test_a_wrong_loss_is_named(loss: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_recipe(DEMO, [f"incv.loss={loss}"])
    assert words in str(refused.value)


def test_options_count_as_results_and_outlast_the_resolved_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(DEMO, ["incv.loss={kind: gce, q: 0.7}"])
    changed = {key: value for key, value in result_keys(recipe).items() if key not in result_keys(load_recipe(DEMO))}
    assert changed == {"incv.loss.kind": "gce", "incv.loss.q": 0.7}
    (tmp_path / "resolved.yaml").write_text(recipe_yaml(recipe))
    assert load_recipe(tmp_path / "resolved.yaml") == recipe


def test_a_method_that_inherits_a_section_may_take_another_loss() -> None:
    keys = ["methods=[standard_incv]", "standard.loss={kind: gce, q: 0.7}", "standard_incv.loss.kind=cross_entropy"]
    assert load_recipe(DEMO, keys).section("standard_incv").loss == LossConfig()
    assert load_recipe(DEMO, keys[:2]).section("standard_incv").loss == GceConfig(kind="gce", q=0.7)
    assert load_recipe(DEMO, [*keys[:2], "standard_incv.loss.q=0.5"]).section("standard_incv").loss.q == 0.5


TOY_LOSS = """
from trainer.config.losses import Loss, LossConfig

class Options(LossConfig):
    scale: float = 2.0

def rows(logits, targets, smoothing, scale):
    return scale * (logits - targets[:, None]).square().mean(dim=1)

LOSS = Loss("toy", Options, "toy_loss:rows")
"""
TOY_STEP = """
from pathlib import Path
import sys
import torch
from trainer.methods.losses import build_row_losses
from trainer.run.recipe import load_recipe

recipe = load_recipe(Path(sys.argv[1]), sys.argv[2:])
print(build_row_losses(recipe.incv)(torch.ones(2, 3), torch.tensor([0, 3])).tolist())
"""


def test_a_loss_of_a_package_is_one_file(tmp_path: Path) -> None:
    install_package(tmp_path, "toy_loss", "incv.losses", "toy = toy_loss:LOSS", TOY_LOSS)
    for options, values in (("{kind: toy}", "[2.0, 8.0]"), ("{kind: toy, scale: 1.0}", "[1.0, 4.0]")):
        done = run_python(tmp_path, "-c", TOY_STEP, str(DEMO), f"incv.loss={options}")
        assert done.stdout.strip() == values, done.stderr
    described = run_python(tmp_path, "-m", "trainer", "keys", "incv.loss").stdout
    assert "with kind: toy" in described
    assert "scale" in described
    refused = run_python(tmp_path, "-m", "trainer", "validate", "-c", "demo", "incv.loss={kind: toy, scale: many}")
    assert "`incv.loss.scale`" in refused.stderr
