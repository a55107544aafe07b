"""The report of a fabricated run: its numbers against independent counts, its gaps, its page."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from shards.durable import read_json, write_json, write_parquet
from trainer.incv.selection_index import SelectionIndex, State
from trainer.records.run_directory import RunDirectory
from trainer.report import write_report
from trainer.report.run import ReportRun
from trainer.report.sections.accuracy import sampling_error
from trainer.report.sections.history import start_rows
from trainer.report.summary import correction_words, summary_table, verdict

Make = Callable[..., Path]
VOID = {"meta", "img", "br", "link", "input", "hr"}


def digit(sample_id: int) -> Image.Image:
    return Image.new("L", (8, 8), sample_id % 256)


def strict_json(path: Path) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def column(path: Path, name: str) -> np.ndarray:
    return pq.read_table(path)[name].to_numpy()


class Balance(HTMLParser):
    """Refuses a page whose tags are not closed in order; collects attributes and the texts between tags."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another tag"


def parsed(run_dir: Path) -> tuple[str, Balance]:
    page = (run_dir / "report.html").read_text()
    reader = Balance()
    reader.feed(page)
    reader.close()
    assert not reader.open
    return page, reader


def test_noise_and_rounds_equal_independent_counts(make_run: Make) -> None:
    run_dir = make_run()
    report = write_report(RunDirectory(run_dir))
    given, true = (column(run_dir / f"{name}.parquet", "label") for name in ("labels", "true_labels"))
    inside = column(run_dir / "selection.parquet", "state") != State.OUTSIDE
    assert report["samples"] == 597
    assert report["noise"]["paper"] == 0.263
    assert report["noise"]["true"] == pytest.approx(np.mean(given[inside] != true[inside]))
    assert len(report["rounds"]) == 3
    for index, entry in enumerate(report["rounds"]):
        state = column(run_dir / "rounds" / str(index) / "selection.parquet", "state")
        chosen = state == State.SELECTED
        assert entry["selected"] == chosen.sum()
        assert entry["removed"] == (state == State.REMOVED).sum()
        assert entry["candidates"] == (state == State.CANDIDATE).sum()
        assert entry["unreadable"] == 1
        assert entry["label_precision"] == pytest.approx(np.mean(given[chosen] == true[chosen]))
        right = inside & (given == true)
        assert entry["label_recall"] == pytest.approx((right & chosen).sum() / right.sum())
    assert report["selection"]["selected"] == report["rounds"][-1]["selected"]


def test_theory_follows_the_realised_noise(make_run: Make) -> None:
    run_dir = make_run()
    report = write_report(RunDirectory(run_dir))
    transition, prior = np.array(report["confusion"]["transition"]), np.array(report["confusion"]["prior"])
    for k, entry in enumerate(report["rounds"], start=1):
        kept = transition * (1 - (1 - transition) ** k)
        clean = prior @ np.diag(kept)
        assert entry["theory"]["label_precision"] == pytest.approx(clean / (prior @ kept.sum(1)), abs=1e-4)
        assert entry["theory"]["label_recall"] == pytest.approx(clean / (prior @ np.diag(transition)), abs=1e-4)


def test_confusion_counts_round_one_predictions_that_are_usable(make_run: Make) -> None:
    run_dir = make_run()
    table = pq.read_table(run_dir / "rounds/0/predictions.parquet").to_pylist()
    true = column(run_dir / "true_labels.parquet", "label")
    of_three = [row["predicted"] for row in table if true[row["sample_id"]] == 3 and row["status"] == 0]
    matrix = write_report(RunDirectory(run_dir))["confusion"]["predicted"]
    expected = [of_three.count(label) / len(of_three) for label in range(10)]
    np.testing.assert_allclose(matrix[3], expected, atol=1e-5)


def test_accuracy_in_percent_from_exact_counts(make_run: Make) -> None:
    accuracy = write_report(RunDirectory(make_run()))["accuracy"]["test"]
    assert accuracy["standard"]["top1"] == 93.0
    assert accuracy["standard"]["top1_each"] == [93.0]
    assert accuracy["standard"]["top1_ensemble"] is None
    assert accuracy["coteaching_incv"]["top1"] == pytest.approx((97.75 + 98.5) / 2)
    assert accuracy["coteaching_incv"]["top5"] == pytest.approx(99.875)
    assert accuracy["coteaching_incv"]["top1_ensemble"] == 98.75


