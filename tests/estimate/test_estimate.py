"""The estimate against numbers that can be checked by hand, and docs/scaling.md against what the command prints."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.errors import ConfigError
from tests.support import RECIPES, REPOSITORY
from trainer.cli import main
from trainer.config.data import DataConfig
from trainer.config.schema import Recipe
from trainer.estimate import measured
from trainer.estimate.cost import CostModel, PhaseCost, all_reduce_seconds
from trainer.estimate.dry_run import size_split
from trainer.estimate.probe import NetworkCost, count_network
from trainer.estimate.table import EstimateOptions, SplitSize, estimate_text
from trainer.methods.method import Epochs
from trainer.run.recipe import load_recipe

SCALING = REPOSITORY / "docs" / "scaling.md"
# inception_resnet_v2, 50 classes, 227 pixels; the first test counts it.
NETWORK = NetworkCost(54_383_314, 245, 13.21e9, 39.61e9, 24.14e6)
RESNET32 = NetworkCost(466_906, 34, 0.1380e9, 0.4139e9, 0.6241e6)


def recipe_of(name: str, *overrides: str) -> Recipe:
    return load_recipe(RECIPES / f"{name}.yaml", list(overrides))


def webvision50(*overrides: str, samples: int = 66_000) -> CostModel:
    return CostModel(recipe_of("webvision50", *overrides), NETWORK, samples, 50, (2_500, 2_500))


def cifar10(*overrides: str) -> CostModel:
    return CostModel(recipe_of("cifar10_sym50", *overrides), RESNET32, 50_000, 10, (10_000,))


def stage_seconds(phases: list[PhaseCost]) -> dict[str, float]:
    return {
        stage: sum(phase.seconds for phase in phases if phase.stage == stage)
        for stage in dict.fromkeys(phase.stage for phase in phases)
    }


def total_hours(phases: list[PhaseCost]) -> float:
    return sum(phase.seconds for phase in phases) / 3600


# --- networks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "classes", "expected"), [(measured.INCEPTION, 50, NETWORK), (measured.RESNET32, 10, RESNET32)]
)
def test_the_flops_of_the_measured_networks(
    reference: measured.MeasuredNetwork, classes: int, expected: NetworkCost
) -> None:
    counted = count_network(reference.name, classes, reference.pixels, {})
    assert counted.step_flops == pytest.approx(reference.step_flops, rel=1e-3)
    assert counted.step_flops == pytest.approx(3 * counted.forward_flops, rel=0.02)
    assert counted.forward_flops == pytest.approx(expected.forward_flops, rel=0.01)  # timm: 2 * 6.61 GMAC
    assert (counted.parameters, counted.layers) == (expected.parameters, reference.layers)
    assert counted.saved_numbers == pytest.approx(expected.saved_numbers, rel=0.01)


def test_a_model_that_cannot_take_the_images_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"image.size = 8 cannot be counted"):
        count_network("inception_resnet_v2", 10, 8, {})


# --- steps: the measured rates come out again -------------------------------------------------------------------


def step_of(model: CostModel, rows: int, networks: int = 1, ranks_first: bool = False) -> PhaseCost:
    batch = model.recipe.batch.model_copy(update={"global_": rows})
    model = replace(model, recipe=model.recipe.model_copy(update={"batch": batch}))
    (phase,) = model.cost_training("any", [Epochs(1, 10_000 * rows, ranks_first=ranks_first)], networks, gpus=1)
    return phase


EAGER = "execution.compile=false"


@pytest.mark.parametrize(
    ("model", "rows", "networks", "rate"),
    [
        (webvision50(EAGER), 128, 1, 2_345),
        (webvision50(EAGER), 512, 1, 2_997),
        (webvision50(), 128, 1, 3_678),
        (webvision50(), 512, 1, 4_745),
        (webvision50(), 128, 2, 2_159),
        (cifar10("precision=bf16", EAGER), 128, 1, 34_000),
        (cifar10("precision=bf16", EAGER), 1024, 1, 74_000),
        (cifar10("precision=bf16"), 128, 1, 47_814),
    ],
)
def test_the_measured_training_rates(model: CostModel, rows: int, networks: int, rate: float) -> None:
    assert step_of(model, rows, networks).images_per_s == pytest.approx(rate, rel=2e-3)


def test_the_measured_forward_rates() -> None:
    """Passes below 100,000 images are not compiled."""
    passes = [webvision50().cost_predicting("incv", 512 * n, 1, 1, gpus=1, compiled=True) for n in (117, 273)]
    assert [phase.images_per_s for phase in passes] == pytest.approx([8_757, 15_887], rel=0.01)


def test_ranking_first_meets_the_measured_step() -> None:
    """1,788 images/s where 115 of 128 rows were trained on; the estimate trains on all."""
    forgotten_s = 2 * 13 * webvision50().scale_rates(compiled=True)[0]
    ranked = step_of(webvision50(), 128, networks=2, ranks_first=True)
    assert 128 / (ranked.seconds / ranked.count - forgotten_s) == pytest.approx(1_788, rel=0.03)


def test_the_measured_memory() -> None:
    """6.5 GB: one network, 128 rows, bf16."""
    assert step_of(webvision50(), 128).memory_bytes == pytest.approx(6.5e9, rel=0.1)


def test_micro_batches_repeat_the_fixed_part_and_save_memory() -> None:
    whole, parts = (step_of(webvision50(f"batch.micro={micro}"), 2048) for micro in ("null", 256))
    assert parts.compute_s["arithmetic"] == whole.compute_s["arithmetic"]
    assert parts.compute_s["fixed part"] == pytest.approx(8 * whole.compute_s["fixed part"])
    assert parts.memory_bytes < whole.memory_bytes / 4


# --- all-reduce -------------------------------------------------------------------------------------------------


def test_the_seconds_of_an_all_reduce() -> None:
    """54.38 M parameters: 7/4 * 217.5 MB at 315 GB/s in a node, 63/32 * 217.5 MB at 100 GB/s between nodes."""
    seconds = [all_reduce_seconds(NETWORK.parameters, gpus) for gpus in (1, 8, 64)]
    assert seconds == pytest.approx([0, 1.208e-3 + 18 * 10e-6, 4.283e-3 + 36 * 10e-6], rel=1e-3)


# --- whole runs -------------------------------------------------------------------------------------------------


def test_the_stages_of_webvision50_on_one_gpu_by_hand() -> None:
    """|S| and |C| before the rounds: 0 and 66,000; 39,600 and 22,440 (60 % agree, a tenth as many are removed)."""
    stages = stage_seconds(webvision50().cost_run(1))
    step = 128 / 3_678
    assert stages["standard"] == pytest.approx(120 * 516 * step, rel=1e-3)  # 66,000 / 128 = 516 steps
    assert stages["coteaching"] == pytest.approx(120 * 516 * 128 / 2_159, rel=1e-3)
    folds = 2 * 50 * (258 + 398) * step  # 33,000 and 39,600 + 11,220 samples
    predicting = 2 * (33_000 + 11_220) / 8_750
    assert stages["incv"] == pytest.approx(folds + predicting, rel=2e-3)
    # Three methods have five networks; each sees two sets of 2,500.
    assert stages["evaluate"] == pytest.approx(5 * 5_000 / 8_750, rel=0.02)


def test_candidates_join_after_the_warm_up() -> None:
    warm, rest = (phase for phase in webvision50().cost_run(1) if phase.stage == "coteaching_incv")
    assert (warm.count, warm.images) == (20 * 415, 128)  # |S| = 39,600 + 13,464 = 53,064
    assert (rest.count, rest.images) == (100 * 415, 128 + 128 * 7_630 // 53_064)


WEBVISION1000 = CostModel(
    recipe_of("webvision1000"), replace(NETWORK, parameters=55_843_464), 2_440_000, 1000, (50_000, 50_000)
)


@pytest.mark.parametrize(
    ("model", "gpus", "hours"),
    [
        (webvision50(), 1, 3.38),
        (webvision50(), 8, 1.10),
        (WEBVISION1000, 8, 4.54),
        (WEBVISION1000, 64, 1.30),
        (WEBVISION1000, 512, 0.88),
        (cifar10(), 1, 0.443),
    ],
)
def test_the_hours_of_the_recipes(model: CostModel, gpus: int, hours: float) -> None:
    """As docs/scaling.md and the recipes' headers state them."""
    assert total_hours(model.cost_run(gpus)) == pytest.approx(hours, rel=0.03)


