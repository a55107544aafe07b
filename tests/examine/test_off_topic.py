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


def test_images_of_noise_are_found_among_features_behind_a_relu() -> None:
    """A few strong features make the classes; an image of noise has the same ones, and lacks the weak ones."""
    torch.manual_seed(0)
    labels = torch.arange(600) % 4
    strong = torch.rand(600, 16) * 6
    weak = torch.eye(4)[labels].repeat_interleave(60, dim=1) * torch.rand(600, 240)
    noise = torch.cat([torch.rand(20, 16) * 6, torch.zeros(20, 240)], dim=1)
    features = torch.cat([torch.cat([strong, weak], dim=1), noise])
    found = find_off_topic(features, np.r_[labels.numpy(), np.arange(20) % 4])
    assert found.found[600:].all()
    assert found.found[:600].mean() < 0.02
