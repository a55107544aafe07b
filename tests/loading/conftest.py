"""Two packed splits: images of one size, and images of many sizes and both formats."""

import pytest

from tests.support.packed_pictures import equal_pictures, mixed_pictures, packed


@pytest.fixture(scope="session")
def equal_index(tmp_path_factory):
    """37 PNGs of 12 x 10 pixels, three classes, four shards."""
    return packed(equal_pictures(37, width=12, height=10, classes=3), tmp_path_factory.mktemp("equal") / "shards")


@pytest.fixture(scope="session")
def mixed_index(tmp_path_factory):
    return packed(mixed_pictures(40), tmp_path_factory.mktemp("mixed") / "shards")
