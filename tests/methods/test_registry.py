"""One registry of methods: apart from the paper's experiments, only trainer/methods knows a method's name."""

import ast
import re
from collections.abc import Iterator
from importlib import import_module

import pytest

from shards.errors import ConfigError
from tests.support import REPOSITORY, toy_package_folder
from tests.support.installed_package import install_package, run_python
from trainer.methods.registry import get_method, method_names, methods_of, usable_methods
from trainer.run.recipe import load_recipe

# The rows of the paper's experiments, whether a method of that name is registered or not.
THE_PAPERS = ("experiments.py", "paper.py", "records.py")
SOURCES = [
    path
    for package in ("trainer", "shards")
    for path in sorted((REPOSITORY / package).rglob("*.py"))
    if "methods" not in path.relative_to(REPOSITORY).parts
    and not (path.parent.name == "reproduce" and path.name in THE_PAPERS)
]
TEMPLATES = sorted((REPOSITORY / "trainer").rglob("*.html"))


def words(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every string and every identifier of a syntax tree, with its line."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Constant(value=str(text)):
                yield line, text
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield line, name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.alias(name=name):
                yield line, name


def test_the_search_finds_names_of_every_kind():
    text = "import a\ndef b(c): return d.e(f=1) + 'g'\nclass h: pass\n"
    assert {word for _, word in words(ast.parse(text))} == set("abcdefgh")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_module_outside_methods_names_a_method(path):
    found = [(line, word) for line, word in words(ast.parse(path.read_text())) if word in method_names()]
    assert not found, f"{path}: {found}"


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_no_template_names_a_method(path):
    quoted = re.findall(r"""["']([a-z_0-9]+)["']""", path.read_text())
    assert not set(quoted) & set(method_names())


def test_every_method_is_complete():
    recipe = load_recipe(REPOSITORY / "recipes" / "tiny.yaml")
    assert [method.name for method in usable_methods()] == list(method_names())
    for method in methods_of(recipe):
        assert method.networks in (1, 2)
        assert isinstance(method.config(recipe), method.section)
        assert set(method.reads(recipe)) <= {"selection", "noise_estimate", "features", *method_names()}
        module, _, function = method.builder.partition(":")
        assert callable(getattr(import_module(module), function))
    assert [method.role for method in usable_methods()].count("reference") == 1


def test_methods_are_trained_in_the_order_of_the_registry_whatever_that_of_the_recipe():
    recipe = load_recipe(REPOSITORY / "recipes" / "tiny.yaml", ["methods=[coteaching_incv, standard]"])
    assert [method.name for method in methods_of(recipe)] == ["standard", "coteaching_incv"]


def test_an_unknown_method_is_refused_with_a_near_match():
    with pytest.raises(ConfigError, match="did you mean coteaching"):
        get_method("coteachin")


GROUP = "incv.methods"
TOY = (toy_package_folder() / "incv_toy.py").read_text()
LOOKUP = """
import sys
from shards.errors import ConfigError
from trainer.methods.registry import get_method

for name in sys.argv[1:]:
    try:
        print(get_method(name).title)
    except ConfigError as error:
        print(error)
"""


def test_an_unusable_package_is_named_by_its_method_alone(tmp_path):
    install_package(tmp_path, "toy", GROUP, "toy_pair = toy:METHOD", TOY)
    install_package(tmp_path, "bad_import", GROUP, "broken = bad_import:METHOD", "import missing_library")
    install_package(tmp_path, "bad_type", GROUP, "typed = bad_type:METHOD", "METHOD = 5")
    install_package(tmp_path, "bad_name", GROUP, "named = bad_name:METHOD", TOY)
    expected = {
        "toy_pair": "^Toy pair$",
        "broken": "'broken'.*bad_import.*missing_library.*uninstall",
        "typed": "bad_type.*not a Method named 'typed'.*uninstall",
        "named": "bad_name.*not a Method named 'named'.*uninstall",
        "toy_pear": "unknown method 'toy_pear'; did you mean toy_pair",
    }
    done = run_python(tmp_path, "-c", LOOKUP, *expected)
    lines = done.stdout.splitlines()
    assert len(lines) == len(expected), done.stderr
    for line, said in zip(lines, expected.values(), strict=True):
        assert re.search(said, line), line


@pytest.mark.parametrize(
    ("entries", "uses", "reason"),
    [
        ({"bad_import": "broken"}, ["methods=[broken]", "broken.epochs=1"], "missing_library"),
        ({"bad_taken": "coteaching"}, [], "'coteaching'"),
        ({"twin_a": "twin", "twin_b": "twin"}, ["twin.epochs=1"], "'twin'"),
    ],
)
def test_an_unusable_package_is_an_error_of_recipes_that_use_it(entries, uses, reason, tmp_path):
    for package, name in entries.items():
        install_package(tmp_path, package, GROUP, f"{name} = {package}:METHOD", "import missing_library")
    refused = run_python(tmp_path, "-m", "trainer", "validate", "-c", "tiny", *uses)
    assert refused.returncode == 2
    *warnings, error = refused.stderr.splitlines()
    assert error.startswith("incv: error")
    for word in (*entries, reason, "uninstall"):
        assert word in error
    assert all(line.startswith("warning: ") for line in warnings), refused.stderr


def test_an_unusable_package_is_a_warning_to_other_recipes(tmp_path):
    install_package(tmp_path, "bad_import", GROUP, "broken = bad_import:METHOD", "import missing_library")
    done = run_python(tmp_path, "-m", "trainer", "validate", "-c", "tiny")
    assert done.returncode == 0, done.stderr
    assert "bad_import" in done.stderr


def test_a_taken_name_does_not_end_other_commands(tmp_path):
    install_package(tmp_path, "bad_taken", GROUP, "coteaching = bad_taken:METHOD", "")
    listed = run_python(tmp_path, "-m", "trainer", "ls")
    assert (listed.returncode, listed.stderr) == (0, "")


def test_a_recipe_is_read_without_torch(tmp_path):
    check = "from pathlib import Path; import sys; from trainer.run.recipe import load_recipe"
    recipe = REPOSITORY / "recipes" / "tiny.yaml"
    read = f"load_recipe(Path({str(recipe)!r}), ['incv.loss={{kind: gce, q: 0.7}}'])"
    done = run_python(tmp_path, "-c", f"{check}; {read}; print('torch' in sys.modules)")
    assert done.stdout == "False\n", done.stderr
