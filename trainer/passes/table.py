"""`SampleTable`: columns of numbers keyed by sample_id, and how the rows of all ranks come together."""

import json
import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shards.errors import DataError
from trainer.distributed.world import World
from trainer.loading.sample_order import Ids
from trainer.passes import Status

_FOLDER = Path("/dev/shm")
WORTH_SHARING = 2**26
"""Bytes of a table below which gloo is as fast."""


class SharedMemory:
    """Memory that all ranks write to, and then read privately; freed with the last mapping, however a rank ends."""

    def __init__(self, world: World, nbytes: int) -> None:
        """Reserve the memory; a collective. `usable` is false on several hosts, or if memory is short."""
        self._world, self._nbytes = world, nbytes
        path = Path(world.broadcast_from_rank0(lambda: str(_FOLDER / f"incv-{uuid.uuid4().hex}")))
        if world.is_rank0:
            self._file = _open(path, os.O_CREAT | os.O_EXCL)
        world.barrier()
        if not world.is_rank0:
            self._file = _open(path, 0)  # fails on another host
        self.usable = not world.barrier(self._file is None)
        if world.is_rank0:
            path.unlink(missing_ok=True)
        if self.usable:
            self.usable = not world.barrier(not self._reserve())

    def _reserve(self) -> bool:
        """Reserve this rank's share of the pages: without it, a write beyond the free memory would be a SIGBUS."""
        assert self._file is not None
        first, last = (self._nbytes * rank // self._world.size for rank in (self._world.rank, self._world.rank + 1))
        try:
            os.ftruncate(self._file, self._nbytes)
            os.posix_fallocate(self._file, first, max(last - first, 1))
        except OSError:
            return False
        return True

    def map(self, shape: tuple[int, int], dtype: torch.dtype, private: bool) -> torch.Tensor:
        """Map the memory as a tensor. private: what is written to the tensor is seen by this rank alone."""
        assert self._file is not None
        kind = torch.empty(0, dtype=dtype).numpy().dtype
        with os.fdopen(os.dup(self._file), "r+b") as file:
            return torch.from_numpy(np.memmap(file, kind, "c" if private else "r+", shape=shape))

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)


def _open(path: Path, flags: int) -> int | None:
    try:
        return os.open(path, os.O_RDWR | flags, 0o600)
    except OSError:
        return None


_BLOCK_BYTES = 2**25
"""Bytes of all ranks that are gathered at a time, so that the buffer adds little to the memory of the table."""
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element: columns are exchanged as integers, which keeps every bit, such as those of a NaN."""

Columns = Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class SampleTable:
    """One row for each sample: `table["losses"]` is a column, `table["losses"][table.at(ids)]` the rows of `ids`."""

    ids: torch.Tensor
    """int64 [rows], ascending, each once."""
    columns: Columns
    """Each [rows, ...], on the device of `ids`, unless a pass wrote it to a file."""

    @classmethod
    def of(cls, ids: torch.Tensor, columns: Columns, what: str) -> "SampleTable":
        """Sort rows by sample_id; raise DataError if an id occurs twice.

        Args:
            what: the pass, for the error.
        """
        if bool((ids[1:] > ids[:-1]).all()):
            return cls(ids, columns)
        ids, order = torch.sort(ids)
        if twice := int((ids[1:] == ids[:-1]).sum()):
            raise DataError(f"{what}: {twice:,} samples occur more than once, but each must occur exactly once")
        return cls(ids, {name: column[order] for name, column in columns.items()})

    @classmethod
    def join(cls, pieces: "Iterable[SampleTable]", what: str) -> "SampleTable":
        """Return the rows of all pieces, which have the same columns; raise DataError if an id occurs twice."""
        every = list(pieces)
        pieces = [piece for piece in every if len(piece)] or every
        columns = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0].columns}
        return cls.of(torch.cat([piece.ids for piece in pieces]), columns, what)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, name: str) -> torch.Tensor:
        try:
            return self.columns[name]
        except KeyError:
            raise KeyError(f"no column {name!r}: the pass was asked for {', '.join(self.columns)}") from None

    @property
    def status(self) -> torch.Tensor:
        """A `Status` for each row: int8 [rows]."""
        return self["status"]

    @property
    def readable(self) -> torch.Tensor:
        """Whether the image could be decoded: bool [rows]."""
        return self.status != int(Status.UNREADABLE)

    @property
    def usable(self) -> torch.Tensor:
        """Whether the image could be decoded and the networks' outputs are finite: bool [rows]."""
        return self.status == int(Status.OK)

    def at(self, ids: "Ids | torch.Tensor") -> torch.Tensor:
        """Return the row of each id: int64 [n], on the device of the table; raise DataError for an unknown id."""
        wanted = torch.as_tensor(ids, device=self.ids.device)
        rows = torch.searchsorted(self.ids, wanted)
        known = rows < len(self.ids)
        known &= self.ids[rows.clamp(max=len(self.ids) - 1)] == wanted if len(self.ids) else False
        if not bool(known.all()):
            unknown = wanted[~known]
            raise DataError(f"{len(unknown):,} samples are not in the table, such as sample_id {int(unknown[0])}")
        return rows

    def rows(self, chosen: torch.Tensor) -> "SampleTable":
        """Return some of the rows. chosen: bool [rows], or ascending row numbers."""
        columns = {name: column[chosen.to(column.device)] for name, column in self.columns.items()}
        return SampleTable(self.ids[chosen], columns)

    def only(self, *names: str) -> "SampleTable":
        """Return the table with some of its columns."""
        return SampleTable(self.ids, {name: self[name] for name in names})

    def to(self, device: torch.device) -> "SampleTable":
        return SampleTable(self.ids.to(device), {name: column.to(device) for name, column in self.columns.items()})


