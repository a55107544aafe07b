"""Shortens class names for tables and axes."""

import re
from collections import Counter
from collections.abc import Sequence

_SYNSET = re.compile(r"(?P<wnid>n\d{8}) +(?P<words>\S.*)")


def short_names(names: Sequence[str]) -> list[str]:
    """Shorten `n01440764 tench, Tinca tinca` to `tench`; other names are unchanged.

    A name shared by several classes (crane, maillot) keeps its WordNet id: `crane (n02012849)`.
    """
    synsets = [_SYNSET.fullmatch(name) for name in names]
    first = [synset["words"].split(",")[0].strip() if synset else None for synset in synsets]
    shared = Counter(first)
    return [
        name if synset is None else f"{word} ({synset['wnid']})" if shared[word] > 1 else str(word)
        for name, synset, word in zip(names, synsets, first, strict=True)
    ]
