"""What tests of several folders share: programs run as real processes, made-up data, small networks, clusters."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def toy_package_folder() -> Path:
    """A package with a training method of its own."""
    return Path(__file__).parent / "toy_package"