def test_the_sampling_error_is_that_of_a_share(make_run: Make) -> None:
    run_dir = make_run()
    counted = write_report(RunDirectory(run_dir))["accuracy"]["test"]["standard"]["count"]
    assert sampling_error(counted) == pytest.approx(100 * 1.96 * (0.5 * 0.5 / counted) ** 0.5)
    assert f"With {counted} images, the sampling error" in (run_dir / "report.html").read_text()


def test_flagged_samples_that_were_held_out_are_counted_apart(make_run: Make) -> None:
    run_dir = make_run()
    (run_dir / "true_labels.parquet").unlink()
    before = write_report(RunDirectory(run_dir))
    assert before["held_out"] == {"samples": 0, "flagged": 0}
    path = run_dir / "selection.parquet"
    index = SelectionIndex.read(path)
    held_out = np.flatnonzero(index.state == State.CANDIDATE)[:20]
    state = index.state.copy()
    state[held_out] = State.HELD_OUT
    replace(index, state=state).write(path)
    shutil.copy(path, run_dir / "rounds/2/selection.parquet")
    report = write_report(RunDirectory(run_dir))
    contradicted = index.predicted[held_out] != column(run_dir / "labels.parquet", "label")[held_out]
    assert report["held_out"] == {"samples": 20, "flagged": int(contradicted.sum())}
    assert report["samples"] == before["samples"] - 20
    page = (run_dir / "report.html").read_text()
    assert "20 more held out for evaluation" in page
    assert "20 of them are among the 20 samples held out of training" in page


def test_files_are_strict_json_equal_to_the_returned_report(make_run: Make) -> None:
    run_dir = make_run()
    report = write_report(RunDirectory(run_dir))
    assert strict_json(run_dir / "report.json") == report
    assert report["time_s"] == {
        "labels": 0.12, "incv": 41.3, "standard": 12.5, "coteaching_incv": 66.4, "evaluate": 1.9, "report": 0.0
    }  # fmt: skip
    assert (report["starts"]["count"], report["starts"]["resumed"]) == (2, 1)
    assert (report["recipe"], report["seed"], report["classes"]) == ("demo", 1, 10)
    assert report["missing"] == {}
    assert [start["processes"] for start in start_rows(report)] == ["1 on cpu", "16 on cuda, torchrun"]
    assert [start["ended"] for start in start_rows(report)] == ["killed", "wrote this report"]
    assert start_rows(report)[1]["resumed from"] == "incv, round 2, fold 1, step 60"
    assert "2 starts; 1 of them resumed from a checkpoint." in (run_dir / "report.html").read_text()
    del report["time_s"]["report"]
    assert start_rows(report)[-1]["ended"] == "still running, or killed"


def test_curves_are_thinned_and_keep_their_ends(make_run: Make) -> None:
    run_dir = make_run()
    metrics = run_dir / "methods/standard/metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"loss": 2', '"loss": NaN, "was": 2', 1) + '{"step": 451, "lo')
    curves = write_report(RunDirectory(run_dir))["curves"]
    columns = curves["methods"]["standard"]
    assert set(curves["rounds"]) == {"1", "2", "3"}
    assert len(columns["step"]) == 200
    assert (columns["step"][0], columns["step"][-1]) == (1, 450)
    strict_json(run_dir / "report.json")


def test_suspects_are_contradicted_never_selected_and_sorted(make_run: Make) -> None:
    run_dir = make_run()
    report = write_report(RunDirectory(run_dir))
    suspects = report["suspicious"]
    state = column(run_dir / "selection.parquet", "state")
    true = column(run_dir / "true_labels.parquet", "label")
    assert len(suspects) == report["flagged"] == np.isin(state, (State.REMOVED, State.CANDIDATE)).sum()
    assert all(suspect["given"] != suspect["predicted"] for suspect in suspects)
    assert all(state[suspect["sample_id"]] in (State.REMOVED, State.CANDIDATE) for suspect in suspects)
    assert all(suspect["true"] == true[suspect["sample_id"]] for suspect in suspects)
    losses = [suspect["loss"] for suspect in suspects]
    assert losses == sorted(losses, reverse=True)


