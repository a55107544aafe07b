"""Batch and epochs that follow the size of the data."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import RECIPES
from trainer.config.fitting import (
    LARGEST_BATCH,
    SMALLEST_BATCH,
    STEPS_PER_EPOCH,
    count_steps,
    describe_lengths,
    fit_batch,
    fit_section,
    resolve_batch,
)
from trainer.config.optimisation import OptimizerConfig
from trainer.config.schema import TrainingConfig
from trainer.methods.built_in import CoteachingIncvConfig
from trainer.run.recipe import load_recipe

TINY = RECIPES / "tiny.yaml"
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
samples = st.integers(1, 10**7)
milestone_epochs = st.sets(st.integers(0, 200), max_size=5)


@unhurried
@given(samples)
def test_a_batch_is_the_largest_that_gives_enough_steps(count: int) -> None:
    batch = fit_batch(count)
    assert batch in (16, 32, 64, 128)
    assert count_steps(count, batch) >= STEPS_PER_EPOCH or batch == SMALLEST_BATCH
    assert batch == LARGEST_BATCH or count_steps(count, 2 * batch) < STEPS_PER_EPOCH


@pytest.mark.parametrize(
    ("count", "batch"), [(1, 16), (224, 16), (225, 32), (448, 32), (449, 64), (896, 64), (897, 128)]
)
def test_batches_at_the_boundaries(count: int, batch: int) -> None:
    assert fit_batch(count) == batch


@pytest.mark.parametrize("count", [1, 300, 449, 898, 10**6])
def test_auto_is_resolved_by_half_the_samples_if_there_are_folds(count: int) -> None:
    recipe = load_recipe(TINY, ["batch.global=auto"])
    assert resolve_batch(recipe, count).batch.rows == fit_batch(count // 2)
    alone = load_recipe(TINY, ["batch.global=auto", "incv=null", "methods=[standard]"])
    assert resolve_batch(alone, count).batch.rows == fit_batch(count)
    assert resolve_batch(recipe, None).batch.rows == LARGEST_BATCH
    given_number = load_recipe(TINY)
    assert resolve_batch(given_number, count) is given_number


@unhurried
@given(st.integers(1, 300), st.integers(0, 5000), st.integers(1, 500), milestone_epochs, st.floats(0, 20))
def test_epochs_are_raised_just_enough_and_all_else_is_stretched(
    epochs: int, least: int, per_epoch: int, at: set[int], warmup: float
) -> None:
    milestones = tuple((epoch, 0.1 / (epoch + 1)) for epoch in sorted(at))
    optimizer = OptimizerConfig(milestones=milestones, warmup_epochs=warmup)
    section = CoteachingIncvConfig(epochs=epochs, min_steps=least, optimizer=optimizer, warmup_epochs=3)
    fitted = fit_section(section, per_epoch)
    if epochs * per_epoch >= least:
        assert fitted is section
        return
    assert least <= fitted.epochs * per_epoch < least + per_epoch
    factor = fitted.epochs / epochs
    assert fitted.ramp_epochs == pytest.approx(section.ramp_epochs * factor, abs=0.5)
    assert fitted.warmup_epochs == pytest.approx(3 * factor, abs=0.5)
    assert fitted.optimizer.warmup_epochs == pytest.approx(warmup * factor)
    stretched = fitted.optimizer.milestones
    assert [rate for _, rate in stretched] == [rate for _, rate in milestones]
    assert all(a < b for (a, _), (b, _) in itertools.pairwise(stretched))
    for (before, _), (after, _) in zip(milestones, stretched, strict=True):
        assert after == pytest.approx(before * factor, abs=0.5)
    assert CoteachingIncvConfig.model_validate(fitted.model_dump(by_alias=True)) == fitted
    assert fit_section(fitted, per_epoch) is fitted


def test_a_warm_up_that_follows_the_noise_is_left_to_the_method() -> None:
    section = CoteachingIncvConfig(epochs=10, min_steps=100)
    assert fit_section(section, 2).warmup_epochs == "from_noise"


def test_without_min_steps_nothing_changes() -> None:
    section = TrainingConfig(epochs=1)
    assert fit_section(section, 1) is section


def test_short_trainings_are_named_with_what_to_set() -> None:
    recipe = load_recipe(TINY, ["incv.min_steps=80", "methods=[standard]"])
    notes, warnings = describe_lengths(recipe, {"incv": 150, "standard": 300})
    (note,) = notes
    assert "incv.min_steps = 80: each fold trains for 16 epochs instead of 5" in note
    (warning,) = warnings
    assert "standard trains for only 50 steps (5 epochs of 10)" in warning
    assert "standard.min_steps" in warning


def test_what_is_too_short_depends_on_what_has_to_be_learned() -> None:
    keys = ["methods=[standard]", "incv=null", "standard.epochs=10"]  # 100 steps
    assert describe_lengths(load_recipe(TINY, keys), {"standard": 300}) == ([], [])
    large = load_recipe(TINY, [*keys, "image.size=64"])
    assert "100 steps" in describe_lengths(large, {"standard": 300})[1][0]
    pretrained = large.model_copy(update={"model": large.model.model_copy(update={"pretrained": True})})
    assert describe_lengths(pretrained, {"standard": 300}) == ([], [])


@pytest.mark.parametrize("name", ["image_folder", "image_folder_finetune"])
@pytest.mark.parametrize("count", [40, 100, 318, 449, 450, 1000, 3000, 5119, 5120, 100_000])
def test_the_recipes_for_own_images_give_every_fold_enough_steps(name: str, count: int) -> None:
    keys = ["image={size: 224, mean: [0, 0, 0], std: [1, 1, 1]}"]
    recipe = resolve_batch(load_recipe(RECIPES / f"{name}.yaml", keys), count)
    assert recipe.incv is not None
    per_epoch = count_steps(-(-count // 2), recipe.batch.rows)
    assert fit_section(recipe.incv, per_epoch).epochs * per_epoch >= recipe.incv.min_steps >= 200
    trainings = {"incv": -(-count // 2), "standard": count, "coteaching_incv": count // 2}
    assert describe_lengths(recipe, trainings)[1] == []
