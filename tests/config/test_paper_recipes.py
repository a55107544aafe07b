"""The CIFAR-10 recipes hold the values of the paper (section 5.2, Supp. A) and of its released code."""

from typing import Any

import pytest

from tests.support.shipped_recipes import shipped
from trainer.methods.registry import METHODS
from trainer.run.stage_graph import stage_keys, stages_of

CIFAR10 = {  # recipe -> noise, ratio
    "cifar10_sym20": ("symmetric", 0.2),
    "cifar10_sym50": ("symmetric", 0.5),
    "cifar10_sym80": ("symmetric", 0.8),
    "cifar10_asym40": ("asymmetric", 0.4),
}
# Keras's l2(1e-4) is the loss term 1e-4 |w|², whose gradient is 2e-4 w.
ADAM = {"kind": "adam", "learning_rate": 1e-3, "weight_decay": 2e-4, "decay_scope": "residual_convs"}
# INCV: halved after 20 and 30 epochs, 1e-4 after 40. Main training: a tenth after 80, 120 and 160, half after 180.
MILESTONES_INCV = ((20, 5e-4), (30, 2.5e-4), (40, 1e-4))
MILESTONES_MAIN = ((80, 1e-4), (120, 1e-5), (160, 1e-6), (180, 5e-7))
each_recipe = pytest.mark.parametrize("name", CIFAR10)


def values_of(section: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(section, name) for name in names}


@each_recipe
def test_the_labels_have_the_noise_of_the_recipes_name(name: str) -> None:
    recipe = shipped(name)
    noise, ratio = CIFAR10[name]
    assert (recipe.labels.noise, recipe.labels.ratio, recipe.labels.matrix) == (noise, ratio, None)
    assert recipe.incv.noise_kind == noise


@each_recipe
def test_the_data_and_the_network_are_the_papers(name: str) -> None:
    recipe = shipped(name)
    assert (recipe.data.train.source, recipe.data.train.split, recipe.data.train.limit) == ("cifar10", "train", None)
    assert [(each.source, each.split, each.limit) for each in recipe.data.eval.values()] == [
        ("cifar10", "test", None)
    ]
    assert values_of(recipe.image, "size", "pad", "flip") == {"size": 32, "pad": 4, "flip": True}
    assert (recipe.image.mean, recipe.image.std) == ((0.0,) * 3, (1.0,) * 3)  # the released code scales to [0, 1]
    assert recipe.model.name == "cifar_resnet32"
    assert recipe.batch.global_ == 128
    assert recipe.methods == ("standard", "coteaching", "coteaching_incv")


@each_recipe
def test_incv_is_the_papers(name: str) -> None:
    incv = shipped(name).incv
    expected = {
        "rounds": 4,
        "epochs": 50,
        "init": "same",
        "round_network": "released_rule",
        "agree_top_k": 1,
        "noise_estimate": "paper",
        "remove_ratio": "from_noise",
        "min_per_class": 0,
    }
    assert values_of(incv, *expected) == expected
    assert values_of(incv.optimizer, *ADAM) == ADAM
    assert incv.optimizer.milestones == MILESTONES_INCV
    assert (incv.optimizer.warmup_epochs, incv.optimizer.clip) == (0.0, None)


@each_recipe
@pytest.mark.parametrize("method", METHODS.built_in)
def test_the_main_training_is_the_papers(name: str, method: str) -> None:
    section = shipped(name, [f"methods=[{', '.join(METHODS.built_in)}]"]).section(method)
    assert section.epochs == 200
    assert values_of(section.optimizer, *ADAM) == ADAM
    assert section.optimizer.milestones == MILESTONES_MAIN
    assert (section.optimizer.warmup_epochs, section.optimizer.clip) == (0.0, None)


@each_recipe
def test_co_teaching_ramps_over_ten_epochs_and_warms_up_by_the_noise(name: str) -> None:
    recipe = shipped(name)
    assert (recipe.section("coteaching").ramp_epochs, recipe.section("coteaching_incv").ramp_epochs) == (10, 10)
    assert recipe.section("coteaching_incv").warmup_epochs == "from_noise"


@each_recipe
def test_baselines_have_a_section_but_run_only_if_they_are_listed(name: str) -> None:
    recipe = shipped(name)
    assert recipe.section("mentornet").loss_percentile == (0.5 if name == "cifar10_sym80" else 0.75)
    for method in ("decoupling", "mentornet", "d2l"):
        read = {key.split(".")[0] for keys in stage_keys(recipe, {}).values() for key in keys}
        assert method not in read
        listed = shipped(name, [f"methods=[{method}]", "incv=null"])
        assert stages_of(listed) == ["pack", "labels", method, "evaluate", "export", "report"]
        assert f"{method}.epochs" in stage_keys(listed, {})[method]


@each_recipe
def test_f_correction_and_d2l_have_the_values_of_their_authors(name: str) -> None:
    recipe = shipped(name)
    assert recipe.section("forward_correction").percentile == 97.0
    expected = {"initial_epochs": "auto", "window": 5, "neighbours": 20, "lid_rows": 128, "lid_batches": 10}
    assert values_of(recipe.section("d2l"), *expected) == expected


@each_recipe
def test_plus_differs_from_algorithm_3_in_its_named_parts_alone(name: str) -> None:
    """Network, budget and algorithm are the same: `incv reproduce ablation` varies the rest."""
    without, plus = (
        stage_keys(shipped(recipe, ("methods=[coteaching_incv]",)), {})["coteaching_incv"]
        for recipe in (name, f"{name}_plus")
    )
    changed = {key for key in without.keys() | plus.keys() if without.get(key) != plus.get(key)}
    optimizer = ("kind", "learning_rate", "schedule", "milestones", "weight_decay", "decay_scope")
    at_this_noise = {
        "cifar10_sym80": {
            *("incv.loss.kind", "incv.loss.q", "incv.rounds", "incv.epochs"),
            *(f"coteaching_incv.{key}" for key in ("noise_of_selected", "warmup_epochs", "ema.use_buffers")),
        },
        "cifar10_asym40": {
            "incv.noise_estimate",
            *(f"coteaching_incv.{key}" for key in ("noise_of_selected", "warmup_epochs", "ema.use_buffers")),
        },
    }
    assert changed == at_this_noise.get(name, {"incv.noise_estimate"}) | {
        *("image.cutout", "image.mean", "image.std", "coteaching_incv.ema.decay"),
        *(f"{section}.optimizer.{key}" for section in ("incv", "coteaching_incv") for key in optimizer),
    }