def test_without_truth_what_needs_it_is_null(make_run: Make) -> None:
    run_dir = make_run()
    (run_dir / "true_labels.parquet").unlink()
    report = write_report(RunDirectory(run_dir))
    expected = {
        "paper": 0.263,
        "confident": 0.421,
        "confidence_curve": None,
        "combined": None,
        "confirmed": None,
        "true": None,
    }
    assert report["noise"] == expected | {"stated": "confident"}
    for entry in report["rounds"]:
        assert (entry["label_precision"], entry["label_recall"], entry["theory"]) == (None, None, None)
        assert entry["selected"] > 0
    assert report["confusion"]["transition"] is None
    assert report["confusion"]["predicted"] is None
    assert report["confusion"]["confident"] is not None
    assert all(suspect["true"] is None for suspect in report["suspicious"])
    page, _ = parsed(run_dir)
    assert "true labels of this data set are unknown" in page
    assert verdict(report).startswith("About 26 to 42 % of the 597 labels are wrong (157 to 251); INCV kept 356; ")


def test_the_estimate_from_the_confidence_curve_is_reported(make_run: Make) -> None:
    run = RunDirectory(make_run())
    found = read_json(run.incv)
    write_json(run.incv, found | {"noise": found["noise"] | {"confidence_curve": 0.377}})
    assert "37.7 %" in summary_table(write_report(run))
    page, _ = parsed(run.root)
    assert "the one from the confidence curve" in page
    (run.root / "true_labels.parquet").unlink()
    config = yaml.safe_load(run.config.read_text())
    config["incv"]["noise_estimate"] = "confidence_curve"
    run.config.write_text(yaml.safe_dump(config))
    report = write_report(run)
    assert report["noise"]["stated"] == "confidence_curve"
    assert "\nAbout 26 to 38 % of the 597 labels are wrong (157 to 225).\n" in summary_table(report)
    page, _ = parsed(run.root)
    assert "This report states the estimate from the confidence curve." in page


def test_without_truth_the_summary_states_a_share_no_more_precise_than_it_is(make_run: Make) -> None:
    run_dir = make_run()
    (run_dir / "true_labels.parquet").unlink()
    report = write_report(RunDirectory(run_dir))
    table = summary_table(report)
    assert report["trust"]["noise_range"] == pytest.approx([0.263, 0.421], abs=5e-4)
    assert "\nAbout 26 to 42 % of the 597 labels are wrong (157 to 251).\n" in table
    assert "26.3 %" not in table
    assert "truth" not in table
    assert "removed" in table
    page, _ = parsed(run_dir)
    assert "26.3 %" in page
    assert "26 to 42 %" in page
    assert "This report states the confident estimate." in page
    for entry in report["rounds"]:
        entry["removed"] = 0
    assert "removed" not in summary_table(report)
    report["trust"] |= {"level": "do not use", "claims_noise": False}
    assert "How many of the 597 labels are wrong is unknown: see `trust` below.\n" in summary_table(report)
    report["trust"] |= {"level": "with care", "claims_noise": True, "noise_range": None}
    assert "\nAbout 42 % of the 597 labels are wrong (251).\n" in summary_table(report)
    report["trust"] |= {"level": "trusted"}
    assert "\nAbout 42.1 % of the 597 labels are wrong (251).\n" in summary_table(report)
    report["noise"] |= {"confident": 0.0}
    assert "About 0.0 % of the 597 labels are wrong (0).\n" in summary_table(report)


def test_nothing_removed_is_not_shown(make_run: Make) -> None:
    run_dir = make_run()
    (run_dir / "true_labels.parquet").unlink()
    for path in [*run_dir.glob("rounds/*/selection.parquet"), run_dir / "selection.parquet"]:
        index = SelectionIndex.read(path)
        state = np.where(index.state == State.REMOVED, State.CANDIDATE, index.state).astype(index.state.dtype)
        replace(index, state=state).write(path)
    write_report(RunDirectory(run_dir))
    selection = parsed(run_dir)[0].partition('id="selection"')[2].partition("</section>")[0]
    assert "candidates" in selection
    assert "removed" not in selection


