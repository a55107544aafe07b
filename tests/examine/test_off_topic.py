"""Images far from every class are found, few or many, and others are not."""

import numpy as np
import pytest
import torch

from trainer.examine.off_topic import find_off_topic


@pytest.mark.parametrize("strays", [3, 100])
def test_strays_that_are_near_to_one_another_are_found(strays: int) -> None:
    torch.manual_seed(0)
    labels = torch.arange(900) % 3
    features = torch.eye(32)[labels] * 8 + torch.randn(900, 32)
    stray = torch.eye(32)[torch.full((strays,), 20)] * 8 + 0.1 * torch.randn(strays, 32)
    found = find_off_topic(torch.cat([features, stray]), np.r_[labels.numpy(), np.arange(strays) % 3])
    assert found.found[900:].all()
    assert found.found[:900].mean() < 0.02
    assert found.scores.shape == (900 + strays,)
