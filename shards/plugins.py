"""Records that installed packages offer through entry points, such as data sets and training methods."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol, TypeVar

from shards.errors import ConfigError


class Named(Protocol):
    @property
    def name(self) -> str: ...


Record = TypeVar("Record", bound=Named)


@dataclass(frozen=True)
class PluginGroup:
    """One entry point group. An entry point has the name of its record; `load` alone imports a package."""

    group: str
    noun: str
    """What a record is, for errors: "data set"."""
    built_in: Mapping[str, str] = field(default_factory=dict)
    """Our own records by name, in order, each as an entry point names it: `module:attribute`.

    They are listed here and not in our package's metadata, so that a source tree works without installation.
    """

    def names(self) -> list[str]:
        """The names of our own records, then those that packages offer, sorted."""
        return [*self.built_in, *sorted(_list_entry_points(self.group).keys() - self.built_in.keys())]

    def find(self, name: str, built_in: Container[str] = ()) -> EntryPoint | None:
        """The entry point of that name, None if there is none; raises ConfigError if the name is not unique."""
        offered = _list_entry_points(self.group).get(name, [])
        if not offered and name in self.built_in:
            return EntryPoint(name, self.built_in[name], self.group)
        if offered and (name in built_in or name in self.built_in):
            package = package_of(offered[0])
            raise ConfigError(
                f"the package {package} offers a {self.noun} named {name!r}, which is the name of a built-in one: "
                f"uninstall {package}, or rename its entry point"
            )
        if len(offered) > 1:
            packages = " and ".join(package_of(entry) for entry in offered)
            raise ConfigError(f"the packages {packages} offer a {self.noun} named {name!r}: uninstall all but one")
        return offered[0] if offered else None

    def load(self, entry: EntryPoint, record_type: type[Record]) -> Record:
        """Import the record of an entry point; raises ConfigError if it is unusable."""
        package = package_of(entry)
        try:
            record = entry.load()
        except Exception as error:  # a third-party module may raise anything
            raise ConfigError(
                f"the {self.noun} {entry.name!r} of the package {package} cannot be imported from {entry.value} "
                f"({type(error).__name__}: {error}): repair or uninstall {package}"
            ) from error
        if not isinstance(record, record_type) or record.name != entry.name:
            raise ConfigError(
                f"{entry.value} of the package {package} is not a {record_type.__name__} named {entry.name!r}, but "
                f"its entry point under {self.group} must name one: repair or uninstall {package}"
            )
        return record


def package_of(entry: EntryPoint) -> str:
    """The name of the package to uninstall."""
    return entry.dist.name if entry.dist is not None else entry.module


@cache
def _list_entry_points(group: str) -> dict[str, list[EntryPoint]]:
    """By name; a name that several packages offer has several."""
    offered: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=group):
        offered.setdefault(entry.name, []).append(entry)
    return offered
