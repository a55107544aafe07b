"""SampleTable: each id exactly once, at any world size and in any order; duplicates and strangers are refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trainer.passes.table
from shards.errors import DataError
from tests.support.thread_world import on_ranks
from trainer.distributed.world import SINGLE_PROCESS
from trainer.passes import Status
from trainer.passes.table import SampleTable, gather_table, prove_coverage

quick = settings(max_examples=50, deadline=None)
unique_ids = st.lists(st.integers(0, 10_000), unique=True, max_size=60)


def columns_of(ids):
    """Numbers of several types and shapes that follow from the ids alone, NaNs with a payload among them."""
    bits = torch.tensor([sample * 2654435761 % 2**32 - 2**31 for sample in ids.tolist()], dtype=torch.int32)
    return {
        "bits": bits.view(torch.float32),
        "matrix": ids[:, None] / torch.tensor([1.0, 3.0, 7.0]),
        "cube": (ids[:, None, None] * torch.ones(1, 2, 2)).half(),
        "status": (ids % 3).to(torch.int8),
        "flag": ids % 2 > 0,
        "wide": ids * 2**40,
    }


def assert_same(table, other):
    assert torch.equal(table.ids, other.ids)
    assert list(table.columns) == list(other.columns)
    for name, column in table.columns.items():
        assert column.dtype == other[name].dtype
        assert column.shape == other[name].shape
        assert column.contiguous().numpy().tobytes() == other[name].contiguous().numpy().tobytes(), name


@given(unique_ids, st.integers(1, 5), st.integers(0, 2**32 - 1), st.sampled_from([1, 300, 2**25]))
@quick
def test_any_split_over_any_world_gives_the_table_of_one_process(ids, size, seed, block):
    draws = np.random.default_rng(seed)
    ids = torch.from_numpy(draws.permutation(np.array(ids, np.int64)))
    owner = torch.from_numpy(draws.integers(0, size, len(ids)))
    alone = gather_table(SINGLE_PROCESS, ids, columns_of(ids), ids.numpy(), "the pass")

    def gathered(world):
        own = ids[owner == world.rank]
        return gather_table(world, own, columns_of(own) if len(own) else {}, draws.permutation(ids.numpy()), "it")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.passes.table, "_BLOCK_BYTES", block)
        tables = on_ranks(size, gathered)
    for table in tables:
        if len(ids):
            assert_same(table, alone)
        assert torch.equal(table.ids, torch.sort(ids).values)


@given(st.lists(st.integers(0, 20), max_size=30), st.sets(st.integers(0, 20)), st.integers(1, 4))
@quick
def test_coverage_is_proven_on_all_ranks_or_refused_on_all(found, expected, size):
    every, wanted = torch.tensor(found, dtype=torch.int64), np.array(sorted(expected), np.int64)
    results = on_ranks(size, lambda world: prove_coverage(world, every[world.rank :: size], wanted, "the pass"))
    if sorted(found) == sorted(expected):
        assert all(sum(map(len, parts)) == len(found) for parts in results)
        return
    times = {sample: found.count(sample) for sample in found}
    missing, twice = len(expected - times.keys()), sum(count > 1 for count in times.values())
    words = f"{missing} are missing, {twice} occur more than once and {len(times.keys() - expected)} do not belong"
    assert all(f"the pass must cover each of {len(expected)} samples" in str(error) for error in results)
    assert all(words in str(error) for error in results)


@given(unique_ids, unique_ids)
@quick
def test_rows_are_looked_up_by_id_and_unknown_ids_are_refused(ids, wanted):
    own = torch.tensor(ids, dtype=torch.int64)
    table = SampleTable.of(own, {"value": own * 10}, "the pass")
    known = [sample for sample in wanted if sample in ids] + ids[:1] * 2
    assert table["value"][table.at(np.array(known, np.int64))].tolist() == [sample * 10 for sample in known]
    if unknown := [sample for sample in wanted if sample not in ids]:
        with pytest.raises(DataError, match=rf"^{len(unknown)} samples are not in .* sample_id {unknown[0]}$"):
            table.at(torch.tensor(wanted))


@given(unique_ids.filter(len), st.integers(1, 4))
@quick
def test_pieces_join_to_the_table_of_one_pass(ids, pieces):
    own = torch.tensor(ids, dtype=torch.int64)
    parts = [own[piece::pieces] for piece in range(pieces)]
    joined = SampleTable.join([SampleTable.of(part, columns_of(part), "a piece") for part in parts], "the pass")
    assert_same(joined, SampleTable.of(own, columns_of(own), "the pass"))
    assert_same(joined.rows(joined.readable).only("wide"), joined.only("wide").rows(joined.status != 1))
    with pytest.raises(DataError, match="the pass: 1 samples occur more than once"):
        SampleTable.join([joined, joined.rows(joined.ids == own[0])], "the pass")


def test_rows_are_readable_usable_or_neither():
    status = torch.tensor([Status.OK, Status.UNREADABLE, Status.NON_FINITE], dtype=torch.int8)
    table = SampleTable(torch.arange(3), {"status": status})
    assert (table.readable.tolist(), table.usable.tolist()) == ([True, False, True], [True, False, False])
    with pytest.raises(KeyError, match="no column 'losses': the pass was asked for status"):
        table["losses"]


def test_pieces_without_rows_join_the_others():
    whole = SampleTable(torch.tensor([2, 7]), {"losses": torch.tensor([0.5, 1.5])})
    nothing = SampleTable(torch.empty(0, dtype=torch.int64), {})
    for pieces in ([nothing, whole], [whole, nothing]):
        joined = SampleTable.join(pieces, "a pass")
        assert torch.equal(joined.ids, whole.ids)
        assert torch.equal(joined["losses"], whole["losses"])
    assert len(SampleTable.join([nothing, nothing], "a pass")) == 0
