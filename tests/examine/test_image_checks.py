"""Bad pictures made by hand are found among ordinary ones; what is usual in a data set is not."""

import numpy as np
import pytest

from trainer.examine.image_checks import check_images

BAD = ("blank", "dark", "bright", "blurred", "tiny", "odd_aspect")


def make_set(n: int = 200) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ordinary pictures with details: uint8 [n, 3, 32, 32], and their width and height."""
    random = np.random.default_rng(0)
    images = random.integers(10, 240, (n, 1, 32, 32)).repeat(3, axis=1).astype(np.uint8)
    return images, random.integers(300, 500, n), random.integers(300, 500, n)


def test_each_bad_picture_is_found() -> None:
    images, width, height = make_set()
    assert not any(check.found.any() for check in check_images(images, width, height).values())
    images[0] = 120
    images[1] //= 8
    images[2] = 225 + images[2] // 9
    images[3] = np.linspace(20, 220, 32)
    width[4] = height[4] = 12
    width[5] = 4000
    checks = check_images(images, width, height)
    assert tuple(checks) == BAD
    for number, name in enumerate(BAD):
        assert np.flatnonzero(checks[name].found).tolist() == [number], checks[name].why


def test_what_is_usual_is_not_found() -> None:
    """Small strokes on black, all of 28 pixels."""
    images = make_set()[0]
    digits = np.zeros_like(images)
    digits[:, :, 8:24, 14:18] = images[:, :, 8:24, 14:18]
    checks = check_images(digits, np.full(200, 28), np.full(200, 28))
    assert not any(check.found.any() for check in checks.values())


@pytest.mark.parametrize("name", BAD)
def test_the_reason_names_the_threshold(name: str) -> None:
    check = check_images(*make_set())[name]
    assert f"{check.threshold:.3g}" in check.why
