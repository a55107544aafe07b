"""A pass: columns against their formulas, unusable rows marked, files, stops, networks without features."""

import numpy as np
import pytest
import torch
from torch import nn

from shards.errors import ConfigError, DataError
from tests.support.toy_passes import CLASSES, NON_FINITE, UNREADABLE, WIDTH, ToyNetwork, image_of, toy_pass
from trainer.distributed.stop import Stopped
from trainer.passes import Status
from trainer.passes.outputs import OUTPUTS, Output
from trainer.passes.table import SampleTable

IDS = np.arange(1, 60, 2)
LABELS = np.arange(60) % CLASSES
LABELS[0] = -1  # of a sample outside the run
USABLE = [sample for sample in IDS.tolist() if sample % UNREADABLE and sample % NON_FINITE]


def logits_of(samples, seed):
    return ToyNetwork(seed)(torch.stack([image_of(sample) for sample in samples])).detach()


@pytest.mark.parametrize("batch", [1, 4, 7, 100])
def test_columns_are_those_of_the_formulas(batch):
    table = toy_pass(batch=batch).run(ToyNetwork(1), IDS, tuple(OUTPUTS), labels=LABELS, top_k=2)
    assert table.ids.tolist() == IDS.tolist()
    assert table.ids[table.usable].tolist() == USABLE
    rows = table.rows(table.usable)
    logits, given = logits_of(USABLE, 1), torch.from_numpy(LABELS[USABLE])
    log_p = logits.log_softmax(dim=1)
    best = log_p.argsort(dim=1, descending=True)
    own = log_p[torch.arange(len(given)), given]
    torch.testing.assert_close(rows["features"], torch.stack([image_of(sample).flatten() for sample in USABLE]))
    torch.testing.assert_close(rows["logits"], logits)
    torch.testing.assert_close(rows["probabilities"], logits.softmax(dim=1))
    torch.testing.assert_close(rows["losses"], nn.functional.cross_entropy(logits, given, reduction="none"))
    torch.testing.assert_close(rows["given_probability"], own.exp())
    torch.testing.assert_close(rows["predicted_probability"], log_p.max(dim=1).values.exp())
    torch.testing.assert_close(rows["second_probability"], log_p.sort(dim=1).values[:, -2].exp())
    assert torch.equal(rows["predicted"], best[:, 0].int())
    assert torch.equal(rows["second"], best[:, 1].int())
    assert torch.equal(rows["agreement"], (best[:, :2] == given[:, None]).any(dim=1))
    assert torch.equal(rows["given_rank"], (best == given[:, None]).int().argmax(dim=1).int())


def test_unreadable_and_non_finite_rows_are_marked():
    table = toy_pass().run(ToyNetwork(1), IDS, tuple(OUTPUTS), labels=LABELS)
    for sample, status in zip(IDS.tolist(), table.status.tolist(), strict=True):
        readable = Status.OK if sample % NON_FINITE else Status.NON_FINITE
        assert status == (readable if sample % UNREADABLE else Status.UNREADABLE)
    lost = table.rows(~table.usable)
    assert len(lost) > 5
    for name in OUTPUTS:
        nothing = {torch.bool: lambda c: ~c, torch.int32: lambda c: c == -1}.get(lost[name].dtype, torch.isnan)
        assert nothing(lost[name]).all(), name


def test_several_networks_give_columns_side_by_side():
    networks = [ToyNetwork(1), ToyNetwork(2)]
    both = toy_pass().run(networks, IDS, ("logits", "losses"), labels=torch.from_numpy(LABELS))
    assert both["logits"].shape == (len(IDS), 2, CLASSES)
    for number, network in enumerate(networks):
        alone = toy_pass().run(network, IDS, ("logits", "losses"), labels=LABELS)
        for name in ("logits", "losses"):
            np.testing.assert_array_equal(both[name][:, number], alone[name])


