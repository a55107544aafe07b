"""Describes the keys of a recipe from its schema: key, type, default and docstring, as text or as a Markdown page."""

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trainer.config.section import Section as RecipeSection

PAGE_COMMAND = "incv keys --markdown > docs/recipe.md"
_PLAIN = {str: "string", int: "integer", float: "number", bool: "true or false", NoneType: "null", Any: "any value"}
_PLURALS = {"string": "strings", "integer": "integers", "number": "numbers", "section": "sections"}
_BOUNDS = {Ge: ("ge", "≥"), Gt: ("gt", ">"), Le: ("le", "≤"), Lt: ("lt", "<")}
_IN_WORDS = ("required", "its defaults")
_WIDTH = 100

MAIN_KEYS = {
    "": "seed methods precision",
    "data": "eval_fraction",
    "data.train": "source root split csv resize limit shards",
    "labels": "noise ratio file corrections",
    "image": "size resize pad flip mean std",
    "model": "name pretrained weights trainable",
    "batch": "global micro",
    "incv": "rounds folds epochs noise_estimate remove_ratio min_per_class",
    "incv.optimizer": "kind learning_rate schedule milestones weight_decay",
    "evaluation": "every",
    "execution": "device loader workers checkpoint_every",
}
"""The keys that matter most, by section."""
_MORE = """`incv keys SECTION` or `incv keys KEY` describes them in full, `incv keys --all` describes all keys.
The sections of the methods, such as `standard`, have epochs and an optimizer as `incv` has."""

_PAGE_HEAD = f"""# Recipe keys

<!-- Written by `{PAGE_COMMAND}` from the docstrings of the schema. Do not edit this page. -->

A recipe is a YAML file with the sections below. `incv run -c RECIPE incv.rounds=2` overrides a key, and
`incv keys SECTION` prints a section of this page. `null` means that a value is not set.

A key with *yes* in the column *results* changes what is computed: if you change it, the stages that read it must run
again. The others say where and how fast a run computes, set a limit, or name a file whose checksum counts instead.
"""


@dataclass(frozen=True)
class Key:
    """One key of a recipe."""

    name: str
    """Dotted, such as `batch.global`."""
    type: str
    default: str
    """As in YAML; `required` if there is none."""
    text: str
    """The docstring, as one paragraph."""
    changes_results: bool


@dataclass(frozen=True)
class Section:
    """A section of a recipe; `names` has several if sections share a schema, as all `optimizer` sections do."""

    names: tuple[str, ...]
    """Dotted; the empty string is the top level."""
    text: str
    keys: tuple[Key, ...]
    kind: str = ""
    """The value of the key `kind` for which the section has these keys too; empty: any."""


def describe_schema(schema: type[BaseModel], extra: Mapping[str, type[BaseModel]] | None = None) -> list[Section]:
    """Describe all sections of a schema, outermost first, and those of the methods, given in `extra` by name."""
    found = list(_walk(schema, ""))
    for name, section in (extra or {}).items():
        found += _walk(section, name)
    names: dict[tuple[type[BaseModel], str], list[str]] = {}
    for name, section, kind in found:
        names.setdefault((section, kind), []).append(name)
    return [
        Section(tuple(each), _paragraph(section.__doc__) if each != [""] else "", tuple(_keys(section, kind)), kind)
        for (section, kind), each in names.items()
    ]


def _walk(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel], str]]:
    """Yield (name, section, kind) of a section and those inside it."""
    yield prefix, section, ""
    for kind, options in section.kinds().items() if issubclass(section, RecipeSection) else ():
        if options is not section:
            yield prefix, options, kind
    for name, field in section.model_fields.items():
        for inner, suffix in _inner_sections(field.annotation):
            yield from _walk(inner, f"{prefix}.{field.alias or name}{suffix}".removeprefix("."))


