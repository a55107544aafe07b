"""The suspicion of a label, against a slow reference and in the cases it is for."""

import math

import numpy as np
import pytest
import torch

from trainer.distributed.world import SINGLE_PROCESS
from trainer.incv.confident import are_doubted
from trainer.incv.suspicion import as_loss, measure_suspicion, usual_probabilities


def draw(rows: int = 40, classes: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    log_p = torch.randn(rows, classes, generator=random, dtype=torch.float64).mul(2).log_softmax(dim=1)
    return log_p, torch.randint(0, classes, (rows,), generator=random)


def test_it_is_the_formula():
    log_p, labels = draw()
    p, mean = log_p.exp(), float(log_p.exp()[range(40), labels].mean())
    usual = [(float(p[labels == k, k].sum()) + mean) / (int((labels == k).sum()) + 1) for k in range(4)]
    found = measure_suspicion(log_p, labels, usual_probabilities(log_p, labels, SINGLE_PROCESS))
    for row, label in enumerate(labels.tolist()):
        odds = [float(p[row, k]) / usual[k] ** 2 for k in range(4)]
        expected = math.log(max(odds[:label] + odds[label + 1 :]) / odds[label])
        assert float(found[row]) == pytest.approx(expected)
        assert float(as_loss(found)[row]) == pytest.approx(-math.log(1 / (1 + math.exp(expected))))


def test_where_many_of_a_class_are_called_another_the_other_label_is_suspicious():
    """Of 100 cats (class 0), 40 are called dogs (1), and the predictions know no better; dogs are called dogs."""
    cats, dogs = torch.tensor([0.6, 0.4]).log().repeat(100, 1), torch.tensor([0.05, 0.95]).log().repeat(60, 1)
    log_p, labels = torch.cat([cats, dogs]), torch.arange(160) >= 60
    suspicion = measure_suspicion(log_p, labels.long(), usual_probabilities(log_p, labels.long(), SINGLE_PROCESS))
    cat, cat_called_dog, dog = suspicion[0], suspicion[60], suspicion[-1]
    assert cat_called_dog > math.log(0.6 / 0.4) > 0 > cat > dog


def test_only_contradicted_labels_are_doubted():
    limit = math.log1p(math.e)
    loss = np.array([limit - 1e-6, limit + 1e-6, limit + 1e-6, np.nan])
    assert are_doubted(loss, np.array([False, False, True, False])).tolist() == [False, True, False, False]