def test_predict_passes_of_methods_are_counted() -> None:
    """F-correction predicts the training set once; D2L measures ten batches of 128 after every epoch."""
    phases = cifar10("methods=[standard, forward_correction, d2l]", "evaluation.every=0").cost_run(1)
    passes = {phase.stage: (phase.count, phase.images) for phase in phases if not phase.rows_at_once}
    assert passes["forward_correction"] == (1, 50_000)
    assert passes["d2l"] == (200, 1280)
    stages = stage_seconds(phases)
    assert 1 < stages["forward_correction"] / stages["standard"] < 1.01
    assert 1 < stages["d2l"] / stages["standard"] < 1.05


def test_folds_take_half_of_the_gpus_each_or_turns() -> None:
    alone, two = (stage_seconds(webvision50().cost_run(gpus))["incv"] for gpus in (1, 2))
    assert alone == pytest.approx(2 * two)
    together, in_turn = (cifar10(f"execution.folds={it}").cost_run(1) for it in ("auto", "in_turn"))
    assert stage_seconds(together)["incv"] == pytest.approx(stage_seconds(in_turn)["incv"] * 35 / 52)


def test_more_folds_train_on_more_samples() -> None:
    """A fold of the first round: on 3/4 of 50,000 samples instead of half, so that a round has 3 instead of 1 times
    the steps of 50,000 samples."""

    def first_round(folds: int, gpus: int = 1) -> tuple[float, int]:
        model = cifar10(f"incv.folds={folds}", "execution.folds=auto" if gpus > 1 else "execution.folds=in_turn")
        training, predicting = [phase for phase in model.cost_run(gpus) if phase.stage == "incv"][:2]
        return training.count, predicting.images

    (steps, judged), (steps_of_4, judged_of_4) = first_round(2), first_round(4)
    assert (judged, judged_of_4) == (25_000, 12_500)
    assert steps_of_4 / steps == pytest.approx(3, rel=0.01)
    assert first_round(4, gpus=2) == (steps_of_4 / 2, judged_of_4)