def test_the_gallery_has_thousands_of_flagged_images_within_a_limit(make_run: Make) -> None:
    run_dir = make_run(samples=9000)
    speckles = np.random.default_rng(0).integers(0, 256, (66, 90, 3), np.uint8)  # the worst case of a codec
    report = write_report(RunDirectory(run_dir), lambda sample_id: Image.fromarray(speckles))
    page, _ = parsed(run_dir)
    body, _, rest = page.partition('<script type="application/json" id="gallery-data">')
    gallery = json.loads(rest.partition("</script>")[0])
    assert report["flagged"] > 3000
    assert body.count("data:image/webp") == 24, "without scripts, the first are shown"
    flagged = [picture for picture, state in zip(gallery["picture"], gallery["state"], strict=True) if state != 2]
    assert len(flagged) == 2400
    assert sum(picture is not None for picture in flagged) >= 2000
    assert len(page) < 15_000_000
    assert f"{report['flagged']:,} labels are flagged" in page


def test_labels_checked_by_hand_are_counted_and_not_flagged(make_run: Make) -> None:
    run_dir = make_run()
    before = write_report(RunDirectory(run_dir))
    assert "by hand" not in summary_table(before)
    assert "by hand" not in parsed(run_dir)[0]
    doubted = before["suspicious"][0]["sample_id"]
    labels = pq.read_table(run_dir / "labels.parquet")
    labels = labels.append_column("checked", [labels["sample_id"].to_numpy() == doubted])
    write_parquet(run_dir / "labels.parquet", labels)
    write_json(run_dir / "corrections.json", {"corrected": 1, "confirmed": 0, "excluded": 3})
    report = write_report(RunDirectory(run_dir))
    assert report["flagged"] == before["flagged"] - 1
    assert doubted not in [suspect["sample_id"] for suspect in report["suspicious"]]
    words = "Labels checked by hand: 1 corrected, 3 excluded."
    assert words in summary_table(report)
    assert words in parsed(run_dir)[0]


def check_labels(run_dir: Path, checked: np.ndarray) -> None:
    """Mark the labels of these samples as checked by hand."""
    labels = pq.read_table(run_dir / "labels.parquet")
    labels = labels.append_column("checked", [np.isin(labels["sample_id"].to_numpy(), checked)])
    write_parquet(run_dir / "labels.parquet", labels)
    write_json(run_dir / "corrections.json", {"corrected": len(checked), "confirmed": 0, "excluded": 0})


def test_strongly_contradicted_checks_are_worth_a_second_look_and_not_flagged(make_run: Make) -> None:
    run_dir = make_run()
    checked = np.arange(0, 600, 7)
    check_labels(run_dir, checked)
    report = write_report(RunDirectory(run_dir), digit, pa.chunked_array([[f"key{number}" for number in range(600)]]))
    selection, given = ReportRun(RunDirectory(run_dir)).selection, column(run_dir / "labels.parquet", "label")
    assert selection is not None
    expected = {
        number: selection.predicted_probability[number]
        for number in checked
        if selection.predicted[number] not in (-1, given[number]) and selection.predicted_probability[number] >= 0.8
    }
    shown = report["corrections"]["second_look"]
    assert report["corrections"]["contradicted"] == len(expected) > len(shown) == 12
    assert [one["sample_id"] for one in shown] == sorted(expected, key=lambda number: -expected[number])[:12]
    for one in shown:
        number = one["sample_id"]
        assert (one["key"], one["given"]) == (f"key{number}", given[number])
        assert one["predicted"] == selection.predicted[number] != one["given"]
        assert one["predicted_probability"] == pytest.approx(expected[number], abs=1e-6)
    assert not {one["sample_id"] for one in shown} & {one["sample_id"] for one in report["suspicious"]}
    page, _ = parsed(run_dir)
    section = page.partition('id="second-look"')[2].partition("</section>")[0]
    assert section.count("data:image/webp") == 12
    assert f"{len(expected)} labels that were checked by hand are contradicted" in section
    assert "The 12 strongest are shown." in section
    for one in shown:
        assert one["key"] in section
    assert f"{len(expected)} of them are worth a second look" in " ".join(summary_table(report).split())
    strict_json(run_dir / "report.json")


