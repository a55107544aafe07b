"""`incv reproduce` and `incv record`: from made-up CIFAR-10 files to a table, and what is refused."""

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shards.sample_index import SampleIndex
from tests.support import REPOSITORY
from tests.support.made_up_cifar import pack_cifar, write_cifar
from trainer.reproduce import runs
from trainer.reproduce.experiments import EXPERIMENTS
from trainer.reproduce.outcome import begin_marker, end_marker

FEW = ("--settings", "sym20", "--methods", "standard,coteaching,coteaching_incv")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_cifar(tmp_path_factory.mktemp("cifar"))


@pytest.fixture
def here(tmp_path: Path, packed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "data").symlink_to(packed / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def records(results: Path) -> dict[str, Any]:
    """The numbers of every record, without times."""
    kept = ("recipe", "method", "seed", "keys", "numerics", "accuracy", "accuracy_per_epoch", "rounds", "noise")
    return {
        file.name: {key: json.loads(file.read_text()).get(key) for key in kept}
        for file in sorted((results / "runs").glob("*.json"))
    }


def test_a_smoke_run_ends_in_a_table_and_figures_and_is_not_repeated(incv, here):
    answer = incv("reproduce", "table1", "figure1", "figure4", "figure6", "--smoke", *FEW)
    assert answer.code == 0, answer.err
    assert "3 of 3 runs are recorded" in answer.out
    assert "its numbers say nothing" in answer.out
    results = here / "runs" / "smoke" / "results"
    found = records(results)
    assert set(found) == {
        f"cifar10_sym20-{name}-seed0.json" for name in ("standard", "coteaching", "coteaching_incv")
    }
    algorithm_3 = found["cifar10_sym20-coteaching_incv-seed0.json"]
    assert len(algorithm_3["accuracy_per_epoch"]["test"]) == 3
    assert algorithm_3["numerics"] == {"incv": 1, "coteaching_incv": 1}
    assert len(algorithm_3["rounds"]) == 4
    assert algorithm_3["accuracy"]["test"]["coteaching_incv"]["top1"] == algorithm_3["accuracy_per_epoch"]["test"][-1]
    baseline = found["cifar10_sym20-coteaching-seed0.json"]
    assert (baseline["rounds"], list(baseline["noise"])) == ([], ["true"])
    table = json.loads((results / "table1.json").read_text())
    assert table["coteaching"]["sym20"]["mean"] == baseline["accuracy"]["test"]["coteaching"]["top1"]
    assert {"figure1.svg", "figure4.svg", "figure6.svg"} <= {file.name for file in (results / "figures").iterdir()}
    # All are recorded: nothing runs, even without the run directories.
    again = incv("reproduce", "table1", "--smoke", *FEW)
    assert again.code == 0
    assert "standard: " not in again.err
    # A record can be made again from its run directory.
    made = incv("record", "runs/smoke/cifar10_sym20-standard-seed0", "--results", "elsewhere")
    assert made.code == 0, made.err
    same = "cifar10_sym20-standard-seed0.json"
    assert records(here / "elsewhere")[same] == found[same]


def test_a_smoke_run_of_plus_keeps_its_parts_and_states_its_ensemble(incv, here):
    answer = incv("reproduce", "table1", "--smoke", "--settings", "asym40", "--methods", "coteaching_incv_plus")
    assert answer.code == 0, answer.err
    results = here / "runs" / "smoke" / "results"
    (found,) = records(results).values()
    keys = found["keys"]
    assert (keys["image.cutout"], keys["coteaching_incv.ema.decay"]) == (4, 0.9995)
    assert "incv.noise_estimate" in keys  # not the default, the paper's
    for section in ("incv", "coteaching_incv"):
        assert keys[f"{section}.optimizer.schedule"] == "cosine"
    cell = json.loads((results / "table1.json").read_text())["coteaching_incv_plus"]["asym40"]
    accuracy = found["accuracy"]["test"]["coteaching_incv"]
    assert (cell["measure"], cell["mean"]) == ("ensemble", accuracy["top1_ensemble"])
    assert cell["last"]["mean"] == accuracy["top1"]


def test_a_smoke_run_of_the_ablation_compares_parts_on_the_validation_split(incv, here):
    """Rows that differ in Co-teaching alone run INCV once."""
    parts = ("plus_without_ema", "plus_with_formula", "coteaching_incv")
    command = ("reproduce", "ablation", "--smoke", "--data", "data/cifar10")
    answer = incv(*command, "--methods", ",".join(parts))
    assert answer.code == 0, answer.err
    assert "3 of 3 runs are recorded" in answer.out
    first, *others = (f"cifar10_asym40_validation-{part}-seed0" for part in parts)
    assert [f"{name}: incv: the same as that of {first}" in answer.err for name in others] == [True, False]
    results = here / "runs" / "smoke" / "results"
    found = records(results)
    assert set(found) == {f"{name}.json" for name in (first, *others)}
    for each in found.values():
        assert (list(each["accuracy"]), list(each["accuracy_per_epoch"])) == (["validation"], ["validation"])
        assert each["keys"]["data.train.split"] == "fit"
    table = json.loads((results / "ablation.json").read_text())
    assert {row for row, cells in table.items() if cells} == set(parts)


@pytest.mark.slow
def test_every_row_of_the_ablation_trains_other_networks(incv, here):
    """A row that changes a key that nothing reads would only repeat plus."""
    assert incv("reproduce", "ablation", "--smoke", "--at-once", "4").code == 0
    rows = [row.name for row in EXPERIMENTS["ablation"].rows]
    roots = [here / "runs" / "smoke" / f"cifar10_asym40_validation-{row}-seed0" for row in rows]
    methods = [root / "methods" / "coteaching_incv" for root in roots]
    # With so few images, noise estimates that differ may drop as many rows.
    rates = [json.loads((folder / "training.json").read_text())["forget_rate"] for folder in methods]
    weights = [(folder / "export" / "model_a" / "model.safetensors").read_bytes() for folder in methods]
    assert len(set(zip(rates, weights, strict=True))) == len(rows)


def test_a_smoke_run_of_f_correction_estimates_t_from_the_epoch_that_held_out_labels_choose(incv, here):
    answer = incv("reproduce", "f_correction", "--smoke", "--settings", "asym40_held_out")
    assert answer.code == 0, answer.err
    assert "2 of 2 runs are recorded" in answer.out
    assert "best epoch on held-out labels" in answer.out
    results = here / "runs" / "smoke" / "results"
    found = records(results)
    assert set(found) == {
        f"cifar10_asym40_held_out-{method}-seed0.json" for method in ("standard", "forward_correction")
    }
    for record in found.values():
        assert record["keys"]["evaluation.choose_on"] == "held_out"
        method, curves = record["method"], record["accuracy_per_epoch"]
        best = curves["held_out"].index(max(curves["held_out"]))
        assert record["accuracy"]["test"][method]["top1"] == pytest.approx(curves["test"][best], abs=0.01)
    # The runs of Table 1 are others, and their records are not mixed with these.
    answer = incv("reproduce", "table1", "--results", str(results))
    assert "stale" not in answer.out


def test_a_record_of_d2l_shows_when_it_turned(incv, here):
    assert incv("reproduce", "table1", "--smoke", "--settings", "sym20", "--methods", "d2l,standard").code == 0
    runs = here / "runs" / "smoke" / "results" / "runs"
    found = json.loads((runs / "cifar10_sym20-d2l-seed0.json").read_text())
    per_epoch = found["metrics_per_epoch"]
    assert [len(per_epoch[name]) for name in ("lid", "alpha")] == [len(found["accuracy_per_epoch"]["test"])] * 2
    assert all(lid > 0 for lid in per_epoch["lid"])
    assert all(0 < alpha <= 1 for alpha in per_epoch["alpha"])
    assert "metrics_per_epoch" not in json.loads((runs / "cifar10_sym20-standard-seed0.json").read_text())


def test_a_smoke_run_of_decoupling_in_eval_mode_is_not_mixed_with_table_1(incv, here):
    answer = incv("reproduce", "decoupling_eval_first", "--smoke", "--settings", "sym20_eval_first")
    assert answer.code == 0, answer.err
    assert "1 of 1 runs are recorded" in answer.out
    assert "86.72 ± 0.32" in answer.out  # the paper's value of symmetric 0.2
    results = here / "runs" / "smoke" / "results"
    ((name, found),) = records(results).items()
    assert name == "cifar10_sym20_eval_first-decoupling-seed0.json"
    assert found["keys"]["decoupling.compare"] == "eval_first"
    answer = incv("reproduce", "table1", "--results", str(results), "--methods", "decoupling")
    assert "0 of 12 runs are recorded" in answer.out
    assert "stale" not in answer.out


def test_a_smoke_run_without_coteaching_selects_as_that_with_it(incv, here):
    """Both run INCV once, and stand beside the paper's values."""
    answer = incv("reproduce", "without_coteaching", "--smoke", "--settings", "sym20")
    assert answer.code == 0, answer.err
    assert "3 of 3 runs are recorded" in answer.out
    assert "89.71 ± 0.18" in answer.out
    assert "cifar10_sym20-coteaching_incv-seed0: incv: the same as that of cifar10_sym20-standard_incv" in answer.err
    found = records(here / "runs" / "smoke" / "results")
    one, pair = (found[f"cifar10_sym20-{row}-seed0.json"] for row in ("standard_incv", "coteaching_incv"))
    assert one["rounds"] == pair["rounds"]
    assert one["keys"]["standard_incv.epochs"] == 3


def test_a_record_of_the_same_run_with_other_numbers_is_not_replaced_by_itself(incv, here):
    assert incv("reproduce", "table1", "--smoke", "--settings", "sym20", "--methods", "standard").code == 0
    run = "runs/smoke/cifar10_sym20-standard-seed0"
    assert incv("record", run, "--results", "mine").code == 0
    assert incv("record", run, "--results", "mine").code == 0  # the same numbers
    file = here / "mine" / "runs" / "cifar10_sym20-standard-seed0.json"
    content = json.loads(file.read_text())
    content["accuracy"]["test"]["standard"]["top1"] = 99.0
    file.write_text(json.dumps(content))
    refused = incv("record", run, "--results", "mine")
    assert refused.code == 2
    assert "--replace" in refused.err
    assert incv("record", run, "--results", "mine", "--replace").code == 0
    # Another run of this name, with other result keys, stays beside it.
    content["keys"]["standard.epochs"] = 77
    file.write_text(json.dumps(content))
    assert incv("record", run, "--results", "mine").code == 0
    assert len(list(file.parent.iterdir())) == 2


def test_the_table_is_printed_from_recorded_runs_with_what_is_missing(incv, here):
    answer = incv("reproduce", "table1", "--results", "none")
    assert answer.code == 0
    assert "85.08 ± 0.43 (5)" in answer.out
    to_fill = "incv reproduce table1 --run --results=none --methods standard --settings sym80 --seeds 0,1,2"
    assert to_fill in answer.out
    assert "coteaching_incv_plus" in answer.out
    assert not (here / "none").exists()
    whole = "  incv reproduce table1 --run --results=none   # all of these:\n"
    assert whole in answer.out
    for chosen in (("--settings", "sym80"), ("--methods", "standard"), ("--seeds", "7")):
        assert whole not in incv("reproduce", "table1", "--results", "none", *chosen).out


def test_the_page_is_written_from_the_usual_folder_alone(incv, here):
    """Its text and its figures are of that folder."""
    page = here / "docs" / "results.md"
    page.parent.mkdir()
    begin, end = begin_marker("table1"), end_marker("table1")
    page.write_text(f"{begin}\nold\n{end}\n")
    for results in ("mine", "results"):
        (here / results / "runs").mkdir(parents=True)
    assert incv("reproduce", "table1", "--write", "--results", "mine").code == 0
    assert "old" in page.read_text()
    assert (here / "mine" / "table1.json").exists()
    assert incv("reproduce", "table1", "--write").code == 0
    assert "Standard training" in page.read_text()


@pytest.mark.parametrize("name", ["table1.json", "figures/figure1.svg"])
def test_a_file_that_it_did_not_write_is_replaced_by_force_alone(name, incv, here):
    (here / "mine" / "runs").mkdir(parents=True)
    command = ("reproduce", "table1", "figure1", "--write", "--results", "mine")
    for _ in range(2):  # its own files are replaced
        assert incv(*command).code == 0
    file = here / "mine" / name
    file.write_text('{"recipe": 1}')
    refused = incv(*command)
    assert refused.code == 2
    assert all(word in refused.err for word in (name, "--force", "--results"))
    assert file.read_text() == '{"recipe": 1}'
    assert incv(*command, "--force").code == 0
    assert file.read_text() != '{"recipe": 1}'


def test_what_is_left_out_is_named(incv, here):
    answer = incv("reproduce", "table1", "f_correction", "--methods", "decoupling")
    assert answer.code == 0
    assert "without any of these methods and settings: f_correction" in answer.out
    folder = here / "results" / "runs"
    folder.mkdir(parents=True)
    own = {"recipe": "mine", "method": "standard", "seed": 0, "command": "incv run -c mine.yaml", "accuracy": {}}
    (folder / "mine.json").write_text(json.dumps(own | {"keys": {}, "numerics": {}}))
    assert "no experiment has their recipe and method: mine.json" in incv("reproduce", "figure1").out


def test_a_record_has_the_command_that_executes_its_run_alone(incv, here):
    words = ("run", "-c", "tiny", "--vary", "seed=0,1", "methods=[standard]", "incv=null", "--at-once=1")
    subprocess.run([sys.executable, "-m", "trainer", *words], check=True, capture_output=True)
    roots = sorted(str(file.parent) for file in Path("runs").glob("tiny*/report.json"))
    assert len(roots) == 2
    assert incv("record", *roots, "--results", "mine").code == 0
    found = records(here / "mine").values()
    commands = {json.loads(file.read_text())["command"] for file in (here / "mine" / "runs").iterdir()}
    assert {each["seed"] for each in found} == {0, 1}
    assert commands == {f"incv run -c tiny 'methods=[standard]' incv=null seed={seed}" for seed in (0, 1)}


def test_a_run_of_earlier_numerics_is_executed_again_beside_it(incv, here, monkeypatch):
    command = ("reproduce", "table1", "--smoke", "--settings", "sym20", "--methods", "standard")
    assert incv(*command).code == 0
    for module in ("stage_graph", "ledger"):
        patched = f"trainer.run.{module}.numerics_of"
        monkeypatch.setattr(patched, lambda stage, recipe: 2 if stage == "standard" else None)
    runs._identify.cache_clear()
    answer = incv(*command)
    runs._identify.cache_clear()
    assert answer.code == 0, answer.err
    assert "1 of 1 runs are recorded" in answer.out
    assert "numerics of standard (1 -> 2)" in answer.out
    found = records(here / "runs" / "smoke" / "results").values()
    assert sorted(each["numerics"]["standard"] for each in found) == [1, 2]


def test_the_file_of_a_figure_is_named_once_it_is_drawn(incv, here):
    file = here / "mine" / "figures" / "figure1.svg"
    assert "figure1.svg" not in incv("reproduce", "figure1", "--results", "mine").out
    file.parent.mkdir(parents=True)
    file.touch()
    assert "figure: mine/figures/figure1.svg" in incv("reproduce", "figure1", "--results", "mine").out


BAD: dict[str, tuple[list[str], list[str]]] = {
    "experiment": (["tabel1"], ["tabel1", "did you mean table1"]),
    "method": (["table1", "--methods", "standart"], ["standart", "did you mean standard"]),
    "setting": (["table1", "--settings", "sym30"], ["sym30", "did you mean sym"]),
    "seeds": (["table1", "--seeds", "one"], ["--seeds", "0,1,2"]),
    "no_method": (["table1", "--methods", ","], ["--methods", "names nothing"]),
    "a_misspelt_folder": (["table1", "--write", "--results", "reslts"], ["no folder", "reslts"]),
    "data_without_run": (["table1", "--data", "x"], ["add --run"]),
    "a_result_key": (["table1", "--run", "standard.epochs=3"], ["standard.epochs=3", "execution"]),
    "an_unknown_key": (["table1", "--run", "execution.workes=3"], ["execution.workes", "execution.workers"]),
}


@pytest.mark.parametrize("which", BAD)
def test_what_is_wrong_with_the_command_line_is_said(which, incv, here):
    arguments, words = BAD[which]
    answer = incv("reproduce", *arguments)
    assert answer.code == 2
    assert all(word in answer.err for word in words), answer.err


def test_missing_cifar10_is_one_error_that_says_where_to_put_it(incv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = incv("reproduce", "table1", "--run", "--methods", "standard", "--seeds", "0")
    assert answer.code == 3
    assert all(word in answer.err for word in ("data/cifar10", "cifar-10-batches-bin", "--data"))
    assert "data.train.root" not in answer.err  # an experiment takes --data alone
    assert answer.err.count("error") == 1
    assert list(tmp_path.iterdir()) == []
    elsewhere = incv("reproduce", "table1", "--run", "--methods", "standard", "--seeds", "0", "--data", "nowhere")
    assert elsewhere.code == 3
    assert "nowhere" in elsewhere.err


def test_a_file_that_is_no_record_is_named(incv, here):
    (here / "results" / "runs").mkdir(parents=True)
    (here / "results" / "runs" / "odd.json").write_text("{")
    answer = incv("reproduce", "table1")
    assert answer.code == 3
    assert "odd.json" in answer.err


def test_a_folder_that_is_no_finished_run_cannot_be_recorded(incv, here):
    assert incv("record", ".").code == 2
    stopped = incv("labels", "-c", "cifar10_smoke", "data.train.limit=40", "--run-dir", "begun")
    assert stopped.code == 0, stopped.err
    answer = incv("record", "begun")
    assert answer.code == 2
    assert "not finished" in answer.err


def test_a_baseline_on_packed_files_needs_no_root(incv, here, tmp_path):
    write_cifar(tmp_path / "other", images=1)
    answer = incv("reproduce", "table1", "--smoke", "--data", "other", "--settings", "sym20", "--methods", "standard")
    assert answer.code == 0, answer.err


def test_settings_can_be_compared_without_the_test_set(incv, here):
    """The command of docs/results.md, on few images."""
    page = (REPOSITORY / "docs" / "results.md").read_text()
    command = page.split("## Tuning without the test set")[1].split("```sh")[1].split("```")[0]
    program, *words = shlex.split(command, comments=True)
    assert program == "incv"
    tiny = ("precision=fp32", "data.train.limit=40", "data.eval.validation.limit=20", "image={size: 8, resize: 8}")
    tiny += (
        "model={name: digits_cnn}",
        "batch={global: 8}",
        "incv.rounds=1",
        "incv.epochs=1",
        "incv.min_per_class=1",
    )
    answer = incv(
        *words, *tiny, "coteaching_incv.epochs=1", "execution={device: cpu, threads: 1}", "--run-dir", "tuned"
    )
    assert answer.code == 0, answer.err
    report = json.loads((here / "tuned" / "report.json").read_text())
    assert list(report["accuracy"]) == ["validation"]
    assert SampleIndex.load(Path("data/shards/cifar10-validation")).keys()[3] == "cifar10/train/45003"


@pytest.mark.slow
def test_every_experiment_runs_end_to_end(incv, here):
    answer = incv("reproduce", "--smoke", "--at-once", "4")
    assert answer.code == 0, answer.err
    assert "to fill the gaps" not in answer.out


def start(folder: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "trainer", "reproduce", "table1", "--smoke", *FEW, "--at-once", "2"]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)


def wait_for(folder: Path, pattern: str, process: "subprocess.Popen[bytes]") -> None:
    """Until a file matches, or the process ends."""
    deadline = time.monotonic() + 300
    while not list(folder.glob(pattern)) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def uninterrupted(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The records of an experiment that nobody interrupts."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "data").symlink_to(packed / "data")
    assert start(folder).wait() == 0, (folder / "log").read_text()
    return records(folder / "runs" / "smoke" / "results")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_experiment_is_completed_with_the_same_records(how, here, uninterrupted):
    codes = []
    for point in ("*/methods/*/checkpoints/step-*[1-9]", "results/runs/*.json"):
        process = start(here)
        wait_for(here / "runs" / "smoke", point, process)
        process.send_signal(how)
        codes.append(process.wait())
    assert codes[0] == (75 if how == signal.SIGTERM else -9), (here / "log").read_text()
    assert start(here).wait() == 0, (here / "log").read_text()
    assert len(uninterrupted) == 3
    assert records(here / "runs" / "smoke" / "results") == uninterrupted