def gather_table(
    world: World, ids: torch.Tensor, columns: Columns, expected: Ids, what: str, fix: str = ""
) -> SampleTable:
    """Return the rows of all ranks on every rank; a collective. Raise DataError unless they cover `expected` once.

    The columns of equal element size are gathered together, one block of rows after the other. A rank needs memory
    for the table, for its own rows and for the blocks.

    Args:
        ids: of this rank's rows, in any order.
        columns: each [len(ids), ...]; a rank without rows may have none.
        expected: the ids over all ranks, in any order.
        what: the pass, for the error.
        fix: what to do about the error.
    """
    parts = prove_coverage(world, ids, expected, what, fix)
    if world.rank_group is None:
        return SampleTable.of(ids, columns, what)
    every = torch.from_numpy(np.sort(expected)).to(ids.device)
    places = [torch.searchsorted(every, part) for part in parts]
    layout = _agree_on_layout(world, columns, what)
    gathered: dict[str, torch.Tensor] = {}
    for itemsize in sorted({dtype.itemsize for dtype, _ in layout.values()}):
        alike = {name: form for name, form in layout.items() if form[0].itemsize == itemsize}
        widths = [int(np.prod(shape)) for _, shape in alike.values()]
        own = [as_rows(columns[name], width) for name, width in zip(alike, widths, strict=True) if len(ids)]
        whole = _gather_rows(world, own, sum(widths), _AS_INTEGERS[itemsize], places)
        for (name, (dtype, shape)), part in zip(alike.items(), whole.split(widths, dim=1), strict=True):
            gathered[name] = part.view(dtype).reshape(len(every), *shape)
    return SampleTable(every, {name: gathered[name] for name in layout})


def prove_coverage(world: World, ids: torch.Tensor, expected: Ids, what: str, fix: str = "") -> list[torch.Tensor]:
    """Return the ids of every rank; raise DataError, on all ranks, unless they cover `expected` exactly once."""
    counts = torch.cat(world.all_gather(torch.tensor([len(ids)], device=ids.device))).tolist()
    padded = ids.new_full((max(*counts, 1),), -1)
    padded[: len(ids)] = ids
    parts = [part[:count] for part, count in zip(world.all_gather(padded), counts, strict=True)]
    every = torch.from_numpy(np.sort(expected)).to(ids.device)
    found, times = torch.unique(torch.cat(parts), return_counts=True)
    if not torch.equal(found, every) or bool((times > 1).any()):
        foreign = int((~torch.isin(found, every)).sum())
        missing = int((~torch.isin(every, found)).sum())
        raise DataError(
            f"{what} must cover each of {len(every):,} samples exactly once, but {missing:,} are missing, "
            f"{int((times > 1).sum()):,} occur more than once and {foreign:,} do not belong to it{fix and ': ' + fix}"
        )
    return parts


def as_rows(column: torch.Tensor, width: int) -> torch.Tensor:
    """Return the bits of a column as integers: [rows, width]."""
    return column.reshape(len(column), width).view(_AS_INTEGERS[column.element_size()])


def _agree_on_layout(world: World, columns: Columns, what: str) -> dict[str, tuple[torch.dtype, list[int]]]:
    """Return dtype and shape of a row of each column, which a rank without rows cannot know."""
    own = {name: (str(column.dtype), list(column.shape[1:])) for name, column in columns.items()}
    layouts = {text for text in world.all_gather_strings(json.dumps(own)) if text != "{}"}
    if len(layouts) > 1:
        raise DataError(f"{what}: the ranks have different columns: {' and '.join(sorted(layouts))}")
    layout: dict[str, Any] = json.loads(layouts.pop()) if layouts else {}
    return {name: (getattr(torch, dtype.removeprefix("torch.")), shape) for name, (dtype, shape) in layout.items()}


def _gather_rows(
    world: World, own: list[torch.Tensor], width: int, dtype: torch.dtype, places: list[torch.Tensor]
) -> torch.Tensor:
    """Return the rows of all ranks: [rows, width].

    Args:
        own: this rank's columns, side by side; empty on a rank without rows.
        places: the rows of the result that each rank's rows become.
    """
    device, rows = places[0].device, sum(map(len, places))
    if device.type == "cpu" and rows * width * dtype.itemsize >= WORTH_SHARING:
        shared = _share_rows(world, own, (rows, width), dtype, places[world.rank])
        if shared is not None:
            return shared
    whole = torch.empty(rows, width, dtype=dtype, device=device)
    block = max(1, _BLOCK_BYTES // (world.size * width * dtype.itemsize))
    sent = torch.empty(min(block, max(map(len, places))), width, dtype=dtype, device=device)
    for first in range(0, max(map(len, places)), block):
        if own and first < len(own[0]):
            rows_sent = [column[first : first + block] for column in own]
            torch.cat(rows_sent, dim=1, out=sent[: len(rows_sent[0])])
        for part, place in zip(world.all_gather(sent), places, strict=True):
            where = place[first : first + block]
            whole.index_copy_(0, where, part[: len(where)])
    return whole


def _share_rows(
    world: World, own: list[torch.Tensor], shape: tuple[int, int], dtype: torch.dtype, place: torch.Tensor
) -> torch.Tensor | None:
    """Return the rows of all ranks in memory that the ranks of a host share; None if they cannot."""
    memory = SharedMemory(world, shape[0] * shape[1] * dtype.itemsize)
    try:
        if not memory.usable:
            return None
        whole, first = memory.map(shape, dtype, private=False), 0
        for column in own:
            whole[:, first : first + column.shape[1]].index_copy_(0, place, column)
            first += column.shape[1]
        world.barrier()  # all rows are there; from here on nobody writes
        return memory.map(shape, dtype, private=True)
    finally:
        memory.close()