def test_a_second_look_is_not_asked_for_without_reason(make_run: Make) -> None:
    run_dir = make_run()
    selection, given = ReportRun(RunDirectory(run_dir)).selection, column(run_dir / "labels.parquet", "label")
    assert selection is not None
    check_labels(run_dir, np.flatnonzero((selection.predicted == given) | (selection.predicted_probability < 0.8)))
    report = write_report(RunDirectory(run_dir))
    assert (report["corrections"]["contradicted"], report["corrections"]["second_look"]) == (0, [])
    assert "second look" not in summary_table(report) + parsed(run_dir)[0]
    # Predictions that cannot be trusted are no reason, either.
    doubted = report | {"corrections": {"corrected": 1, "contradicted": 1, "second_look": [{"sample_id": 1}]}}
    assert "1 of them is worth a second look" in correction_words(doubted | {"trust": {"level": "with care"}})
    assert "second look" not in correction_words(doubted | {"trust": {"level": "do not use"}})


def test_an_unfinished_run_has_no_second_look(make_run: Make) -> None:
    run_dir = make_run()
    check_labels(run_dir, np.arange(50))
    (run_dir / "selection.parquet").unlink()
    shutil.rmtree(run_dir / "rounds")
    report = write_report(RunDirectory(run_dir))
    assert (report["corrections"]["contradicted"], report["corrections"]["second_look"]) == (None, None)
    assert "second look" not in summary_table(report) + parsed(run_dir)[0]


def test_without_evaluation(make_run: Make) -> None:
    run_dir = make_run()
    (run_dir / "evaluation.json").unlink()
    report = write_report(RunDirectory(run_dir))
    assert report["accuracy"] is None
    assert "evaluate stage has not finished" in parsed(run_dir)[0]
    assert "accuracy has not been measured yet" in verdict(report)


def test_without_incv(make_run: Make) -> None:
    run_dir = make_run()
    (run_dir / "incv.json").unlink()
    (run_dir / "selection.parquet").unlink()
    shutil.rmtree(run_dir / "rounds")
    report = write_report(RunDirectory(run_dir), digit)
    assert report["samples"] == 600
    assert report["noise"]["paper"] is None
    assert report["noise"]["true"] is not None
    assert report["rounds"] == []
    assert (report["selection"], report["suspicious"]) == (None, None)
    assert "No round of INCV has finished" in parsed(run_dir)[0]
    strict_json(run_dir / "report.json")


def test_in_the_middle_of_incv_the_finished_rounds_count(make_run: Make) -> None:
    run_dir = make_run()
    for name in ("incv.json", "selection.parquet", "evaluation.json", "rounds/2/selection.parquet"):
        (run_dir / name).unlink()
    report = write_report(RunDirectory(run_dir))
    assert [entry["round"] for entry in report["rounds"]] == [1, 2]
    assert report["selection"]["selected"] == report["rounds"][1]["selected"]
    parsed(run_dir)


def test_a_run_that_has_only_labels(make_run: Make) -> None:
    run_dir = make_run()
    for name in ("incv.json", "evaluation.json", "selection.parquet", "true_labels.parquet"):
        (run_dir / name).unlink()
    shutil.rmtree(run_dir / "rounds")
    shutil.rmtree(run_dir / "methods")
    write_json(run_dir / "manifest.json", {"recipe": "demo", "stages": {}, "starts": []})
    report = write_report(RunDirectory(run_dir), digit)
    assert report["class_names"] == [str(number) for number in range(10)]
    parsed(run_dir)
    assert summary_table(report)


def test_class_names_are_escaped_everywhere(make_run: Make) -> None:
    names = ["<script>alert(1)</script>", '"><img src=x>', "a & b", *(f"class {n}" for n in range(7))]
    run_dir = make_run(names=names)
    manifest = read_json(run_dir / "manifest.json")
    manifest["starts"][0]["command"] = "incv run '<script>evil</script>'"
    manifest["recipe"] = "<b>demo</b>"
    write_json(run_dir / "manifest.json", manifest)
    write_report(RunDirectory(run_dir))
    page, reader = parsed(run_dir)
    assert reader.tags.count("script") == 2, "the page's own: data and code"
    assert "img" not in reader.tags
    assert "b" not in {tag for tag in reader.tags if f"<{tag}>demo" in page}
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