def test_a_round_judged_by_its_best_epoch_predicts_after_every_epoch() -> None:
    def passes(rule: str) -> list[float]:
        phases = webvision50(f"incv.round_network={rule}").cost_run(2)
        return [phase.count for phase in phases if phase.stage == "incv" and not phase.rows_at_once]

    assert passes("last") == [1, 1]
    assert passes("best") == [51, 51]


def test_decoding_binds_where_it_is_slower() -> None:
    """Four workers decode 680 images/s, and training takes 3,678."""
    phases = webvision50("execution.loader=cpu", "execution.workers=4").cost_run(1)
    for phase in phases:
        assert phase.seconds_by == {"decoding": pytest.approx(phase.count * phase.images / (4 * 2_722 / 16))}


def test_what_a_run_does_not_compile_is_slower() -> None:
    for key in ("execution.compile=false", "execution.deterministic=true"):
        assert not any(phase.compiled for phase in webvision50(key).cost_run(1))
        assert total_hours(webvision50(key).cost_run(1)) > 1.4 * total_hours(webvision50().cost_run(1))


@settings(deadline=None, max_examples=30)
@given(
    st.integers(10_000, 3_000_000),
    st.integers(0, 6),
    st.sampled_from(["one_pass", "eval_first"]),
    st.sampled_from(["last", "best"]),
)
def test_twice_the_gpus_never_cost_fewer_gpu_hours(samples: int, power: int, rank: str, judge: str) -> None:
    model = webvision50(f"coteaching.rank={rank}", f"incv.round_network={judge}", samples=samples)
    few, many = model.cost_run(2**power), model.cost_run(2 ** (power + 1))
    assert 2 * total_hours(many) >= total_hours(few) * (1 - 1e-9)
    for one, other in zip(few, many, strict=True):
        assert other.images <= one.images
        assert other.memory_bytes <= one.memory_bytes


# --- text -------------------------------------------------------------------------------------------------------


