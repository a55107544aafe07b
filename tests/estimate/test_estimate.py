"""The estimate: it meets what was measured, counts all work, behaves as work does, and docs/scaling.md shows it."""

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shards.errors import ConfigError
from tests.support import RECIPES, REPOSITORY
from trainer.cli import main
from trainer.config.schema import DataConfig, IncvConfig, Recipe
from trainer.estimate import figures
from trainer.estimate.asked import Asked, Counted, counted_split, estimated
from trainer.estimate.network import NetworkCost, network_cost
from trainer.estimate.table import estimate_text
from trainer.estimate.times import (
    Cost,
    Estimate,
    Setting,
    all_reduce_bytes,
    all_reduce_seconds,
    estimate,
    predicting_cost,
    setting_of,
    training_cost,
)
from trainer.estimate.work import Predicting, Samples, Training, rounds_of, work_of
from trainer.loading.sample_order import candidate_rows
from trainer.methods.predict import WORTH_COMPILING
from trainer.run.recipe import load_recipe

SCALING = REPOSITORY / "docs" / "scaling.md"
# inception_resnet_v2, 50 classes, 227 pixels; a test below counts it.
NETWORK = NetworkCost(54_383_314, 245, 13.21e9, 39.61e9, 24.14e6)
GPUS = (1, 2, 4, 8, 16, 32, 64, 128)


def recipe_of(name: str = "webvision1000", *overrides: str) -> Recipe:
    return load_recipe(RECIPES / f"{name}.yaml", list(overrides))


def setting(recipe: Recipe, samples: int = 66_000) -> Setting:
    return setting_of(recipe, NETWORK, samples, None)


def run_on(
    gpus: int, *overrides: str, samples: int = 66_000, recipe: str = "webvision50", halves: bool | None = None
) -> Estimate:
    """Folds take halves of an even number of GPUs, as in a run."""
    loaded = recipe_of(recipe, *overrides)
    split = gpus % 2 == 0 if halves is None else halves
    return estimate(work_of(loaded, Samples(samples, 50, {"val": 2_500})), gpus, split, setting(loaded, samples))


def webvision50() -> Setting:
    return setting(recipe_of("webvision50"))


# --- against what was measured ------------------------------------------------------------------------------


def is_counted_as(counted: NetworkCost, measured: figures.MeasuredStep) -> None:
    assert counted.step_flops == pytest.approx(measured.step_flops, rel=1e-3)
    assert counted.layers == measured.layers
    assert counted.step_flops == pytest.approx(3 * counted.forward_flops, rel=0.02)


def test_the_webvision_network_is_counted_quickly_and_right() -> None:
    before = time.process_time()
    counted = network_cost("inception_resnet_v2", 50, 227, {})
    assert time.process_time() - before < 10, "a person waits for it; 2 s on a core of its own"
    is_counted_as(counted, figures.INCEPTION)
    assert counted.parameters == NETWORK.parameters
    assert counted.forward_flops == pytest.approx(2 * 6.61e9, rel=0.01)  # timm's table: 6.61 GMAC
    assert counted.saved_numbers == pytest.approx(NETWORK.saved_numbers, rel=0.01)


def test_the_cifar_network_is_counted_right() -> None:
    is_counted_as(network_cost("cifar_resnet32", 10, 32, {}), figures.RESNET32)


def test_memory_meets_the_measured_one() -> None:
    """6.5 GB at batch 128, one network, bf16."""
    cost = training_cost(Training("standard", 1, 1, 128), 1, webvision50())
    assert cost.memory_bytes == pytest.approx(6.5e9, rel=0.1)