@pytest.mark.parametrize(
    ("source", "name"), [("digits", "digits"), ("image_folder", "photos"), ("webdataset", "photos")]
)
def test_a_page_is_named_by_its_data(make_run: Make, source: str, name: str) -> None:
    run_dir = make_run()
    manifest = read_json(run_dir / "manifest.json")
    manifest["dataset"]["source"] = source
    write_json(run_dir / "manifest.json", manifest)
    config = yaml.safe_load((run_dir / "config.resolved.yaml").read_text())
    config["data"] = {"train": {"root": "/data/photos", "split": "train"}}
    (run_dir / "config.resolved.yaml").write_text(yaml.safe_dump(config))
    write_report(RunDirectory(run_dir))
    page, _ = parsed(run_dir)
    assert f"<h1>{name}</h1>" in page
    assert f"<title>{name}: INCV report</title>" in page


@pytest.mark.parametrize("truth", [True, False])
def test_the_page_begins_with_images(make_run: Make, truth: bool) -> None:
    run_dir = make_run()
    if not truth:
        (run_dir / "true_labels.parquet").unlink()
    write_report(RunDirectory(run_dir))
    page, _ = parsed(run_dir)
    assert page.index('id="suspicious"') < page.index('id="noise"')


def test_the_page_asks_for_nothing_outside_itself(make_run: Make) -> None:
    run_dir = make_run()
    write_report(RunDirectory(run_dir), digit)
    page, reader = parsed(run_dir)
    targets = [value for name, value in reader.attributes if name in ("src", "href", "srcset", "data", "action")]
    assert targets
    assert all(value.startswith(("data:image/webp;base64,", "#")) for value in targets)
    assert not re.search(r"url\(|@import|https?://", page)
    assert {"link", "iframe", "object"}.isdisjoint(reader.tags)


def test_a_picture_that_cannot_be_read_does_not_stop_the_report(make_run: Make) -> None:
    run_dir = make_run()
    broken = write_report(RunDirectory(run_dir))["suspicious"][0]["sample_id"]

    def image_of(sample_id: int) -> Image.Image:
        if sample_id == broken:
            raise OSError("truncated")
        return Image.new("RGB", (300, 200))

    write_report(RunDirectory(run_dir), image_of)
    page, _ = parsed(run_dir)
    assert page.partition("<script")[0].count("data:image/webp;base64,") == 23
    assert page.count('class="blank"') == 1


def test_many_classes_show_pairs_instead_of_matrices(make_run: Make) -> None:
    run_dir = make_run(names=[f"synset {number}" for number in range(120)])
    report = write_report(RunDirectory(run_dir))
    assert report["classes"] == 120
    assert report["confusion"]["transition"] is None
    worst = report["confusion"]["pairs"]["given"]
    assert worst[0]["count"] == max(pair["count"] for pair in worst)
    assert all(pair["from"] != pair["to"] for pair in worst)
    assert "too large to show" in parsed(run_dir)[0]
    shown = report["confusion"]["excerpt"]
    assert 2 <= len(shown["classes"]) == len(shown["matrix"]) <= 20
    estimated = report["confusion"]["estimated_pairs"]
    for pair in estimated[:10]:  # at most 20 classes
        row, column_ = shown["classes"].index(pair["from"]), shown["classes"].index(pair["to"])
        assert shown["matrix"][row][column_] == pytest.approx(pair["share"], abs=1e-4)


def test_verdict_and_summary_table(make_run: Make) -> None:
    report = write_report(RunDirectory(make_run()))
    assert verdict(report) == (
        "41.5 % of the 597 labels are wrong; INCV kept 356 with 95.5 % precision; "
        "INCV + Co-teaching reaches 98.1 %, 5.1 points above standard training."
    )
    table = summary_table(report)
    assert max(len(line) for line in table.splitlines()) <= 90
    for part in ("26.3 %", "42.1 %", "round 3", "(88.3 %)", "INCV + Co-teaching", "98.8 %"):
        assert part in table


def test_a_long_method_name_stays_within_the_table(make_run: Make) -> None:
    run_dir = make_run()
    evaluation = read_json(run_dir / "evaluation.json")
    evaluation["a set with a very long name for a table"] = {"m" * 80: evaluation["test"]["coteaching_incv"]}
    write_json(run_dir / "evaluation.json", evaluation)
    assert max(len(line) for line in summary_table(write_report(RunDirectory(run_dir))).splitlines()) <= 90