def test_a_row_counts_for_each_network_whose_numbers_are_finite():
    broken = ToyNetwork(2)
    broken.weight.data.fill_(torch.nan)
    table = toy_pass().run([ToyNetwork(1), broken], np.array([1, 2]), ("probabilities",))
    assert table.status.tolist() == [Status.NON_FINITE] * 2
    assert torch.isfinite(table["probabilities"][:, 0]).all()
    assert torch.isnan(table["probabilities"][:, 1]).all()


def test_a_column_of_the_callers_own():
    margin = Output("margin", lambda rows: rows.likeliest[0][:, 0] - rows.likeliest[0][:, 1])
    table = toy_pass().run(ToyNetwork(1), np.array(USABLE), (margin,))
    ordered = logits_of(USABLE, 1).sort(dim=1).values
    torch.testing.assert_close(table["margin"], ordered[:, -1] - ordered[:, -2])


def test_pieces_of_a_pass_join_to_the_whole():
    outputs = ("predicted", "features")
    whole = toy_pass().run(ToyNetwork(1), IDS, outputs)
    pieces = [toy_pass().run(ToyNetwork(1), part, outputs) for part in np.array_split(IDS[::-1], 3)]
    joined = SampleTable.join(pieces, "the pass")
    assert torch.equal(joined.ids, whole.ids)
    for name in (*outputs, "status"):
        np.testing.assert_array_equal(joined[name], whole[name])


@pytest.mark.parametrize("order", [0, 1])
def test_features_in_a_file_are_those_in_memory(tmp_path, order):
    path = tmp_path / "new" / "features"
    path.parent.mkdir()
    (path.parent / ".features.partial").write_bytes(b"of a pass that was stopped" * 1000)
    whole = toy_pass(order=order).run(ToyNetwork(1), IDS, ("features",))
    table = toy_pass(order=order).run(ToyNetwork(1), IDS, ("features", "predicted"), features_to=path)
    np.testing.assert_array_equal(table["features"], whole["features"].half())
    assert path.stat().st_size == len(IDS) * WIDTH * 2
    table["features"][0] = 3.0  # stays in memory
    np.testing.assert_array_equal(np.fromfile(path, np.float16).reshape(-1, WIDTH), whole["features"].half())
    assert [each.name for each in path.parent.iterdir()] == ["features"]


def test_a_stop_inside_a_pass_leaves_no_file(tmp_path):
    with pytest.raises(Stopped, match=r"toy: predicting at step 2 \(STOP file\)"):
        toy_pass(stop_at=2).run(ToyNetwork(1), IDS, ("features",), features_to=tmp_path / "features")
    assert not (tmp_path / "features").exists()


def test_what_cannot_be_computed_is_refused():
    with pytest.raises(ConfigError, match=r"toy: voting reads the features.*Linear does not give.*set model\.name"):
        toy_pass().run(nn.Linear(2, 2), IDS, ("features",), doing="voting")
    with pytest.raises(ValueError, match="give `labels` to the pass"):
        toy_pass().run(ToyNetwork(1), IDS, ("losses",))
    with pytest.raises(DataError, match=r"toy: predicting must cover each of 2 samples exactly once, but .* 1 occur"):
        toy_pass().run(ToyNetwork(1), np.array([3, 3]))


def test_a_pass_over_no_samples_has_its_columns():
    table = toy_pass().run(ToyNetwork(1), IDS[:0], ("losses", "predicted"), labels=np.zeros(200, np.int64))
    assert len(table) == len(table.usable) == len(table["losses"]) == len(table["predicted"]) == 0


def test_features_for_a_file_need_not_be_asked_for(tmp_path):
    table = toy_pass().run(ToyNetwork(1), IDS, features_to=tmp_path / "features")
    assert {"features", "probabilities"} <= table.columns.keys()
    assert len(table.rows(table.usable)["features"]) == int(table.usable.sum())
