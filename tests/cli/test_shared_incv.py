"""Variants with the same INCV stage run it once, and end as if each had run it."""

from pathlib import Path

import pytest

from shards.durable import read_json, write_json
from tests.support.brief_incv import BRIEF, files_of_incv, files_of_methods
from tests.support.command_line import TINY, stop_during_incv, variant_roots
from trainer.config.sweep import Variant
from trainer.run.recipe import load_recipe
from trainer.run.shared_incv import find_incv_sources

TRAINED = (*BRIEF, "methods=[coteaching_incv]")
EPOCHS = "coteaching_incv.epochs"
RATE = "coteaching_incv.optimizer.learning_rate"


def sweep(incv, *arguments, epochs="1,2"):
    return incv("run", "-c", TINY, *TRAINED, "--vary", f"{EPOCHS}={epochs}", *arguments)


def taken_from(root: Path) -> str | None:
    """The run whose INCV stage this run has taken over."""
    noted = read_json(root / "manifest.json").get("incv_from")
    return None if noted is None else Path(noted["run"]).name


def test_incv_runs_once_and_each_run_is_that_of_its_own(incv, playground):
    answer = sweep(incv, epochs="1,2,3")
    assert answer.code == 0, answer.err
    first, *others = variant_roots(answer.out, EPOCHS)
    assert taken_from(first) is None
    assert [taken_from(root) for root in others] == [first.name] * 2
    assert f"{EPOCHS}=2: incv: the same as that of {EPOCHS}=1" in answer.err
    for epochs, root in enumerate((first, *others), 1):
        alone = incv("run", "-c", TINY, *TRAINED, f"{EPOCHS}={epochs}", "--run-dir", f"alone-{epochs}")
        assert alone.code == 0
        assert files_of_incv(root) == files_of_incv(f"alone-{epochs}")
        assert files_of_methods(root) == files_of_methods(f"alone-{epochs}")
        assert len(files_of_incv(root)) > 15


def test_one_at_a_time_shares_too(incv, playground):
    answer = sweep(incv, "--at-once", "1")
    assert answer.code == 0, answer.err
    first, second = variant_roots(answer.out, EPOCHS)
    assert [taken_from(first), taken_from(second)] == [None, first.name]


def test_what_another_has_finished_before_is_taken_over(incv, playground):
    (done,) = variant_roots(sweep(incv, epochs="2").out, EPOCHS)
    answer = sweep(incv, epochs="1,2")
    first, second = variant_roots(answer.out, EPOCHS)
    assert second == done
    assert [taken_from(first), taken_from(second)] == [second.name, None]
    assert "incv: already done" in answer.err


def test_if_the_run_that_executes_incv_fails_the_other_executes_it(incv, playground):
    first, second = (Path(line) for line in sweep(incv, "--print-run-dir").out.splitlines())
    first.mkdir(parents=True)
    (first / "manifest.json").write_text("{")
    answer = sweep(incv)
    assert answer.code != 0
    assert taken_from(second) is None
    assert (second / "report.json").exists()
    assert not (first / "report.json").exists()


def test_what_a_run_has_finished_before_it_fails_is_taken_over(incv, playground):
    answer = incv("run", "-c", TINY, *TRAINED, f"{EPOCHS}=30", "--vary", f"{RATE}=1e30,0.002,0.003", "--at-once", "1")
    assert answer.code != 0
    first, *others = variant_roots(answer.out, RATE)
    assert not (first / "report.json").exists()
    assert [taken_from(root) for root in others] == [first.name] * 2
    assert all((root / "report.json").exists() for root in others)


def test_if_the_run_that_executes_incv_fails_one_of_the_others_executes_it(incv, playground):
    first, *others = (Path(line) for line in sweep(incv, "--print-run-dir", epochs="1,2,3").out.splitlines())
    first.mkdir(parents=True)
    (first / "manifest.json").write_text("{")
    answer = sweep(incv, epochs="1,2,3")
    assert [taken_from(root) for root in others] == [None, others[0].name]
    assert f"{EPOCHS}=3: incv: {EPOCHS}=1 has ended without finishing it" in answer.err
    assert all((root / "report.json").exists() for root in others)