@pytest.mark.parametrize(
    ("networks", "rows", "rate", "compiled"),
    [
        (1, 128, 2_345, False),
        (1, 512, 2_997, False),
        (1, 128, 3_678, True),
        (1, 512, 4_745, True),
        (2, figures.PAIR_ROWS, figures.PAIR_IMAGES_A_SECOND, True),
    ],
)
def test_the_measured_steps_come_out_again(networks: int, rows: int, rate: float, compiled: bool) -> None:
    cost = training_cost(Training("standard", networks, 10, rows, compiled=compiled), 1, webvision50())
    assert cost.images / cost.seconds == pytest.approx(rate, rel=1e-3)


@pytest.mark.parametrize(
    ("rows", "rate", "compiled"), [(128, 34_000, False), (1024, 74_000, False), (128, 47_814, True)]
)
def test_the_measured_steps_of_small_pictures_come_out_again(rows: int, rate: float, compiled: bool) -> None:
    network = network_cost("cifar_resnet32", 10, 32, {})
    small = setting_of(recipe_of("cifar10_sym50", "precision=bf16"), network, 50_000, None)
    cost = training_cost(Training("standard", 1, 10, rows, compiled=compiled), 1, small)
    assert cost.images / cost.seconds == pytest.approx(rate, rel=1e-3)


def test_measured_forwards_come_out_again() -> None:
    """Short passes as written, long ones compiled."""
    passes = [Predicting("incv", 1, samples, 1, compiled=True) for samples in (512 * 117, 512 * 273)]
    rates = [cost.images / cost.seconds for cost in (predicting_cost(one, 1, webvision50()) for one in passes)]
    assert rates == pytest.approx([8_757, 15_887], rel=0.01)


def test_eval_first_meets_the_measured_step() -> None:
    """Of 128 rows 115 are trained on: 1,788 images/s."""
    work = Training("coteaching", 2, 1, 128, ranks_first=True, compiled=True)
    ranked = training_cost(work, 1, webvision50()).seconds
    forgotten = 2 * 13 * webvision50().speeds.compiled.row_s
    assert 128 / (ranked - forgotten) == pytest.approx(1_788, rel=0.03)


def test_a_step_is_a_fixed_part_and_one_that_grows_with_its_rows() -> None:
    """As written, three sizes were measured: a line through two of them meets the third."""
    line = figures.INCEPTION.written
    assert 256 / (line.fixed_s + 256 * line.row_s) == pytest.approx(2_761, rel=0.02)


def test_the_rows_of_a_pair_cost_twice_those_of_one_network() -> None:
    """Measured as written: pairs at 128 and 256 rows, 1,171 and 1,381 images/s."""
    two = figures.Rates((128, 256), (1_171, 1_381))
    assert two.row_s == pytest.approx(2 * figures.INCEPTION.written.row_s, rel=0.05)


# --- gradients between GPUs ---------------------------------------------------------------------------------


@given(st.integers(1, 10**9), st.integers(1, 4096))
def test_a_ring_moves_each_gradient_twice_past_every_other_gpu(parameters: int, gpus: int) -> None:
    sent = all_reduce_bytes(parameters, gpus)
    assert sent * gpus == pytest.approx(2 * (gpus - 1) * 4 * parameters)
    assert sent < 2 * 4 * parameters
    assert all_reduce_bytes(parameters, gpus + 1) > sent


def test_gradients_are_exchanged_by_several_only_and_slower_between_nodes() -> None:
    times = [all_reduce_seconds(NETWORK.parameters, gpus, small=1) for gpus in GPUS]
    assert times[0] == 0
    assert times == sorted(times)
    assert times[GPUS.index(16)] > 2 * times[GPUS.index(8)]


# --- all work is counted --------------------------------------------------------------------------------------


def test_both_folds_are_counted() -> None:
    """One GPU trains them in turn; two have one each, and then do exactly the same."""
    alone, two = run_on(1), run_on(2)
    assert alone.stages()["incv"] == pytest.approx(2 * two.stages()["incv"])
    assert run_on(2, halves=False).stages()["incv"] < alone.stages()["incv"]


