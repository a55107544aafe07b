"""Errors in the words of `incv audit`: FOLDER and the options of the command, instead of recipe keys."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from shards.errors import ConfigError, InputError
from shards.sources import SourceOptions
from trainer.run.source_check import SourceChanged

SOURCE_KEYS = tuple(f"data.train.{option.name}" for option in fields(SourceOptions))
"""Recipe keys that options of the same names set."""


def audit_words(folder: Path, chooses_network: bool) -> dict[str, str]:
    """Return what replaces recipe keys and options of other commands.

    chooses_network: whether --model or --weights is given.
    """
    words = {"--root": str(folder), "data.train.root": str(folder)}
    words[f"data.train.root = {folder.absolute().resolve()}"] = str(folder)
    words |= {key: f"--{key.rpartition('.')[2].replace('_', '-')}" for key in SOURCE_KEYS}
    if chooses_network:
        words |= {"model.weights": "--weights", "model.name =": "--model", "model.name": "--model"}
    return words


def replace_words(text: str, words: Mapping[str, str]) -> str:
    """Replace whole words; where several begin at the same place, the longest."""
    longest_first = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    return re.sub(rf"(?<![\w.-])(?:{longest_first})(?![\w-])", lambda found: words[found[0]], text)


@contextmanager
def in_words_of_audit(words: Mapping[str, str]) -> Iterator[None]:
    """Raise the errors of the block with these words."""
    try:
        yield
    except SourceChanged as error:
        raise ConfigError(
            f"{replace_words(error.difference, words)}. Add `--redo pack` to audit the images as they are now"
        ) from error
    except InputError as error:
        message = replace_words(str(error), words)
        if message == str(error):
            raise
        raise type(error)(message) from error