def test_the_run_whose_incv_is_furthest_executes_it(incv, playground):
    long = [each for each in TRAINED if not each.startswith("incv.epochs")] + ["incv.epochs=12"]
    command = ("run", "-c", TINY, *long, "--vary", f"{EPOCHS}=1,2")
    _, second = incv(*command, "--print-run-dir").out.splitlines()
    stop_during_incv("run", "-c", TINY, *long, f"{EPOCHS}=2", "--run-dir", second)
    done = incv(*command)
    assert done.code == 0, done.err
    first, second = variant_roots(done.out, EPOCHS)
    assert [taken_from(first), taken_from(second)] == [second.name, None]
    assert not (second / "old").exists()


@pytest.mark.parametrize("damage", ["another version", "a lost file"])
def test_what_cannot_be_taken_over_is_run_anew(incv, playground, damage):
    (done,) = variant_roots(sweep(incv, epochs="2").out, EPOCHS)
    if damage == "another version":
        content = read_json(done / "manifest.json")
        content["stages"]["incv"]["numerics"] = 0
        write_json(done / "manifest.json", content)
    else:
        (done / "rounds" / "0" / "predictions.parquet").unlink()
    answer = sweep(incv, epochs="1,2")
    first, _ = variant_roots(answer.out, EPOCHS)
    assert taken_from(first) is None
    assert (first / "report.json").exists(), answer.err
    assert "--incv-from" not in answer.err


def test_redoing_incv_redoes_it_in_each_run(incv, playground):
    assert sweep(incv).code == 0
    again = sweep(incv, "--redo", "incv")
    assert again.code == 0, again.err
    assert [taken_from(root) for root in variant_roots(again.out, EPOCHS)] == [None, None]


def test_the_plan_says_which_run_executes_incv(incv, playground):
    out = sweep(incv, "--dry-run").out
    assert f"{EPOCHS}=2:\ntakes INCV over from {EPOCHS}=1\n" in out
    assert out.count("  incv             taken over ") == out.count("  incv             to do ") == 1


def test_the_estimate_of_a_run_that_takes_incv_over_leaves_it_out(incv, playground):
    whole, rest = sweep(incv, "--dry-run", "--gpus", "1", "--samples", "5000").out.split(f"{EPOCHS}=2:\n")
    assert "estimate for the whole recipe" in whole
    assert "  time of incv " in whole
    assert "estimate for what follows INCV" in rest
    assert "  time of incv " not in rest
    assert "  time of coteaching_incv " in rest


def test_a_signal_during_incv_stops_all_and_the_same_command_goes_on(incv, playground):
    long = [each for each in TRAINED if not each.startswith("incv.epochs")] + ["incv.epochs=12"]
    command = ("run", "-c", TINY, *long, "--vary", f"{EPOCHS}=1,2")
    assert f"{EPOCHS}=2: incv: not started" in stop_during_incv(*command)
    assert len(list(playground.glob("runs/*/manifest.json"))) == 1
    done = incv(*command)
    assert done.code == 0, done.err
    first, second = variant_roots(done.out, EPOCHS)
    assert taken_from(second) == first.name


def variant(name: str, *overrides: str) -> Variant:
    return Variant(overrides, load_recipe(Path(TINY), overrides), Path("runs") / name, "tiny", "incv run", name)


@pytest.mark.parametrize(
    "difference",
    [
        "seed=1",
        "incv.epochs=6",
        "labels.ratio=0.4",
        "image.pad=2",
        "precision=bf16",
        "data.train.limit=200",
        "data.train.shards=elsewhere",
    ],
)
def test_runs_whose_incv_differs_share_nothing(difference):
    assert find_incv_sources([variant("a"), variant("b", difference)], (), None, None) == {}


def test_runs_share_with_the_first_of_their_kind():
    other = "seed=1"
    a, b, c = variant("a"), variant("b", other), variant("c", "methods=[standard]")
    d, e = variant("d", other, "standard.epochs=2"), variant("e", "incv=null", "methods=[standard]")
    assert find_incv_sources([a, b, c, d, e], (), None, None) == {c.root: a, d.root: b}
    assert find_incv_sources([a, c], (), "standard", None) == {}
    assert find_incv_sources([a, variant("a", "evaluation.every=1")], (), None, None) == {}  # the same directory
