"""From a pass to predictions: unusable rows marked, top-k agreement, merged, and back from their file."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from shards.durable import read_parquet, write_parquet
from shards.errors import DataError
from tests.support.prediction_rows import rows
from trainer.incv.predictions import OUTPUTS, Predictions, merge_predictions
from trainer.loading.batch import Batch
from trainer.passes import Status
from trainer.passes.outputs import OUTPUTS as COLUMNS
from trainer.passes.sample_pass import Collector
from trainer.passes.table import SampleTable

LOGITS = [[2.0, 1.0, 0.0], [0.0, 1.0, 2.0], [0.0, 5.0, 0.0]]


def batch(ids: list[int], weights: list[float] | None = None) -> Batch:
    weights = weights or [float(number >= 0) for number in ids]
    images = torch.zeros(len(ids), 3, 2, 2)
    return Batch(torch.tensor(ids), images, torch.tensor(weights))


def judged(ids, labels, logits, weights=None, top_k=1) -> Predictions:
    by_id = torch.zeros(max(ids) + 1, dtype=torch.int64)
    by_id[torch.tensor(ids)] = torch.tensor(labels)
    collector = Collector([COLUMNS[name] for name in OUTPUTS], by_id, top_k)
    collector.add(batch(ids, weights), [(torch.tensor(logits),)], len(ids), len(ids))
    return Predictions.of_table(SampleTable.of(*collector.columns(torch.device("cpu")), "the pass"), fold=1)


def test_rows_by_hand():
    found = judged([8, 3, 5], [0, 0, 2], LOGITS)
    assert found.sample_id.tolist() == [3, 5, 8]
    assert found.predicted.tolist() == [2, 1, 0]
    assert found.agrees.tolist() == [False, False, True]
    assert found.fold.tolist() == [1, 1, 1]
    total = sum(math.exp(logit) for logit in (0, 1, 2))
    np.testing.assert_allclose(found.loss[[0, 2]], [math.log(total), math.log(total) - 2], rtol=1e-6)
    np.testing.assert_allclose(found.given_probability[[0, 2]], [1 / total, math.exp(2) / total], rtol=1e-6)
    np.testing.assert_allclose(found.predicted_probability[[0, 2]], math.exp(2) / total, rtol=1e-6)
    assert found.agreement() == 1 / 3


@pytest.mark.parametrize(
    ("top_k", "agrees"), [(1, [False, False]), (2, [True, False]), (3, [True, True]), (9, [True] * 2)]
)
def test_a_sample_agrees_if_its_label_is_among_the_top_k(top_k, agrees):
    found = judged([0, 1], [1, 0], LOGITS[:2], top_k=top_k)
    assert found.agrees.tolist() == agrees
    assert found.predicted.tolist() == [0, 2]


@pytest.mark.parametrize("broken", [[math.nan, 0.0, 0.0], [math.inf, 0.0, 0.0], [0.0, -math.inf, 0.0]])
def test_non_finite_outputs_are_rows_of_their_own_kind(broken):
    found = judged([0, 1], [0, 0], [broken, LOGITS[0]])
    assert found.status.tolist() == [Status.NON_FINITE, Status.OK]
    assert found.predicted[0] == -1
    assert not found.agrees[0]
    assert np.isnan([found.loss[0], found.given_probability[0], found.predicted_probability[0]]).all()
    assert found.agreement() == 1.0


def test_unreadable_samples_are_returned_once_whatever_the_network_says():
    found = judged([0, 1, 2], [0, 0, 0], [LOGITS[0], [math.nan] * 3, LOGITS[0]], weights=[0.0, 0.0, 1.0])
    assert found.sample_id.tolist() == [0, 1, 2]
    assert found.status.tolist() == [Status.UNREADABLE, Status.UNREADABLE, Status.OK]
    assert found.agrees.tolist() == [False, False, True]


def test_agreement_of_nothing_usable_is_none_at_all():
    assert rows([1, 2], [True, True], status=Status.UNREADABLE).agreement() == 0.0


def test_predictions_come_back_from_their_file(tmp_path: Path):
    written = judged([8, 3, 5], [0, 0, 2], LOGITS, weights=[1.0, 0.0, 1.0])
    written.write(tmp_path / "predictions.parquet")
    back = Predictions.read(tmp_path / "predictions.parquet")
    for name in Predictions.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(back, name), getattr(written, name))
        assert getattr(back, name).dtype == getattr(written, name).dtype


def test_a_file_without_all_columns_is_refused(tmp_path: Path):
    judged([8], [0], LOGITS[:1]).write(tmp_path / "whole.parquet")
    write_parquet(tmp_path / "older.parquet", read_parquet(tmp_path / "whole.parquet", "").drop_columns(["second"]))
    with pytest.raises(DataError, match=r"lacks the columns second.*--redo incv"):
        Predictions.read(tmp_path / "older.parquet")


def test_predictions_of_another_run_are_refused():
    found = judged([8, 3, 5], [0, 0, 2], LOGITS)
    assert merge_predictions([found], np.array([5, 3, 8])).sample_id.tolist() == [3, 5, 8]
    with pytest.raises(DataError, match=r"exactly once.*--redo incv"):
        merge_predictions([found], np.array([3, 5]))
