"""Which source each sample comes from, such as Google or Flickr in WebVision: the top folder of its key."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

MOST = 12  # more folders than this are no sources


@dataclass(frozen=True, eq=False)
class SampleSources:
    """The source of each sample."""

    names: list[str]
    numbers: NDArray[np.int16]
    """Position in `names`, by sample_id."""


def find_sources(keys: pa.ChunkedArray | pa.Array, labels: NDArray[np.integer]) -> SampleSources | None:
    """Return the sources of samples with these keys, or None if the data set has only one.

    The top folders of the keys are sources if they are few and each has several classes: where every class has a
    folder of its own, folders say nothing new. labels: those of the source, by sample_id.
    """
    top = pc.struct_field(pc.extract_regex(keys, r"^(?P<top>[^/]+)/"), "top")
    coded = pc.dictionary_encode(top)
    coded = coded.combine_chunks() if isinstance(coded, pa.ChunkedArray) else coded
    if isinstance(coded, pa.ChunkedArray):  # without any key
        return None
    names = coded.dictionary.to_pylist()
    if not 2 <= len(names) <= MOST or coded.null_count:
        return None
    numbers = coded.indices.to_numpy().astype(np.int16)
    for number in range(len(names)):
        found = labels[numbers == number]
        if (found == found[0]).all():
            return None
    return SampleSources(names, numbers)
