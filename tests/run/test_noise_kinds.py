"""Kinds of label noise by name, also of installed packages; a broken package matters to recipes that use it."""

import re

from tests.support import RECIPES
from tests.support.installed_package import install_package, run_python

GROUP = "incv.noise_kinds"
SWAP = (
    "import numpy as np\n"
    "from trainer.run.noise_kinds import NoiseKind\n"
    "KIND = NoiseKind('swap', lambda config, classes: np.eye(classes)[::-1], uses_ratio=False)\n"
)
PROGRAM = f"""
import sys
from pathlib import Path
from shards.errors import ConfigError
from trainer.run.noise_kinds import build_transition
from trainer.run.recipe import load_recipe

for noise in sys.argv[1:]:
    try:
        recipe = load_recipe(Path({str(RECIPES / "tiny.yaml")!r}), [f"labels={{{{noise: {{noise}}}}}}"])
        matrix = build_transition(recipe.labels, 3)
        print(noise, None if matrix is None else matrix.tolist())
    except ConfigError as error:
        print(noise, error)
"""


def test_a_noise_kind_of_another_package(tmp_path):
    """Installed as a distribution with an entry point, and used by a recipe."""
    install_package(tmp_path, "swapping", GROUP, "swap = swapping:KIND", SWAP)
    done = run_python(tmp_path, "-c", PROGRAM, "swap")
    assert done.stdout.strip() == "swap [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]", done.stderr


def test_an_unusable_package_is_named_by_the_recipes_that_use_it(tmp_path):
    install_package(tmp_path, "bad_import", GROUP, "broken = bad_import:KIND", "import missing_library")
    install_package(tmp_path, "bad_type", GROUP, "typed = bad_type:KIND", "KIND = 5")
    install_package(tmp_path, "bad_name", GROUP, "named = bad_name:KIND", SWAP)
    install_package(tmp_path, "bad_clash", GROUP, "symmetric = bad_clash:KIND", SWAP.replace("swap", "symmetric"))
    install_package(tmp_path, "twin_a", GROUP, "twin = twin_a:KIND", SWAP.replace("swap", "twin"))
    install_package(tmp_path, "twin_b", GROUP, "twin = twin_b:KIND", SWAP.replace("swap", "twin"))
    expected = {
        "broken": r"'broken'.*bad_import.*missing_library.*uninstall",
        "typed": r"bad_type.*not a NoiseKind named 'typed'.*uninstall",
        "named": r"bad_name.*not a NoiseKind named 'named'.*uninstall",
        "symmetric": r"bad_clash.*'symmetric'.*uninstall",
        "twin": r"twin_[ab] and twin_[ab].*'twin'.*uninstall",
        "symetric": r"unknown kind 'symetric'; did you mean symmetric.*broken",
        "asymmetric": r"asymmetric \[\[1.0, 0.0, 0.0\]",
        "none": "none None",
    }
    done = run_python(tmp_path, "-c", PROGRAM, *expected)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(expected), done.stderr
    for line, said in zip(lines, expected.values(), strict=True):
        assert re.search(said, line), line