def test_the_size_of_a_split_that_is_not_packed() -> None:
    train = recipe_of("webvision50").data.train
    assert size_split(train, None, None) == SplitSize(66_000, 50, "published size")
    assert size_split(train.model_copy(update={"limit": 500}), None, None) == SplitSize(500, 50, "published size")
    assert size_split(DataConfig(source="image_folder", shards="nowhere"), None, None) is None


@pytest.mark.parametrize(
    ("recipe", "train", "reason"),
    [
        (recipe_of("image_folder"), None, "--samples"),
        (recipe_of("tiny", "model.name=resnet10x"), SplitSize(1_000, 10, "packed"), "resnet10x"),
    ],
)
def test_why_there_is_no_estimate(recipe: Recipe, train: SplitSize | None, reason: str) -> None:
    text = estimate_text(recipe, {"train": train}, EstimateOptions())
    assert text.startswith("no estimate: ")
    assert reason in text


def test_without_incv_and_methods_nothing_is_left_to_estimate() -> None:
    recipe, train = recipe_of("tiny", "methods=[]"), SplitSize(1_000, 10, "packed")
    assert "time of incv" in estimate_text(recipe, {"train": train}, EstimateOptions())
    text = estimate_text(recipe, {"train": train}, EstimateOptions(takes_incv_over=True))
    assert text == "no estimate: INCV is taken over, and no method is trained"


def test_a_step_that_does_not_fit_says_what_to_set() -> None:
    def advice(*overrides: str) -> list[str]:
        train = SplitSize(2_440_000, 1000, "packed")
        text = estimate_text(recipe_of("webvision1000", *overrides), {"train": train}, EstimateOptions(gpus=(1,)))
        return [line for line in text.splitlines() if "batch.micro" in line]

    (line,) = advice()
    micro, key = re.findall(r"batch\.micro=\d+", line)[0], re.findall(r"set (\w+\.rank) to (\w+)", line)[0]
    assert advice(micro, "=".join(key)) == []


def documented() -> dict[str, str]:
    """Each command of docs/scaling.md with the output that the page shows."""
    return dict(re.findall(r"```\n\$ incv (run .+?)\n(.+?)\n```", SCALING.read_text(), re.DOTALL))


@pytest.mark.parametrize("command", documented())
def test_the_page_shows_what_the_command_prints(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 0
    printed = capsys.readouterr().out
    assert printed[printed.index("estimate for") :].rstrip() == documented()[command]


def test_the_summary_repeats_the_tables() -> None:
    """| `recipe overrides` | GPUs | time | dollars | bottleneck |"""
    rows = re.findall(r"^\| `(.+?)` \| (\S+) \| (.+?) \| (.+?) \| (.+?) \|$", SCALING.read_text(), re.MULTILINE)
    assert len(rows) >= 8
    for recipe, *cells in rows:
        shown = []
        for command, output in documented().items():
            if re.sub(r"run -c (.+?) --dry-run --gpus \S+", r"\1", command) == recipe:
                lines = [re.split(r" {2,}", line.strip()) for line in output.split("\n\n")[1].splitlines()]
                named = {line[0]: line[1:] for line in lines[1:]}
                counts = [cell.split()[0] for cell in lines[0]]
                shown = [*zip(counts, named["total time"], named["dollars"], named["bottleneck"], strict=True)]
        assert tuple(cells) in shown


def test_training_the_classifier_alone_costs_little_more_than_a_forward_pass():
    whole = count_network("resnet18", 10, 64, {})
    frozen = count_network("resnet18", 10, 64, {}, "classifier")
    assert frozen.forward_flops == whole.forward_flops
    assert frozen.step_flops < 1.01 * frozen.forward_flops
    assert frozen.saved_numbers < 0.01 * whole.saved_numbers


def test_an_audit_by_features_has_a_plan_without_training(capsys, tmp_path, monkeypatch):
    """The command of docs/webvision.md, as a dry run."""
    page = (REPOSITORY / "docs" / "webvision.md").read_text()
    command = page.split("## Audit the labels")[1].split("-m trainer run ")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command.replace("\\\n", " "))
    assert main(["run", *words, "--dry-run", "--gpus", "1,8"]) == 0
    printed = capsys.readouterr().out
    assert "time of features" in printed
    assert "training, images/s" not in printed
