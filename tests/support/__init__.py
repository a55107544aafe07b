"""Shared test support: runs as processes, toy networks, packed images, a small Slurm.

A module here is imported by tests or started by them as a program; none holds a test. The paths below spare each file
its own count of parent folders.
"""

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
RECIPES = REPOSITORY / "recipes"


def toy_package_folder() -> Path:
    """A package with a training method of its own."""
    return Path(__file__).parent / "toy_package"


def relabel_package_folder() -> Path:
    """A package with a training method that plans each epoch by what a pass over the data found."""
    return Path(__file__).parent / "relabel_package"
