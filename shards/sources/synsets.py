"""The classes of WebVision and ILSVRC12, in label order: a WordNet id (wnid) and its names for each."""

import re

from shards.errors import DataError
from shards.sources.text_file import TextFile, read_lines, refuse_line

_WNID = re.compile(r"n\d{8}")


def is_wnid(word: str) -> bool:
    return _WNID.fullmatch(word) is not None


def wnid(class_name: str) -> str:
    """Return the unique WordNet id of a class: `n01440764` for `n01440764 tench, Tinca tinca`."""
    return class_name.split(" ")[0]


def read_synsets(text: TextFile) -> tuple[str, ...]:
    """Read synsets.txt; returns its lines, the class names in label order."""
    names: list[str] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(read_lines(text).to_pylist(), start=1):
        name = line.strip()
        if not is_wnid(wnid(name)):
            raise refuse_line(text, number, line, "expected a WordNet id (n and eight digits) and class names")
        first = lines.setdefault(wnid(name), number)
        if first != number:
            raise refuse_line(text, number, line, f"this is the same class as line {first}")
        names.append(name)
    if not names:
        raise DataError(f"{text.shown} in {text.root} is empty; download the whole list")
    return tuple(names)


def imagenet_synsets() -> tuple[str, ...]:
    """Return the 1000 ImageNet classes from timm, identical to the lines of WebVision's synsets.txt."""
    from timm.data import ImageNetInfo  # imported here: it imports torch, which takes seconds

    info = ImageNetInfo("imagenet-1k")
    return tuple(f"{name} {info.label_name_to_description(name, detailed=False)}" for name in info.label_names())
