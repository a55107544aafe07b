"""Every shipped recipe loads, plans without data, and opens with its command, cost and known result."""

import fnmatch
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.support import RECIPES
from tests.support.command_line import Answer, unchanged
from trainer.config.recipe_file import recipe_yaml
from trainer.methods.registry import method_names
from trainer.run.recipe import check_recipe, load_recipe
from trainer.run.result_keys import default_keys, result_keys
from trainer.run.stage_graph import stages_of

Incv = Callable[..., Answer]
SHIPPED = sorted(RECIPES.glob("*.yaml"))
each_recipe = pytest.mark.parametrize("recipe", SHIPPED, ids=lambda path: path.stem)


def test_there_are_recipes() -> None:
    assert {"tiny", "demo", "webvision50", "webvision1000"} <= {recipe.stem for recipe in SHIPPED}


@each_recipe
def test_a_recipe_resolves_to_itself(recipe: Path) -> None:
    """config.resolved.yaml, with every default written out, says the same."""
    loaded = load_recipe(recipe)
    assert check_recipe(yaml.safe_load(recipe_yaml(loaded)), "resolved") == loaded


@each_recipe
def test_a_recipe_is_valid(recipe: Path, incv: Incv) -> None:
    answer = incv("validate", "-c", recipe)
    assert answer.code == 0, answer.err


