"""What a run shows of its own quality: predictions repeated over rounds, and classes with few selected samples."""

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.incv.predictions import Predictions
from trainer.incv.selection_index import SelectionIndex, State
from trainer.records.run_directory import RunDirectory
from trainer.report.run import ReportRun, RunSamples
from trainer.report.signals import (
    confirmed_noise,
    rare_classes,
    read_repeated,
    repeated_predictions,
    stated_estimate,
)


def predictions(rows: dict[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The usable predictions {sample_id: class} of a round."""
    return np.array(list(rows), np.int64), np.array(list(rows.values()), np.int32)


def test_repeated_predictions():
    given_labels = np.array([0, 0, 0, 0, 0, 0], np.int32)
    rounds = [
        predictions({0: 0, 1: 1, 2: 1, 3: 1, 5: 2}),
        predictions({1: 1, 2: 2, 3: 0, 4: 1}),
    ]
    #                                                  agrees, same, other, agrees later, once, once
    assert repeated_predictions(rounds, given_labels).tolist() == [-1, 1, 0, -1, -1, -1]


@given(
    st.lists(st.dictionaries(st.integers(0, 9), st.integers(0, 3)), max_size=4),
    st.lists(st.integers(0, 3), min_size=10, max_size=10),
)
def test_repeated_predictions_by_definition(rounds, labels):
    found = repeated_predictions([predictions(rows) for rows in rounds], np.array(labels, np.int32))
    for sample_id in range(10):
        seen = [rows[sample_id] for rows in rounds if sample_id in rows]
        if len(seen) < 2 or seen[-1] == labels[sample_id]:
            assert found[sample_id] == -1
        else:
            assert found[sample_id] == (seen[0] == seen[-1])


def test_rare_classes():
    labels = np.repeat(np.arange(3, dtype=np.int32), 30)
    index = SelectionIndex.of_candidates(90, np.arange(90))
    index.state[:27] = State.SELECTED  # all of class 0 but three
    index.state[30:56] = State.SELECTED
    index.state[60:66] = State.SELECTED
    samples = RunSamples(labels, None, np.ones(90, bool), ["cat", "dog", "fox"])
    assert rare_classes(samples, index) == ("fox",)
    index.state[60:85] = State.SELECTED
    assert rare_classes(samples, index) == ()


def test_the_stated_estimate():
    noise = {"paper": 0.1, "confident": 0.2, "confirmed": None}
    assert stated_estimate(noise, "paper") == ("paper", 0.1)
    assert stated_estimate(noise, "confident") == ("confident", 0.2)
    assert stated_estimate(noise | {"confirmed": 0.15}, "confident") == ("confirmed", 0.15)
    assert stated_estimate(noise | {"confirmed": 0.15}, None) == ("confirmed", 0.15)
    assert stated_estimate(noise | {"confirmed": 0.15}, "paper") == ("paper", 0.1)
    assert stated_estimate({"paper": None, "confident": None, "confirmed": None}, None) is None


def two_rounds(folder: Path) -> tuple[ReportRun, SelectionIndex, RunSamples]:
    """A run of 12 samples with the given label 0, of which 4 are held out; 2 of the others are contradicted twice."""
    run = RunDirectory(folder)
    index = SelectionIndex.of_candidates(12, np.arange(12))
    index.state[:5], index.state[8:] = State.SELECTED, State.HELD_OUT
    rounds = ({i: int(i >= 5) for i in range(12)}, {5: 1, 6: 1, 7: 2} | dict.fromkeys(range(8, 12), 1))
    index.predicted[:8] = (0, 0, 0, 0, 0, 1, 1, 2)
    index.given_probability[:8] = (0.9, 0.9, 0.9, 0.9, 0.9, 0.1, 0.1, 0.1)  # mean 0.6
    index.predicted_probability[:8] = (0.9, 0.9, 0.9, 0.9, 0.9, 0.7, 0.7, 0.7)
    for number, rows in enumerate(rounds):
        ids, predicted = predictions(rows)
        zeros, none = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int8)
        run.round(number).mkdir(parents=True)
        second = np.zeros(len(ids), np.int32)
        table = Predictions(ids, none, predicted, predicted == 0, zeros, zeros, zeros, second, zeros, second, none)
        table.write(run.round_predictions(number))
        index.write(run.round_selection(number))
    return ReportRun(run), index, RunSamples(np.zeros(12, np.int32), None, np.ones(12, bool), ["cat", "dog", "fox"])


def test_held_out_samples_do_not_count(tmp_path):
    run, index, samples = two_rounds(tmp_path)
    samples.given[8] = 1  # the classes 1 and 2 have no threshold without samples
    samples.given[9] = 2
    repeated = read_repeated(run, samples)
    assert confirmed_noise(run, samples, index, repeated) == 0  # only held-out samples have these labels


def test_only_confident_contradictions_count(tmp_path):
    run, index, samples = two_rounds(tmp_path)
    samples.given[3], samples.given[4] = 1, 2
    index.given_probability[3:5] = 0.65  # the thresholds of the classes 1 and 2
    repeated = read_repeated(run, samples)
    assert confirmed_noise(run, samples, index, repeated) == 2 / 8
    index.predicted_probability[6] = 0.6
    assert confirmed_noise(run, samples, index, repeated) == 1 / 8
    index.predicted_probability[5] = np.nan  # not stored
    assert confirmed_noise(run, samples, index, repeated) is None


def test_a_sample_without_a_prediction_does_not_spoil_the_threshold(tmp_path):
    run, index, samples = two_rounds(tmp_path)
    samples.given[2:5] = 1
    index.given_probability[2:5] = (np.nan, 0.65, 0.65)
    index.state[2] = State.UNREADABLE
    assert confirmed_noise(run, samples, index, read_repeated(run, samples)) == 2 / 8
