"""Records of installed packages: found without an import, checked when loaded, refused by the package's name."""

import sys
from pathlib import Path

import pytest

from shards.errors import ConfigError
from shards.plugins import PluginGroup
from shards.sources import SourceType
from tests.support.installed_package import install_package

RECORD = 'from shards.sources import SourceType\nSOURCE = SourceType("one", open, splits=())\n'


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PluginGroup:
    """A group that no other test uses: its entry points are listed once per process."""
    monkeypatch.syspath_prepend(tmp_path)
    return PluginGroup(f"incv.test_{tmp_path.name}", "data set")


def load(plugins: PluginGroup, name: str) -> SourceType:
    entry = plugins.find(name, ())
    assert entry is not None
    return plugins.load(entry, SourceType)


def test_names_are_listed_without_an_import(plugins, tmp_path):
    install_package(tmp_path, "listed_z", plugins.group, "z = listed_z:SOURCE", "raise SystemExit")
    install_package(tmp_path, "listed_a", plugins.group, "a = listed_a:SOURCE", "raise SystemExit")
    assert plugins.names() == ["a", "z"]
    assert plugins.find("z", built_in=("y",)) is not None
    assert plugins.find("y", built_in=("y",)) is None
    assert not {"listed_a", "listed_z"} & sys.modules.keys()


def test_a_record_is_loaded_by_its_name(plugins, tmp_path):
    install_package(tmp_path, "loaded", plugins.group, "one = loaded:SOURCE", RECORD)
    assert load(plugins, "one").name == "one"


@pytest.mark.parametrize(
    ("package", "name", "module", "said"),
    [
        ("bad_import", "one", "import missing_library", r"'one'.*bad_import.*missing_library.*uninstall bad_import"),
        ("bad_end", "one", "raise OSError('no disk')", r"'one'.*bad_end.*OSError: no disk.*uninstall bad_end"),
        ("bad_attribute", "one", "", r"'one'.*bad_attribute.*AttributeError.*uninstall bad_attribute"),
        ("bad_type", "one", "SOURCE = 5", r"bad_type.*not a SourceType named 'one'.*uninstall bad_type"),
        ("bad_name", "two", RECORD, r"bad_name.*not a SourceType named 'two'.*uninstall bad_name"),
    ],
)
def test_an_unusable_record_is_refused_by_its_package(plugins, tmp_path, package, name, module, said):
    install_package(tmp_path, package, plugins.group, f"{name} = {package}:SOURCE", module)
    with pytest.raises(ConfigError, match=said):
        load(plugins, name)


def test_a_taken_name_is_refused_and_no_other(plugins, tmp_path):
    install_package(tmp_path, "taking", plugins.group, "one = taking:SOURCE\nfree = taking:SOURCE", RECORD)
    with pytest.raises(ConfigError, match=r"taking.*'one'.*built-in.*uninstall taking"):
        plugins.find("one", built_in={"one": None})
    assert plugins.find("free", built_in={"one": None}) is not None


def test_a_name_of_two_packages_is_refused(plugins, tmp_path):
    for package in ("twin_a", "twin_b"):
        install_package(tmp_path, package, plugins.group, f"one = {package}:SOURCE", RECORD)
    assert plugins.names() == ["one"]
    with pytest.raises(ConfigError, match=r"(twin_a and twin_b|twin_b and twin_a).*'one'.*uninstall"):
        plugins.find("one", built_in=())