def _inner_sections(annotation: Any) -> Iterator[tuple[type[BaseModel], str]]:
    """Yield the sections that a key holds, with the suffix of their names: `.<name>` if a mapping holds them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, ""
    elif get_origin(annotation) is dict:
        for inner, suffix in _inner_sections(get_args(annotation)[1]):
            yield inner, f".<name>{suffix}"
    elif get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _inner_sections(member)


def _keys(section: type[BaseModel], kind: str) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        if kind and name not in section.__annotations__:  # a key of any kind
            continue
        inner = next(_inner_sections(field.annotation), None)
        text = field.description or (inner[0].__doc__ if inner is not None else None)
        described = describe_type(field.annotation, field.metadata)
        yield Key(field.alias or name, described, _default(field), _paragraph(text), _changes_results(field))


def _changes_results(field: FieldInfo) -> bool:
    """Whether the key, or any key of the section that it holds, is a result key."""
    sections = [section for section, _ in _inner_sections(field.annotation)]
    if sections:
        return any(_changes_results(key) for section in sections for key in section.model_fields.values())
    extra = field.json_schema_extra
    return not (isinstance(extra, dict) and extra.get("execution"))


def describe_type(annotation: Any, limits: Sequence[Any] = ()) -> str:
    """Describe the values of an annotation in words: `integer ≥ 1, or null`. limits: as Pydantic collects them."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        outer = [limit for each in inner[1:] for limit in (each.metadata if isinstance(each, FieldInfo) else [each])]
        return describe_type(inner[0], [*outer, *limits])
    if origin in (Union, UnionType):
        parts = [describe_type(member, limits if member is not NoneType else ()) for member in inner]
        return f"{', '.join(parts[:-1])}, or {parts[-1]}"
    if origin is Literal:
        words = [f"`{value}`" for value in inner]
        return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
    if origin is tuple and inner[-1:] == (...,):
        least = next((limit.min_length for limit in limits if isinstance(limit, MinLen)), 0)
        of = describe_type(inner[0])
        plural = f"lists{of.removeprefix('list')}" if of.startswith("list ") else _PLURALS.get(of, of)
        return f"list of {plural}" + (f", at least {least}" if least else "")
    if origin is tuple:
        return f"[{', '.join(describe_type(member) for member in inner)}]"
    if origin is dict:
        of = describe_type(inner[1])
        return "mapping" if inner[1] is Any else f"{_PLURALS.get(of, of)} by name"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return _bounded(_PLAIN.get(annotation, getattr(annotation, "__name__", str(annotation))), limits)


def _bounded(noun: str, limits: Sequence[Any]) -> str:
    bounds = {}
    for limit in limits:
        for kind, (attribute, sign) in _BOUNDS.items():
            if isinstance(limit, kind):
                bounds[sign] = getattr(limit, attribute)
    if bounds.keys() == {"≥", "≤"}:
        return f"{noun} from {bounds['≥']:g} to {bounds['≤']:g}"
    return noun + "".join(f"{',' if at else ''} {sign} {bounds[sign]:g}" for at, sign in enumerate(bounds))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "its defaults"
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _paragraph(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").strip()


def select_section(sections: Sequence[Section], name: str) -> list[Section]:
    """Return the section of that name and those inside it, under these names alone; empty if there is none."""
    selected = []
    for section in sections:
        names = tuple(own for own in section.names if own == name or own.startswith(f"{name}."))
        if names:
            selected.append(replace(section, names=names))
    return selected


def find_key(sections: Sequence[Section], name: str) -> Section | None:
    """Return a section with the key `name` alone, such as `incv.rounds`; None if there is no such key."""
    prefix, _, last = name.rpartition(".")
    for section in sections:
        keys = tuple(key for key in section.keys if key.name == last)
        if keys and prefix in section.names:
            return Section((prefix,), "", keys, section.kind)
    return None


def format_text(sections: Sequence[Section]) -> str:
    """Format sections for a terminal."""
    blocks = []
    for section in sections:
        head = ", ".join(name or "top level" for name in section.names)
        head += f" with kind: {section.kind}" if section.kind else ""
        lines = [head, *textwrap.wrap(section.text, _WIDTH)]
        for key in section.keys:
            default = "required" if key.default == "required" else f"default: {key.default}"
            lines += ["", f"  {key.name}   {key.type.replace('`', '')}; {default}"]
            lines += textwrap.wrap(key.text, _WIDTH, initial_indent="      ", subsequent_indent="      ")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def format_main_keys(sections: Sequence[Section]) -> str:
    """Format the keys that matter most for a terminal, a line each."""
    blocks = []
    for section, names in MAIN_KEYS.items():
        lines = [section or "top level"]
        for name in names.split():
            found = find_key(sections, f"{section}.{name}".removeprefix("."))
            assert found is not None, (section, name)
            (key,) = found.keys
            text = textwrap.shorten(key.text.split(". ")[0].rstrip("."), _WIDTH - 35, placeholder=" …")
            lines.append(f"  {name:<18}{key.default:<17}{text}")
        blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, _MORE])


def format_page(sections: Sequence[Section]) -> str:
    """Format all sections as a Markdown page."""
    blocks = [_PAGE_HEAD]
    for section in sections:
        names = ", ".join(f"`{name}`" for name in section.names if name) or "Top level"
        names += f" with `kind: {section.kind}`" if section.kind else ""
        lines = [f"## {names}", *(["", section.text] if section.text else [])]
        lines += ["", "| key | values | default | results | meaning |", "|---|---|---|---|---|"]
        for key in section.keys:
            default = key.default if key.default in _IN_WORDS else f"`{key.default}`"
            cells = [f"`{key.name}`", key.type, default, "yes" if key.changes_results else "no", key.text]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)
