"""The settings of an audit: enough steps for a fold of any size."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.auditing.settings import FROM_SCRATCH, FROM_WEIGHTS, Start, choose_batch, choose_epochs, choose_recipe
from trainer.run.recipe import check_recipe

DATA = {"source": "image_folder", "split": "", "root": "photos", "shards": "shards"}
schedules = st.sampled_from([FROM_WEIGHTS, FROM_SCRATCH])


@given(st.integers(20, 3_000_000), schedules)
def test_every_fold_gets_enough_steps(samples, schedule):
    batch = choose_batch(samples)
    epochs = choose_epochs(samples, batch, schedule)
    steps = math.ceil(samples / 2 / batch)
    assert epochs * steps >= schedule.steps
    assert epochs >= schedule.epochs
    assert (epochs - 1) * steps < schedule.steps or epochs == schedule.epochs  # no more than needed
    assert batch <= samples


@given(st.integers(20, 3_000_000), st.integers(20, 3_000_000))
def test_more_images_never_get_a_smaller_batch(one, other):
    assert choose_batch(min(one, other)) <= choose_batch(max(one, other))


@settings(deadline=None)  # the first call imports timm
@given(st.integers(20, 3_000_000), st.booleans(), st.sampled_from(["cpu", "cuda"]))
def test_the_recipe_is_valid(samples, scratch, device):
    start = Start("resnet18") if scratch else Start("resnet18", pretrained=True, image={"size": 160})
    recipe = check_recipe(choose_recipe(dict(DATA), samples, start, device, 2), "audit")
    assert recipe.methods == ()
    assert recipe.incv is not None
    assert recipe.incv.remove_ratio == 0  # so that every doubtful sample is predicted again
    assert recipe.image.resize is not None
    assert recipe.image.resize > recipe.image.size
    assert recipe.model.pretrained is not scratch