@each_recipe
def test_a_recipe_plans_without_data_and_writes_nothing(
    recipe: Path, incv: Incv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with unchanged(tmp_path):
        answer = incv("run", "-c", recipe, "--dry-run")
    assert answer.code == 0, answer.err
    assert f"into runs/{recipe.stem}" in answer.out
    for stage in stages_of(load_recipe(recipe)):
        assert re.search(rf"^ +{stage} +(to do|always run)", answer.out, re.MULTILINE), stage


@each_recipe
def test_a_recipe_opens_with_command_cost_and_result(recipe: Path) -> None:
    lines = recipe.read_text().splitlines()
    header = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    text = " ".join(line.lstrip("# ") for line in header)
    assert len(header[0].lstrip("# ")) > 10, "the first line says what it is; `incv ls` prints it"
    assert f"incv run -c recipes/{recipe.name}" in text
    cost = re.search(r"Cost: (.+?)\.? Known result: (.+)", text)
    assert cost, "the header has `Cost: ...` and then `Known result: ...`"
    result = cost[2]
    assert re.search(r"not yet run|none|\d %", result), f"neither a figure nor `not yet run`: {result}"


# What the paper says of its WebVision experiment: dotted key (`*`: any name) -> value, and where it says so.
THE_PAPERS: dict[str, tuple[object, str]] = {
    "data.train.source": ("webvision", "we use the WebVision dataset 1.0"),
    "data.train.split": ("train", "the training set of WebVision contains many real-world noisy labels"),
    "data.train.subset": ("google", "the first 50 classes of the Google image subset"),
    "data.*.classes": (50, "the first 50 classes"),
    "data.*.resize": (256, "resize each image to make shorter size as 256"),
    "data.eval.webvision_val.source": ("webvision", "the human-annotated WebVision validation set"),
    "data.eval.ilsvrc12_val.source": ("ilsvrc12", "and the ILSVRC12 validation set"),
    "data.eval.*.split": ("val", "validation set"),
    "labels.noise": ("none", "real-world noisy labels: nothing is corrupted"),
    "image.size": (227, "randomly crop a patch of size 227x227"),
    "image.resize": (256, "make shorter size as 256"),
    "image.flip": (True, "horizontal random flipping"),
    "model.name": ("inception_resnet_v2", "we use the inception-resnet v2"),
    "batch.global": (128, "the batch size is set to 128 for all experiments"),
    "incv.rounds": (2, "we set the number of iterations to 2"),
    "incv.epochs": (50, "train the model for simply 50 epochs at each iteration"),
    "incv.init": ("fresh", "Algorithm 2, lines 3 and 9: initialize, reinitialize"),
    "incv.agree_top_k": (1, "Algorithm 2, line 6: the predicted label is the given one"),
    "incv.noise_estimate": ("paper", "Algorithm 2, line 8: estimate the noise ratio"),
    "incv.remove_ratio": (0.1, "we set the remove ratio r to 0.1"),
    "*.optimizer.kind": ("sgd", "the SGD optimizer"),
    "*.optimizer.learning_rate": (0.1, "an initial learning rate 0.1"),
    "incv.optimizer.milestones": (
        [[20, 0.05], [30, 0.025], [40, 0.01]],
        "divided by 2 after 20 and 30 epochs, and finally takes the value 0.01 after 40 epochs",
    ),
    **{
        f"{method}.{key}": said
        for method in ("standard", "forward_correction", "decoupling", "coteaching", "mentornet", "d2l")
        for key, said in {
            "epochs": (120, "we train the networks for 120 epochs"),
            "optimizer.milestones": ([[40, 0.01], [80, 0.001]], "divided by 10 after 40, and 80 epochs"),
        }.items()
    },
    "coteaching_incv.warmup_epochs": (20, "we set the warm-up epoch as E0 = 20"),
    "coteaching.ramp_epochs": (10, "section 5.3: n(e) = |B_S| (1 - noise of S * min(e / 10, 1))"),
}
LEFT_TO_DEFAULTS = (  # keys that say "nothing special" where they are not written
    *(
        "data.*.limit",
        "data.*.classes",
        "data.*.subset",
        "image.pad",
        "image.fill",
        "model.options",
        "model.trainable",
        *("incv.judge", "incv.features_file", "incv.predictions_file", "incv.against"),
    ),
    *("labels.ratio", "labels.matrix", "labels.seed", "labels.source_is_true", "order.window"),
    "*.optimizer.schedule",
    "*.min_steps",
    "*.label_smoothing",
    "*.ema",
    "*.loss.kind",
    *("incv.halves", "incv.folds"),
    "data.eval_fraction",
    "evaluation.*",
    *("image.cutout", "image.random_resized_crop", "image.rand_augment.*", "image.color_jitter.*", "*.mixup.alpha"),
    *("image.auto_augment", "image.augment"),
)
web_recipes = pytest.mark.parametrize("name", ["webvision50", "webvision1000"])


def leaves(node: yaml.Node, key: str = "") -> Iterator[tuple[str, object, int]]:
    """Every value in a recipe with its dotted key and its line; a list is one value."""
    if isinstance(node, yaml.MappingNode):
        for name, inner in node.value:
            yield from leaves(inner, f"{key}.{name.value}".removeprefix("."))
    else:
        yield key, yaml.safe_load(yaml.serialize(node)), node.end_mark.line


def papers_values(key: str) -> list[object]:
    return [value for pattern, (value, _) in THE_PAPERS.items() if fnmatch.fnmatchcase(key, pattern)]


@web_recipes
def test_a_web_recipe_marks_what_the_paper_does_not_give(name: str) -> None:
    text = (RECIPES / f"{name}.yaml").read_text()
    lines = text.splitlines()
    for key, value, line in leaves(yaml.compose(text)):
        if key.endswith((".root", ".shards")):
            continue  # where it lies on this machine
        marked = re.search(r"# assumed: \S+", lines[line]) is not None
        assert marked != (value in papers_values(key)), f"line {line + 1}, {key}: {value}"


def test_the_50_class_recipe_has_every_value_of_the_paper() -> None:
    text = (RECIPES / "webvision50.yaml").read_text()
    written = {key: value for key, value, _ in leaves(yaml.compose(text))}
    for pattern, (value, words) in THE_PAPERS.items():
        own = {key: given for key, given in written.items() if fnmatch.fnmatchcase(key, pattern)}
        assert own, f"{pattern}: {words}"
        assert all(given == value for given in own.values()), f"{own}: the paper says {words}"


@web_recipes
def test_a_web_recipe_hides_no_result_key_behind_a_default(name: str) -> None:
    path = RECIPES / f"{name}.yaml"
    written = {key for key, _, _ in leaves(yaml.compose(path.read_text()))}
    recipe = load_recipe(path)
    written |= {key.replace("coteaching.", "coteaching_incv.") for key in written}  # which inherits them
    written |= set(method_names())  # sections of methods that it does not train
    hidden = (set(result_keys(recipe)) | set(default_keys(recipe))) - written
    assert [key for key in hidden if not any(fnmatch.fnmatchcase(key, left) for left in LEFT_TO_DEFAULTS)] == []


@web_recipes
def test_crops_of_the_packed_images_are_not_scaled(name: str) -> None:
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    packed = {recipe.data.train.resize, *(split.resize for split in recipe.data.eval.values())}
    assert packed == {recipe.image.resize}


def test_the_rates_of_the_large_batch_follow_the_linear_rule() -> None:
    recipe = load_recipe(RECIPES / "webvision1000.yaml")
    for section in (recipe.incv, recipe.section("standard"), recipe.section("coteaching")):
        assert section is not None
        assert section.optimizer.learning_rate == pytest.approx(0.1 * recipe.batch.global_ / 256)
        assert section.optimizer.warmup_epochs > 0
        assert all(epoch < section.epochs for epoch, _ in section.optimizer.milestones)
    assert all(recipe.batch.global_ % gpus == 0 for gpus in (8, 16, 32, 64))