def test_a_round_that_judges_by_the_best_epoch_predicts_after_every_epoch() -> None:
    def passes(rule: str) -> list[int]:
        work = work_of(recipe_of("webvision50", f"incv.round_network={rule}"), Samples(66_000, 50, {}))
        return [one.passes for one in work if isinstance(one, Predicting)]

    assert passes("last") == [1, 1]
    assert passes("best") == [51, 51]
    assert passes("released_rule") == [51, 51]  # little noise is assumed: the rule says best in up to 4 rounds
    best, last = (run_on(1, f"incv.round_network={rule}").stages()["incv"] for rule in ("best", "last"))
    one = webvision50()
    held_out = [one_round.candidates // 2 for one_round in rounds_of(_incv(), Samples(66_000, 50, {}))[0]]
    extra = sum(2 * predicting_cost(Predicting("incv", 1, half, 50), 1, one).seconds for half in held_out)
    assert best - last == pytest.approx(extra, rel=1e-6)


def _incv(*overrides: str) -> IncvConfig:
    config = recipe_of("webvision50", *overrides).incv
    assert config is not None
    return config


def test_the_rule_of_the_released_code_follows_the_noise() -> None:
    rounds, _, _ = rounds_of(
        _incv("incv.round_network=released_rule", "incv.rounds=6"), Samples(10**6, 50, {}, agreement=0.3)
    )
    assert [one.best for one in rounds] == [True, True, False, False, False, False]


def test_the_ranking_forwards_of_eval_first_are_counted() -> None:
    work = Training("coteaching", 2, 100, 128, compiled=True)
    one = webvision50()
    plain, ranked = training_cost(work, 1, one), training_cost(replace(work, ranks_first=True), 1, one)
    assert ranked.seconds == pytest.approx(plain.seconds * (1 + one.speeds.compiled.forward_share))
    assert ranked.flops == pytest.approx(plain.flops * (1 + NETWORK.forward_flops / NETWORK.step_flops))
    recipes = [run_on(1, f"coteaching.rank={rank}").stages() for rank in ("one_pass", "eval_first")]
    assert recipes[1]["coteaching"] > 1.2 * recipes[0]["coteaching"]


def test_candidates_join_the_steps_after_the_warm_up() -> None:
    work = work_of(recipe_of("webvision50"), Samples(66_000, 50, {}))
    warm, rest = (one for one in work if isinstance(one, Training) and one.stage == "coteaching_incv")
    _, selected, candidates = rounds_of(_incv(), Samples(66_000, 50, {}))
    assert (warm.candidate_rows, rest.candidate_rows) == (0, candidate_rows(128, selected, candidates))
    assert rest.candidate_rows > 0
    assert (warm.steps, rest.steps) == (20 * -(-selected // 128), 100 * -(-selected // 128))


def test_every_method_is_evaluated_on_every_set_by_each_of_its_networks() -> None:
    work = work_of(recipe_of("webvision50"), Samples(66_000, 50, {"one": 2_500, "two": 5_000}))
    evaluated = [
        (one.networks, one.samples) for one in work if one.stage == "evaluate" and isinstance(one, Predicting)
    ]
    assert sorted(evaluated) == [(1, 2_500), (1, 5_000), *[(2, 2_500)] * 2, *[(2, 5_000)] * 2]


def test_parts_of_a_batch_cost_their_fixed_parts_and_save_memory() -> None:
    work = Training("standard", 1, 10, 2048)
    whole, parts = (training_cost(work, 1, replace(setting(recipe_of()), micro=micro)) for micro in (None, 256))
    assert parts.chain[0] == whole.chain[0]
    assert parts.chain[1] == pytest.approx(8 * whole.chain[1])
    assert parts.memory_bytes < whole.memory_bytes / 4


# --- compiled or as written -----------------------------------------------------------------------------------


def compiled_stages(*overrides: str, recipe: str = "webvision1000") -> dict[str, set[bool]]:
    """Of each stage, whether its trainings and the networks of its passes are compiled."""
    found: dict[str, set[bool]] = {}
    for one in work_of(recipe_of(recipe, *overrides), Samples(2_440_000, 1000, {"val": 10**6})):
        found.setdefault(one.stage, set()).add(one.compiled)
    return found


def test_what_a_run_compiles_is_counted_as_compiled() -> None:
    """Trainings of 5,000 steps; not evaluation, which loads its networks."""
    long = {"incv": {True}, "standard": {True}, "coteaching_incv": {True}, "evaluate": {False}}
    assert compiled_stages() == long
    assert compiled_stages("batch.global=16384") == long | {"incv": {False}}
    assert compiled_stages("batch.global=16384", "execution.compile=true") == long


@pytest.mark.parametrize("key", ["execution.compile=false", "execution.deterministic=true"])
def test_keys_that_forbid_compiling_are_counted(key: str) -> None:
    assert set().union(*compiled_stages(key).values()) == {False}
    assert 1.2 < run_on(1, key).hours / run_on(1).hours < 1.7


@pytest.mark.parametrize("epochs", [1, 119])
def test_parts_of_a_training_are_compiled_as_the_whole_is(epochs: int) -> None:
    """Co-teaching with a warm-up, however short, is one training."""
    assert compiled_stages(f"coteaching.warmup_epochs={epochs}", recipe="webvision50")["coteaching_incv"] == {True}


def test_a_long_pass_is_compiled_where_its_training_is() -> None:
    work = Predicting("incv", 1, 10 * WORTH_COMPILING, 1)
    written, compiled = (predicting_cost(replace(work, compiled=it), 1, webvision50()) for it in (False, True))
    assert written.seconds > 1.5 * compiled.seconds


def test_the_text_says_what_is_not_compiled() -> None:
    def text(*overrides: str) -> str:
        recipe, samples = recipe_of("webvision1000", *overrides), Samples(2_440_000, 1000, {})
        return estimate_text(recipe, samples, "packed", setting(recipe), [], {}, price=1.0)

    assert "not compiled" not in text()
    assert "not compiled, which execution.compile decides: trainings of incv\n" in text("batch.global=16384")
    assert "cold compilation" in text("batch.global=16384")
    assert "cold compilation" not in text("execution.compile=false")


# --- it behaves as work does ----------------------------------------------------------------------------------

overrides = st.sampled_from(["coteaching.rank=one_pass", "coteaching.rank=eval_first"])


@settings(deadline=None, max_examples=30)
@given(st.integers(10_000, 3_000_000), st.integers(1, 10**6), st.integers(1, 100), st.sampled_from(GPUS))
def test_more_samples_or_epochs_take_longer(samples: int, more: int, epochs: int, gpus: int) -> None:
    keys = [f"{section}.epochs={epochs}" for section in ("incv", "standard", "coteaching")]
    keys += ["incv.optimizer.milestones=[]", "coteaching.warmup_epochs=0"]
    longer = [key.replace(f"={epochs}", f"={epochs + 1}") for key in keys]
    fewer, all_ = (run_on(gpus, *keys, samples=count) for count in (samples, samples + more))
    epoch_more = run_on(gpus, *longer, samples=samples)
    # Where more work is compiled, and faster, it may take less.
    assert epoch_more.hours > fewer.hours or _compiled(epoch_more) != _compiled(fewer)
    assume(_compiled(fewer) == _compiled(all_))
    # Parts of the samples are whole numbers: one more in all may be one less where it costs more.
    assert all_.hours >= fewer.hours * (1 - 1 / samples)


def _compiled(run: Estimate) -> list[bool]:
    """Which of its trainings and predict passes are."""
    return [cost.compute_step.compiled and _long_enough(cost) for cost in run.costs]


def _long_enough(cost: Cost) -> bool:
    return isinstance(cost.compute_step, Training) or cost.images >= WORTH_COMPILING * cost.compute_step.passes


@settings(deadline=None, max_examples=50)
@given(st.integers(10_000, 3_000_000), st.sampled_from(GPUS[:-1]), overrides, st.sampled_from(["last", "best"]))
def test_twice_the_gpus_never_do_more_each_and_never_gain_more_than_twice(
    samples: int, gpus: int, rank: str, judge: str
) -> None:
    keys = (rank, f"incv.round_network={judge}")
    few, many = (run_on(n, *keys, samples=samples) for n in (gpus, 2 * gpus))
    for one, other in zip(few.costs, many.costs, strict=True):
        assert other.flops * many.turns(other) <= one.flops * few.turns(one)
        assert other.images * many.turns(other) <= one.images * few.turns(one)
        assert other.memory_bytes <= one.memory_bytes
    # A predict pass fills its last batch up, which more GPUs may do with fewer rows: hence not exactly twice.
    assert many.hours > few.hours / 2 * 0.97


@given(st.integers(2, 3_000_000), st.floats(0, 1), st.integers(2, 1000), st.floats(0, 3) | st.just("from_noise"))
def test_rounds_never_hold_more_samples_than_there_are(
    samples: int, agreement: float, classes: int, remove: float | str
) -> None:
    config = _incv("incv.rounds=5", f"incv.remove_ratio={remove}")
    rounds, selected, candidates = rounds_of(config, Samples(samples, classes, {}, agreement))
    sizes = [(one.selected, one.candidates) for one in rounds] + [(selected, candidates)]
    assert sizes[0] == (0, samples)
    assert all(s >= 0 and c >= 0 and s + c <= samples for s, c in sizes)
    assert [s for s, _ in sizes] == sorted(s for s, _ in sizes)
    assert len(rounds) == 5 or candidates < 2


def test_few_rows_a_gpu_leave_the_fixed_part_of_a_step() -> None:
    shares = [run_on(gpus).resources() for gpus in (1, 8, 64)]
    arithmetic = [share["arithmetic"] for share in shares]
    assert arithmetic == sorted(arithmetic, reverse=True)
    assert [run_on(gpus).binds() for gpus in (1, 64)] == ["arithmetic", "fixed part of steps"]
    assert all(sum(share.values()) == pytest.approx(1) for share in shares)


@pytest.mark.parametrize(("changed", "binds"), [({"decoded": 100.0}, "decoding"), ({"image_bytes": 5e6}, "storage")])
def test_what_is_slowest_binds_and_sets_the_time(changed: dict[str, float], binds: str) -> None:
    recipe = recipe_of("webvision50")
    slow = replace(setting(recipe), **changed)  # type: ignore[arg-type]
    one = estimate(work_of(recipe, Samples(66_000, 50, {})), 1, False, slow)
    assert one.binds() == binds
    assert one.hours > run_on(1).hours
    expected = 1 / 100 if binds == "decoding" else 5e6 / figures.STORAGE
    assert one.hours * 3600 == pytest.approx(sum(cost.images * one.turns(cost) for cost in one.costs) * expected)


def test_two_small_folds_overlap_on_one_gpu() -> None:
    recipe = recipe_of("cifar10_sym50")
    work, small = work_of(recipe, Samples(50_000, 10, {})), setting(recipe, 50_000)
    together, in_turn = (estimate(work, 1, False, small, in_turn=turn).stages() for turn in (False, True))
    assert together["incv"] == pytest.approx(in_turn["incv"] * 35 / 52)
    assert together["standard"] == in_turn["standard"]


def test_small_pictures_are_decoded_once() -> None:
    kept = setting(recipe_of("cifar10_sym50"), 50_000)
    assert kept.decoded is None
    cost = training_cost(Training("standard", 1, 10, 128), 1, kept)
    assert (cost.decoding_s, cost.storage_s) == (0, 0)


# --- how many samples -----------------------------------------------------------------------------------------


def test_published_sizes_stand_in_for_shards() -> None:
    train = recipe_of("webvision50").data.train
    assert counted_split(train, None, None) == Counted(66_000, 50, "published size")
    assert counted_split(train.model_copy(update={"limit": 500}), None, None) == Counted(500, 50, "published size")
    everything = counted_split(recipe_of("webvision1000").data.train, None, None)
    assert everything is not None
    assert (everything.samples, everything.classes) == (2_440_000, 1000)
    assert counted_split(DataConfig(source="image_folder", shards="nowhere"), None, None) is None


def test_no_estimate_is_made_up_where_nothing_is_known() -> None:
    recipe = recipe_of("image_folder")
    assert "--samples" in estimated(recipe, {"train": None}, Asked())
    known = {"train": Counted(1_000, 10, "packed")}
    on_cpu = estimated(recipe_of("tiny", "execution.device=cpu"), known, Asked())
    assert on_cpu.startswith("no estimate: execution.device is cpu")
    unknown = estimated(recipe_of("tiny", "model.name=resnet10x"), known, Asked())
    assert unknown.startswith("no estimate: unknown model 'resnet10x'")


def test_a_model_that_cannot_take_the_pictures_is_said() -> None:
    with pytest.raises(ConfigError, match=r"image.size = 8 cannot be counted"):
        network_cost("inception_resnet_v2", 10, 8, {})


def test_a_step_that_does_not_fit_says_what_to_set() -> None:
    def text(gpus: int, *overrides: str) -> str:
        recipe, samples = recipe_of("webvision1000", *overrides), Samples(2_440_000, 1000, {})
        one = estimate(work_of(recipe, samples), gpus, gpus > 1, setting(recipe, samples.train))
        return estimate_text(recipe, samples, "packed", setting(recipe, samples.train), [one], {}, price=1.0)

    assert "more than" not in text(8)
    (line,) = [line for line in text(1).splitlines() if "more than" in line]
    assert line.startswith("1 GPU: a step of coteaching_incv")
    assert "more than" not in text(1, *re.findall(r"[\w.]+=\w+", line))


# --- docs/scaling.md ------------------------------------------------------------------------------------------

Columns = dict[str, dict[str, str]]


def documented() -> dict[str, str]:
    """Each command of the page with the output that the page shows."""
    blocks = re.findall(r"```\n\$ incv (run .+?)\n(.+?)\n```", SCALING.read_text(), re.DOTALL)
    return dict(blocks)


@pytest.mark.parametrize("command", documented())
def test_the_page_shows_what_the_command_prints(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 0
    printed = capsys.readouterr().out
    assert printed[printed.index("estimate for") :].rstrip() == documented()[command]


def columns(output: str) -> Columns:
    """Of a printed estimate: the cells of each number of GPUs by their labels."""
    lines = [re.split(r" {2,}", line.strip()) for line in output.split("\n\n")[1].splitlines()]
    wide = [line for line in lines if len(line) == len(lines[0]) + 1]
    return {gpus: {line[0]: line[1 + at] for line in wide} for at, gpus in enumerate(lines[0])}


def test_the_summary_repeats_the_tables() -> None:
    """| `recipe overrides` | GPUs | time | dollars | binds first |"""
    tables = {
        re.sub(r"run -c (.+?) --dry-run --gpus \S+", r"\1", key): columns(out) for key, out in documented().items()
    }
    rows = re.findall(r"^\| `(.+?)` \| (\S+) \| (.+?) \| (.+?) \| (.+?) \|$", SCALING.read_text(), re.MULTILINE)
    assert {gpus for _, gpus, *_ in rows} == {"1", "8", "64", "512"}
    for recipe, gpus, hours, dollars, binds in rows:
        cells = tables[recipe][f"{gpus} GPU{'s' if gpus != '1' else ''}"]
        assert (cells["time of all"], cells["dollars"], cells["binds first"]) == (hours, dollars, binds)
