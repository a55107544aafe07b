"""Counts against a numpy reference, and forward passes that return each id once."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import trainer.passes.forward
from trainer.distributed.stop import Stopped
from trainer.distributed.world import SINGLE_PROCESS
from trainer.loading.augment import Draws
from trainer.loading.batch import Batch, BatchRequest
from trainer.passes.forward import iterate_forward
from trainer.passes.sample_pass import Collector
from trainer.passes.table import SampleTable
from trainer.run import evaluation

CPU = torch.device("cpu")


@dataclass
class Labelled(Batch):
    """A batch, and the labels of its rows, which a pass looks up by id."""

    labels: torch.Tensor | None = None


def batch_of(labels, weights, ids):
    weights = torch.tensor(weights, dtype=torch.float)
    return Labelled(torch.tensor(ids), torch.zeros(len(ids), 3, 2, 2), weights, labels=torch.tensor(labels))


def table_of(passes, output, labels=None):
    """What a pass over these batches, whose rows have logits, collects."""
    passes, columns, ids = list(passes), [], []
    for batch, logits in passes:
        real = int((batch.ids >= 0).sum())
        order = torch.argsort((batch.ids < 0).int(), stable=True)  # fill rows are the last
        given = batch.labels[order]
        batch = Batch(batch.ids[order], batch.images, batch.weights[order])
        by_id = torch.zeros(max(1, int(batch.ids.max()) + 1), dtype=torch.int64)
        by_id[batch.ids[:real]] = given[:real]
        collector = Collector([output], by_id, single=False)
        collector.add(batch, [(scores[order],) for scores in logits], real, real)
        own, found = collector.columns(CPU)
        ids.append(own)
        columns.append(found)
    return SampleTable.of(torch.cat(ids), {n: torch.cat([c[n] for c in columns]) for n in columns[0]}, "the pass")


def count_hits(passes):
    passes = list(passes)
    return evaluation.count_hits(SINGLE_PROCESS, table_of(passes, evaluation.HITS), len(passes[0][1]))


def reference(scores, labels, top):
    """Rows whose label is among the `top` highest scores."""
    best = np.argsort(-scores, axis=1)[:, :top]
    return int((best == labels[:, None]).any(axis=1).sum())


def check_label_hits(passes, samples, classes, random):
    """Against two kinds of labels, row by row; unreadable rows do not count."""
    labels = random.integers(0, classes, (2, samples))
    networks = len(passes[0][1])
    readable, hit = 0, np.zeros((2, networks), int)
    for batch, scores in passes:
        for row, (sample, weight) in enumerate(zip(batch.ids.tolist(), batch.weights.tolist(), strict=True)):
            if weight > 0:
                readable += 1
                found = [int(network[row].argmax()) for network in scores]
                hit += [[each == label for each in found] for label in labels[:, sample]]
    kinds = {"given": torch.from_numpy(labels[0]), "true": torch.from_numpy(labels[1])}
    counted = evaluation.count_label_hits(SINGLE_PROCESS, table_of(passes, evaluation.PREDICTED), kinds, networks)
    for kind, hits in zip(counted.values(), hit, strict=True):
        assert kind.each == pytest.approx([each / readable for each in hits] if readable else [0.0] * networks)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 12),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_counts_are_those_of_the_reference(seed, classes, networks, shapes):
    """Batches of (real, unreadable, fill) rows; unreadable ones count, and are missed by everyone."""
    random = np.random.default_rng(seed)
    passes, kept_scores, kept_labels, total = [], [], [], 0
    for real, unreadable, fill in shapes:
        kinds = random.permutation([1] * real + [0] * unreadable).tolist() + [-1] * fill
        rows = len(kinds)
        labels = random.integers(0, classes, rows)
        scores = random.normal(size=(networks, rows, classes)).astype(np.float32) * 3
        ids = [total + row if kind >= 0 else -1 for row, kind in enumerate(kinds)]
        weights = [float(kind == 1) for kind in kinds]
        passes.append((batch_of(labels, weights, ids), [torch.from_numpy(network) for network in scores]))
        readable = np.array(kinds) == 1
        kept_scores.append(scores[:, readable].astype(np.float64))
        kept_labels.append(labels[readable])
        total += real + unreadable
    scores, labels = np.concatenate(kept_scores, axis=1), np.concatenate(kept_labels)
    probabilities = np.exp(scores) / np.exp(scores).sum(axis=2, keepdims=True)
    expected = {
        "count": total,
        "networks": [{"top1": reference(s, labels, 1), "top5": reference(s, labels, 5)} for s in scores],
        "unreadable": total - len(labels),
        "ensemble": None,
    }
    if networks > 1:
        mean = probabilities.mean(axis=0)
        expected["ensemble"] = {"top1": reference(mean, labels, 1), "top5": reference(mean, labels, 5)}
    counted = count_hits(iter(passes))
    check_label_hits(passes, total, classes, random)
    assert counted == expected
    numbers = [counted["count"], *counted["networks"][0].values()]
    assert all(type(number) is int for number in numbers)


def test_an_ensemble_is_the_mean_of_probabilities_not_of_logits():
    """One sure network against one that hardly prefers: probabilities 0.9 + 0.4 against 0.1 + 0.6."""
    probabilities = torch.tensor([[[0.9, 0.1]], [[0.4, 0.6]]])
    logits = [probabilities[0].log(), probabilities[1].log() * 1000 + 5]
    batch = batch_of([1], [1.0], [0])
    counted = count_hits([(batch, logits)])
    assert counted["networks"] == [{"top1": 0, "top5": 1}, {"top1": 1, "top5": 1}]
    assert counted["ensemble"] == {"top1": 1, "top5": 1}  # 0.1 + 1.0 against 0.9 + 0.0
    mild = [probabilities[0].log(), probabilities[1].log()]
    assert count_hits([(batch, mild)])["ensemble"] == {"top1": 0, "top5": 1}


@pytest.mark.parametrize("classes", [1, 2, 4, 5])
def test_with_five_classes_or_fewer_every_readable_row_is_among_the_first_five(classes):
    labels = [row % classes for row in range(6)]
    batch = batch_of(labels, [1, 1, 0, 1, 1, 0], [0, 1, 2, 3, 4, -1])
    counted = count_hits([(batch, [torch.randn(6, classes)])])
    assert (counted["count"], counted["networks"][0]["top5"]) == (5, 4)


def test_an_unreadable_image_is_missed_though_its_row_would_hit():
    scores = torch.eye(4)
    batch = batch_of([0, 1, 2, 3], [1, 0, 1, 1], [0, 1, 2, 3])
    assert count_hits([(batch, [scores])]) == {
        "count": 4,
        "networks": [{"top1": 3, "top5": 3}],
        "unreadable": 1,
        "ensemble": None,
    }


def request_of(ids, rows):
    n = len(ids)
    return BatchRequest(np.array(ids), Draws(np.zeros((n, 4), np.int32), np.zeros(n, bool)), rows, False)


class Loader:
    """Images that hold their own id, zeros in fill rows."""

    def batches(self, requests):
        for request in requests:
            ids = torch.full((request.rows,), -1)
            ids[: len(request.ids)] = torch.from_numpy(request.ids)
            images = ids.clamp(min=0).float()[:, None, None, None].expand(-1, 3, 2, 2)
            yield Labelled(ids, images, (ids >= 0).float(), labels=ids.clamp(min=0) % 3)

    def close(self):
        pass


class Probe(nn.Module):
    """Answers with the id it is shown; notes its mode."""

    def __init__(self):
        super().__init__()
        self.dropout, self.modes = nn.Dropout(0.5), []

    def forward(self, images):
        self.modes.append((self.training, torch.is_grad_enabled()))
        return self.dropout(images[:, :, 0, 0])


REQUESTS = [request_of([4, 9, 2], 3), request_of([7], 3)]
GO_ON = SimpleNamespace(reason=lambda: None)
AS_EVER = (CPU, "fp32", GO_ON, "predict")


def test_a_forward_pass_returns_each_id_once_in_eval_mode():
    networks = [Probe().train(), Probe().eval()]
    passes = list(iterate_forward(networks, Loader(), REQUESTS, CPU, "fp32", GO_ON, "evaluate"))
    seen = [
        (int(i), row.tolist()) for batch, ((a,), _) in passes for i, row in zip(batch.ids, a, strict=True) if i >= 0
    ]
    assert seen == [(4, [4] * 3), (9, [9] * 3), (2, [2] * 3), (7, [7] * 3)]
    for batch, logits in passes:
        assert len(batch.ids) == 3
        assert [scores.dtype for (scores,) in logits] == [torch.float32] * 2
    assert all(network.modes == [(False, False)] * 2 for network in networks)
    assert [network.training for network in networks] == [True, False]  # as they were found


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_evaluation_does_not_depend_on_the_size_of_its_batches(rows):
    """execution.predict_batch is no result key. Twenty images, in 1 to 20 batches, the last one filled up."""
    torch.manual_seed(0)
    networks = [nn.Sequential(nn.Conv2d(3, 8, 2), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 7)) for _ in range(2)]

    def counted(batch):
        ids = range(20)
        requests = [request_of(ids[at : at + batch], min(batch, 20)) for at in range(0, 20, batch)]
        passes = iterate_forward(networks, Loader(), requests, *AS_EVER)
        return count_hits((batch, [scores for (scores,) in answers]) for batch, answers in passes)

    assert counted(rows) == counted(8)
    assert counted(rows)["count"] == 20
    assert 0 < counted(rows)["networks"][0]["top1"] < 20


def test_logits_are_fp32_under_bf16():
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    _, ((scores,),) = next(iterate_forward([network], Loader(), REQUESTS, CPU, "bf16", GO_ON, "evaluate"))
    assert scores.dtype == torch.float32
    assert torch.equal(scores, scores.bfloat16().float())  # the network itself answered in bf16


@pytest.mark.parametrize(("batches", "compiled"), [(2, False), (3, True)])
def test_blocks_compiled_for_training_are_compiled_for_long_passes(monkeypatch, batches, compiled):
    monkeypatch.setattr(trainer.passes.forward, "WORTH_COMPILING", 9)
    block, met = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), []
    expected = [scores for _, ((scores,),) in iterate_forward([block], Loader(), REQUESTS[:1] * batches, *AS_EVER)]

    def noted(graph, examples):
        met.append(len(examples))
        return graph.forward

    block.compile(backend=noted, dynamic=False)
    block(torch.zeros(2, 3, 2, 2))  # as trained on
    met.clear()
    answered = [scores for _, ((scores,),) in iterate_forward([block], Loader(), REQUESTS[:1] * batches, *AS_EVER)]
    assert len(met) == compiled
    assert all(torch.equal(one, other) for one, other in zip(answered, expected, strict=True))


def test_a_forward_pass_stops_when_asked_and_leaves_the_networks_as_they_were():
    answers = iter([None, "STOP file"])
    network = Probe().train()
    passes = iterate_forward(
        [network], Loader(), REQUESTS, CPU, "fp32", SimpleNamespace(reason=lambda: next(answers)), "predict"
    )
    next(passes)
    with pytest.raises(Stopped, match=r"predict at step 1 \(STOP file\)"):
        next(passes)
    assert network.training


def test_batches_are_closed_when_a_pass_fails():
    """Threads and decoders stand behind them, and the error may live for long."""
    closed = []

    class Watched(Loader):
        def batches(self, requests):
            try:
                yield from super().batches(requests)
            finally:
                closed.append(True)

    class Failing(nn.Module):
        def forward(self, images):
            raise OSError("a network that fails")

    passes = iterate_forward([Failing()], Watched(), REQUESTS, CPU, "fp32", GO_ON, "predict")
    with pytest.raises(OSError, match="a network") as error:
        next(passes)
    assert closed == [True], error


def test_a_network_that_answers_nan_hits_nothing():
    batch = batch_of(list(range(10)), [1] * 10, list(range(10)))
    assert count_hits([(batch, [torch.full((10, 10), float("nan"))])])["networks"] == [{"top1": 0, "top5": 0}]
