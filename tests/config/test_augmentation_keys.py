"""The keys of augmentation: off unless set, hashed when set, refused where they contradict others."""

import pytest

from shards.errors import ConfigError
from tests.support import RECIPES
from trainer.run.recipe import load_recipe
from trainer.run.result_keys import hash_keys, result_keys

TINY = RECIPES / "tiny.yaml"


def keys_of(*overrides):
    return result_keys(load_recipe(TINY, overrides))


def refused(*overrides):
    with pytest.raises(ConfigError) as caught:
        load_recipe(TINY, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    "off",
    [
        "image.random_resized_crop=null",
        "image.rand_augment.operations=0",
        "image.color_jitter={brightness: 0.0, contrast: 0, saturation: 0, hue: 0}",
        "image.auto_augment=null",
        "image.augment={}",
        "standard.mixup.alpha=0",
        "incv.mixup={}",
    ],
)
def test_a_key_that_is_off_is_not_hashed(off):
    assert keys_of(off) == keys_of()


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("image.random_resized_crop={scale: [0.25, 1]}", "image.random_resized_crop.scale", [0.25, 1.0]),
        ("image.rand_augment.operations=2", "image.rand_augment.operations", 2),
        ("image.color_jitter.hue=0.1", "image.color_jitter.hue", 0.1),
        ("image.auto_augment=imagenet", "image.auto_augment", "imagenet"),
        ("standard.mixup.alpha=0.2", "standard.mixup.alpha", 0.2),
        ("incv.mixup.alpha=0.2", "incv.mixup.alpha", 0.2),
    ],
)
def test_a_key_that_is_on_is_hashed(override, key, value):
    pad = ["image.pad=0"]  # which resized crops exclude
    assert keys_of(*pad, override)[key] == value
    assert hash_keys(keys_of(*pad, override)) != hash_keys(keys_of(*pad))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("image.random_resized_crop={}", "scale"),
        ("image.random_resized_crop={scale: [0.0, 1.0]}", "above 0, at most 1"),
        ("image.random_resized_crop={scale: [0.5, 1.1]}", "above 0, at most 1"),
        ("image.random_resized_crop={scale: [0.9, 0.5]}", "increasing"),
        ("image.random_resized_crop={scale: [0.5, 1.0], ratio: [2.0, 1.0]}", "ratio must be two increasing"),
        ("image.random_resized_crop={scale: [0.5, 1.0]}", "image.pad 0"),  # tiny pads by 1
        ("image.rand_augment.magnitude=31", "magnitude"),
        ("image.rand_augment.operations=-1", "operations"),
        ("image.color_jitter.hue=0.6", "hue"),
        ("image.color_jitter.brightness=-0.1", "brightness"),
        ("image.auto_augment=svhn", "auto_augment"),
        ("image.augment.negative={}", "unknown augmentation 'negative'; no installed package offers any"),
        ("standard.mixup.alpha=-1", "alpha"),
    ],
)
def test_a_value_out_of_range_is_refused(override, message):
    assert message in refused(override)


def test_methods_that_rank_samples_refuse_mixup():
    assert "coteaching.mixup.alpha" in refused("methods=[coteaching]", "coteaching.mixup.alpha=0.2")
    inherited = refused("methods=[coteaching_incv]", "coteaching.mixup.alpha=0.2")
    for words in ("coteaching_incv.mixup.alpha", "come from `coteaching`", "standard", "incv.mixup"):
        assert words in inherited


def test_a_section_of_a_method_that_is_not_run_is_not_judged():
    load_recipe(TINY, ["methods=[standard]", "coteaching.mixup.alpha=0.2"])
